"""Fixtures that several rooms share: real hosts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With ``-n`` one process serves SGLangs, one boots containers, and whoever is free takes the next file.

    Servers fill the cores and containers share addresses, so each kind is one group. Both begin at once, being the
    longest; of the files, those that mostly wait and those that compute take turns, the long ones first.
    """
    kinds: dict[str, set[str]] = {}
    for item in items:
        if {"sshd", "new_sshd"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.waits)
        kinds.setdefault(file_of(item), set()).update(mark.name for mark in item.iter_markers())
    waiting = [file for file, marks in kinds.items() if "waits" in marks]
    computing = sorted(
        (file for file, marks in kinds.items() if "waits" not in marks), key=lambda f: "wheels" not in kinds[f]
    )
    place = {file: float(at) for at, file in enumerate(computing)} | {file: at + 0.5 for at, file in enumerate(waiting)}
    place |= {"served": -2.0, "hosts": -1.0}
    keys: dict[pytest.Item, float] = {}
    for item in items:
        special = (name for mark, name in (("e2e", "served"), ("host", "hosts")) if item.get_closest_marker(mark))
        group = next(special, file_of(item))
        item.add_marker(pytest.mark.xdist_group(group))
        keys[item] = place[group]
    items.sort(key=lambda item: keys[item])


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


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
