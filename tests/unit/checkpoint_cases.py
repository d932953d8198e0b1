"""Small safetensors files and checkpoint folders, whole or damaged, for the tests of the checkpoint reader."""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent.parent / "golden"
FIXTURES = sorted(path.parent for path in GOLDEN.glob("tiny*/*/config.json"))
FIXTURE_IDS = [path.name for path in FIXTURES]
DTYPE_BYTES = {"U8": 1, "I8": 1, "BF16": 2, "F16": 2, "F32": 4, "U32": 4, "F8_E4M3": 1, "I64": 8}
Header = dict[str, Any]


def fixture(name: str) -> Path:
    """The golden checkpoint of that name."""
    (found,) = GOLDEN.glob(f"tiny*/{name}")
    return found


def header_of(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> Header:
    """A correct header for tensors of these dtypes and shapes, one after the other."""
    header, offset = Header(), 0
    for name, (dtype, shape) in shapes.items():
        end = offset + math.prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    return header


def data_bytes(header: Header) -> int:
    """Bytes of data that a correct header speaks of."""
    return max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)


def write_file(path: Path, header: Header | bytes, data: bytes) -> Path:
    """A safetensors file from a header (or its raw JSON) and data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def read_file(path: Path) -> tuple[Header, bytes]:
    """The header and the data of a safetensors file."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def copy_of(name: str, folder: Path) -> Path:
    """A copy of a golden checkpoint that may be damaged."""
    return Path(shutil.copytree(fixture(name), folder / name))


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the object in a JSON file in place."""
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def edit_tensors(folder: Path, edit: Callable[[dict[str, tuple[str, tuple[int, ...], bytes]]], object]) -> None:
    """Rewrite a one-file checkpoint after `edit` has changed its tensors, name -> (dtype, shape, bytes)."""
    path = folder / "model.safetensors"
    header, data = read_file(path)
    header.pop("__metadata__", None)
    tensors = {
        name: (entry["dtype"], tuple(entry["shape"]), data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }
    edit(tensors)
    shapes = {name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()}
    write_file(path, header_of(shapes), b"".join(raw for _, _, raw in tensors.values()))
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
