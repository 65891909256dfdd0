"""The command with the stand-in stack, on this machine."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import BootHost
from tests.hosts.container import TestHost
from tests.releases import standin

TOP = Path(__file__).resolve().parents[2]


@dataclass
class Deployed:
    """One deployment, made by the command as a person types it."""

    host: str
    port: int
    place: list[str]
    """Options that say which deployment."""
    wanted: list[str]
    """Options that say what is to be served there."""
    environ: dict[str, str] = field(default_factory=dict)

    def run(self, command: str, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "tests.releases.standin", command, self.host, *self.place, *words]
        env = {**os.environ, **self.environ, **environ}
        return subprocess.run(argv, cwd=TOP, env=env, capture_output=True, text=True, timeout=600)

    def json(self, command: str, *words: str, code: int = 0, **environ: str) -> dict[str, Any]:
        done = self.run(command, *words, "--json", **environ)
        assert done.returncode == code, (
            f"{command} {words}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
        assert "Traceback" not in done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def up(self, *words: str, code: int = 0, **environ: str) -> dict[str, Any]:
        return self.json("up", *self.what, *words, code=code, **environ)

    def plan(self, *words: str, code: int = 0, **environ: str) -> dict[str, Any]:
        return self.json("plan", *self.what, *words, code=code, **environ)

    @property
    def what(self) -> list[str]:
        return ["--stack", "standin", "--port", str(self.port), *self.wanted]

    def serving(self) -> Mapping[str, Any]:
        """What the server says of itself."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/server_info", timeout=10) as reply:
            found: dict[str, Any] = json.load(reply)
        return found


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return standin.make_wheels(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="session")
def box(test_host: BootHost) -> TestHost:
    """A container whose pip knows the stand-in's wheels alone, with a small disk of its own at ``/srv/d``."""
    machine = test_host("releases")
    standin.make_wheels(machine.state / "srv" / "wheels")
    script = """
        set -e
        mkdir -p /srv/d ~tester/.config/pip
        mountpoint -q /srv/d || mount -t tmpfs -o size=400m tmpfs /srv/d
        chown tester: /srv/d
        printf '[global]\nno-index = true\nfind-links = /srv/wheels\n' > ~tester/.config/pip/pip.conf
        chown -R tester: ~tester
    """
    done = machine.exec("sh", "-c", script)
    assert done.returncode == 0, done.stderr
    return machine


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Iterator[Deployed]:
    """A healthy deployment under the supervisor, ended after the module."""
    root = tmp_path_factory.mktemp("host") / "root"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = Deployed(
        "local",
        port,
        ["--root", str(root)],
        ["--mode", "supervisor"],
        {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "HOME": str(root.parent)},
    )
    try:
        found.up()
        yield found
    finally:
        found.run("down", "--break-lock")
        shutil.rmtree(root, ignore_errors=True)
