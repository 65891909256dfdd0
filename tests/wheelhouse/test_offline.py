"""From a wheelhouse to a host: what travels, what is refused, and a host without a route that ends healthy."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_deploy.errors import CommandFailed, HostError
from dflash_deploy.host import Host, connect
from tests.conftest import BootHost
from tests.hosts.container import power_off
from tests.hosts.loopback import Sshd
from tests.hosts.network import networks
from tests.wheelhouse.conftest import Cli

MIB = 1 << 20


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def flip(path: Path) -> None:
    """Spoil one bit."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture
def big(tmp_path: Path) -> Path:
    path = tmp_path / "big.whl"
    path.write_bytes(b"".join(hashlib.sha256(str(i).encode()).digest() for i in range(MIB)))
    return path


def test_a_cut_upload_goes_on_and_arrives_whole(new_sshd: Callable[..., Sshd], big: Path, tmp_path: Path) -> None:
    server = new_sshd()
    host = connect(server.target)
    target, total = tmp_path / "there" / "blob", big.stat().st_size
    seen: list[int] = []

    def cut_in_the_middle(done: int, _: int) -> None:
        seen.append(done)
        if done > total // 2 and len(seen) > 1:
            server.cut()
            time.sleep(0.2)

    with pytest.raises(HostError):
        host.upload(str(big), str(target), sha256=digest(big), on_progress=cut_in_the_middle)
    part = tmp_path / "there" / "blob.part"
    assert not target.exists() and 0 < part.stat().st_size < total
    begun: list[int] = []
    host.upload(str(big), str(target), sha256=digest(big), on_progress=lambda done, _: begun.append(done))
    assert begun[0] > 0 and target.read_bytes() == big.read_bytes() and not part.exists()
    host.close()


@pytest.fixture(params=["local", "ssh"])
def host(request: pytest.FixtureRequest) -> Host:
    from dflash_deploy.host.local import LocalHost

    return LocalHost() if request.param == "local" else connect(request.getfixturevalue("sshd").target)


def test_what_is_not_the_file_is_refused_by_name(host: Host, big: Path, tmp_path: Path) -> None:
    target = tmp_path / "there" / "blob"
    with pytest.raises(CommandFailed, match=r"big\.whl has a wrong hash"):
        host.upload(str(big), str(target), sha256="0" * 64)
    assert list(target.parent.iterdir()) == []
    # What lies there from something else is not what was begun: sent from the start, once.
    (tmp_path / "there" / "blob.part").write_bytes(b"something else")
    host.upload(str(big), str(target), sha256=digest(big))
    assert digest(target) == digest(big) and [p.name for p in target.parent.iterdir()] == ["blob"]
    host.close()


@pytest.mark.wheels
def test_a_damaged_wheel_is_refused_before_the_host_is_touched(
    cli: Cli, house: Callable[[], Path], tmp_path: Path
) -> None:
    folder, root = house(), tmp_path / "root"
    wheel = next(folder.glob("jinja2-*.whl"))
    flip(wheel)
    words = ("provision", "local", "--stack", "standin", "--root", str(root), "--mode", "supervisor")
    error = cli.json(*words, "--wheelhouse", str(folder), exit_code=2)["error"]
    assert len(error["evidence"]) == 1 and error["evidence"][0].startswith(f"{wheel.name}: wrong hash")
    assert "wheelhouse build" in error["hint"]
    assert not (root / "cache").exists() and not list(root.rglob("pyvenv.cfg"))


@pytest.mark.wheels
def test_provision_from_wheels_over_ssh(cli: Cli, built: Path, sshd: Sshd, tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.toml"
    inventory.write_text(
        f'[box]\naddress = "{sshd.user}@127.0.0.1:{sshd.port}"\nidentity_file = "{sshd.key}"\n'
        f'known_hosts = "{sshd.known_hosts}"\nroot = "{tmp_path / "root"}"\nstack = "standin"\nmode = "supervisor"\n'
        f'algorithm = "NONE"\nwheelhouse = "{built}"\n'
    )
    words = ("box", "--inventory", str(inventory))
    planned = cli.json("plan", *words, exit_code=10)
    titles = [step["title"] for plan in planned["plans"] for step in plan["steps"]]
    assert any(title.startswith("upload 7 of 7 wheels (1.") for title in titles) and not (tmp_path / "root").exists()
    first = cli.json("provision", *words)
    assert first["changed"]
    assert not cli.json("provision", *words)["changed"]
    cache = tmp_path / "root" / "cache" / "wheels"
    blobs = [path for path in cache.iterdir() if path.is_file()]
    assert len(blobs) == 7 and all(digest(path) == path.name for path in blobs)

    # A wheel that the host's disk has spoiled is named, and the next run brings it again.
    stamp = next((tmp_path / "root").rglob(".dflash-deploy-stack.json"))
    stamp.unlink()
    victim = next(p for p in blobs if p.name in _sums(built, "jinja2"))
    flip(victim)
    error = cli.json("provision", *words, exit_code=4)["error"]
    assert any("jinja2-3.1.6" in line and "wrong hash" in line for line in error["evidence"]), error
    done = cli.run("provision", *words)
    assert done.returncode == 0 and "upload 1 of 7 wheels" in done.stderr


def _sums(folder: Path, name: str) -> list[str]:
    raw = json.loads((folder / "wheelhouse.json").read_text())
    return [wheel["sha256"] for wheel in raw["wheels"] if wheel["file"].startswith(name)]


@pytest.mark.wheels
def test_wheels_of_another_python_or_stack_are_refused(cli: Cli, house: Callable[[], Path], tmp_path: Path) -> None:
    folder = house()
    manifest = folder / "wheelhouse.json"
    raw = json.loads(manifest.read_text())
    raw["target"].update(python=[3, 99], glibc=[2, 99])
    raw["pins"] = "0" * 64
    manifest.write_text(json.dumps(raw))
    words = ("provision", "local", "--stack", "standin", "--root", str(tmp_path / "root"), "--mode", "supervisor")
    evidence = "\n".join(cli.json(*words, "--wheelhouse", str(folder), exit_code=6)["error"]["evidence"])
    assert "other pins" in evidence and "glibc >= 2.99" in evidence and "needs Python 3.99" in evidence


@pytest.mark.wheels
@pytest.mark.host
def test_a_host_without_a_route_ends_healthy(cli: Cli, test_host: BootHost, tmp_path: Path) -> None:
    with networks(1) as (network,):
        options = 'root = "/srv/dflash"\nstack = "standin"\nalgorithm = "NONE"\n'
        machine = test_host("airgap", netns=network.name, address=network.address, options=options)
        try:
            machine.exec("install", "-d", "-o", machine.user, "/srv/dflash")
            routes = machine.exec("ip", "route").stdout.splitlines()
            assert len(routes) == 1 and "default" not in routes[0], routes
            words = (machine.name, "--inventory", str(machine.hosts_toml))
            folder = tmp_path / "house"
            built = cli.json("wheelhouse", "build", "--for", *words, "--stack", "standin", "--out", str(folder))
            assert built["target"]["python"] == [3, 11]
            answer = cli.json("up", *words, "--wheelhouse", str(folder))
            assert answer["ok"] and answer["changed"] and answer["health"]["data"]["completion"]
            assert not cli.json("up", *words, "--wheelhouse", str(folder))["changed"]
            cli.json("down", *words)
        finally:
            power_off("airgap")
