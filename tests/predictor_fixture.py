"""Small checkpoints with a layer that predicts further tokens, made of golden ones that have none."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors import deserialize

GOLDEN = Path(__file__).parent / "golden" / "tiny"
Tensors = dict[str, tuple[str, list[int], bytes]]
Edit = Callable[[Tensors, int], None]


def with_predictor(name: str, folder: Path, edit: Edit) -> Path:
    """A copy of a golden checkpoint whose last layer is there once more, as a predictor; `edit(tensors, layer)` adds the rest."""
    source, made = GOLDEN / name, folder / name
    made.mkdir()
    config = json.loads((source / "config.json").read_text())
    layer = config["num_hidden_layers"]
    (made / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    raw = (source / "model.safetensors").read_bytes()
    tensors = {name: (found["dtype"], found["shape"], bytes(found["data"])) for name, found in deserialize(raw)}
    old, new = f"model.layers.{layer - 1}.", f"model.layers.{layer}."
    tensors |= {name.replace(old, new): found for name, found in tensors.items() if name.startswith(old)}
    edit(tensors, layer)
    _write(made / "model.safetensors", tensors)
    return made


def set_values(tensors: Tensors, name: str, values: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]") -> None:
    """A tensor of these values, rounded towards zero to bf16."""
    tensors[name] = ("BF16", list(values.shape), (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes())


def random_predictor(tensors: Tensors, layer: int) -> None:
    """Its guesses are as good as none."""
    rng, path = np.random.default_rng(3), f"model.layers.{layer}"
    hidden = tensors["model.norm.weight"][1][0]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        set_values(tensors, f"{path}.{name}.weight", rng.normal(1.0, 0.1, hidden).astype(np.float32))
    set_values(tensors, f"{path}.eh_proj.weight", rng.normal(0.0, 0.1, (hidden, 2 * hidden)).astype(np.float32))


def random_mtp(tensors: Tensors, layer: int) -> None:
    """As `random_predictor`, named as Qwen3-Next has it: the layer below `mtp.layers.0`, norms that are used as 1 + w."""
    old, rng, hidden = f"model.layers.{layer}.", np.random.default_rng(3), tensors["model.norm.weight"][1][0]
    for name in [name for name in tensors if name.startswith(old)]:
        tensors[name.replace(old, "mtp.layers.0.")] = tensors.pop(name)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        set_values(tensors, f"mtp.{name}.weight", rng.normal(0.0, 0.1, hidden).astype(np.float32))
    set_values(tensors, "mtp.fc.weight", rng.normal(0.0, 0.1, (hidden, 2 * hidden)).astype(np.float32))


def perfect_predictor(tensors: Tensors, layer: int) -> None:
    """No layer adds anything, so the next token follows from the last one alone; the predictor knows that token: it is always right."""
    for name, (dtype, shape, data) in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = (dtype, shape, bytes(len(data)))
    path, hidden = f"model.layers.{layer}", tensors["model.norm.weight"][1][0]
    for name in ("enorm", "hnorm"):
        set_values(tensors, f"{path}.{name}.weight", np.ones(hidden, np.float32))
    tensors[f"{path}.shared_head.norm.weight"] = tensors["model.norm.weight"]
    set_values(tensors, f"{path}.eh_proj.weight", np.eye(hidden, 2 * hidden, dtype=np.float32))


def _write(path: Path, tensors: Tensors) -> None:
    header, end = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end := end + len(data)]}
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(data for _, _, data in tensors.values()))
