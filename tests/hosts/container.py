"""Debian containers with systemd as PID 1 and sshd, booted by ``testhost.sh``."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from dflash_deploy.inventory import Target
from tests.hosts.loopback import free_port, make_key

SCRIPT = Path(__file__).with_name("testhost.sh")
BOOT_S = 600
"""Seconds for a boot; the first one makes the base."""


class CannotBoot(Exception):
    """No container can be booted here; the text says why."""


@dataclass(frozen=True)
class TestHost:
    """A booted container."""

    __test__ = False

    name: str
    address: str
    port: int
    user: str
    key: Path
    known_hosts: Path
    hosts_toml: Path
    """An inventory with this host under its name."""
    state: Path

    def target(self, user: str | None = None) -> Target:
        return Target(
            name=self.name,
            address=self.address,
            port=self.port,
            user=user or self.user,
            identity_files=(str(self.key),),
            identities_only=True,
            known_hosts=(str(self.known_hosts),),
        )

    def exec(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run as root inside, without ssh."""
        return subprocess.run([SCRIPT, "exec", self.name, *argv], capture_output=True, text=True, timeout=60)


def boot(
    folder: Path,
    name: str = "ct200",
    *,
    disk: bool = False,
    netns: str = "",
    address: str = "127.0.0.1",
    user: str = "tester",
    options: str = "",
    uv: Path | None = None,
) -> TestHost:
    """Boot a container; :func:`power_off` it afterwards, whatever happens.

    Args:
        folder: for keys, known_hosts and hosts.toml.
        options: more lines for the host's table in hosts.toml.
        uv: an executable that the container finds in its PATH.

    Raises:
        CannotBoot: not root, or the tools or the base cannot be had.
    """
    if os.geteuid() != 0:
        raise CannotBoot("booting a container needs root")
    folder.mkdir(parents=True, exist_ok=True)
    key = folder / "key"
    if not key.exists():
        make_key(key)
    port = free_port()
    command = [str(SCRIPT), "up", name, str(port), str(key.with_suffix(".pub"))]
    command += ["--disk"] if disk else []
    command += ["--netns", netns] if netns else []
    command += ["--uv", str(uv)] if uv else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BOOT_S)
    except subprocess.TimeoutExpired as error:
        power_off(name)
        raise CannotBoot(f"no boot within {BOOT_S} s") from error
    if done.returncode != 0:
        raise CannotBoot(done.stderr.strip() or f"exit {done.returncode}")
    about = dict(line.split("=", 1) for line in done.stdout.splitlines())
    kind, blob = Path(about["hostkey"]).read_text().split()[:2]
    known_hosts = folder / "known_hosts"
    known_hosts.write_text(f"[{address}]:{port} {kind} {blob}\n")
    hosts_toml = folder / "hosts.toml"
    hosts_toml.write_text(
        f'[{name}]\naddress = "{user}@{address}:{port}"\nidentity_file = "{key}"\n'
        f'known_hosts = "{known_hosts}"\n{options}\n'
    )
    return TestHost(name, address, port, user, key, known_hosts, hosts_toml, Path(about["state"]))


def power_off(name: str) -> None:
    """Power ``name`` off and forget it; harmless when it is not there."""
    subprocess.run([SCRIPT, "down", name], capture_output=True, timeout=120, check=True)
