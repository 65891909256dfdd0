"""A hub on loopback: as much of its protocol as the hub's own client asks for."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from dataclasses import dataclass, field

SHA = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """One repository; ``spoiled`` names files that are sent with a wrong byte."""

    repo: str
    files: dict[str, bytes]
    spoiled: set[str] = field(default_factory=set)
    tokens: set[str] = field(default_factory=set)
    """Authorization headers that came."""
    url: str = ""

    def describe(self) -> dict[str, object]:
        siblings = []
        for name, data in self.files.items():
            entry: dict[str, object] = {"rfilename": name, "size": len(data)}
            entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            if name.endswith(".safetensors"):
                digest = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        return {"id": self.repo, "modelId": self.repo, "sha": SHA, "siblings": siblings, "tags": [], "private": False}

    def tree(self) -> list[dict[str, object]]:
        found = []
        for name, data in self.files.items():
            oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            entry: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": oid}
            if name.endswith(".safetensors"):
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            found.append(entry)
        return found


def serve(hub: Hub) -> http.server.ThreadingHTTPServer:
    """Start it; its address is then in ``hub.url``."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None: ...

        def answer(self, status: int, data: bytes, headers: dict[str, str], head: bool) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if not head:
                self.wfile.write(data)

        def get(self, head: bool) -> None:
            hub.tokens.add(self.headers.get("Authorization", ""))
            path = self.path.partition("?")[0]
            prefix = f"/{hub.repo}/resolve/{SHA}/"
            if path.startswith(f"/api/models/{hub.repo}/tree/"):
                self.answer(200, json.dumps(hub.tree()).encode(), {"Content-Type": "application/json"}, head)
            elif path.startswith(f"/api/models/{hub.repo}"):
                self.answer(200, json.dumps(hub.describe()).encode(), {"Content-Type": "application/json"}, head)
            elif path.startswith(prefix) and path.removeprefix(prefix) in hub.files:
                name = path.removeprefix(prefix)
                data = hub.files[name]
                headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": SHA}
                if name in hub.spoiled:
                    data = data[:-1] + bytes([data[-1] ^ 1])
                self.answer(200, data, headers, head)
            else:
                self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"}, head)

        def do_GET(self) -> None:
            self.get(False)

        def do_HEAD(self) -> None:
            self.get(True)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
