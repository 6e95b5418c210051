"""Serve a Hugging Face Hub on 127.0.0.1: the protocol of downloads and uploads, with faults on request.

By hand: ``python tests/support/hub_server.py FOLDER``, then download with ``HF_ENDPOINT=http://127.0.0.1:8000``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import huggingface_hub
import pytest
from huggingface_hub import constants

REPOSITORY = "EleutherAI/gpt-j-6b"
COMMIT = "47e169305d2e8376be1d31e765533382721b2cc1"
CONVERTED = "refs/convert/parquet"
LARGE_BYTES = 10_000  # from here on a file counts as stored in git-lfs: known by its SHA-256, served from elsewhere


@dataclass
class Request:
    """Record one client request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""


@dataclass
class Revision:
    """Hold a data set revision: a folder of files and its README metadata."""

    folder: Path
    commit: str
    card: dict[str, object] = field(default_factory=dict)
    unsafe_files: list[dict[str, object]] = field(default_factory=list)  # listed, with names outside the folder


@dataclass
class Pushed:
    """Record a repository created by a push: visibility, files, commit messages."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


@dataclass
class Hub:
    """A folder served as one repository, and data sets."""

    folder: Path  # files of the repository
    datasets: dict[str, dict[str, Revision]] = field(default_factory=dict)
    """Revisions by name, of each data set by name."""
    url: str = ""  # address of this server
    requests: list[Request] = field(default_factory=list)  # in order of arrival
    cut_after: int | None = None  # bytes of a large file before the connection breaks; None: never
    cuts: int = 0  # remaining breaks
    status: int | None = None  # answer every request with this and `error_code`, if set
    error_code: str | None = None
    damage: bool = False  # flip a bit in every answer
    stall_after: int | None = None
    """Bytes of a large file after which the server sends no more, with the connection open; None: never."""
    storage: str = ""  # server of large files; by default this one
    branches: dict[str, Revision] = field(default_factory=dict)  # other revisions of the model, by name
    pushed: dict[str, Pushed] = field(default_factory=dict)  # repositories created by clients, by name
    stored: dict[str, bytes] = field(default_factory=dict)  # uploaded large files, by SHA-256
    closing: threading.Event = field(default_factory=threading.Event)

    def fetched(self) -> list[str]:
        """Return the names of the requested files."""
        return [r.path.rpartition("/")[2] for r in self.requests if r.method == "GET" and "/resolve/" in r.path]

    def asked(self, path: str) -> dict[str, object] | None:
        """Return the Hub's answer about a repository at a revision; ``None`` if the revision does not exist.

        Raises:
            KeyError: unknown repository.
        """
        kind, name, revision = re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/revision/(.+))?", path).groups()
        if kind == "models" and name in self.pushed:
            return {"id": name, "modelId": name, "sha": COMMIT, "private": self.pushed[name].private, "siblings": []}
        if (kind, name) == ("models", REPOSITORY):
            main = revision in (None, "main", COMMIT)
            found = Revision(self.folder, COMMIT) if main else self.branches.get(revision)
        else:
            revisions = self.datasets[name] if kind == "datasets" else {}[name]
            named = {**revisions, **{each.commit: each for each in revisions.values()}}
            found = named.get(revision or "main")
        if found is None:
            return None
        tags = ["pytorch", "gptj", "license:apache-2.0"]
        siblings = _siblings(found.folder) + found.unsafe_files
        about = {"id": name, "sha": found.commit, "tags": tags, "siblings": siblings}
        return about | ({"modelId": name} if kind == "models" else {"cardData": found.card or None})

    def file(self, path: str) -> Path:
        """Return the file behind a content address."""
        if path.startswith("/cdn/"):
            return Path(path.removeprefix("/cdn"))
        if path.startswith(f"/{REPOSITORY}/resolve/{COMMIT}/"):
            return self.folder / path.rpartition("/")[2]
        for branch in self.branches.values():
            if path.startswith(f"/{REPOSITORY}/resolve/{branch.commit}/"):
                return branch.folder / path.rpartition("/")[2]
        name, commit, inside = re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([0-9a-f]+)/(.+)", path).groups()
        return next(each.folder for each in self.datasets[name].values() if each.commit == commit) / inside


def _siblings(folder: Path) -> list[dict[str, object]]:
    siblings = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        name = path.relative_to(folder).as_posix()
        entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": _git_id(content)}
        if len(content) >= LARGE_BYTES:
            digest = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"size": len(content), "sha256": digest, "pointerSize": 135}
        siblings.append(entry)
    return siblings


@contextmanager
def serve(folder: Path, port: int = 0) -> Iterator[Hub]:
    """Serve a folder as `REPOSITORY` until the block ends."""
    hub = Hub(folder.absolute())

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
        hub.closing.set()
        server.shutdown()
        server.server_close()


def set_hub_constants(patch: pytest.MonkeyPatch, **values: object) -> None:
    """Set constants that `huggingface_hub` reads from the environment only on import."""
    for name, value in values.items():
        patch.setattr(constants, name, value)


@contextmanager
def reachable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve a folder as the Hub of this process, with network access meanwhile."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    set_hub_constants(monkeypatch, HF_HUB_OFFLINE=False, DOWNLOAD_CHUNK_SIZE=1000)  # a cut download has whole chunks
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    huggingface_hub.close_session()
    with serve(folder) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running
    huggingface_hub.close_session()


def _git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        body = self._body()
        path = unquote(urlsplit(self.path).path)
        self._record(path, body)
        if self.hub.status is not None:
            self._send(self.hub.status, b"{}", {"X-Error-Code": self.hub.error_code or ""})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._say({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            self._say({"files": [self._upload_mode(file) for file in json.loads(body)["files"]]})
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._say({"transfer": "basic", "objects": [self._action(each) for each in json.loads(body)["objects"]]})
        else:
            self._commit(path, [json.loads(line) for line in body.splitlines()])

    def do_PUT(self) -> None:
        body, name = self._body(), self.path.rpartition("/")[2]
        self._record(self.path, body)
        if self.hub.cuts:
            self.hub.cuts -= 1
            self._send(403, b"", {})
            return
        assert hashlib.sha256(body).hexdigest() == name
        self.hub.stored[name] = body
        self._send(200, b"", {})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while length := int(self.rfile.readline(), 16):
            body += self.rfile.read(length)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _record(self, path: str, body: bytes) -> None:
        headers = {key.lower(): value for key, value in self.headers.items()}
        self.hub.requests.append(Request(self.command, path, headers, body))

    def _say(self, answer: dict[str, object], status: int = 200) -> None:
        self._send(status, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _create(self, asked: dict[str, str]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        exists = name in self.hub.pushed
        self.hub.pushed.setdefault(name, Pushed(asked.get("visibility") == "private"))
        self._say({"url": f"{self.hub.url}/{name}"}, 409 if exists else 200)

    def _upload_mode(self, file: dict[str, object]) -> dict[str, object]:
        is_large = file["size"] >= LARGE_BYTES or str(file["path"]).endswith(".safetensors")
        return {"path": file["path"], "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}

    def _action(self, file: dict[str, object]) -> dict[str, object]:
        upload = {"actions": {"upload": {"href": f"{self.hub.url}/lfs/{file['oid']}"}}}
        return file | ({} if file["oid"] in self.hub.stored else upload)

    def _commit(self, path: str, lines: list[dict[str, dict[str, str]]]) -> None:
        name = re.fullmatch(r"/api/models/(.+)/commit/main", path)[1]
        repository = self.hub.pushed[name]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                repository.commits.append(value["summary"])
            elif line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            else:
                repository.files[value["path"]] = self.hub.stored[value["oid"]]
        self._say({"commitUrl": f"{self.hub.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT})

    def do_CONNECT(self) -> None:  # as a proxy
        self._answer()

    def log_message(self, *arguments: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self._record(path, b"")
        if self.hub.status is not None:
            self._send(self.hub.status, b"", {"X-Error-Code": self.hub.error_code or ""})
        elif path.startswith("/api/"):
            self._tell(path)
        elif "/resolve/" in path or path.startswith("/cdn/"):
            self._resolve(path)
        else:
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"})

    def _tell(self, path: str) -> None:
        try:
            about = self.hub.asked(path)
        except (KeyError, AttributeError):
            # The Hub answers 401, not 404, for a repository that is not there.
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
            return
        if about is None:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            self._send(200, json.dumps(about).encode(), {"Content-Type": "application/json"})

    def _resolve(self, address: str) -> None:
        path = self.hub.file(address)
        if not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        elif path.stat().st_size >= LARGE_BYTES and not address.startswith("/cdn/"):
            self._send(302, b"", {"Location": f"{self.hub.storage}/cdn{quote(str(path))}", "X-Repo-Commit": COMMIT})
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
        if self.hub.stall_after is not None and len(content) >= LARGE_BYTES:
            self._send(status, body, headers, length=self.hub.stall_after)
            self.hub.closing.wait(20)
            return
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
        if self.command != "HEAD":
            self.wfile.write(body[:length])
            self.wfile.flush()


if __name__ == "__main__":
    with serve(Path(sys.argv[1]), port=8000) as running:
        print(f"HF_ENDPOINT={running.url}", flush=True)
        threading.Event().wait()
