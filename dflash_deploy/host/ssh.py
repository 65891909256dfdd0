"""A host over SSH. The only file that knows paramiko.

One connection, kept alive and made anew when it was lost. Every command is one channel without a terminal::

    exec sh -c '<read the script from stdin, eval it>' sh TOKEN

The script (variables, then argv quoted once by ``shlex.join``) travels on stdin before the command's own input, so
that neither shows in
``ps`` through the login shell. ``TOKEN`` is printed on both streams before the command starts: what a login file
printed comes before it and
is dropped. sshd makes each channel's process a session leader, so its pid names the process group that is ended at a
deadline.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import logging
import os
import posixpath
import re
import secrets
import shlex
import socket
import stat
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import paramiko

from dflash_deploy.errors import (
    AuthError,
    CommandFailed,
    CommandTimeout,
    ConnectError,
    ConnectionLost,
    HostError,
    HostKeyError,
)
from dflash_deploy.host.known_hosts import fingerprint, known_keys, lookup_name, record
from dflash_deploy.host.streams import SILENCE_S, Collector, Stream, check_command, serve_port, wrong_digest
from dflash_deploy.inventory import Target
from dflash_deploy.model import Result

# No quote and no backslash inside: fish and csh read single-quoted words otherwise than sh does. $1 is the token, $2
# a newline for printf.
_READ_SCRIPT = (
    'n="$(printf %bx "$2")"; n="${n%x}"; s=; '
    'while IFS= read -r l; do if [ "$l" = "$1" ]; then break; fi; s="$s$l$n"; done; '
    'echo "$1" >&2; echo "$1 $$"; eval "$s"'
)

KEEPALIVE_S = 15
PEER_SILENT_S = 60
"""A peer that acknowledges nothing for this long is taken as gone."""
KILL_AFTER_S = 1.0
_LOST = (paramiko.SSHException, EOFError, ConnectionError, OSError)

logging.getLogger("paramiko").addHandler(logging.NullHandler())


class SshHost:
    """A machine behind sshd. See :class:`~dflash_deploy.host.base.Host` for the contract."""

    def __init__(
        self,
        target: Target,
        *,
        accept_new: bool = False,
        connect_timeout_s: float = 30.0,
        on_notice: Callable[[str], None] | None = None,
    ) -> None:
        self.name = target.name
        self.target = target
        self.connect_timeout_s = connect_timeout_s
        self._accept_new = accept_new
        self._notice = on_notice or (lambda text: None)
        self._chain: list[paramiko.Transport] = []
        self._sftp: paramiko.SFTPClient | None = None
        self._home: str | None = None
        self._lock = threading.RLock()

    # connection

    def connect(self) -> None:
        """Connect now, unless connected. :meth:`run` and the others do so themselves.

        Raises:
            ConnectError, AuthError, HostKeyError
        """
        self._transport()

    def close(self) -> None:
        with self._lock:
            self._sftp = None
            for transport in reversed(self._chain):
                transport.close()
            self._chain = []

    def _transport(self) -> paramiko.Transport:
        with self._lock:
            if self._chain and all(t.is_active() for t in self._chain):
                return self._chain[-1]
            self.close()
            deadline = time.monotonic() + self.connect_timeout_s
            pause_s = 0.2
            while True:
                try:
                    for hop in (*self.target.proxy_jump, self.target):
                        self._chain.append(self._hop(hop, self._chain[-1] if self._chain else None, deadline))
                    return self._chain[-1]
                except _Again as again:
                    self.close()
                    if again.final or time.monotonic() + pause_s >= deadline:
                        raise ConnectError(
                            f"{self.name}: no SSH connection to {again.where} within {self.connect_timeout_s:g} s",
                            evidence=str(again),
                            hint="check that the host is up, its address and port, and that sshd runs there",
                        ) from again
                    self._notice(f"{self.name}: {again}; trying again")
                    time.sleep(pause_s)
                    pause_s = min(pause_s * 2, 4.0)
                except BaseException:
                    self.close()
                    raise

    def _hop(self, hop: Target, via: paramiko.Transport | None, deadline: float) -> paramiko.Transport:
        where = f"{hop.address}:{hop.port}"
        left = max(0.5, deadline - time.monotonic())
        sock: Any
        try:
            if via is not None:
                sock = via.open_channel("direct-tcpip", (hop.address, hop.port), ("127.0.0.1", 0), timeout=left)
            elif hop.proxy_command:
                sock = paramiko.ProxyCommand(hop.proxy_command)
            else:
                sock = socket.create_connection((hop.address, hop.port), timeout=left)
                # Small messages wait for answers here: Nagle's algorithm would hold each back by 40 ms.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with contextlib.suppress(OSError, AttributeError):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, PEER_SILENT_S * 1000)
        except socket.gaierror as error:
            raise _Again(where, f"{hop.address}: {error.strerror}", final=error.errno == socket.EAI_NONAME) from error
        except _LOST as error:
            raise _Again(where, f"{where}: {error}") from error
        transport = paramiko.Transport(sock)
        try:
            transport.banner_timeout = left
            recorded = list(known_keys(hop.known_hosts, hop.address, hop.port))
            _prefer(transport, [key.kind for key in recorded])
            try:
                transport.start_client(timeout=left)
            except _LOST as error:
                raise _Again(where, f"{where}: {str(error) or 'closed during the handshake'}") from error
            transport.set_keepalive(KEEPALIVE_S)
            self._check_key(hop, transport.get_remote_server_key(), recorded)
            self._authenticate(hop, transport, left)
        except BaseException:
            transport.close()
            raise
        return transport

    def _check_key(self, hop: Target, key: paramiko.PKey, recorded: Sequence[Any]) -> None:
        kind, blob = key.get_name(), key.asbytes()
        seen = f"offered: {kind} {fingerprint(blob)}"
        revoked = [k for k in recorded if k.revoked and k.blob == blob]
        if revoked:
            raise HostKeyError(
                f"{hop.name}: the host's key is revoked", evidence=[seen, f"revoked in {revoked[0].where}"]
            )
        valid = [k for k in recorded if not k.revoked]
        if any(k.blob == blob for k in valid):
            return
        named = lookup_name(hop.address, hop.port)
        if valid:
            raise HostKeyError(
                f"{hop.name}: the key of {named} has changed",
                evidence=[seen, *(f"recorded: {k.kind} {fingerprint(k.blob)} ({k.where})" for k in valid)],
                hint=f"if the host was set up anew: ssh-keygen -R '{named}', then connect with --accept-new",
            )
        if not self._accept_new or not hop.known_hosts:
            raise HostKeyError(
                f"{hop.name}: the key of {named} is unknown",
                evidence=[seen],
                hint="compare it with ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub on the host, then use --accept-new",
            )
        try:
            record(hop.known_hosts[0], hop.address, hop.port, kind, blob)
        except OSError as error:
            raise HostKeyError(
                f"{hop.name}: cannot record the key in {hop.known_hosts[0]}", evidence=[seen, str(error)]
            ) from error
        self._notice(f"{hop.name}: new host key {kind} {fingerprint(blob)} recorded in {hop.known_hosts[0]}")

    def _authenticate(self, hop: Target, transport: paramiko.Transport, left: float) -> None:
        transport.auth_timeout = left
        tried: list[str] = []
        for label, load in _keys(hop):
            try:
                key = load()
            except _Unusable as why:
                tried.append(f"{label}: {why}")
                continue
            if key is None:
                continue
            try:
                if not transport.auth_publickey(hop.user, key):
                    return
                tried.append(f"{label}: accepted, but another method is wanted as well")
            except paramiko.BadAuthenticationType as error:
                tried.append(f"{label}: the host takes {', '.join(error.allowed_types)}")
            except paramiko.AuthenticationException as error:
                banner = (transport.get_banner() or b"").decode("utf-8", "replace").strip()
                if "booting up" in banner or "nologin" in banner:
                    raise _Again(f"{hop.address}:{hop.port}", banner) from error
                tried.append(f"{label}: refused" + (f" ({banner})" if banner else ""))
            except _LOST as error:
                tried.append(f"{label}: {str(error) or 'the host closed the connection'}")
            if not transport.is_active():
                tried.append("the host closed the connection")
                break
            if transport.is_authenticated():
                return
        raise AuthError(
            f"{hop.name}: {hop.user}@{hop.address}:{hop.port} took none of the keys",
            evidence=tried or ["no key to offer: no agent, no identity file"],
            hint="ssh-add the key, name it as identity_file in hosts.toml, or add it to authorized_keys on the host",
        )

    def _channel(self, open_it: Callable[[paramiko.Transport], Any]) -> Any:
        """A fresh channel. A connection that died while idle is made anew once; nothing ran on it, so that is safe."""
        for last in (False, True):
            transport = self._transport()
            try:
                return open_it(transport)
            except paramiko.ChannelException as error:
                raise ConnectionLost(f"{self.name}: the host refuses another channel", evidence=str(error)) from error
            except _LOST as error:
                self.close()
                if last:
                    raise self._lost("while opening a channel", error) from error
        raise AssertionError("unreachable")

    def _lost(self, when: str, error: BaseException | None = None) -> ConnectionLost:
        return ConnectionLost(
            f"{self.name}: the connection broke {when}",
            evidence=[str(error)] if error is not None and str(error) else (),
            hint="run the same command again: it goes on from there",
        )

    # commands

    @property
    def home(self) -> str:
        if self._home is None:
            result = self.run(["sh", "-c", 'printf %s "$HOME"'])
            if not result.ok or not result.out.startswith("/"):
                raise CommandFailed(f"{self.name}: the host names no home folder", evidence=(result.out, result.err))
            self._home = result.out
        return self._home

    def run(
        self,
        argv: Sequence[str],
        *,
        input: bytes | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        on_line: Callable[[str, str], None] | None = None,
    ) -> Result:
        words = check_command(argv, env)
        return self._run(words, [input] if input else [], env, timeout_s, on_line)

    def _start(self, words: Sequence[str], env: Mapping[str, str] | None) -> tuple[Any, str]:
        token = secrets.token_hex(16)
        lines = [f"export {name}={shlex.quote(value)}" for name, value in (env or {}).items()]
        script = "\n".join([*lines, f"{shlex.join(words)}", token, ""])

        def begin(transport: paramiko.Transport) -> Any:
            channel = transport.open_session(timeout=30)
            channel.exec_command(f"exec sh -c '{_READ_SCRIPT}' sh {token} '\\012'")
            return channel

        channel = self._channel(begin)
        try:
            channel.sendall(script.encode())
        except _LOST as error:
            channel.close()
            if self._dead():
                raise self._lost("before the command started", error) from error
        return channel, token

    def _dead(self) -> bool:
        """Whether the transport is gone; its thread closes the channels a moment before it says so."""
        for _ in range(20):
            if not self._chain or not all(t.is_active() for t in self._chain):
                return True
            time.sleep(0.05)
        return False

    def _run(
        self,
        words: tuple[str, ...],
        feed: Iterable[bytes],
        env: Mapping[str, str] | None,
        timeout_s: float,
        on_line: Callable[[str, str], None] | None,
    ) -> Result:
        began = time.monotonic()
        channel, token = self._start(words, env)
        collector = Collector(on_line)
        markers = {"stdout": _Marker(token), "stderr": _Marker(token)}
        for name, recv in (("stdout", channel.recv), ("stderr", channel.recv_stderr)):
            collector.reader(name, markers[name].wrap(recv))
        threading.Thread(target=_feed, args=(channel, feed), daemon=True).start()
        ended = 0.0
        finished = False
        try:
            while not collector.ended:
                left = began + timeout_s - time.monotonic()
                if left <= 0:
                    raise self._timed_out(words, timeout_s, collector)
                took = collector.take(min(left, 0.2))
                # Once the end of its output has come, the rest is only waited for: a busy machine reads late.
                if not took and channel.exit_status_ready() and not channel.eof_received:
                    ended = ended or time.monotonic()
                    if time.monotonic() - max(collector.last, ended) > SILENCE_S:
                        break
            while not channel.exit_status_ready():
                if time.monotonic() > began + timeout_s:
                    raise self._timed_out(words, timeout_s, collector)
                channel.status_event.wait(0.1)
            code = channel.recv_exit_status()
            finished = True
        finally:
            collector.stop()
            if not finished:
                self._end_group(markers["stdout"].pid)
            channel.close()
        if code == -1 and self._dead():
            self.close()
            raise self._lost(f"while {words[0]} ran")
        if markers["stdout"].pid is None:
            raise CommandFailed(
                f"{self.name}: the login shell of {self.target.user} does not run commands",
                evidence=[
                    m.noise.decode("utf-8", "replace").strip()[-500:] for m in markers.values() if m.noise.strip()
                ],
                hint="give the user a POSIX login shell: chsh -s /bin/bash",
            )
        data = collector.data
        # -1: sshd reports a signal instead of a status, as when the whole group was killed from outside.
        return Result(
            words, 137 if code == -1 else code, bytes(data["stdout"]), bytes(data["stderr"]), time.monotonic() - began
        )

    def pipe(self, argv: Sequence[str], feed: Iterable[bytes] = (), *, timeout_s: float = 3600.0) -> Iterator[bytes]:
        words = check_command(argv, None)
        channel, token = self._start(words, None)
        markers = {"stdout": _Marker(token), "stderr": _Marker(token)}
        broken: list[BaseException] = []

        def pump() -> None:
            try:
                for data in feed:
                    channel.sendall(data)
                channel.shutdown_write()
            except _LOST:
                pass  # the reader sees it too
            except BaseException as error:
                broken.append(error)
                channel.close()

        threading.Thread(target=pump, daemon=True).start()
        deadline = time.monotonic() + timeout_s
        finished = False
        try:
            channel.settimeout(1.0)
            recv = markers["stdout"].wrap(channel.recv)
            while True:
                try:
                    chunk = recv(1 << 18)
                except TimeoutError:
                    if time.monotonic() > deadline:
                        raise CommandTimeout(
                            f"{self.name}: {words[0]} did not end within {timeout_s:g} s and was ended"
                        ) from None
                    continue
                if not chunk:
                    break
                yield chunk
            if broken:
                raise broken[0]
            while not channel.exit_status_ready() and time.monotonic() < deadline:
                if channel.status_event.wait(0.5) or (self._chain and not self._chain[-1].is_active()):
                    break
            code = channel.recv_exit_status() if channel.exit_status_ready() else -1
            finished = True
        finally:
            if not finished:
                self._end_group(markers["stdout"].pid)
            if not finished or code == 0:
                channel.close()
        if code != 0:
            if code == -1 and self._dead():
                self.close()
                raise self._lost(f"while {words[0]} ran")
            said = b""
            with contextlib.suppress(*_LOST, TimeoutError):
                read = markers["stderr"].wrap(channel.recv_stderr)
                while chunk := read(1 << 16):
                    said += chunk
            channel.close()
            raise CommandFailed(
                f"{self.name}: {words[0]} ended with {code}",
                evidence=said[-2000:].decode("utf-8", "replace").strip().splitlines()[-5:],
            )

    def _timed_out(self, words: Sequence[str], timeout_s: float, collector: Collector) -> HostError:
        tail = (
            bytes(collector.data["stderr"] or collector.data["stdout"])[-2000:]
            .decode("utf-8", "replace")
            .splitlines()[-5:]
        )
        return CommandTimeout(
            f"{self.name}: {words[0]} did not end within {timeout_s:g} s and was ended",
            evidence=tail,
            hint="look at the host's load",
        )

    def _end_group(self, pid: int | None) -> None:
        """SIGTERM to the command's process group, SIGKILL after a moment. Closing the channel alone would leave it
        running."""
        if pid is None or not self._chain or not self._chain[-1].is_active():
            return
        script = f"kill -TERM -{pid} 2>/dev/null; sleep {KILL_AFTER_S}; kill -KILL -{pid} 2>/dev/null; :"
        with contextlib.suppress(*_LOST):
            channel = self._chain[-1].open_session(timeout=10)
            channel.settimeout(10)
            channel.exec_command(f"exec sh -c '{script}'")
            channel.recv(1)  # EOF when done
            channel.close()

    # files

    def _files(self) -> paramiko.SFTPClient:
        with self._lock:
            transport = self._transport()
            if self._sftp is None:
                try:
                    self._sftp = paramiko.SFTPClient.from_transport(transport)
                except paramiko.ChannelException as error:
                    raise self._lost("while opening SFTP", error) from error
                except _LOST as error:
                    if self._dead():
                        raise self._lost("while opening SFTP", error) from error
                    raise CommandFailed(
                        f"{self.name}: sshd offers no SFTP",
                        evidence=str(error),
                        hint="enable 'Subsystem sftp' in sshd_config",
                    ) from error
            assert self._sftp is not None
            return self._sftp

    @contextlib.contextmanager
    def _file_errors(self, doing: str, hint: str = "") -> Iterator[None]:
        try:
            yield
        except (HostError, CommandFailed):
            raise
        except _LOST as error:
            gone = (
                isinstance(error, EOFError | paramiko.SSHException | ConnectionError) or "closed" in str(error).lower()
            )
            if gone and self._dead():
                self.close()
                raise self._lost(f"while trying to {doing}", error) from error
            self._sftp = None if gone else self._sftp
            raise CommandFailed(f"{self.name}: cannot {doing}", evidence=str(error), hint=hint) from error

    def read(self, path: str) -> bytes | None:
        with self._file_errors(f"read {path}"):
            sftp = self._files()
            try:
                about = sftp.stat(path)
                if stat.S_ISDIR(about.st_mode or 0):
                    raise CommandFailed(f"{self.name}: cannot read {path}", evidence="is a folder")
                with sftp.open(path, "rb") as handle:
                    if (about.st_size or 0) > 1 << 18:
                        handle.prefetch(about.st_size)
                    return handle.read()
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTDIR):
                    return None
                # SFTP has no code for "a parent is a file"; OpenSSH says Failure.
                if error.errno is None and self._parent_is_file(sftp, path):
                    return None
                raise

    @staticmethod
    def _parent_is_file(sftp: paramiko.SFTPClient, path: str) -> bool:
        parent = posixpath.dirname(path)
        while parent not in ("", "/"):
            try:
                return not stat.S_ISDIR(sftp.stat(parent).st_mode or 0)
            except OSError:
                parent = posixpath.dirname(parent)
        return False

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        folder = posixpath.dirname(path)
        with self._file_errors(f"write {path}", f"check the owner of and the space in {folder}"):
            sftp = self._files()
            goal, before = path, None
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISLNK(sftp.lstat(path).st_mode or 0):
                    goal = sftp.normalize(path)
                before = sftp.stat(goal)
            if before is not None and not stat.S_ISREG(before.st_mode or 0):
                raise CommandFailed(f"{self.name}: {path} is no ordinary file", hint="name another path")
            if before is None:
                self._make_folders(sftp, posixpath.dirname(goal))
            temporary = posixpath.join(
                posixpath.dirname(goal), f".{posixpath.basename(goal)}.{secrets.token_hex(6)}.tmp"
            )
            wanted = (stat.S_IMODE(before.st_mode or 0) if before is not None else 0o644) if mode == -1 else mode
            try:
                with sftp.open(temporary, "wx") as handle:
                    sftp.chmod(temporary, 0o600)
                    handle.set_pipelined(True)
                    handle.write(data)
                    handle.set_pipelined(False)
                    handle.flush()
                    size = handle.stat().st_size
                    if size != len(data):
                        raise OSError(f"only {size} of {len(data)} bytes could be written: no space left?")
                    _fsync(sftp, handle)
                if before is not None:
                    mine = sftp.stat(temporary)
                    if (mine.st_uid, mine.st_gid) != (before.st_uid, before.st_gid):
                        sftp.chown(temporary, before.st_uid or 0, before.st_gid or 0)
                sftp.chmod(temporary, wanted)
                sftp.posix_rename(temporary, goal)
            except BaseException:
                with contextlib.suppress(*_LOST):
                    if self._sftp is sftp:
                        sftp.remove(temporary)
                raise

    @staticmethod
    def _make_folders(sftp: paramiko.SFTPClient, folder: str) -> None:
        missing = []
        while folder not in ("", "/"):
            try:
                sftp.stat(folder)
                break
            except FileNotFoundError:
                missing.append(folder)
                folder = posixpath.dirname(folder)
        for name in reversed(missing):
            sftp.mkdir(name, 0o755)

    def copy_tree(self, source: str, target: str, *, on_progress: Callable[[int, int], None] | None = None) -> None:
        root = Path(source)
        if not root.is_dir():
            raise CommandFailed(f"{source} is no folder", hint="name a folder that exists")
        files = [p for p in sorted(root.rglob("*")) if "__pycache__" not in p.relative_to(root).parts]
        result = self._run(
            ("sh", "-c", _UNPACK, "sh", target, secrets.token_hex(6)),
            _tar(root, files, on_progress),
            None,
            3600.0,
            None,
        )
        if not result.ok:
            raise CommandFailed(
                f"{self.name}: cannot copy {source} to {target}",
                evidence=result.err.strip().splitlines()[-5:],
                hint=f"check the owner of and the space in {posixpath.dirname(target)}",
            )

    def upload(
        self, source: str, target: str, *, sha256: str, on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        part, total = target + ".part", Path(source).stat().st_size
        for attempt in (1, 2):
            begin = self._run(("sh", "-c", _PART, "sh", part, str(total)), (), None, 60.0, None)
            if not begin.ok:
                raise self._not_taken(source, target, begin.err)
            offset = int(begin.out)
            result = self._run(
                ("sh", "-c", 'cat >>"$1" && sha256sum <"$1"', "sh", part),
                _rest(source, offset, total, on_progress),
                None,
                6 * 3600.0,
                None,
            )
            if not result.ok:
                raise self._not_taken(source, target, result.err)
            found = (result.out.split() or [""])[0]
            if not found:
                raise self._not_taken(source, target, "the host did not say what arrived")
            if found == sha256:
                moved = self._run(("mv", "-f", part, target), (), None, 60.0, None)
                if not moved.ok:
                    raise self._not_taken(source, target, moved.err)
                return
            self._run(("rm", "-f", part), (), None, 60.0, None)
            # What an earlier attempt left was perhaps of another file.
            if attempt == 2 or not offset:
                raise wrong_digest(self.name, source, sha256, found)

    def _not_taken(self, source: str, target: str, err: str) -> CommandFailed:
        return CommandFailed(
            f"{self.name}: cannot upload {posixpath.basename(source)}",
            evidence=err.strip().splitlines()[-3:],
            hint=f"check the owner of and the space in {posixpath.dirname(target)}",
        )

    # streams

    @contextlib.contextmanager
    def forward(self, remote_port: int, remote_host: str = "127.0.0.1") -> Iterator[int]:
        def reach() -> tuple[Stream, Callable[[], object]]:
            channel = self._channel(
                lambda t: t.open_channel("direct-tcpip", (remote_host, remote_port), ("127.0.0.1", 0), timeout=10)
            )
            return channel, channel.shutdown_write

        self._transport()
        with serve_port(reach) as port:
            yield port

    def follow(self, path: str, *, offset: int = 0, poll_s: float = 0.25) -> Iterator[bytes]:
        # tail -F on the host knows inodes, which SFTP does not show. A file that is shorter than offset has been
        # truncated: from its start.
        script = (
            'o=$2; s=$(wc -c <"$1" 2>/dev/null) && [ "$s" -lt "$o" ] && o=0; '
            'exec tail -c "+$((o + 1))" -F -- "$1" 2>/dev/null'
        )
        channel, token = self._start(("sh", "-c", script, "sh", path, str(offset)), None)
        marker = _Marker(token)
        try:
            channel.settimeout(poll_s)
            recv = marker.wrap(channel.recv)
            while True:
                try:
                    chunk = recv(65536)
                except TimeoutError:
                    yield b""
                    continue
                if not chunk:
                    if self._dead():
                        self.close()
                        raise self._lost(f"while following {path}")
                    raise CommandFailed(
                        f"{self.name}: cannot follow {path}", evidence=f"tail ended with {channel.recv_exit_status()}"
                    )
                yield chunk
        finally:
            self._end_group(marker.pid)
            channel.close()


class _Again(Exception):
    """A failed attempt that a later one may mend, unless ``final``."""

    def __init__(self, where: str, text: str, final: bool = False) -> None:
        super().__init__(text)
        self.where = where
        self.final = final


class _Unusable(Exception):
    """A key that cannot be offered."""


class _Marker:
    """Drops what came before the token's line, and keeps the pid that stands on it."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._seen = False
        self.noise = b""
        self.pid: int | None = None

    def wrap(self, recv: Callable[[int], bytes]) -> Callable[[int], bytes]:
        def filtered(size: int) -> bytes:
            while not self._seen:
                chunk = recv(size)
                self.noise += chunk
                if not chunk:
                    return b""
                head, found, rest = self.noise.partition(self._token)
                line, newline, rest = rest.partition(b"\n")
                if found and newline:
                    self._seen = True
                    self.noise = head
                    self.pid = int(line) if line.strip() else None
                    if rest:
                        return rest
                elif not found and len(self.noise) > 1 << 20:
                    self.noise = self.noise[-4096:]
            return recv(size)

        return filtered


