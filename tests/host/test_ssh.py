"""What only an SSH host can get wrong, against a real sshd."""

from __future__ import annotations

import os
import stat
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_deploy.errors import AuthError, CommandFailed, ConnectError, ConnectionLost, HostKeyError
from dflash_deploy.host import connect
from dflash_deploy.host.ssh import SshHost
from tests.hosts.loopback import Sshd, free_port, make_key

NewSshd = Callable[..., Sshd]


def shown_fingerprint(key: Path) -> str:
    return subprocess.run(["ssh-keygen", "-lf", key], capture_output=True, text=True, check=True).stdout.split()[1]


def test_unknown_key_is_refused_with_its_fingerprint(sshd: Sshd, tmp_path: Path) -> None:
    with pytest.raises(HostKeyError) as caught:
        connect(sshd.target_with(known_hosts=(str(tmp_path / "none"),)))
    assert shown_fingerprint(sshd.host_key) in " ".join(caught.value.evidence)
    assert "--accept-new" in caught.value.hint
    assert not (tmp_path / "none").exists()


def test_accept_new_records_the_key_once(sshd: Sshd, tmp_path: Path) -> None:
    known = tmp_path / "ssh" / "known_hosts"
    known.parent.mkdir()
    known.write_text("elsewhere ssh-ed25519 AAAA")  # no newline at its end
    known.chmod(0o600)
    target = sshd.target_with(known_hosts=(str(known),))
    notices: list[str] = []
    connect(target, accept_new=True, on_notice=notices.append).close()
    assert shown_fingerprint(sshd.host_key) in " ".join(notices)
    connect(target, accept_new=True).close()
    connect(target).close()
    assert known.read_text().count(f"[127.0.0.1]:{sshd.port}") == 1
    found = subprocess.run(["ssh-keygen", "-F", f"[127.0.0.1]:{sshd.port}", "-f", known], capture_output=True)
    assert found.returncode == 0  # OpenSSH reads what we wrote


