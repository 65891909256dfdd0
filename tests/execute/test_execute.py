"""The executor on this machine, in temporary folders."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dflash_deploy.errors import CommandFailed, HostChanged, Locked
from dflash_deploy.execute import Journal, Progress, digest, execute, holder, local_tree, lock, remote_tree
from dflash_deploy.host.local import LocalHost
from dflash_deploy.model import CopyTree, Plan, Remove, Run, Status, WriteFile


@pytest.fixture
def host() -> LocalHost:
    return LocalHost()


def test_every_kind_of_step_and_the_journal(host: LocalHost, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "file").write_bytes(b"\x00data")
    (tmp_path / "old").mkdir()
    steps = (
        WriteFile(str(tmp_path / "made" / "file"), b"text", 0o600, ""),
        CopyTree(str(source), str(tmp_path / "copy")),
        Run(("sh", "-c", "echo one; echo two >&2; echo $SECRET"), title="talk", env={"SECRET": "s3cret"}),
        Run(("false",), title="not needed", unless=("true",)),
        Remove(str(tmp_path / "old")),
    )
    news: list[Progress] = []
    journal = Journal(host, str(tmp_path / "root" / "journal.jsonl"))
    outcomes = execute(Plan("all", steps), host, journal=journal, on_progress=news.append)
    assert [o.status for o in outcomes] == [
        Status.CHANGED,
        Status.CHANGED,
        Status.CHANGED,
        Status.SKIPPED,
        Status.CHANGED,
    ]
    assert (tmp_path / "made" / "file").stat().st_mode & 0o777 == 0o600
    assert remote_tree(host, str(tmp_path / "copy")) == local_tree(source) != {}
    assert not (tmp_path / "old").exists()
    assert {n.line for n in news if n.title == "talk" and n.line} == {"one", "two", "s3cret"}
    written = (tmp_path / "root" / "journal.jsonl").read_text()
    assert [json.loads(line)["event"] for line in written.splitlines()].count("begin") == 5
    assert "s3cret" not in written


def test_a_file_that_is_not_the_planned_one_is_not_overwritten(host: LocalHost, tmp_path: Path) -> None:
    path = tmp_path / "file"
    step = WriteFile(str(path), b"new", expect_sha256=digest(b"old"))
    path.write_bytes(b"somebody else's")
    with pytest.raises(HostChanged) as caught:
        execute(Plan("p", (step,)), host)
    assert path.read_bytes() == b"somebody else's" and caught.value.exit_code == 8
    path.unlink()
    with pytest.raises(HostChanged):
        execute(Plan("p", (step,)), host)
    path.write_bytes(b"old")
    execute(Plan("p", (step,)), host)
    assert path.read_bytes() == b"new"
    # The same plan after an interruption: what it wrote already is no change by others.
    assert execute(Plan("p", (step,)), host)[0].status == Status.SKIPPED


def test_a_failure_stops_shows_its_lines_and_is_journalled(host: LocalHost, tmp_path: Path) -> None:
    steps = (
        Run(("sh", "-c", "echo fine; echo 'ERROR: no such wheel'; exit 7"), title="install"),
        WriteFile(str(tmp_path / "never"), b""),
    )
    journal = Journal(host, str(tmp_path / "journal.jsonl"))
    with pytest.raises(CommandFailed) as caught:
        execute(Plan("p", steps), host, journal=journal)
    assert "exit 7" in caught.value.message and "ERROR: no such wheel" in caught.value.evidence
    assert not (tmp_path / "never").exists()
    assert json.loads((tmp_path / "journal.jsonl").read_text().splitlines()[-1])["event"] == "failed"


def test_two_runs_at_once_one_wins(host: LocalHost, tmp_path: Path) -> None:
    inside, refused = [], []
    gate = threading.Barrier(6)

    def run() -> None:
        gate.wait()
        try:
            with lock(LocalHost(), str(tmp_path), "up"):
                inside.append(1)
                time.sleep(2)
        except Locked as error:
            refused.append(error)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(inside) == 1 and len(refused) == 5
    assert "up" in refused[0].evidence[0] and str(os.getpid()) in refused[0].evidence[0]
    assert holder(host, str(tmp_path)) is None


def test_a_lock_is_released_when_its_step_fails(host: LocalHost, tmp_path: Path) -> None:
    with pytest.raises(CommandFailed), lock(host, str(tmp_path), "up"):
        execute(Plan("p", (Run(("false",), title="fail"),)), host)
    with lock(host, str(tmp_path), "up"):
        pass


HOLD = """
import sys, time
from dflash_deploy.execute import lock
from dflash_deploy.host.local import LocalHost
with lock(LocalHost(), sys.argv[1], "provision"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_killed_owner_is_recognised(host: LocalHost, tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None and owner.stdout.readline() == b"held\n"
        with pytest.raises(Locked), lock(host, str(tmp_path), "up"):
            pass
        owner.send_signal(signal.SIGKILL)
    finally:
        owner.kill()
        owner.wait()
    notices: list[str] = []
    with lock(host, str(tmp_path), "up", on_notice=notices.append):
        found = holder(host, str(tmp_path))
        assert found is not None and found["pid"] == os.getpid() and found["stale"] == ""
    assert "is gone" in notices[0]


def test_a_lock_of_another_machine_needs_break_lock_until_it_is_old(host: LocalHost, tmp_path: Path) -> None:
    owner = {"user": "u", "host": "elsewhere", "pid": 1, "what": "up", "since": time.time() - 60}
    path = tmp_path / "lock" / "owner.json"
    path.parent.mkdir()
    path.write_text(json.dumps(owner))
    with pytest.raises(Locked) as caught, lock(host, str(tmp_path), "up"):
        pass
    assert "--break-lock" in caught.value.hint
    with lock(host, str(tmp_path), "up", break_lock=True):
        pass
    path.parent.mkdir()
    path.write_text(json.dumps(owner))
    # The host's clock counts, not the owner's.
    os.utime(path, (time.time() - 7 * 3600,) * 2)
    with lock(host, str(tmp_path), "up"):
        pass


def test_a_lock_without_an_owner_is_taken_over(host: LocalHost, tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with lock(host, str(tmp_path), "up"):
        assert holder(host, str(tmp_path))


def test_only_our_own_lock_is_released(host: LocalHost, tmp_path: Path) -> None:
    with lock(host, str(tmp_path), "first"):
        with lock(LocalHost(), str(tmp_path), "second", break_lock=True):
            pass
        other = tmp_path / "lock"
        other.mkdir()
        (other / "owner.json").write_text("{}")
    assert other.is_dir()
