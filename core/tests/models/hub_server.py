"""A hub on the loopback interface: repositories of files, spoken to as huggingface_hub does; with faults."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "c0ff"
LARGE = (".safetensors", ".gguf", ".bin")


class Hub:
    """What a hub holds and how it misbehaves.

    Attributes:
        repos: files by name, by repository.
        status: with which every call is refused; None to answer.
        gated: refuse those without the token "secret".
        cut: large files end after so many bytes, this many times.
        wrong: large files have another byte at their end than their hash is of, this many times.
        asked: (method, path) of each call.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.url = ""
        self.status: int | None = None
        self.gated = False
        self.cut: tuple[int, int] = (0, 0)
        self.wrong = 0
        self.asked: list[tuple[str, str]] = []

    def files_asked(self) -> set[str]:
        """Return the files whose content was asked for."""
        return {
            path.split("/resolve/")[1].partition("/")[2]
            for method, path in self.asked
            if "/resolve/" in path and method == "GET"
        }

    def describe(self, repo: str) -> dict[str, Any]:
        """Return a repository as the hub's API shows it."""
        siblings = [
            {"rfilename": name, "size": len(content), "blobId": hashlib.sha1(content).hexdigest()}
            | _lfs(name, content, "sha256")
            for name, content in self.repos[repo].items()
        ]
        return {
            "id": repo,
            "modelId": repo,
            "sha": COMMIT,
            "private": False,
            "siblings": siblings,
            "tags": [],
            "downloads": 0,
        }

    def tree(self, repo: str) -> list[dict[str, Any]]:
        """Return a repository's files as the hub's API lists them."""
        return [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            | _lfs(name, content, "oid")
            for name, content in self.repos[repo].items()
        ]


def _lfs(name: str, content: bytes, key: str) -> dict[str, Any]:
    if not name.endswith(LARGE):
        return {}
    return {"lfs": {key: hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}}


@contextmanager
def serving_hub() -> Iterator[Hub]:
    """Serve a hub until the end of the context."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((self.command, path))
            if hub.status is not None:
                self._send(hub.status, b'{"error": "refused"}', {})
            elif hub.gated and self.headers.get("Authorization") != "Bearer secret":
                self._send(401, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."})
            else:
                self._known(path)

        def _known(self, path: str) -> None:
            repo = next((name for name in hub.repos if f"/{name}/" in f"{path}/"), None)
            revision = path.rpartition("/revision/")[2] if "/revision/" in path else "main"
            if repo is None:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif revision not in ("main", "v1", COMMIT):
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            elif "/resolve/" in path:
                self._file(repo, path.split("/resolve/")[1].partition("/")[2])
            elif "/tree/" in path:
                self._send(200, json.dumps(hub.tree(repo)).encode(), {"Content-Type": "application/json"})
            else:
                self._send(200, json.dumps(hub.describe(repo)).encode(), {"Content-Type": "application/json"})

        def _file(self, repo: str, name: str) -> None:
            content = hub.repos[repo][name]
            is_large = name.endswith(LARGE)
            digest = hashlib.sha256(content) if is_large else hashlib.sha1(content)
            headers = {"ETag": f'"{digest.hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            start, status = 0, 200
            if span := self.headers.get("Range"):
                start, status = int(span.removeprefix("bytes=").partition("-")[0]), 206
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            size, times = hub.cut
            if is_large and self.command == "GET" and times:
                hub.cut = size, times - 1
                self._send(status, content[start:], headers, size)
                self.close_connection = True
                return
            if is_large and self.command == "GET" and hub.wrong:
                hub.wrong -= 1
                content = content[:-1] + bytes([content[-1] ^ 1])
            self._send(status, content[start:], headers)

        def _send(self, status: int, body: bytes, headers: dict[str, str], sent: int | None = None) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[:sent])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
