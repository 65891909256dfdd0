"""``up local``: a machine without a GPU ends with a healthy DDTREE service, also after kill -9 in the middle."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]

MAIN = [sys.executable, "-c", "from dflash_deploy.cli import main; main()"]


@pytest.fixture
def words(tmp_path: Path) -> Iterator[list[str]]:
    """Options of a deployment whose venv is kept between runs, and which is always ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "dflash-deploy" / "e2e"
    base = ["local", "--root", str(tmp_path / "root"), "--venv", str(cache / "root" / "venv"), "--stack", "cpu"]
    base += ["--mode", "supervisor"]
    try:
        yield [*base, "--port", str(port)]
    finally:
        subprocess.run([*MAIN, "down", *base[:5], *base[7:], "--break-lock"], capture_output=True, timeout=300)


def cli(command: str, words: list[str], exit_code: int = 0) -> dict[str, Any]:
    done = subprocess.run([*MAIN, command, *words, "--json"], capture_output=True, text=True, timeout=3000)
    assert done.returncode == exit_code, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_up_killed_up_again_and_once_more(words: list[str]) -> None:
    # Killed in the middle of each step in turn, then the same command again.
    for step in ("provision", "patch", "launch", "health"):
        victim = subprocess.Popen([*MAIN, "up", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert victim.stderr is not None
        for line in victim.stderr:
            if line.startswith(f"{step} ..."):
                time.sleep(0.5)
                break
        victim.send_signal(signal.SIGKILL)
        victim.stderr.close()
        victim.wait()
    first = cli("up", words)
    assert first["ok"]
    data = first["health"]["data"]
    assert data["acceptance_length"] > 1.5 and data["completion"] and sum(data["acceptance_histogram"]) > 0
    again = cli("up", words)
    assert not again["changed"] and {step["status"] for step in again["steps"]} == {"ok"}
    assert cli("plan", words)["changes"] is False
