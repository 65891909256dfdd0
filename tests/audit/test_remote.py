"""Audits over a real sshd: one command a host, whatever the login shell prints; several hosts at once."""

from __future__ import annotations

import importlib.resources
import json
import re
from collections.abc import Callable
from pathlib import Path

from tests.audit.test_commands import call, follows
from tests.audit.test_wheels import build_venv
from tests.hosts.loopback import Sshd

NOISE = 'ForceCommand echo "Welcome to {"; echo oops >&2; eval "$SSH_ORIGINAL_COMMAND"; s=$?; echo bye; exit $s\n'


def inventory(folder: Path, **hosts: Sshd) -> str:
    lines = [
        f'[{name}]\naddress = "{sshd.user}@127.0.0.1:{sshd.port}"\nidentity_file = "{sshd.key}"\n'
        f'known_hosts = "{sshd.known_hosts}"\n'
        for name, sshd in hosts.items()
    ]
    lines.append('[gone]\naddress = "nobody@127.0.0.1:1"\n')
    path = folder / "hosts.toml"
    path.write_text("\n".join(lines))
    return str(path)


def test_one_command_and_a_noisy_login_shell(new_sshd: Callable[..., Sshd], tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    build_venv(venv, "0.4.5", "2.13.0")
    noisy = new_sshd(NOISE + "LogLevel VERBOSE")
    hosts = inventory(tmp_path, noisy=noisy)
    done = call("audit", "noisy", "--inventory", hosts, "--venv", str(venv), "--model", "~/no-such-model", "--json")
    assert done.returncode == 6, done.stderr
    report = json.loads(done.stdout)
    assert "extension-symbols-resolve" in {f["rule"] for f in report["findings"] if f["severity"] == "fail"}
    assert report["probe"]["via"] == "python" and not report["probe"]["errors"]
    missing = next(f for f in report["findings"] if f["rule"] == "model-folder-readable")
    assert missing["severity"] == "fail" and "~" not in missing["message"]
    log = (noisy.folder / "sshd.log").read_text()
    assert len(re.findall("Starting session: ", log)) == 1
    assert len(re.findall("Accepted publickey", log)) == 1


def test_several_hosts_at_once(new_sshd: Callable[..., Sshd], tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    build_venv(venv, "0.4.5", "2.11.0")
    hosts = inventory(tmp_path, a=new_sshd(), b=new_sshd())
    options = ("--inventory", hosts, "--venv", str(venv), "--connect-timeout", "0.5", "--save", str(tmp_path / "facts"))
    done = call("audit", "a", "b", "gone", "local", "--parallel", "3", "--json", *options)
    answer = json.loads(done.stdout)
    schema = json.loads(importlib.resources.files("dflash_deploy.audit").joinpath("report.schema.json").read_text())
    follows(schema["$defs"]["fleet"], answer)
    for host in answer["hosts"]:
        if host["report"]:
            follows(schema, host["report"])
    assert [host["host"] for host in answer["hosts"]] == ["a", "b", "gone", "local"]
    assert answer["hosts"][2]["report"] is None and answer["hosts"][2]["error"]["exit_code"] == 3
    codes = [0 if host["report"]["compatible"] else 6 for host in answer["hosts"] if host["report"]]
    assert done.returncode == answer["exit_code"] == max(3, *codes)
    assert sorted(path.name for path in (tmp_path / "facts").iterdir()) == ["a.json", "b.json", "local.json"]
    assert done.stderr.count("/4 ") == 4
    people = call("audit", "a", "gone", *options[:-2])
    assert "no SSH connection" in people.stdout and "gone" in people.stdout