_UNPACK = """set -eu
goal=$1; new=$1.$2.new; old=$1.$2.old
mkdir -p "$(dirname "$goal")"
mkdir "$new"
trap 'rm -rf "$new" "$old"' EXIT
trap 'exit 1' HUP INT TERM
tar -xpf - --no-same-owner -C "$new"
if [ -e "$goal" ] || [ -L "$goal" ]; then mv "$goal" "$old"; fi
mv "$new" "$goal" || { [ ! -e "$old" ] || mv "$old" "$goal"; exit 1; }
"""


def _tar(root: Path, files: Sequence[Path], on_progress: Callable[[int, int], None] | None) -> Iterator[bytes]:
    """An uncompressed tar of ``files``, chunk by chunk, in constant memory; owners and times of this machine are left
    out."""
    total = sum(p.lstat().st_size for p in files if p.is_file() and not p.is_symlink())
    done = 0
    for path in files:
        info = tarfile.TarFile(fileobj=io.BytesIO(), mode="w").gettarinfo(str(path), path.relative_to(root).as_posix())
        if not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
            continue
        if info.islnk():
            info.type, info.size, info.linkname = tarfile.REGTYPE, path.stat().st_size, ""
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        yield info.tobuf(tarfile.PAX_FORMAT)
        if not info.isreg():
            continue
        left = info.size
        with path.open("rb") as handle:
            while left and (chunk := handle.read(min(left, 1 << 16))):
                left -= len(chunk)
                done += len(chunk)
                yield chunk
                if on_progress is not None:
                    on_progress(done, total)
        yield b"\0" * (left + -info.size % 512)
    yield b"\0" * 1024


