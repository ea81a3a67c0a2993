"""A stand-in for the Hugging Face hub: requests of huggingface_hub to list, download and upload a snapshot."""

from __future__ import annotations

import hashlib
import json
import threading
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class FakeHub:
    """Repositories by kind and name, each with its revisions; `main` is the last one."""

    url: str = ""
    revisions: dict[str, dict[str, Mapping[str, bytes]]] = field(default_factory=dict)
    """`datasets/ORG/NAME` or `models/ORG/NAME`, to commits, to files."""
    gated: set[str] = field(default_factory=set)
    visibility: dict[str, str] = field(default_factory=dict)
    """Visibility of repositories that a request has made, by name."""
    asked: list[str] = field(default_factory=list)

    def push(self, name: str, files: Mapping[str, bytes]) -> str:
        """A new commit; its hash."""
        commits = self.revisions.setdefault(name, {})
        commit = hashlib.sha1(f"{name}{len(commits)}".encode()).hexdigest()
        commits[commit] = files
        return commit

    def downloaded(self) -> list[str]:
        """The files whose contents were asked for."""
        return [path.split("/resolve/")[1].split("/", 1)[1] for path in self.asked]

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        parts = unquote(urlsplit(path).path).strip("/").split("/")
        if parts[0] == "api":
            verb, revision = parts[4:6] or ("revision", "main")
            kind, name = parts[1], "/".join(parts[2:4])
        else:
            kind = "datasets" if parts[0] == "datasets" else "models"
            parts = parts[1:] if kind == "datasets" else parts
            name, verb, revision = "/".join(parts[:2]), parts[2], parts[3]
        key = f"{kind}/{name}"
        commits = self.revisions.get(key)
        if commits is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if key in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        commit = list(commits)[-1] if revision == "main" else revision
        if commit not in commits:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        files = commits[commit]
        if verb == "revision":
            siblings = [{"rfilename": name} for name in files]
            return self.json({"id": name, "sha": commit, "siblings": siblings})
        if verb == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": _blob(data)}
                for name, data in files.items()
            ]
            return self.json(entries)
        data = files["/".join(parts[4:])]
        return 200, {"ETag": f'"{_blob(data)}"', "X-Repo-Commit": commit}, data

    def take(self, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """The answer to a POST: a repository, how files want to be sent, a commit."""
        parts = path.strip("/").split("/")
        if parts[1] == "repos":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if f"models/{name}" in self.gated:
                return 403, {"X-Error-Message": "this token may not write there"}, b""
            self.visibility.setdefault(name, asked.get("visibility", "public"))
            return self.json({"url": f"{self.url}/{name}"})
        name = "/".join(parts[2:4])
        if parts[4] == "preupload":
            files = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                for each in json.loads(body)["files"]
            ]
            return self.json({"files": files})
        lines = [json.loads(line) for line in body.splitlines()]
        sent = {
            line["value"]["path"]: b64decode(line["value"]["content"])
            for line in lines
            if line["key"] == "file"
        }
        commit = self.push(f"models/{name}", sent)
        url = f"{self.url}/{name}/commit/{commit}"
        return self.json({"commitUrl": url, "commitOid": commit, "success": True})

    def json(self, value: object) -> tuple[int, dict[str, str], bytes]:
        """An answer of the API."""
        return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _blob(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve it on loopback."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send(*hub.take(self.path, sent))

        def do_GET(self) -> None:
            answered = hub.answer(self.path)
            if self.command == "GET" and "/resolve/" in self.path:
                hub.asked.append(self.path)
            self.send(*answered)

        def send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
