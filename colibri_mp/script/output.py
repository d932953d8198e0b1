"""The folder that a script writes to: `transcript-N.jsonl` for each launch, and `report.json`; files are replaced as a whole.

The folder is the user's alone (0700, files 0600): transcripts are what people have said.
"""

import json
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from colibri_mp.errors import WriteError
from colibri_mp.user_cache import replace_file

_TRANSCRIPT = re.compile(r"transcript-(\d+)\.jsonl")


def default_folder(script: Path) -> Path:
    """A new one for each run: script-runs/NAME-20260131-120000."""
    return Path("script-runs") / f"{script.stem}-{time.strftime('%Y%m%d-%H%M%S')}"


class Output:
    """Writes into `folder`, which is made at once, so that a run does not end with nowhere to go.

    Raises:
        WriteError: a folder or a file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise WriteError(
                f"{folder}: cannot be made: {error.strerror}; give another folder with --output"
            ) from error
        self._first: bytes | None = None
        self._num_transcripts = 0

    def write_transcript(self, number: int, content: bytes) -> tuple[str, bool | None]:
        """The path of the file, and whether it is the same as that of the first launch (None for that one)."""
        path = self.folder / f"transcript-{number}.jsonl"
        self._write(path, content)
        self._num_transcripts = number
        if self._first is None:
            self._first = content
            return str(path), None
        return str(path), content == self._first

    def write_report(self, report: dict[str, Any]) -> Path:
        """Write the report, and remove transcripts that an earlier run with more launches has left here."""
        path = self.folder / "report.json"
        self._write(path, (json.dumps(report, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace"))
        for other in self.folder.iterdir():
            found = _TRANSCRIPT.fullmatch(other.name)
            if found and int(found[1]) > self._num_transcripts:
                other.unlink(missing_ok=True)
        return path

    def remove_if_empty(self) -> None:
        """Nothing came of it: leave no empty folder."""
        with suppress(OSError):
            self.folder.rmdir()

    def _write(self, path: Path, content: bytes) -> None:
        try:
            replace_file(path, content)
        except OSError as error:
            raise WriteError(
                f"{path}: cannot be written: {error.strerror}; give another folder with --output"
            ) from error
