"""One contract, three hosts. The fake one takes part wherever no real process is needed."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflash_deploy.errors import CommandFailed, CommandTimeout
from dflash_deploy.host import Host, connect
from dflash_deploy.host.fake import FakeHost
from dflash_deploy.host.local import LocalHost
from tests.hosts.loopback import Sshd

MIB = 1 << 20


@pytest.fixture(params=["local", "ssh"])
def real(request: pytest.FixtureRequest) -> Iterator[Host]:
    """A host that starts processes."""
    if request.param == "local":
        yield LocalHost()
        return
    server: Sshd = request.getfixturevalue("sshd")
    host = connect(server.target)
    yield host
    host.close()


@pytest.fixture(params=["local", "ssh", "fake"])
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    if request.param == "fake":
        yield FakeHost()
        return
    if request.param == "local":
        yield LocalHost()
        return
    server: Sshd = request.getfixturevalue("sshd")
    ssh = connect(server.target)
    yield ssh
    ssh.close()


def test_a_non_zero_exit_is_a_value(real: Host) -> None:
    result = real.run(["sh", "-c", "echo out; echo err >&2; exit 7"])
    assert (result.exit_code, result.out, result.err, result.ok) == (7, "out\n", "err\n", False)


def test_argv_is_quoted_once(real: Host) -> None:
    words = ["a b", "it's", '"$HOME"', "x\ny", "né→", "--", "-n", "", "*", "\\n", "`id`", "!x", "tab\t", "~"]
    script = "import sys; sys.stdout.write(repr(sys.argv[1:]))"
    assert real.run(["python3", "-c", script, *words]).out == repr(words)


def test_input_reaches_the_command_whole(real: Host) -> None:
    data = bytes(range(256)) * 4096
    assert real.run(["cat"], input=data).stdout == data
    assert real.run(["cat"]).stdout == b""


def test_input_that_nobody_reads_is_no_error(real: Host) -> None:
    assert real.run(["true"], input=b"x" * 4 * MIB).exit_code == 0


def test_environment_is_added_and_not_on_a_command_line(real: Host) -> None:
    secret = "s3cret it's\nmultiline"
    script = 'ps -eo args >"$1"; printf %s "$TOKEN_FOR_TEST"; test -n "$HOME"'
    seen = Path(real.home) / f".ps-{os.getpid()}"
    try:
        result = real.run(["sh", "-c", script, "sh", str(seen)], env={"TOKEN_FOR_TEST": secret})
        assert (result.out, result.exit_code) == (secret, 0)
        assert "sh -c" in seen.read_text()
        assert "s3cret" not in seen.read_text()
    finally:
        seen.unlink(missing_ok=True)


def test_no_terminal(real: Host) -> None:
    assert real.run(["sh", "-c", "test -t 0 || test -t 1 || test -t 2; echo $?; tty"]).out.split("\n")[0] == "1"


def test_twenty_megabytes_on_both_streams(real: Host) -> None:
    script = "import os\nfor i in range(320): os.write(1, b'x' * 65536); os.write(2, b'y' * 65536)"
    result = real.run(["python3", "-c", script])
    assert result.stdout == b"x" * 20 * MIB
    assert result.stderr == b"y" * 20 * MIB


def test_lines_come_while_the_command_runs(real: Host) -> None:
    seen: list[tuple[float, str, str]] = []
    began = time.monotonic()
    real.run(
        ["sh", "-c", "echo one; sleep 1; echo two >&2; printf three"],
        on_line=lambda stream, text: seen.append((time.monotonic() - began, stream, text)),
    )
    assert sorted((s, t) for _, s, t in seen) == [("stderr", "two"), ("stdout", "one"), ("stdout", "three")]
    assert seen[-1][0] - seen[0][0] > 0.7


def test_deadline_ends_grandchildren(real: Host) -> None:
    mark = f"7{os.getpid()}"
    with pytest.raises(CommandTimeout) as caught:
        # Seconds, because ssh on a busy machine begins late.
        real.run(["sh", "-c", f"echo begun; trap '' TERM; sleep {mark}.5 & sleep {mark}.25"], timeout_s=5)
    assert "begun" in caught.value.evidence
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and real.run(["pgrep", "-f", f"^sleep {mark}"]).ok:
        time.sleep(0.1)
    assert real.run(["pgrep", "-f", f"^sleep {mark}"]).exit_code == 1


def test_a_missing_command_is_exit_127(real: Host) -> None:
    result = real.run(["no-such-command-here"])
    assert result.exit_code == 127
    assert "no-such-command-here" in result.err


def test_a_signal_is_exit_128_and_more(real: Host) -> None:
    assert real.run(["sh", "-c", "kill -9 $$"]).exit_code == 137


def test_a_child_that_holds_the_output_does_not_hold_the_caller(real: Host) -> None:
    began = time.monotonic()
    result = real.run(["sh", "-c", "sleep 30 & echo $!"], timeout_s=20)
    real.run(["kill", result.out.strip()])
    assert result.exit_code == 0
    assert time.monotonic() - began < 15


def test_bad_commands_are_refused(host: Host) -> None:
    for argv, env in (([], {}), ("ls", {}), (["a\0b"], {}), (["true"], {"A B": "c"})):
        with pytest.raises(ValueError):
            host.run(argv, env=env)


def test_files(host: Host, tmp_path: Path) -> None:
    path = str(tmp_path / "new" / "folder" / "file ü")
    data = os.urandom(3 * MIB)
    assert host.read(path) is None
    host.write(path, data)
    assert host.read(path) == data
    host.write(path, b"")
    assert host.read(path) == b""
    assert host.read(path + "/below") is None
    with pytest.raises(CommandFailed):
        host.read(str(tmp_path / "new"))
    with pytest.raises(CommandFailed):
        host.write(str(tmp_path / "new"), b"x")


def test_modes(real: Host, tmp_path: Path) -> None:
    path = tmp_path / "file"
    real.write(str(path), b"1", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o751)
    real.write(str(path), b"2", mode=-1)
    assert path.stat().st_mode & 0o777 == 0o751
    real.write(str(path), b"3", mode=0o640)
    assert path.stat().st_mode & 0o777 == 0o640
    real.write(str(tmp_path / "other"), b"4", mode=-1)
    assert (tmp_path / "other").stat().st_mode & 0o777 == 0o644


def test_owner_is_kept(real: Host, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    path = tmp_path / "file"
    path.write_bytes(b"old")
    os.chown(path, 1234, 4321)
    real.write(str(path), b"new", mode=-1)
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 4321)


def test_a_link_stays_a_link(real: Host, tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    real.write(str(tmp_path / "link"), b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_a_full_disk_leaves_the_old_bytes(real: Host, tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root")
    small = tmp_path / "small"
    small.mkdir()
    if not LocalHost().run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(small)]).ok:
        pytest.skip("cannot mount here")
    try:
        path = small / "file"
        path.write_bytes(b"old")
        with pytest.raises(CommandFailed):
            real.write(str(path), b"x" * MIB)
        assert path.read_bytes() == b"old"
        assert [p.name for p in small.iterdir()] == ["file"]
        assert LocalHost().run(["mount", "-o", "remount,ro", str(small)]).ok
        with pytest.raises(CommandFailed):
            real.write(str(path), b"new")
        assert path.read_bytes() == b"old"
    finally:
        real.close()  # its working folder may lie there
        LocalHost().run(["umount", "-l", str(small)])


def test_a_tree_is_switched_whole(host: Host, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub" / "__pycache__").mkdir(parents=True)
    (source / "sub" / "big").write_bytes(os.urandom(MIB))
    (source / "sub" / "__pycache__" / "x.pyc").write_bytes(b"stale")
    (source / ("long" * 40)).write_bytes(b"name")
    (source / "run.sh").write_bytes(b"#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    goal = tmp_path / "in" / "target"
    progress: list[tuple[int, int]] = []
    host.copy_tree(str(source), str(goal), on_progress=lambda done, total: progress.append((done, total)))
    assert host.read(f"{goal}/sub/big") == (source / "sub" / "big").read_bytes()
    assert host.read(f"{goal}/{'long' * 40}") == b"name"
    assert host.read(f"{goal}/sub/__pycache__/x.pyc") is None
    assert progress[-1][0] == progress[-1][1] == sum(p.stat().st_size for p in source.rglob("*") if p.is_file()) - 5
    (source / "run.sh").unlink()
    host.copy_tree(str(source), str(goal))
    assert host.read(f"{goal}/run.sh") is None
    if not isinstance(host, FakeHost):
        assert [p.name for p in goal.parent.iterdir()] == ["target"]
    with pytest.raises(CommandFailed):
        host.copy_tree(str(tmp_path / "nothing"), str(goal))


def test_a_tree_that_cannot_be_written_leaves_the_old_one(real: Host, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_bytes(b"new")
    (tmp_path / "file").write_bytes(b"no folder")
    with pytest.raises(CommandFailed):
        real.copy_tree(str(source), str(tmp_path / "file" / "target"))
    assert (tmp_path / "file").read_bytes() == b"no folder"


def test_forward(real: Host) -> None:
    payload = os.urandom(2 * MIB)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo() -> None:
            client, _ = server.accept()
            with client:
                data = b""
                while chunk := client.recv(65536):
                    data += chunk
                client.sendall(data[::-1])

        thread = threading.Thread(target=echo)
        thread.start()
        with (
            real.forward(server.getsockname()[1]) as port,
            socket.create_connection(("127.0.0.1", port), timeout=20) as client,
        ):
            client.sendall(payload)
            client.shutdown(socket.SHUT_WR)
            back = b""
            while chunk := client.recv(65536):
                back += chunk
        thread.join(10)
    assert back == payload[::-1]


def test_follow_across_truncation_and_rotation(real: Host, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"skip-start\n")
    chunks = real.follow(str(log), offset=5, poll_s=0.05)
    got = b""

    def until(text: bytes) -> None:
        nonlocal got
        deadline = time.monotonic() + 20
        for chunk in chunks:
            got += chunk
            if text in got:
                return
            assert time.monotonic() < deadline, got

    until(b"start\n")
    assert got == b"start\n"
    with log.open("ab") as out:
        out.write(b"more\n")
    until(b"more\n")
    log.write_bytes(b"cut\n")
    until(b"cut\n")
    log.rename(tmp_path / "log.1")
    log.write_bytes(b"rotated\n")
    until(b"rotated\n")
    assert got == b"start\nmore\ncut\nrotated\n"
    chunks.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and real.run(["pgrep", "-f", f"tail.*{log}"]).ok:
        time.sleep(0.1)
    assert not real.run(["pgrep", "-f", f"[t]ail.*{log}"]).ok


def test_home(host: Host) -> None:
    assert host.home.startswith("/")


def test_closing_twice_is_harmless(host: Host) -> None:
    host.close()
    host.close()


def test_the_last_word_is_not_lost_on_a_busy_machine(real: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that comes late finds what the command said before it ended."""
    from dflash_deploy.host.streams import Collector

    whole = Collector.reader

    def late(self: Collector, stream: str, recv: Callable[[int], bytes]) -> threading.Thread:
        def slow(size: int) -> bytes:
            chunk = recv(size)
            if b"word" in chunk:
                time.sleep(3)
            return chunk

        return whole(self, stream, slow)

    monkeypatch.setattr(Collector, "reader", late)
    assert real.run(["sh", "-c", "echo word"]).out == "word\n"


def test_a_child_that_holds_one_stream_open_is_not_waited_for(real: Host) -> None:
    began = time.monotonic()
    result = real.run(["sh", "-c", "sleep 25 2>/dev/null & echo begun"], timeout_s=60)
    assert result.out == "begun\n" and time.monotonic() - began < 20
