"""Reading a checkpoint's JSON files, with an error that names the file and what to do."""

import json
import math
from pathlib import Path
from typing import Any

from colibri_mp.errors import CheckpointError

_NON_FINITE = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in the JSON file `path`. Raises `CheckpointError` if it is missing, unreadable or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_hook=_float_from_object)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; a checkpoint folder must have it") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}): fetch the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, not an object: fetch the file again")
    return value


def _float_from_object(value: dict[str, Any]) -> Any:
    """`transformers` 5 writes an infinite or undefined float as {"__float__": "Infinity"}."""
    return _NON_FINITE.get(value["__float__"], value) if value.keys() == {"__float__"} else value
