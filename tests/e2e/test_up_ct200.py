"""``up ct200``: a bare container ends with a healthy DDTREE service under systemd, which a reboot does not end."""

from __future__ import annotations

import os
import subprocess
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import BootHost
from tests.e2e.conftest import dflash_deploy
from tests.hosts.container import TestHost
from tests.patches.wheels import wheel

pytestmark = [pytest.mark.e2e, pytest.mark.host, pytest.mark.timeout(3600)]

ROOT = "/srv/dflash-deploy"


def cli(machine: TestHost, command: str, *words: str, exit_code: int = 0) -> dict[str, Any]:
    return dflash_deploy(command, machine.name, "--inventory", str(machine.hosts_toml), *words, exit_code=exit_code)


def uv() -> Path | None:
    """uv where its wheel can be had: a third of pip's time for 6 GB. This machine's own environment is pip's."""
    try:
        path = wheel("uv", "0.13.9")
    except (subprocess.SubprocessError, IndexError):
        return None
    program = path.with_suffix("")
    if not program.exists():
        with zipfile.ZipFile(path) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/scripts/uv"))
            fresh = program.with_suffix(f".{os.getpid()}")
            fresh.write_bytes(archive.read(name))
            fresh.chmod(0o755)
            fresh.replace(program)
    return program


def test_up_reboot_down(test_host: BootHost) -> None:
    # A reboot of the container must find its unit again: its root file system is on disk.
    machine = test_host("ct200", disk=True, options=f'root = "{ROOT}"\nstack = "cpu"\n', uv=uv())
    machine.exec("mkdir", "-p", ROOT)
    machine.exec("chown", machine.user, ROOT)
    assert cli(machine, "plan", exit_code=10)["changes"]
    first = cli(machine, "up")
    assert first["ok"] and first["changed"]
    data = first["health"]["data"]
    assert data["acceptance_length"] > 1.5 and data["completion"]
    again = cli(machine, "up")
    assert not again["changed"] and {step["status"] for step in again["steps"]} == {"ok"}
    assert cli(machine, "plan")["changes"] is False
    before = cli(machine, "status")
    assert before["running"] and before["enabled"] and before["mode"] == "systemd-system"
    machine.exec("systemctl", "reboot")
    time.sleep(5)
    # No command of ours between the reboot and the check but one that waits: the unit starts the service.
    after = cli(machine, "up")
    assert not after["changed"]
    assert cli(machine, "status")["since"] > before["since"]
    cli(machine, "down")
    assert not cli(machine, "status", exit_code=9)["running"]
    left = machine.exec("sh", "-c", "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '").stdout
    assert "sglang" not in left.replace("sh -c", "") and "serve.py" not in left
