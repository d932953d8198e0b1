"""From what the user gives as --model to a folder: a folder, the built-in model, or a Hugging Face id.

An id is `org/name`, or `org/name@revision` for a branch, tag or commit. It is looked up in the local Hugging Face cache
first (HF_HOME and HF_HUB_CACHE count, as for every program that uses it) and downloaded only if it is not there, which
HF_HUB_OFFLINE=1 forbids. Only files that are read are fetched.
huggingface_hub is imported only for an id, since that alone takes longer than opening a checkpoint.
"""

import fnmatch
import importlib.resources
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from colibri_mp.checkpoint.source import has_all_files
from colibri_mp.errors import CheckpointError

Progress = Callable[[str], None]

BUILT_IN = "demo"
NEEDED_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]
UNNEEDED_FILES = ["*/*.safetensors", "*/*.json", "*/*.txt", "consolidated*.safetensors"]
_HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)


def resolve(model: str | None, progress: Progress | None = None) -> Path:
    """The folder of `model`: None or "demo" is the built-in model (a folder of that name is "./demo").

    `progress` gets a line of text now and then during a download. Raises `CheckpointError` if `model` is neither a
    folder nor an id, or cannot be had.
    """
    if model is None or model == BUILT_IN:
        return _built_in()
    folder = Path(model).expanduser()
    if model and folder.exists():
        return folder
    match = _HUB_ID.fullmatch(model)
    if match is None or model.startswith((".", "~")):
        raise CheckpointError(
            f"{model or 'empty model name'}: no such folder. Give a folder with config.json and *.safetensors, a Hugging "
            f"Face id (org/name), or {BUILT_IN!r} for the built-in model"
        )
    return _from_hub(match["id"], match["revision"], progress or (lambda _: None))


def _built_in() -> Path:
    folder = Path(str(importlib.resources.files("colibri_mp") / "demo_model"))
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder}: the built-in model is not there: reinstall colibri-mp, or give --model")
    return folder


def _from_hub(repo_id: str, revision: str | None, progress: Progress) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot(**options: Any) -> Path:
        options.update(revision=revision, allow_patterns=NEEDED_FILES, ignore_patterns=UNNEEDED_FILES)
        return Path(huggingface_hub.snapshot_download(repo_id, **options))

    try:
        cached = _complete(snapshot, LocalEntryNotFoundError)
        if cached is not None:
            return cached
        _refuse_full_disk(repo_id, revision)
        return snapshot(tqdm_class=_reporting_bar(progress))
    except CheckpointError:
        raise
    except _hub_errors() as error:
        raise CheckpointError(_explain(repo_id, revision, error)) from error


def _complete(snapshot: Callable[..., Path], not_found: type[Exception]) -> Path | None:
    """The snapshot in the cache, if it holds a whole checkpoint: an interrupted download leaves some of the files."""
    try:
        folder = snapshot(local_files_only=True)
    except not_found:
        return None
    return folder if has_all_files(folder) else None


def _refuse_full_disk(repo_id: str, revision: str | None) -> None:
    """Ask the hub for the sizes, and refuse before the download if the cache's disk cannot hold what is missing."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    info = HfApi().model_info(repo_id, revision=revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    wanted = [name for name in sizes if _matches(name, NEEDED_FILES) and not _matches(name, UNNEEDED_FILES)]
    missing = [name for name in wanted if not isinstance(try_to_load_from_cache(repo_id, name, revision=info.sha), str)]
    needed_bytes = sum(sizes[name] for name in missing)
    cache = Path(constants.HF_HUB_CACHE).expanduser()
    free_bytes = shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.exists())).free
    if needed_bytes > free_bytes:
        raise CheckpointError(
            f"{repo_id}: {needed_bytes / 1e9:.2f} GB are to be downloaded, {cache} has {free_bytes / 1e9:.2f} GB free: "
            "make room, or set HF_HOME to a folder on a larger disk"
        )


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _hub_errors() -> tuple[type[Exception], ...]:
    """What huggingface_hub raises: its own errors, all OSError or ValueError, and those of the HTTP library it uses."""
    from huggingface_hub.errors import HfHubHTTPError

    http_error = HfHubHTTPError.__bases__[0]  # base of all errors of requests or httpx, whichever it is
    assert issubclass(http_error, Exception)
    return (OSError, ValueError, http_error)


def _reporting_bar(progress: Progress) -> type[Any]:
    """A progress bar for huggingface_hub that draws nothing and tells `progress` the bytes, at most once a second."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class ReportingBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)  # huggingface_hub's own bars take it, tqdm does not
            options.update(disable=False, mininterval=1.0)
            super().__init__(*args, **options)

        def display(self, *_args: Any, **_options: Any) -> bool:
            if self.unit == "B" and self.total:
                progress(f"downloading: {self.n / 1e9:.2f} of {self.total / 1e9:.2f} GB")
            return True

    return ReportingBar


def _explain(repo_id: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    name = f"{repo_id}@{revision}" if revision else repo_id
    if isinstance(error, GatedRepoError):
        return f"{name}: is gated: accept its terms on {constants.ENDPOINT}/{repo_id}, then run `hf auth login`"
    if isinstance(error, RepositoryNotFoundError | RevisionNotFoundError):
        return f"{name}: neither a folder here nor a model on {constants.ENDPOINT} (private ones need `hf auth login`)"
    reason = (
        "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"it could not be downloaded ({_first_line(error)})"
    )
    return (
        f"{name}: neither a folder here nor, complete, in the Hugging Face cache {constants.HF_HUB_CACHE}, "
        f"and {reason}. Check the name and the connection, or give the folder of a checkpoint"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
