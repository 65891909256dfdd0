"""One wheelhouse of the stand-in stack, built by the command from the configured index."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import standin


@dataclass(frozen=True)
class Cli:
    """The command line with the stand-in stack."""

    links: Path

    def run(self, *words: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.hosts.standin", *words]
        env = standin.environment(self.links)
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env)

    def json(self, *words: str, exit_code: int = 0, timeout_s: float = 300.0) -> dict[str, Any]:
        done = self.run(*words, "--json", timeout_s=timeout_s)
        assert done.returncode == exit_code, f"{' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer


@pytest.fixture(scope="session")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    return Cli(standin.make_wheels(tmp_path_factory.mktemp("links")))


@pytest.fixture(scope="session")
def built(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Never changed; copy it with :func:`house`."""
    folder = tmp_path_factory.mktemp("house") / "standin"
    answer = cli.json("wheelhouse", "build", "--stack", "standin", "--out", str(folder))
    assert answer["ok"] and answer["bytes"] > 1 << 20
    return folder


@pytest.fixture
def house(built: Path, tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """Makes a copy that a test may damage."""
    yield lambda: Path(shutil.copytree(built, tmp_path / "house"))
