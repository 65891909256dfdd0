"""Settings → unit, environment file and the steps of a launch."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_deploy.assets import templates_dir
from dflash_deploy.errors import UsageError
from dflash_deploy.facts import Facts, Gpu
from dflash_deploy.plan.launch import (
    Present,
    ServiceFiles,
    env_quoted,
    exec_line,
    paths,
    plan_launch,
    render,
    unit_path,
)
from dflash_deploy.settings import Mode, Settings, effective

MODES = list(Mode)


def deployed(facts: Facts, mode: Mode, **options: object) -> tuple[Settings, ServiceFiles]:
    settings = effective("h", facts, options={"mode": str(mode), **options})
    return settings, render(settings, facts, templates_dir(), ("content",))


def present_of(settings: Settings, facts: Facts, files: ServiceFiles) -> Present:
    """What stands on the host after a launch."""
    data = {settings.env_file: files.env, settings.runner: files.runner, settings.staged_unit: files.unit}
    data |= {settings.secrets_file: files.secrets, unit_path(settings, facts): files.unit}
    digests = {path: hashlib.sha256(data[path]).hexdigest() for path in paths(settings, facts)}
    return Present(digests, True, True, files.fingerprint)


@pytest.mark.parametrize("mode", MODES)
def test_a_second_launch_does_nothing(facts: Facts, mode: Mode) -> None:
    settings, files = deployed(facts, mode)
    first = plan_launch(settings, facts, files, Present({}))
    assert not first.empty
    assert plan_launch(settings, facts, files, present_of(settings, facts, files)).empty


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "change",
    [
        {"port": 31000},
        {"budget": 8},
        {"env": {"A": "b"}},
        {"server_args": ["--x"]},
        {"model": "/m", "draft_model": "/d"},
    ],
)
def test_any_change_of_what_serves_restarts(facts: Facts, mode: Mode, change: dict[str, object]) -> None:
    settings, files = deployed(facts, mode)
    before = present_of(settings, facts, files)
    settings, changed = deployed(facts, mode, **change)
    plan = plan_launch(settings, facts, changed, before)
    assert plan.steps[-1].title == "restart the service"


@pytest.mark.parametrize("mode", MODES)
def test_other_content_restarts(facts: Facts, mode: Mode) -> None:
    settings, files = deployed(facts, mode)
    other = render(settings, facts, templates_dir(), ("other patches",))
    assert other.fingerprint != files.fingerprint
    assert not plan_launch(settings, facts, other, present_of(settings, facts, files)).empty


def test_a_unit_that_is_there_is_not_written_again(facts: Facts) -> None:
    settings, files = deployed(facts, Mode.SYSTEM)
    stopped = replace(present_of(settings, facts, files), running=False, running_fingerprint="")
    titles = [step.title for step in plan_launch(settings, facts, files, stopped).steps]
    assert titles == ["reload systemd", "forget earlier failures", "start the service"]
    disabled = replace(present_of(settings, facts, files), enabled=False)
    assert [step.title for step in plan_launch(settings, facts, files, disabled).steps] == [
        "enable the service at boot"
    ]


def test_an_ordinary_user_goes_through_sudo_only_for_system_units(facts: Facts) -> None:
    settings, files = deployed(facts, Mode.SYSTEM)
    steps = [step.describe() for step in plan_launch(settings, facts, files, Present({})).steps]
    assert any("sudo -n /bin/sh -c 'install" in step for step in steps) and b"User=me\n" in files.unit
    root = replace(facts, uid=0, user="root")
    settings, files = deployed(root, Mode.SYSTEM)
    steps = [step.describe() for step in plan_launch(settings, root, files, Present({})).steps]
    assert not any("sudo" in step for step in steps) and b"User=" not in files.unit
    settings, files = deployed(facts, Mode.USER)
    steps = [step.describe() for step in plan_launch(settings, facts, files, Present({})).steps]
    assert not any("sudo" in step for step in steps) and any("/run/user/1000" in step for step in steps)


@pytest.mark.parametrize("mode", [Mode.SYSTEM, Mode.USER])
def test_what_is_started_is_the_unit_that_lies_there(facts: Facts, mode: Mode) -> None:
    """A run was cut off with its unit in place and systemd had not read it: the next one finds files as wanted."""
    settings, files = deployed(facts, mode)
    found = replace(present_of(settings, facts, files), running_fingerprint="of an older release")
    steps = [step.describe() for step in plan_launch(settings, facts, files, found).steps]
    assert not any("install -D" in step for step in steps)
    assert "daemon-reload" in steps[-3] and "restart" in steps[-1]


def test_secrets_are_in_the_environment_file_alone(facts: Facts) -> None:
    settings, files = deployed(facts, Mode.SYSTEM, env={"HF_TOKEN": "hf_secret"})
    plan = plan_launch(settings, facts, files, Present({}))
    assert b"hf_secret" in files.env and b"hf_secret" not in files.unit
    assert "hf_secret" not in repr(plan) + " ".join(step.describe() for step in plan.steps)
    assert next(step.mode for step in plan.steps if getattr(step, "path", "") == settings.env_file) == 0o600  # type: ignore[union-attr]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.parametrize("mode", [Mode.SYSTEM, Mode.USER])
def test_systemd_accepts_the_unit(facts: Facts, mode: Mode, tmp_path: Path) -> None:
    python = tmp_path / "root % x" / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    awkward = ["--json", '{"a": "$HOME %h \\\\ \'x\'"}']
    me = replace(facts, user="root", uid=0)
    root = tmp_path / "root % x"
    settings, files = deployed(me, mode, root=str(root), venv=str(root / "venv"), server_args=awkward)
    unit = tmp_path / f"{settings.service}.service"
    unit.write_bytes(files.unit)
    scope = "--user" if mode == Mode.USER else "--system"
    result = subprocess.run(
        ["systemd-analyze", "verify", scope, "--man=no", str(unit)], capture_output=True, text=True, timeout=60
    )
    complaints = [line for line in result.stderr.splitlines() if unit.name in line]
    assert complaints == [], result.stderr


@pytest.mark.parametrize("mode", [Mode.SYSTEM, Mode.USER])
def test_hardening_leaves_the_gpus_alone(facts: Facts, mode: Mode) -> None:
    """Each of these, set or implied, hides device nodes or forbids memory that a compiler writes and runs."""
    gpu = Gpu(0, "G", (9, 0), 81920, 80000)
    machine = replace(facts, gpus=(gpu,), driver=(580, 65, 6), glibc=(2, 39))
    wanted = {"stack": "sglang-0.5.16-cu130", "model": "/m", "draft_model": "/d"}
    settings, files = deployed(machine, mode, **wanted, server_args=["--mem-fraction-static", "0.7"])
    unit = files.unit.decode()
    keys = {line.partition("=")[0] for line in unit.splitlines() if not line.startswith("#")}
    forbidden = {"PrivateDevices", "DeviceAllow", "DevicePolicy", "ProtectClock", "MemoryDenyWriteExecute"}
    assert not keys & {*forbidden, "PrivateUsers", "RestrictNamespaces", "SystemCallFilter", "ProcSubset"}
    assert {"NoNewPrivileges", "LimitNOFILE", "LimitMEMLOCK", "StartLimitBurst"} <= keys
    assert ("ProtectSystem" in keys) == ("nvidia-modprobe" in unit) == (mode == Mode.SYSTEM)
    # The gate: this port, and on each GPU as much free memory as the server will take.
    gate = next(line for line in unit.splitlines() if " gate " in line)
    assert f"--port {settings.port}" in gate and "--gpu-share 0.7" in gate


def test_places_that_hardening_would_hide(facts: Facts) -> None:
    _, files = deployed(facts, Mode.SYSTEM, root="/tmp/deploy")
    assert b"PrivateTmp" not in files.unit and b"ProtectSystem=full" in files.unit
    _, files = deployed(facts, Mode.SYSTEM, root="/usr/local/deploy")
    assert b"PrivateTmp=yes" in files.unit and b"ProtectSystem" not in files.unit


def test_quoting() -> None:
    assert exec_line(["a", "b c", 'd"e', "50%", "$X", ""]) == 'a "b c" "d\\"e" 50%% $$X ""'
    assert env_quoted('a"b$c`d\\e') == '"a\\"b\\$c\\`d\\\\e"'


def test_hosts_that_serve_together_are_told_so(facts: Facts) -> None:
    options = {"model": "/m", "algorithm": "DFLASH", "draft_model": "/d", "nnodes": 2, "node_rank": 1}
    meeting = {"dist_init_addr": "10.0.0.7:20000"}
    settings = effective("h", facts, options=options, entry=meeting)
    words = " ".join(settings.server_argv())
    assert "--nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.7:20000" in words
    assert Settings.of_record("h", settings.as_dict()).server_argv() == settings.server_argv()
    assert "--nnodes" not in effective("h", facts, options={"model": "/m", "algorithm": "NONE"}).server_argv()
    elsewhere = {"algorithm": "DDTREE", "stack": "sglang-0.5.23-cpu"}
    for wrong in ({"node_rank": 2}, {"dist_init_addr": "nowhere"}, elsewhere):
        with pytest.raises(UsageError):
            effective("h", facts, options={**options, **wrong}, entry=meeting)
