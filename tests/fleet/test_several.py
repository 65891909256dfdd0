"""``up`` on many hosts at once, and one after the other, with one that fails: sshds on loopback, and containers with
systemd. The stand-in stack.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import BootHost
from tests.hosts import standin
from tests.hosts.container import power_off
from tests.hosts.loopback import Sshd, free_port
from tests.scope import EVERYTHING
from tests.wheelhouse.conftest import Cli, built, cli

__all__ = ["built", "cli"]

HOSTS = int(os.environ.get("DFLASH_FLEET_HOSTS") or (16 if EVERYTHING else 3))
"""16 take two cores some minutes."""
CONTAINERS = EVERYTHING or "DFLASH_FLEET_HOSTS" in os.environ

pytestmark = [pytest.mark.wheels, pytest.mark.waits, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Fleet:
    """Hosts with an sshd, a folder and a port each."""

    names: list[str]
    inventory: Path
    moods: dict[str, Path]
    """Per host the file that tells its stand-in server how to behave."""
    roots: dict[str, Path]
    """Per host the deployment's root, as this side reads it."""


@pytest.fixture(scope="module")
def uv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with uv, which installs in a tenth of pip's time."""
    folder = tmp_path_factory.mktemp("uv")
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), "uv==0.13.9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        pytest.skip(f"uv cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return folder / "bin"


@pytest.fixture
def fleet(new_sshd: Callable[..., Sshd], built: Path, uv: Path, cli: Cli, tmp_path: Path) -> Iterator[Fleet]:
    names = [f"h{index:02}" for index in range(HOSTS)]
    moods = {name: tmp_path / f"{name}.mood" for name in names}
    text = (
        f'[defaults]\nstack = "standin"\nmode = "supervisor"\nalgorithm = "NONE"\nwheelhouse = "{built}"\n'
        f"[groups]\nfarm = {json.dumps(names)}\n"
    )
    for name in names:
        server = new_sshd(f"SetEnv PATH={uv}:/usr/local/bin:/usr/bin:/bin")
        text += (
            f'[{name}]\naddress = "{server.user}@127.0.0.1:{server.port}"\nidentity_file = "{server.key}"\n'
            f'known_hosts = "{server.known_hosts}"\nroot = "{tmp_path / name}"\nport = {free_port()}\n'
            f'env = {{ STANDIN_MOOD = "{moods[name]}" }}\n'
        )
    inventory = tmp_path / "hosts.toml"
    inventory.write_text(text)
    try:
        yield Fleet(names, inventory, moods, {name: tmp_path / name for name in names})
    finally:
        for name in names:
            cli.run("down", name, "--inventory", str(inventory), "--break-lock")


@pytest.fixture
def containers(test_host: BootHost, built: Path, uv: Path, tmp_path: Path) -> Iterator[Fleet]:
    """Containers with systemd: a service there is a unit of the system's."""
    names = [f"fleet{index:02}" for index in range(HOSTS)]
    moods, roots = {}, {}
    text = f'[defaults]\nstack = "standin"\nalgorithm = "NONE"\nwheelhouse = "{built}"\n'
    text += f"[groups]\nfarm = {json.dumps(names)}\n"
    try:
        for name in names:
            options = f'root = "/srv/d"\nport = {free_port()}\nenv = {{ STANDIN_MOOD = "/srv/mood" }}\n'
            machine = test_host(name, options=options)
            srv = machine.state / "srv"
            moods[name], roots[name] = srv / "mood", srv / "d"
            shutil.copy(uv / "uv", srv / "uv")
            script = f"install -d -o {machine.user} /srv/d && ln -s /srv/uv /usr/local/bin/uv"
            assert machine.exec("sh", "-c", script).returncode == 0
            text += machine.hosts_toml.read_text()
        inventory = tmp_path / "hosts.toml"
        inventory.write_text(text)
        yield Fleet(names, inventory, moods, roots)
    finally:
        for name in names:
            power_off(name)


@pytest.fixture(
    params=[
        "sshd",
        pytest.param(
            "container",
            marks=[
                pytest.mark.host,
                pytest.mark.skipif(not CONTAINERS, reason="costly: DFLASH_FLEET_HOSTS=N boots so many containers"),
            ],
        ),
    ]
)
def farm(request: pytest.FixtureRequest) -> Fleet:
    found = request.getfixturevalue("fleet" if request.param == "sshd" else "containers")
    assert isinstance(found, Fleet)
    return found


def rows(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["host"]: row for row in answer["hosts"]}


def test_many_at_once_one_fails_then_the_same_command_completes(cli: Cli, farm: Fleet) -> None:
    fleet = farm
    words = ("up", "farm", "--inventory", str(fleet.inventory))
    victim = fleet.names[len(fleet.names) // 2]
    fleet.moods[victim].write_text("die")
    began = time.monotonic()
    answer = cli.json(*words, "--parallel", str(HOSTS), exit_code=9, timeout_s=1500)
    taken = time.monotonic() - began
    found = rows(answer)
    print(f"{HOSTS} hosts at once: {answer['done']} done, {HOSTS - answer['done']} failed, exit 9, {taken:.0f} s")
    assert list(found) == fleet.names and answer["done"] == HOSTS - 1
    assert [name for name, row in found.items() if row["status"] == "failed"] == [victim]
    assert found[victim]["exit_code"] == 9 and found[victim]["error"]["evidence"]
    assert all(row["status"] == "changed" and row["answer"]["health"] for n, row in found.items() if n != victim)
    assert not list(fleet.roots[fleet.names[0]].rglob("site-packages/pip")), "uv made the environment, not pip"

    fleet.moods[victim].unlink()
    again = rows(cli.json(*words, timeout_s=1500))
    assert {row["status"] for name, row in again.items() if name != victim} == {"ok"}
    assert again[victim]["status"] == "changed"

    # One after the other: the first that does not become healthy is the last that is touched.
    second = fleet.names[1]
    fleet.moods[second].write_text("die")
    done = cli.run(*words, "--rolling", "--server-arg=--log-level-http=warning", timeout_s=1500)
    assert done.returncode == 9, done.stderr[-3000:]
    assert f"1 done, 1 failed, {HOSTS - 2} not begun" in done.stdout
    table = {line.split()[1]: line for line in done.stdout.splitlines() if line.startswith("\u2502")}
    assert "changed" in table[fleet.names[0]] and "failed" in table[second] and "not begun" in table[fleet.names[2]]


def test_an_interrupt_ends_the_hosts_runs(cli: Cli, fleet: Fleet) -> None:
    command = [sys.executable, "-m", "tests.hosts.standin", "provision", "farm", "--inventory", str(fleet.inventory)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=standin.environment(cli.links)
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.rstrip().endswith("provision ..."):
            break
    process.send_signal(signal.SIGINT)
    process.stderr.read()
    assert process.wait(60) == 130
    left = subprocess.run(["pgrep", "-f", str(fleet.inventory)], capture_output=True, text=True).stdout
    assert left == ""
