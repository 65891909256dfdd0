"""A container as a host: systemd, users, reboot, a network of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_deploy.errors import HostError
from dflash_deploy.host import connect
from dflash_deploy.inventory import resolve
from tests.conftest import BootHost
from tests.hosts.network import networks

pytestmark = pytest.mark.host


def test_systemd_users_and_contract(test_host: BootHost, tmp_path: Path) -> None:
    booted = test_host("ct200", disk=True)
    host = connect(resolve("ct200", inventory=booted.hosts_toml))
    assert host.run(["cat", "/proc/1/comm"]).out == "systemd\n"
    assert host.run(["systemctl", "is-system-running", "--wait"]).out.strip() in ("running", "degraded")
    assert host.run(["systemctl", "--user", "is-system-running", "--wait"]).out.strip() in ("running", "degraded")
    assert host.run(["sudo", "-n", "id", "-u"]).out == "0\n"
    assert host.home == "/home/tester"
    host.write("/home/tester/deep/file", b"data", mode=0o600)
    assert host.read("/home/tester/deep/file") == b"data"
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a").write_bytes(b"a")
    host.copy_tree(str(tmp_path / "tree"), "/home/tester/tree")
    assert host.run(["cat", "/home/tester/tree/a"]).out == "a"
    made = host.run(["python3", "-m", "venv", "/home/tester/v"], timeout_s=120)
    assert made.ok, made.err
    host.close()


def test_reboot(test_host: BootHost) -> None:
    booted = test_host("ct200", disk=True)
    host = connect(resolve("ct200", inventory=booted.hosts_toml), connect_timeout_s=60)
    host.write("/home/tester/kept", b"kept")
    before = host.run(["cat", "/proc/sys/kernel/random/boot_id"]).out
    with contextlib.suppress(HostError):
        host.run(["sudo", "-n", "systemctl", "reboot"], timeout_s=30)
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        try:
            after = host.run(["cat", "/proc/sys/kernel/random/boot_id"], timeout_s=10)
        except HostError:
            continue
        if after.ok and after.out != before:  # nspawn gives each boot an id of its own
            break
        time.sleep(0.2)
    else:
        pytest.fail("did not come back")
    assert booted.exec("cat", "/proc/sys/kernel/random/boot_id").stdout == after.out
    assert host.read("/home/tester/kept") == b"kept"
    host.close()


@pytest.fixture
def network() -> Iterator[tuple[str, str]]:
    """A network namespace with a veth pair; gives its name and the address inside."""
    with networks(1) as found:
        yield found[0].name, found[0].address


def test_a_network_of_its_own(network: tuple[str, str], test_host: BootHost) -> None:
    name, address = network
    booted = test_host("netted", netns=name, address=address)
    host = connect(resolve("netted", inventory=booted.hosts_toml))
    assert host.run(["cat", "/proc/1/comm"]).out == "systemd\n"
    host.close()
