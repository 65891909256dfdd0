"""Two hosts that serve one model together: containers with an address each, joined by a bridge and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import BootHost
from tests.fleet.test_several import rows, uv
from tests.hosts.container import TestHost, power_off
from tests.hosts.network import networks
from tests.wheelhouse.conftest import Cli, built, cli

__all__ = ["built", "cli", "uv"]

pytestmark = [pytest.mark.wheels, pytest.mark.host, pytest.mark.timeout(900)]

NAMES = ("first", "second")
MEETING_PORT = 20000


@pytest.fixture
def pair(test_host: BootHost, uv: Path) -> Iterator[list[TestHost]]:
    with networks(len(NAMES)) as found:
        try:
            machines = []
            for name, network in zip(NAMES, found, strict=True):
                machine = test_host(name, netns=network.name, address=network.address)
                shutil.copy(uv / "uv", machine.state / "srv" / "uv")
                script = f"install -d -o {machine.user} /srv/d && ln -s /srv/uv /usr/local/bin/uv"
                assert machine.exec("sh", "-c", script).returncode == 0
                machines.append(machine)
            yield machines
        finally:
            for name in NAMES:
                power_off(name)


def test_two_hosts_serve_together(cli: Cli, pair: list[TestHost], built: Path, tmp_path: Path) -> None:
    first, second = pair
    inventory = tmp_path / "hosts.toml"
    inventory.write_text(
        f'[defaults]\nstack = "standin"\nroot = "/srv/d"\nalgorithm = "NONE"\nwheelhouse = "{built}"\n'
        + "".join(machine.hosts_toml.read_text() for machine in pair)
        + '[clusters.big]\nhosts = ["first", "second"]\nserver_args = ["--tp-size", "2"]\n'
    )
    words = ("up", "big", "--inventory", str(inventory))
    # One alone would wait for the other for ever.
    alone = cli.json("up", "first", *words[2:], exit_code=2)["error"]
    assert "not all named" in alone["message"]
    found = rows(cli.json(*words, timeout_s=600))
    assert [row["status"] for row in found.values()] == ["changed", "changed"]
    # Requests go to the first; the second says that its part is ready.
    assert found["first"]["answer"]["health"]["data"]["completion"]
    assert "ready as rank 1" in {step["detail"] for step in found["second"]["answer"]["steps"]}
    logs = [machine.exec("sh", "-c", "cat /srv/d/releases/*/log/*").stdout for machine in pair]
    assert f"ranks that came: [1] from ['{second.address}']" in logs[0]
    assert f"met the first at {first.address}:{MEETING_PORT}" in logs[1]
    for rank, machine in enumerate(pair):
        serving = machine.exec("sh", "-c", "tr '\\0' ' ' < /proc/$(pgrep -f sglang.launch_server | tail -1)/cmdline")
        shape = f"--nnodes 2 --node-rank {rank} --dist-init-addr {first.address}:{MEETING_PORT} --tp-size 2"
        assert shape in serving.stdout
    again = rows(cli.json(*words))
    assert {row["status"] for row in again.values()} == {"ok"}
    cli.json("down", "big", *words[2:])
