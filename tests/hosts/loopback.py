"""A real sshd on loopback, for the user who runs the tests: own keys, own configuration, a free port."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_deploy.inventory import Target

SSHD = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
READY_S = 20.0


def free_port() -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def make_key(path: Path, passphrase: str = "") -> Path:
    """A fresh ed25519 key pair; ``path`` is the private half."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", "test", "-f", path], check=True)
    return path


@dataclass
class Sshd:
    """A running sshd and what a client needs for it."""

    folder: Path
    port: int
    user: str
    key: Path
    host_key: Path
    known_hosts: Path
    process: subprocess.Popen[bytes]

    @property
    def target(self) -> Target:
        return Target(
            name="loopback",
            address="127.0.0.1",
            port=self.port,
            user=self.user,
            identity_files=(str(self.key),),
            identities_only=True,
            known_hosts=(str(self.known_hosts),),
        )

    def target_with(self, **changes: object) -> Target:
        return replace(self.target, **changes)  # type: ignore[arg-type]

    def children(self) -> list[int]:
        """Pids of the processes that serve one connection each."""
        found = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True)
        return [int(word) for word in found.stdout.split()]

    def cut(self) -> None:
        """End every connection at once, as a failing network would. The listener stays."""
        for pid in self.children():
            served = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
            for victim in (pid, *map(int, served)):
                try:
                    os.kill(victim, signal.SIGKILL)
                except ProcessLookupError:
                    continue

    def stop(self) -> None:
        self.cut()
        self.process.terminate()
        self.process.wait(10)


def start_sshd(folder: Path, *, extra: str = "", port: int | None = None) -> Sshd:
    """Start one. ``extra`` is added to its configuration.

    Raises:
        RuntimeError: it did not come up; the message holds its log.
    """
    assert SSHD is not None
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    port = port or free_port()
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    host_key = folder / "host_key"
    key = folder / "user_key"
    for path in (host_key, key):
        if not path.exists():
            make_key(path)
    authorized = folder / "authorized_keys"
    authorized.write_bytes(key.with_suffix(".pub").read_bytes())
    authorized.chmod(0o600)
    known_hosts = folder / "known_hosts"
    kind, blob = host_key.with_suffix(".pub").read_text().split()[:2]
    known_hosts.write_text(f"[127.0.0.1]:{port} {kind} {blob}\n")
    config = folder / "sshd_config"
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {host_key}\nAuthorizedKeysFile {authorized}\nPidFile none\n"
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        f"PermitRootLogin prohibit-password\nMaxStartups 200\nSubsystem sftp internal-sftp\n{extra}\n"
    )
    log = folder / "sshd.log"
    with log.open("ab") as sink:
        process = subprocess.Popen([SSHD, "-D", "-e", "-f", config], stderr=sink, stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
            continue
        return Sshd(folder, port, getpass.getuser(), key, host_key, known_hosts, process)
    process.kill()
    raise RuntimeError(f"sshd did not come up: {log.read_text()}")
