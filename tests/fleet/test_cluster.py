"""Two hosts that serve one model together: containers with an address each, joined by a bridge and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import BootHost
from tests.fleet.test_several import rows, uv
from tests.hosts.container import TestHost, power_off
from tests.hosts.loopback import Sshd
from tests.hosts.network import networks
from tests.scope import costly
from tests.wheelhouse.conftest import Cli, built, cli

__all__ = ["built", "cli", "uv"]

pytestmark = [pytest.mark.wheels, pytest.mark.waits, pytest.mark.timeout(900)]

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


@pytest.mark.host
@costly
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
        assert f"reached at {machine.address} on host0" in logs[rank]
        script = "tr '\\0' ' ' < /proc/$(pgrep -f '[s]glang.launch_server' | tail -1)/cmdline"
        serving = machine.exec("sh", "-c", script)
        shape = f"--nnodes 2 --node-rank {rank} --dist-init-addr {first.address}:{MEETING_PORT} --tp-size 2"
        assert shape in serving.stdout
    again = rows(cli.json(*words))
    assert {row["status"] for row in again.values()} == {"ok"}
    assert [row["status"] for row in rows(cli.json("status", "big", *words[2:])).values()] == ["ok", "ok"]
    assert [row["status"] for row in rows(cli.json("down", "big", *words[2:])).values()] == ["changed", "changed"]
    assert [row["exit_code"] for row in rows(cli.json("status", "big", *words[2:], exit_code=9)).values()] == [9, 9]


def test_a_cluster_is_started_as_one(cli: Cli, sshd: Sshd, tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.toml"
    strange = f'address = "127.0.0.1:{sshd.port}"\nknown_hosts = "{tmp_path / "none"}"\n'
    inventory.write_text(f'[first]\n{strange}[second]\n{strange}[clusters.big]\nhosts = ["first", "second"]\n')
    words = ("--inventory", str(inventory), "--stack", "standin", "--algorithm", "NONE")
    assert "not all named" in cli.json("up", "first", *words, exit_code=2)["error"]["message"]
    # All of them: each is gone to (its key was never met), and not refused for being named alone.
    found = rows(cli.json("up", "big", *words, exit_code=3))
    assert [row["exit_code"] for row in found.values()] == [3, 3]
