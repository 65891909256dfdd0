"""Tokens and keys reach the server alone: no command line, log, journal, unit or file that others may read has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.hosts.container import TestHost

pytestmark = [pytest.mark.host, pytest.mark.timeout(1500)]
TOP = Path(__file__).resolve().parents[2]
TOKEN, KEY = "hf_n0b0dyMayReadThis", "sk-n0rThatOne-77"
ROOT, PORT = "/srv/d/secrets", 31772
WATCH = """
import glob, os, time
seen = set()
for path in ("/run/seen", "/run/stop"):
    if os.path.exists(path):
        os.unlink(path)
while not os.path.exists("/run/stop"):
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            with open(path, "rb") as file:
                seen.add(file.read().replace(b"\\0", b" "))
        except OSError:
            continue
    time.sleep(0.1)
with open("/run/seen", "wb") as file:
    file.write(b"\\n".join(seen))
"""


def cli(box: TestHost, command: str, *words: str, code: int = 0, talk: bool = True) -> str:
    """Everything that the command prints; without its talk on stderr where that is not wanted."""
    argv = [sys.executable, "-m", "tests.releases.standin", command, box.name, "--inventory", str(box.hosts_toml)]
    env = {**os.environ, "SGLANG_API_KEY": KEY}
    done = subprocess.run([*argv, *words], cwd=TOP, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == code, f"{done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout + (done.stderr if talk else "")


def local_argv(stop: threading.Event, seen: list[bytes]) -> None:
    while not stop.is_set():
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                seen.append(path.read_bytes())
            except OSError:
                continue
        time.sleep(0.1)


def test_secrets_and_a_second_up(box: TestHost, tmp_path: Path) -> None:
    secrets = tmp_path / "secrets.env"
    secrets.write_text(f"HF_TOKEN={TOKEN}\n")
    with box.hosts_toml.open("a") as inventory:
        inventory.write(f'root = "{ROOT}"\nstack = "standin"\nport = {PORT}\nenv_file = "{secrets}"\n')
    try:
        # Readable by others, or on the command line: refused, and not repeated.
        said = cli(box, "up", "--env", "SGLANG_API_KEY", code=2)
        assert "chmod 600" in said
        secrets.chmod(0o600)
        assert KEY not in cli(box, "up", "--env", f"SGLANG_API_KEY={KEY}", code=2)
        assert "everyone on the host could read it" in cli(box, "up", "--server-arg=--api-key=x", code=2)
        heard: list[bytes] = []
        stop = threading.Event()
        thread = threading.Thread(target=local_argv, args=(stop, heard))
        thread.start()
        watcher = subprocess.Popen(
            [Path(TOP, "tests/hosts/testhost.sh"), "exec", box.name, "python3", "-c", WATCH],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            printed = cli(box, "up", "--env", "SGLANG_API_KEY", "--json")
            for command in ("status", "logs", "releases", "health"):
                printed += cli(box, command)
            printed += cli(box, "plan", "--env", "SGLANG_API_KEY", "--budget", "9", code=10)
            bundle = tmp_path / "bundle.tar.gz"
            printed += cli(box, "diagnose", "--bundle", str(bundle))
        finally:
            stop.set()
            thread.join()
            box.exec("touch", "/run/stop")
            watcher.wait(30)
        began = time.monotonic()
        again = json.loads(cli(box, "up", "--env", "SGLANG_API_KEY", "--json", talk=False))
        taken = time.monotonic() - began - next(s["seconds"] for s in again["steps"] if s["name"] == "health")
        print(f"a second up over SSH takes {taken:.1f} s beyond the health probe")
        assert not again["changed"]
        if os.getloadavg()[0] < (os.cpu_count() or 1):
            assert taken <= 5.0
        # The server has both, and asks for the key.
        log = box.exec("sh", "-c", f"cat {ROOT}/releases/*/log/*").stdout
        assert "token ***" in log and "server_args=" in log
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=10)
        assert refused.value.code == 401
        assert json.loads(printed[: printed.index("\n}\n") + 2])["ok"]
        unpacked = subprocess.run(["tar", "xzOf", bundle], capture_output=True, text=True, check=True).stdout
        inside = box.exec("cat", "/run/seen").stdout
        assert "launch_server" in inside and "serve.py" in inside
        journal = box.exec("journalctl", "--no-pager", "-o", "cat").stdout
        units = box.exec("sh", "-c", "cat /etc/systemd/system/dflash-sglang.service").stdout
        assert "ExecStart=" in units
        places = {
            "output of commands": printed, "bundle": unpacked, "command lines there": inside,
            "command lines here": b"\n".join(heard).decode("utf-8", "replace"), "system journal": journal,
            "unit": units, "log": log, "journal of steps": box.exec("cat", f"{ROOT}/journal.jsonl").stdout,
        }  # fmt: skip
        for where, text in places.items():
            assert text.strip(), where
            for secret in (TOKEN, KEY):
                assert secret not in text, where
        # Wherever they lie, nobody else may read them.
        script = (
            f"grep -rlE '{TOKEN}|{KEY}' /srv /etc /home /root /tmp /var /run 2>/dev/null | xargs -r stat -c '%a %n'"
        )
        holding = [line.split() for line in box.exec("sh", "-c", script).stdout.splitlines()]
        assert {Path(path).suffix for _, path in holding} == {".env", ".yaml"}, holding
        assert {mode for mode, _ in holding} == {"600"}, holding
        assert box.exec("su", "nobody", "-s", "/bin/sh", "-c", f"cat {holding[0][1]}").returncode != 0
    finally:
        cli(box, "down")
