"""A deployment of the stand-in server on this machine, always ended."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dflash_deploy.assets import templates_dir
from dflash_deploy.execute import execute
from dflash_deploy.facts import Facts
from dflash_deploy.host.local import LocalHost
from dflash_deploy.launch import ServiceState, observe, present
from dflash_deploy.model import Plan, StepOutcome
from dflash_deploy.plan.launch import plan_launch, render, stop_steps
from dflash_deploy.settings import Settings, effective
from tests.launch import fake_server


@dataclass
class Service:
    """Launches as the command does."""

    host: LocalHost
    facts: Facts
    settings: Settings

    def state(self) -> ServiceState:
        return observe(self.host, self.settings, self.facts)

    def plan(self) -> Plan:
        files = render(self.settings, self.facts, templates_dir(), ())
        return plan_launch(
            self.settings, self.facts, files, present(self.host, self.settings, self.facts, self.state())
        )

    def launch(self) -> list[StepOutcome]:
        return execute(self.plan(), self.host)

    def down(self) -> None:
        execute(Plan("down", tuple(stop_steps(self.settings, self.facts))), self.host)

    def change(self, **values: object) -> None:
        self.settings = replace(self.settings, **values)  # type: ignore[arg-type]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    facts = Facts("here", "x86_64", "Linux", str(tmp_path), "me", 1000)
    root = tmp_path / "root with space"
    fake_server.install(root / "venv")
    options = {
        "root": str(root),
        "venv": str(root / "venv"),
        "port": port,
        "stack": "cpu",
        "env": {"WORDS": 'a"b $HOME `c` \\d'},
    }
    made = Service(LocalHost(), facts, effective("here", facts, options=options))
    try:
        yield made
    finally:
        if made.host.read(made.settings.runner) is not None:
            made.down()
