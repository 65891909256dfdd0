"""A package that stands in for SGLang where only starting and ending matters: an HTTP server with a child process."""

from __future__ import annotations

import sys
from pathlib import Path

SOURCE = """
import http.server, os, subprocess, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
if "--die" in sys.argv:
    print("RuntimeError: as asked", flush=True)
    sys.exit(3)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("token", os.environ.get("WORDS", ""), "child", child.pid, flush=True)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        print("GET", self.path, flush=True)
        self.send_response(200); self.end_headers(); self.wfile.write(b"ok")
    def log_message(self, *args): pass

http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def install(venv: Path) -> None:
    """A venv-like folder whose python knows ``sglang.launch_server``."""
    package = venv / "packages" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(SOURCE)
    python = venv / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{venv}/packages" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
