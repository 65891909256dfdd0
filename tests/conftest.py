"""Fixtures that several rooms share: real hosts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.hosts import container
from tests.hosts.loopback import SSHD, Sshd, start_sshd


class BootHost(Protocol):
    """Boots a container, or gives the one of that name that is up already."""

    def __call__(
        self,
        name: str = ...,
        *,
        disk: bool = ...,
        netns: str = ...,
        address: str = ...,
        user: str = ...,
        options: str = ...,
        uv: Path | None = ...,
    ) -> container.TestHost: ...


SERVED = ("tests/e2e/", "tests/wheelhouse/test_real_stack.py")
HOSTS = (
    "tests/e2e/test_up_ct200.py",
    "tests/fleet/",
    "tests/hosts/",
    "tests/launch/test_systemd.py",
    "tests/releases/",
    "tests/wheelhouse/test_offline.py",
)


def group_of(nodeid: str) -> str:
    """What runs in one process, when there are several: servers, containers, and any other file by itself."""
    file = nodeid.partition("::")[0]
    return "hosts" if file.startswith(HOSTS) else "served" if file.startswith(SERVED) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n`` one process serves SGLangs, one boots containers, and whoever is free takes the next file.

    Servers fill the cores and containers share addresses, so each kind is one group.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order in which files are taken: servers and containers begin at once, being the longest; of the rest, files
    that mostly wait and files that compute take turns, the long ones first."""
    kinds: dict[str, set[str]] = {}
    for item in items:
        if {"sshd", "new_sshd"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.waits)
        marks, group = {mark.name for mark in item.iter_markers()}, group_of(item.nodeid)
        if {"e2e", "host"} & marks and group not in ("served", "hosts"):
            raise pytest.UsageError(f"{item.nodeid} is marked {sorted(marks)}: name its file in SERVED or HOSTS")
        kinds.setdefault(group, set()).update(marks)
    waiting = [group for group, marks in kinds.items() if "waits" in marks]
    computing = sorted(
        (g for g, marks in kinds.items() if "waits" not in marks), key=lambda g: "wheels" not in kinds[g]
    )
    place = {group: float(at) for at, group in enumerate(computing)}
    place |= {group: at + 0.5 for at, group in enumerate(waiting)} | {"served": -2.0, "hosts": -1.0}
    items.sort(key=lambda item: place[group_of(item.nodeid)])


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """A real sshd on loopback."""
    if SSHD is None:
        pytest.skip("no sshd here: install openssh-server")
    server = start_sshd(tmp_path_factory.mktemp("sshd"))
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def new_sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Sshd]]:
    """Starts further sshds, with keys and settings of their own, ended after the test."""
    if SSHD is None:
        pytest.skip("no sshd here: install openssh-server")
    servers: list[Sshd] = []

    def start(extra: str = "", port: int | None = None) -> Sshd:
        servers.append(start_sshd(tmp_path_factory.mktemp("sshd"), extra=extra, port=port))
        return servers[-1]

    try:
        yield start
    finally:
        for server in servers:
            server.stop()


@pytest.fixture(scope="session")
def test_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BootHost]:
    """Boots containers by name (``ct200`` unless told otherwise), powered off when the session ends, also after
    failures. Skips with the reason where none can be booted. Two runs beside each other do not meet."""
    booted: dict[str, container.TestHost] = {}
    tried: list[str] = []

    def boot(
        name: str = "ct200",
        *,
        disk: bool = False,
        netns: str = "",
        address: str = "127.0.0.1",
        user: str = "tester",
        options: str = "",
        uv: Path | None = None,
    ) -> container.TestHost:
        if name not in booted:
            tried.append(name)
            try:
                booted[name] = container.boot(
                    tmp_path_factory.mktemp(name),
                    name,
                    disk=disk,
                    netns=netns,
                    address=address,
                    user=user,
                    options=options,
                    uv=uv,
                )
            except container.CannotBoot as why:
                pytest.skip(f"no test host: {why}")
        return booted[name]

    # Containers of this run lie apart from those of another.
    before = os.environ.get("TESTHOST_RUN")
    os.environ["TESTHOST_RUN"] = str(os.getpid())
    try:
        yield boot
    finally:
        for name in tried:
            container.power_off(name)
        if before is None:
            del os.environ["TESTHOST_RUN"]
        else:
            os.environ["TESTHOST_RUN"] = before
