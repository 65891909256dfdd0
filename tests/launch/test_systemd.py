"""The service under a real systemd: survives a reboot, ends whole, and a second launch changes nothing."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable

import pytest

from dflash_deploy.assets import templates_dir
from dflash_deploy.diagnose import diagnose
from dflash_deploy.errors import HostError
from dflash_deploy.execute import execute
from dflash_deploy.facts import Facts, gather
from dflash_deploy.host import Host, connect
from dflash_deploy.launch import observe, present, tail
from dflash_deploy.model import Plan
from dflash_deploy.plan.launch import plan_launch, render, stop_steps
from dflash_deploy.settings import Mode, Settings, effective
from tests.conftest import BootHost
from tests.launch.fake_server import SOURCE

pytestmark = pytest.mark.host


def bring(host: Host, root: str) -> None:
    """The stand-in server as ``<root>/venv``."""
    host.write(f"{root}/venv/packages/sglang/__init__.py", b"")
    host.write(f"{root}/venv/packages/sglang/launch_server.py", SOURCE.encode())
    script = f'#!/bin/sh\nPYTHONPATH="{root}/venv/packages" exec /usr/bin/python3 "$@"\n'
    host.write(f"{root}/venv/bin/python", script.encode(), mode=0o755)


def eventually(holds: Callable[[], bool], seconds: float = 30.0) -> bool:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if holds():
            return True
        time.sleep(0.3)
    return False


def answers(host: Host, settings: Settings) -> bool:
    script = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=2)"
    return host.run(["/usr/bin/python3", "-c", script, settings.url], timeout_s=10).ok


def serving(host: Host, settings: Settings) -> str:
    return host.run(
        ["sh", "-c", "ps -eo args 2>/dev/null || cat /proc/[0-9]*/cmdline | tr '\\0' ' '"], timeout_s=10
    ).out


def test_system_unit(test_host: BootHost) -> None:
    machine = test_host("ctunit", disk=True)
    host = connect(machine.target())
    root = f"{host.home}/deploy"
    bring(host, root)
    facts = gather(host, discover=False)
    assert facts.systemd == "system" and facts.uid != 0
    options = {"root": root, "venv": f"{root}/venv", "stack": "cpu", "env": {"WORDS": 'a"b $HOME \\d'}}
    settings = effective("ctunit", facts, options=options)
    assert settings.mode == Mode.SYSTEM

    def launch() -> int:
        files = render(settings, facts, templates_dir(), ())
        plan = plan_launch(settings, facts, files, present(host, settings, facts, observe(host, settings, facts)))
        return len(execute(plan, host))

    assert launch() > 0
    assert eventually(lambda: answers(host, settings))
    state = observe(host, settings, facts)
    assert state.running and state.enabled and state.server_pid
    # A login sees another boot's id than a unit with protected tunables does here; the runner's account holds for both.
    asked = host.run([settings.python, "-I", settings.runner, "status", "--state", settings.state_file], timeout_s=20)
    assert json.loads(asked.out)["running"], asked.out
    assert 'token a"b $HOME \\d child' in "\n".join(tail(host, settings, 50))
    assert launch() == 0
    # The runner killed: systemd ends the rest and starts anew.
    assert host.run(["kill", "-9", str(state.pid)]).ok
    assert eventually(lambda: observe(host, settings, facts).restarts == 1 and answers(host, settings))
    assert launch() == 0
    before = host.read("/proc/sys/kernel/random/boot_id")
    with contextlib.suppress(HostError):
        host.run(["sudo", "-n", "systemctl", "reboot"], timeout_s=20)
    host.close()

    def back() -> bool:
        nonlocal host
        try:
            host = connect(machine.target(), connect_timeout_s=5)
            return observe(host, settings, facts).running and answers(host, settings)
        except HostError:
            return False

    time.sleep(2)
    assert eventually(back, 90), before
    assert launch() == 0
    execute(Plan("down", tuple(stop_steps(settings, facts))), host)
    state = observe(host, settings, facts)
    assert not state.running and not state.enabled
    assert "launch_server" not in serving(host, settings) and "time.sleep(600)" not in serving(host, settings)
    host.close()


def test_user_unit_and_its_gate(test_host: BootHost) -> None:
    """A unit of the account's own manager; its port taken by another process is told and waited for, not fought."""
    machine = test_host("ctunit", disk=True)
    assert machine.exec("loginctl", "enable-linger", machine.user).returncode == 0
    host = connect(machine.target())
    root = f"{host.home}/own"
    bring(host, root)
    facts = gather(host, discover=False)
    options = {"root": root, "venv": f"{root}/venv", "stack": "cpu", "mode": "systemd-user", "port": 30500}
    settings = effective("ctunit", facts, options=options)

    def launch() -> int:
        files = render(settings, facts, templates_dir(), ())
        plan = plan_launch(settings, facts, files, present(host, settings, facts, observe(host, settings, facts)))
        return len(execute(plan, host))

    taken = f"nohup /usr/bin/python3 -m http.server {settings.port} >/dev/null 2>&1 & echo $!"
    holder = host.run(["sh", "-c", taken], timeout_s=20).out.strip()
    # The unit is accepted as it is rendered, by the systemd that will run it.
    files = render(settings, facts, templates_dir(), ())
    host.write(f"{root}/check/{settings.service}.service", files.unit)
    host.write(settings.runner, files.runner)
    checked = host.run(
        ["systemd-analyze", "verify", "--user", "--man=no", f"{root}/check/{settings.service}.service"], timeout_s=60
    )
    assert settings.service not in checked.err, checked.err
    unit = files.unit.decode().replace("--wait 60", "--wait 1")
    told = launch_with_taken_port(host, settings, facts, unit)
    assert not told, told
    text = "\n".join(tail(host, settings, 20))
    assert f"not started: port {settings.port} is in use by pid {holder}" in text
    assert diagnose(text.encode()).primary.id == "port-in-use"  # type: ignore[union-attr]
    assert host.run(["kill", holder]).ok
    assert launch() > 0
    assert eventually(lambda: answers(host, settings))
    state = observe(host, settings, facts)
    assert state.running and state.enabled and "active" in state.detail
    limits = (host.read(f"/proc/{state.server_pid}/limits") or b"").decode()
    assert int(next(row for row in limits.splitlines() if "open files" in row).split()[3]) >= 4096
    assert launch() == 0
    execute(Plan("down", tuple(stop_steps(settings, facts))), host)
    assert not observe(host, settings, facts).running
    host.close()


def launch_with_taken_port(host: Host, settings: Settings, facts: Facts, unit: str) -> str:
    """Start the unit while its port is taken; empty when its gate kept it from starting."""
    from dflash_deploy.plan.launch import systemctl, unit_path

    files = render(settings, facts, templates_dir(), ())
    for path, data in ((settings.env_file, files.env), (settings.runner, files.runner)):
        host.write(path, data)
    host.write(unit_path(settings, facts), unit.encode())
    service = f"{settings.service}.service"
    host.run(systemctl(settings.mode, facts, "daemon-reload"), timeout_s=60)
    began = host.run(systemctl(settings.mode, facts, "start", service), timeout_s=60)
    told = host.run(systemctl(settings.mode, facts, "status", "--no-pager", service), timeout_s=60).out
    gate = host.run([settings.python, settings.runner, "gate", "--log", settings.log_file, "--port", "1"], timeout_s=60)
    host.run(systemctl(settings.mode, facts, "stop", service), timeout_s=60)
    gated = not began.ok and "ExecStartPre" in told and host.read(settings.log_file) is not None
    return "" if gated else f"{began.err}\n{told}\n{gate.err}"
