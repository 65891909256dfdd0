"""What the end-to-end tests share: one CPU stack on this machine, provisioned and patched by the command itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MAIN = (sys.executable, "-c", "from dflash_deploy.cli import main; main()")


def dflash_deploy(*words: str, exit_code: int = 0, timeout_s: float = 3000) -> dict[str, Any]:
    """Run the command as a person does and read its ``--json`` answer."""
    done = subprocess.run([*MAIN, *words, "--json"], capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == exit_code, f"{' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="session")
def cpu_root() -> Path:
    """Folder that keeps the provisioned environment between runs: it takes minutes and gigabytes to make."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dflash-deploy" / "e2e" / "root"


@pytest.fixture(scope="session")
def cpu_venv(cpu_root: Path) -> Path:
    """Folder of a virtual environment with the CPU stack and its patch sets; nothing runs from it yet."""
    # Named, so that it is the tests' own: other releases are not made from it.
    dflash_deploy("provision", "local", "--root", str(cpu_root), "--venv", str(cpu_root / "venv"), "--stack", "cpu")
    dflash_deploy("patch", "local", "--venv", str(cpu_root / "venv"))
    return cpu_root / "venv"