def test_a_new_known_hosts_file_is_private(sshd: Sshd, tmp_path: Path) -> None:
    known = tmp_path / "new" / "known_hosts"
    connect(sshd.target_with(known_hosts=(str(known),)), accept_new=True).close()
    assert stat.S_IMODE(known.stat().st_mode) == 0o600
    assert stat.S_IMODE(known.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("accept_new", [False, True])
def test_a_changed_key_is_always_refused(sshd: Sshd, tmp_path: Path, accept_new: bool) -> None:
    other = make_key(tmp_path / "other")
    kind, blob = other.with_suffix(".pub").read_text().split()[:2]
    known = tmp_path / "known_hosts"
    known.write_text(f"[127.0.0.1]:{sshd.port} {kind} {blob}\n")
    with pytest.raises(HostKeyError) as caught:
        connect(sshd.target_with(known_hosts=(str(known),)), accept_new=accept_new)
    evidence = " ".join(caught.value.evidence)
    assert shown_fingerprint(other) in evidence
    assert shown_fingerprint(sshd.host_key) in evidence
    assert known.read_text().count("\n") == 1


def test_hashed_known_hosts(sshd: Sshd, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_bytes(sshd.known_hosts.read_bytes())
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", known], check=True, capture_output=True)
    assert known.read_text().startswith("|1|")
    connect(sshd.target_with(known_hosts=(str(known),))).close()


def test_a_revoked_key_is_refused(sshd: Sshd, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    line = sshd.known_hosts.read_text()
    known.write_text(f"{line}@revoked {line}")
    with pytest.raises(HostKeyError, match="revoked"):
        connect(sshd.target_with(known_hosts=(str(known),)))


def test_wrong_key(sshd: Sshd, tmp_path: Path) -> None:
    wrong = make_key(tmp_path / "wrong")
    with pytest.raises(AuthError) as caught:
        connect(sshd.target_with(identity_files=(str(wrong), str(tmp_path / "missing"))))
    assert any(str(wrong) in line and "refused" in line for line in caught.value.evidence)
    assert any("no such file" in line for line in caught.value.evidence)


def test_an_encrypted_key_is_named(sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    locked = make_key(tmp_path / "locked", passphrase="secret")
    with pytest.raises(AuthError) as caught:
        connect(sshd.target_with(identity_files=(str(locked),)))
    assert "encrypted" in " ".join(caught.value.evidence)


def test_an_agent_opens_an_encrypted_key(new_sshd: NewSshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = new_sshd()
    locked = make_key(tmp_path / "locked", passphrase="secret")
    (server.folder / "authorized_keys").write_bytes(locked.with_suffix(".pub").read_bytes())
    socket_path = tmp_path / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", socket_path], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while not socket_path.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        ask = tmp_path / "ask"
        ask.write_text("#!/bin/sh\necho secret\n")
        ask.chmod(0o700)
        env = {**os.environ, "SSH_AUTH_SOCK": str(socket_path), "SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force"}
        subprocess.run(["ssh-add", locked], env=env, check=True, capture_output=True)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket_path))
        connect(server.target_with(identity_files=(str(locked),))).close()
        connect(server.target_with(identity_files=(), identities_only=False)).close()
    finally:
        agent.terminate()
        agent.wait(10)


def test_a_closed_port_is_given_up_at_the_deadline(sshd: Sshd) -> None:
    began = time.monotonic()
    with pytest.raises(ConnectError) as caught:
        connect(sshd.target_with(port=free_port()), connect_timeout_s=2)
    assert 0.5 < time.monotonic() - began < 5
    assert "refused" in " ".join(caught.value.evidence)


def test_a_host_that_comes_up_late_is_reached(new_sshd: NewSshd) -> None:
    first = new_sshd()
    port, target = first.port, first.target
    first.stop()
    started: list[Sshd] = []

    def late() -> None:
        time.sleep(1.5)
        started.append(new_sshd(port=port))

    thread = threading.Thread(target=late)
    thread.start()
    notices: list[str] = []
    with pytest.raises(HostKeyError):  # another sshd with another key: it was reached, and is not the one we know
        connect(target, connect_timeout_s=20, on_notice=notices.append)
    thread.join()
    assert notices
    connect(replace(target, known_hosts=started[0].target.known_hosts, identity_files=started[0].target.identity_files))


def test_jump_through_two_hosts(sshd: Sshd, new_sshd: NewSshd) -> None:
    first, second = new_sshd(), new_sshd()
    chain = (replace(first.target, name="one"), replace(second.target, name="two"))
    host = connect(sshd.target_with(proxy_jump=chain))
    assert host.run(["echo", "through"]).out == "through\n"
    assert first.children() and second.children()
    host.close()
    with pytest.raises(AuthError, match="two"):
        connect(sshd.target_with(proxy_jump=(chain[0], replace(chain[1], identity_files=("/nonexistent",)))))


def test_a_cut_connection_is_lost_and_made_anew(new_sshd: NewSshd) -> None:
    server = new_sshd()
    host = connect(server.target)
    threading.Timer(1.0, server.cut).start()
    began = time.monotonic()
    with pytest.raises(ConnectionLost):
        host.run(["sleep", "20"])
    assert time.monotonic() - began < 10
    assert host.run(["echo", "again"]).out == "again\n"
    server.cut()
    time.sleep(0.2)
    assert host.run(["echo", "idle"]).out == "idle\n"
    host.close()


def test_a_cut_write_leaves_the_old_bytes(new_sshd: NewSshd, tmp_path: Path) -> None:
    server = new_sshd()
    host = connect(server.target)
    path = tmp_path / "file"
    path.write_bytes(b"old")
    threading.Timer(0.15, server.cut).start()
    with pytest.raises(ConnectionLost):
        for _ in range(50):
            host.write(str(path), b"x" * (20 << 20))
            path.write_bytes(b"old")
    assert path.read_bytes() == b"old"
    host.write(str(path), b"new")
    assert host.read(str(path)) == b"new"
    host.close()


def test_a_cut_tree_leaves_the_old_one(new_sshd: NewSshd, tmp_path: Path) -> None:
    server = new_sshd()
    source, goal = tmp_path / "source", tmp_path / "goal"
    source.mkdir()
    (source / "big").write_bytes(b"x" * (32 << 20))
    goal.mkdir()
    (goal / "old").write_bytes(b"old")
    host = connect(server.target)
    cut = threading.Event()

    def progress(done: int, total: int) -> None:
        if done > total // 2 and not cut.is_set():
            cut.set()
            server.cut()

    with pytest.raises(ConnectionLost):
        host.copy_tree(str(source), str(goal), on_progress=progress)
    assert [p.name for p in goal.iterdir()] == ["old"]
    host.copy_tree(str(source), str(goal))
    assert [p.name for p in goal.iterdir()] == ["big"]
    host.close()


def test_a_noisy_login_file_does_not_reach_the_result(new_sshd: NewSshd, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    noisy = home / "login.sh"
    noisy.write_text('#!/bin/sh\necho welcome; echo warning >&2\nexec sh -c "$SSH_ORIGINAL_COMMAND"\n')
    noisy.chmod(0o755)
    server = new_sshd(extra=f"ForceCommand {noisy}\nSubsystem sftp2 internal-sftp")
    result = connect(server.target).run(["sh", "-c", "echo out; echo err >&2"], input=b"x")
    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")


def test_a_login_that_runs_nothing_is_named(new_sshd: NewSshd) -> None:
    server = new_sshd(extra="ForceCommand echo This account is not available.")
    host = connect(server.target)
    with pytest.raises(CommandFailed, match="login shell") as caught:
        host.run(["true"])
    assert "not available" in " ".join(caught.value.evidence)


def test_many_commands_at_once(sshd: Sshd) -> None:
    host = connect(sshd.target)
    assert isinstance(host, SshHost)
    found: list[str] = []
    threads = [threading.Thread(target=lambda n=n: found.append(host.run(["echo", str(n)]).out)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == sorted(f"{n}\n" for n in range(8))
    host.close()