_PART = """set -eu
mkdir -p "$(dirname "$1")"
[ -f "$1" ] || : >"$1"
size=$(wc -c <"$1")
if [ "$size" -gt "$2" ]; then : >"$1"; size=0; fi
echo "$size"
"""
"""How much of a file is there already; makes it writable, and its folder."""


def _rest(source: str, offset: int, total: int, on_progress: Callable[[int, int], None] | None) -> Iterator[bytes]:
    """The bytes of a file from an offset on."""
    with Path(source).open("rb") as file:
        file.seek(offset)
        if on_progress is not None:
            on_progress(offset, total)
        while chunk := file.read(1 << 18):
            yield chunk
            offset += len(chunk)
            if on_progress is not None:
                on_progress(offset, total)


def _feed(channel: Any, feed: Iterable[bytes]) -> None:
    with contextlib.suppress(*_LOST):
        for data in feed:
            channel.sendall(data)
    with contextlib.suppress(*_LOST):
        channel.shutdown_write()


def _fsync(sftp: Any, handle: Any) -> None:
    """``fsync@openssh.com``; a server without it writes all the same."""
    with contextlib.suppress(OSError):
        sftp._request(paramiko.sftp.CMD_EXTENDED, "fsync@openssh.com", handle.handle)


def _prefer(transport: paramiko.Transport, kinds: Sequence[str]) -> None:
    """Ask first for the key types that are recorded, so that a known host is not met under another of its keys."""
    options = transport.get_security_options()
    wanted = set(kinds)
    if "ssh-rsa" in wanted:
        wanted |= {"rsa-sha2-512", "rsa-sha2-256"}
    known = tuple(options.key_types)
    options.key_types = tuple(k for k in known if k in wanted) + tuple(k for k in known if k not in wanted)


