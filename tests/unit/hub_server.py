"""A hub of one model on localhost: the few answers that huggingface_hub asks for to download a snapshot."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve_model(repo_id: str, folder: Path, sizes: dict[str, int] | None = None) -> Iterator[tuple[str, list[str]]]:
    """Serve the files of `folder` as `repo_id`; gives the address and the list of requests so far.

    `sizes` are lies about the sizes of files.
    """
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = self.path.split("?")[0]
            requests.append(f"{self.command} {path}")
            if path.startswith(f"/api/models/{repo_id}/tree/"):
                self.send_json([entry(file) for file in files()])
            elif path in (f"/api/models/{repo_id}", f"/api/models/{repo_id}/revision/main"):
                siblings = [{"rfilename": name_of(file), "size": size_of(file)} for file in files()]
                self.send_json({"id": repo_id, "sha": COMMIT, "siblings": siblings})
            elif path.startswith(f"/{repo_id}/resolve/{COMMIT}/"):
                self.send_file(folder / path.removeprefix(f"/{repo_id}/resolve/{COMMIT}/"))
            else:
                self.send_json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

        def send_json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
            self.send_bytes(json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})})

        def send_file(self, path: Path) -> None:
            self.send_bytes(path.read_bytes(), 200, {"ETag": f'"{etag(path)}"', "X-Repo-Commit": COMMIT})

        def send_bytes(self, body: bytes, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_arguments: Any) -> None:
            """Quiet."""

    def files() -> list[Path]:
        return sorted(path for path in folder.rglob("*") if path.is_file())

    def name_of(path: Path) -> str:
        return path.relative_to(folder).as_posix()

    def size_of(path: Path) -> int:
        return (sizes or {}).get(name_of(path), path.stat().st_size)

    def entry(path: Path) -> dict[str, Any]:
        return {"type": "file", "path": name_of(path), "size": size_of(path), "oid": etag(path)}

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def etag(path: Path) -> str:
    """The git blob id, as the hub gives it for small files."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
