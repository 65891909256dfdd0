"""What the end-to-end tests share: one CPU stack on this machine, provisioned and patched by the command itself."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.patches.wheels import unpack

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


def release_venv(cpu_venv: Path, version: str, packages: Sequence[str]) -> Path:
    """Environment of another release over the packages of the CPU stack, kept between runs; patched by the command.

    ``packages``: pins that the release has otherwise. Gigabytes less to install than a stack of its own.
    """
    python = str(cpu_venv / "bin" / "python")
    made_from = repr((sorted(packages), str(cpu_venv), os.path.realpath(python)))
    venv = cpu_venv.parent / f"sglang-{version}-{hashlib.sha256(made_from.encode()).hexdigest()[:12]}"
    done = venv / "complete"
    if not done.exists():
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.run([python, "-m", "venv", "--without-pip", str(venv)], check=True)
        (site,) = (venv / "lib").glob("python3.*/site-packages")
        (below,) = (cpu_venv / "lib").glob("python3.*/site-packages")
        (site / "cpu_stack.pth").write_text(f"{below}\n")
        unpack("sglang", version, site)
        install = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-compile",
            "--target",
            str(site),
        ]
        subprocess.run([*install, *packages], check=True, timeout=600)
        done.touch()
    dflash_deploy("patch", "local", "--venv", str(venv))
    return venv


@pytest.fixture(scope="session")
def cpu_venv(cpu_root: Path) -> Path:
    """Folder of a virtual environment with the CPU stack and its patch sets; nothing runs from it yet."""
    # Named, so that it is the tests' own: other releases are not made from it.
    dflash_deploy("provision", "local", "--root", str(cpu_root), "--venv", str(cpu_root / "venv"), "--stack", "cpu")
    dflash_deploy("patch", "local", "--venv", str(cpu_root / "venv"))
    return cpu_root / "venv"
