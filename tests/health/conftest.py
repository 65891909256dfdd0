"""A stand-in server in a process of its own, and the settings that plan it."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dflash_deploy.audit.stacks import get_stack
from dflash_deploy.host.local import LocalHost
from dflash_deploy.settings import Mode, Settings


@dataclass
class Standin:
    settings: Settings
    host: LocalHost
    process: subprocess.Popen[bytes]
    mode_file: Path
    site: Path

    def mode(self, name: str) -> None:
        self.mode_file.write_text(name)

    def patched(self, name: str = "ddtree") -> Path:
        """A patched file with its manifest, as the patch engine leaves them."""
        target = self.site / "sglang" / "x.py"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"x = 1\n")
        entry = {"pristine": "", "patched": hashlib.sha256(b"x = 1\n").hexdigest()}
        record = {
            "schema": 1,
            "package": "sglang",
            "version": "0.5.16",
            "sets": [name],
            "files": {"sglang/x.py": entry},
        }
        (self.site / ".dflash-deploy").mkdir(exist_ok=True)
        (self.site / ".dflash-deploy" / "manifest.json").write_text(json.dumps(record))
        return target


@pytest.fixture
def standin(tmp_path: Path) -> Iterator[Standin]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    site = venv / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    stack = replace(get_stack("sglang-0.5.16-cpu"), patch_sets=(), server_args=())
    settings = Settings(
        host="local", stack=stack, root=str(tmp_path), venv=str(venv), service="s", bind="127.0.0.1", port=port,
        model="/m/target", draft_model="/m/draft", algorithm="DFLASH", budget=16,
        server_args=(), env={}, mode=Mode.SUPERVISOR, tiny_pair=False,
    )  # fmt: skip
    mode_file = tmp_path / "mode"
    mode_file.write_text("ok")
    script = Path(__file__).with_name("sglang_standin.py")
    process = subprocess.Popen([settings.python, "-I", str(script), str(mode_file), str(port)])
    host = LocalHost(name="local")
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield Standin(settings, host, process, mode_file, site)
    finally:
        process.kill()
        process.wait()
        host.close()