def _keys(hop: Target) -> Iterator[tuple[str, Callable[[], paramiko.PKey | None]]]:
    """Keys in the order in which they are offered: named files, the agent's, the usual files; at most one default
    file that is missing."""
    agent_keys: tuple[Any, ...] = ()
    with contextlib.suppress(*_LOST):
        agent_keys = paramiko.Agent().get_keys() if os.environ.get("SSH_AUTH_SOCK") else ()
    offered: set[bytes] = set()

    def from_file(path: str) -> paramiko.PKey | None:
        public = Path(path + ".pub")
        with contextlib.suppress(OSError, IndexError, ValueError):
            blob = paramiko.pkey.PublicBlob.from_file(str(public)).key_blob
            for key in agent_keys:
                if key.asbytes() == blob:
                    offered.add(blob)
                    return key  # type: ignore[no-any-return]
        try:
            key = paramiko.PKey.from_path(path)
        except FileNotFoundError:
            raise _Unusable("no such file") from None
        except (paramiko.PasswordRequiredException, TypeError):
            raise _Unusable("is encrypted and not in the agent: ssh-add it") from None
        except (OSError, ValueError, paramiko.SSHException, paramiko.pkey.UnknownKeyType) as error:
            raise _Unusable(str(error) or type(error).__name__) from error
        offered.add(key.asbytes())
        return key

    def from_agent(key: Any) -> paramiko.PKey | None:
        return None if key.asbytes() in offered else key

    for path in hop.identity_files:
        yield path, lambda path=path: from_file(path)  # type: ignore[misc]
    if hop.identities_only:
        return
    for key in agent_keys:
        yield f"agent key {fingerprint(key.asbytes())}", lambda key=key: from_agent(key)  # type: ignore[misc]
    if not hop.identity_files:
        for name in ("id_ed25519", "id_ecdsa", "id_rsa"):
            usual = Path.home() / ".ssh" / name
            if usual.exists():
                yield str(usual), lambda path=str(usual): from_file(path)  # type: ignore[misc]


def read_ssh_config(text: str, name: str) -> tuple[dict[str, Any], frozenset[str]]:
    """What an OpenSSH client configuration says of ``name``, and every pattern that stands after a ``Host``.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        if re.search(r"^\s*match\b.*\bexec\b", text, re.I | re.M):
            vars(paramiko.config)["invoke"] = importlib.import_module("invoke")  # see ssh_module
        config = paramiko.SSHConfig.from_text(text)
        return dict(config.lookup(name)), frozenset(config.get_hostnames())
    except (paramiko.ConfigParseError, paramiko.CouldNotCanonicalize, ImportError, ValueError) as error:
        raise ValueError(str(error)) from error
