"""A Hugging Face Hub on 127.0.0.1: as much of its protocol as a download uses, and faults on request.

Run it by hand to download from a folder: ``python tests/hub_server.py FOLDER``, then ``HF_ENDPOINT=http://127.0.0.1:8000``.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

REPOSITORY = "EleutherAI/gpt-j-6b"
COMMIT = "47e169305d2e8376be1d31e765533382721b2cc1"
LARGE_BYTES = 10_000  # from here on a file counts as stored in git-lfs: known by its SHA-256, served from elsewhere


@dataclass
class Request:
    """What a client sent."""

    method: str
    path: str
    headers: dict[str, str]


@dataclass
class Hub:
    """A folder served as one repository.

    Attributes:
        folder: its files.
        url: where it listens.
        requests: what came, in order.
        cut_after: bytes of a large file after which the connection breaks; ``None`` never.
        cuts: how often it still breaks.
        status: answer everything with this and `error_code`, where set.
        damage: flip a bit in what is sent.
    """

    folder: Path
    url: str = ""
    requests: list[Request] = field(default_factory=list)
    cut_after: int | None = None
    cuts: int = 0
    status: int | None = None
    error_code: str | None = None
    damage: bool = False

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def fetched(self) -> list[str]:
        """Return the names of the files that were asked for."""
        return [r.path.rpartition("/")[2] for r in self.requests if r.method == "GET" and "/resolve/" in r.path]

    def info(self) -> dict[str, object]:
        siblings = []
        for name in self.files():
            content = (self.folder / name).read_bytes()
            entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": _git_id(content)}
            if len(content) >= LARGE_BYTES:
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"size": len(content), "sha256": digest, "pointerSize": 135}
            siblings.append(entry)
        tags = ["pytorch", "gptj", "license:apache-2.0"]
        return {"id": REPOSITORY, "modelId": REPOSITORY, "sha": COMMIT, "tags": tags, "siblings": siblings}


@contextmanager
def serve(folder: Path, port: int = 0) -> Iterator[Hub]:
    """Serve a folder as `REPOSITORY` until the block ends."""
    hub = Hub(folder)

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *arguments: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(
            Request(self.command, path, {key.lower(): value for key, value in self.headers.items()})
        )
        if self.hub.status is not None:
            self._send(self.hub.status, b"", {"X-Error-Code": self.hub.error_code or ""})
        elif path in (
            f"/api/models/{REPOSITORY}",
            *(f"/api/models/{REPOSITORY}/revision/{r}" for r in ("main", COMMIT)),
        ):
            self._send(200, json.dumps(self.hub.info()).encode(), {"Content-Type": "application/json"})
        elif path.startswith(f"/api/models/{REPOSITORY}/revision/"):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith(f"/{REPOSITORY}/resolve/{COMMIT}/"):
            self._resolve(self.hub.folder / path.rpartition("/")[2])
        elif path.startswith("/cdn/"):
            self._file(self.hub.folder / path.rpartition("/")[2])
        else:
            # The Hub answers 401, not 404, for a repository that is not there.
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"})

    def _resolve(self, path: Path) -> None:
        if not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        elif path.stat().st_size >= LARGE_BYTES:
            self._send(302, b"", {"Location": f"/cdn/{path.name}", "X-Repo-Commit": COMMIT})
        else:
            self._file(path)

    def _file(self, path: Path) -> None:
        content = path.read_bytes()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_git_id(content)}"', "Accept-Ranges": "bytes"}
        status, start = 200, 0
        if requested := self.headers.get("Range"):
            start = int(requested.removeprefix("bytes=").partition("-")[0])
            status, headers["Content-Range"] = 206, f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        if self.hub.damage:
            body = body[:-1] + bytes([body[-1] ^ 1])
        cut = self.hub.cut_after
        if cut is None or self.hub.cuts == 0 or len(content) < LARGE_BYTES:
            self._send(status, body, headers)
            return
        self.hub.cuts -= 1
        self._send(status, body, headers, length=cut)
        self.close_connection = True

    def _send(self, status: int, body: bytes, headers: dict[str, str], length: int | None = None) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:length])
            self.wfile.flush()


if __name__ == "__main__":
    with serve(Path(sys.argv[1]), port=8000) as running:
        print(f"HF_ENDPOINT={running.url}", flush=True)
        threading.Event().wait()
