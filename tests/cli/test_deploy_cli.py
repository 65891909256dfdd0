"""The command line as people use it, without a server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

MAIN = [sys.executable, "-c", "from dflash_deploy.cli import main; main()"]


def cli(*words: str, home: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HOME": str(home)}
    return subprocess.run([*MAIN, *words], capture_output=True, text=True, timeout=120, env=environ, cwd=home)


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nimport dflash_deploy.cli as cli\nsys.argv = ['dflash-deploy', '--help']\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        "heavy = 'torch', 'paramiko', 'libcst', 'rich', 'jinja2', 'triton'\n"
        "print([m for m in heavy if m in sys.modules], file=sys.stderr)"
    )
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.stderr.strip().endswith("[]"), done.stderr
        assert "up" in done.stdout and "Exit codes" in done.stdout
    # What is ours is little beside the framework; on a machine with a core to spare the limit itself holds, too. Both
    # are the best of several tries: a busy machine has quiet moments.
    framework = ours = 60.0
    least = 0.2 if os.getloadavg()[0] < 0.5 * (os.cpu_count() or 1) else 60.0
    for _ in range(25):
        framework, ours = min(framework, seconds("import typer")), min(ours, seconds(code))
        if ours < least and ours - framework < max(0.1, framework):
            break
    assert ours - framework < max(0.1, framework), (ours, framework)
    assert ours < least, (ours, framework)


def seconds(code: str) -> float:
    """Wall time of a Python process."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    return time.monotonic() - began


def test_plan_says_what_up_would_do_and_changes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "root"
    words = ("plan", "local", "--root", str(root), "--stack", "cpu", "--mode", "supervisor", "--json")
    done = cli(*words, "--model", str(tmp_path), "--algorithm", "NONE", home=tmp_path)
    assert done.returncode == 2 and "no such folder" in done.stderr
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    done = cli(*words, "--model", str(tmp_path / "model"), "--algorithm", "NONE", home=tmp_path)
    assert done.returncode == 10, done.stderr
    plans = {each["name"]: each for each in json.loads(done.stdout)["plans"]}
    assert plans["provision"]["steps"] and plans["launch"]["steps"] and not plans["models"]["steps"]
    assert not root.exists()


def test_bad_options_come_out_together_without_a_traceback(tmp_path: Path) -> None:
    done = cli("up", "local", "--port", "99999", "--budget", "0", "--algorithm", "x", "--stack", "cpu", home=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert all(word in done.stderr for word in ("port", "budget", "algorithm"))


def test_a_locked_host_is_refused(tmp_path: Path) -> None:
    owner = tmp_path / "root" / "lock" / "owner.json"
    owner.parent.mkdir(parents=True)
    owner.write_text(json.dumps({"user": "ann", "host": "elsewhere", "pid": 7, "what": "up", "since": time.time()}))
    done = cli("down", "local", "--root", str(tmp_path / "root"), "--json", home=tmp_path)
    assert (
        done.returncode == 8
        and json.loads(done.stdout)["error"]["kind"] == "Locked"
        and "ann on elsewhere" in done.stderr
    )
    done = cli("down", "local", "--root", str(tmp_path / "root"), "--break-lock", "--json", home=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["changed"] is False
    assert not owner.parent.exists()


def test_status_and_logs_of_nothing(tmp_path: Path) -> None:
    done = cli("status", "local", "--root", str(tmp_path / "root"), "--json", home=tmp_path)
    assert done.returncode == 9 and json.loads(done.stdout)["running"] is False
    done = cli("logs", "local", "--root", str(tmp_path / "root"), home=tmp_path)
    assert done.returncode == 4 and "no log" in done.stderr


def test_up_refuses_before_anything_changes(tmp_path: Path) -> None:
    words = ("up", "local", "--root", str(tmp_path / "root"), "--stack", "cpu", "--mode", "supervisor", "--json")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = cli(*words, "--port", port, home=tmp_path)
    assert done.returncode == 6, done.stderr
    error = json.loads(done.stdout)["error"]
    assert any(port in line and str(os.getpid()) in line for line in error["evidence"]), error
    assert not (tmp_path / "root" / "venvs").exists()
