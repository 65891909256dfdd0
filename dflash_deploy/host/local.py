"""This machine as a host. The only file that starts processes here."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from dflash_deploy.errors import CommandFailed, CommandTimeout
from dflash_deploy.host.streams import (
    EXIT_NOT_EXECUTABLE,
    EXIT_NOT_FOUND,
    SILENCE_S,
    Collector,
    Stream,
    check_command,
    serve_port,
    wrong_digest,
)
from dflash_deploy.model import Result


class LocalHost:
    """Runs commands here, in the user's home folder, each in a session of its own without a terminal."""

    def __init__(self, name: str = "local", *, cancelled: threading.Event | None = None) -> None:
        """``cancelled``: once set, every command that runs is ended, and :meth:`run` raises KeyboardInterrupt."""
        self.name = name
        self.home = str(Path.home())
        self._cancelled = cancelled or threading.Event()
        self._running = threading.Semaphore(0)
        self._begun = 0

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
        began = time.monotonic()
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE if input else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self.home if Path(self.home).is_dir() else "/",
                env={**os.environ, **(env or {})},
                start_new_session=True,
                bufsize=0,
            )
        except FileNotFoundError:
            return Result(words, EXIT_NOT_FOUND, stderr=f"{words[0]}: not found\n".encode())
        except OSError as error:
            return Result(words, EXIT_NOT_EXECUTABLE, stderr=f"{words[0]}: {error.strerror}\n".encode())
        assert process.stdout is not None and process.stderr is not None
        collector = Collector(on_line)
        collector.reader("stdout", process.stdout.read)
        collector.reader("stderr", process.stderr.read)
        if input and process.stdin is not None:
            threading.Thread(target=_feed, args=(process.stdin, input), daemon=True).start()
        finished, ended = False, 0.0
        self._begun += 1
        try:
            while not collector.ended:
                if self._cancelled.is_set():
                    raise KeyboardInterrupt
                left = began + timeout_s - time.monotonic()
                if left <= 0:
                    raise _timed_out(self.name, words, timeout_s, collector)
                took = collector.take(min(left, 0.2))
                # While there is something to read, it is waited for: a busy machine reads late.
                if not took and process.poll() is not None and not _pending(process, collector):
                    ended = ended or time.monotonic()
                    if time.monotonic() - max(collector.last, ended) > SILENCE_S:
                        break
            try:
                code = process.wait(max(0.0, began + timeout_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise _timed_out(self.name, words, timeout_s, collector) from None
            finished = True
        finally:
            collector.stop()
            if not finished:
                _end_group(process)
            self._running.release()
        if collector.ended:
            process.stdout.close()
            process.stderr.close()
        # As a shell reports it, so that both hosts agree: 128 + signal.
        code = 128 - code if code < 0 else code
        data = collector.data
        return Result(words, code, bytes(data["stdout"]), bytes(data["stderr"]), time.monotonic() - began)

    def pipe(self, argv: Sequence[str], feed: Iterable[bytes] = (), *, timeout_s: float = 3600.0) -> Iterator[bytes]:
        words = check_command(argv, None)
        with tempfile.TemporaryFile() as said:
            try:
                process = subprocess.Popen(
                    words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, start_new_session=True,
                    cwd=self.home if Path(self.home).is_dir() else "/",
                )  # fmt: skip
            except OSError as error:
                raise CommandFailed(f"{self.name}: {words[0]} cannot be started", evidence=str(error)) from error
            assert process.stdin is not None and process.stdout is not None
            broken: list[BaseException] = []
            threading.Thread(target=_pump, args=(process, feed, broken), daemon=True).start()
            deadline = time.monotonic() + timeout_s
            try:
                while True:
                    ready, _, _ = select.select([process.stdout], [], [], 1.0)
                    if ready:
                        chunk = os.read(process.stdout.fileno(), 1 << 18)
                        if not chunk:
                            break
                        yield chunk
                    elif broken:
                        break
                    elif time.monotonic() > deadline:
                        raise CommandTimeout(f"{self.name}: {words[0]} did not end within {timeout_s:g} s")
                code = process.wait(30) if not broken else -1
            finally:
                _end_group(process)
            if broken:
                raise broken[0]
            if code != 0:
                said.seek(0)
                raise CommandFailed(
                    f"{self.name}: {words[0]} ended with {code}",
                    evidence=said.read()[-2000:].decode("utf-8", "replace").strip().splitlines()[-5:],
                )

    def wait_idle(self, timeout_s: float) -> None:
        """Wait until no command runs any more."""
        deadline = time.monotonic() + timeout_s
        for _ in range(self._begun):
            self._running.acquire(timeout=max(0.0, deadline - time.monotonic()))

    def read(self, path: str) -> bytes | None:
        try:
            return Path(path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise CommandFailed(f"{self.name}: cannot read {path}", evidence=str(error)) from error

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        target = Path(path)
        temporary: Path | None = None
        try:
            if target.is_symlink():  # write through a link, as an editor would, and keep the link
                target = target.resolve()
            target.parent.mkdir(parents=True, exist_ok=True)
            before = target.stat() if target.exists() else None
            if before is not None and not stat.S_ISREG(before.st_mode):
                raise CommandFailed(f"{self.name}: {path} is no ordinary file", hint="name another path")
            handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
            temporary = Path(name)
            with os.fdopen(handle, "wb") as out:
                out.write(data)
                out.flush()
                if before is not None and (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(out.fileno(), before.st_uid, before.st_gid)
                wanted = (stat.S_IMODE(before.st_mode) if before is not None else 0o644) if mode == -1 else mode
                os.fchmod(out.fileno(), wanted)
                os.fsync(out.fileno())
            temporary.replace(target)
            temporary = None
            _sync_folder(target.parent)
        except OSError as error:
            raise CommandFailed(
                f"{self.name}: cannot write {path}",
                evidence=str(error),
                hint=f"check the owner of and the space in {target.parent}",
            ) from error
        finally:
            if temporary is not None:
                temporary.unlink(missing_ok=True)

    def copy_tree(self, source: str, target: str, *, on_progress: Callable[[int, int], None] | None = None) -> None:
        goal = Path(target)
        total, done = tree_bytes(source), 0
        try:
            goal.parent.mkdir(parents=True, exist_ok=True)
            fresh = Path(tempfile.mkdtemp(prefix=f".{goal.name}.", suffix=".new", dir=goal.parent))
        except OSError as error:
            raise CommandFailed(f"{self.name}: cannot copy to {target}", evidence=str(error)) from error
        old = fresh.with_suffix(".old")

        def copy(one: str, other: str) -> str:
            nonlocal done
            shutil.copy2(one, other, follow_symlinks=False)
            done += Path(one).lstat().st_size
            if on_progress is not None:
                on_progress(min(done, total), total)
            return other

        try:
            shutil.copytree(
                source,
                fresh,
                symlinks=True,
                ignore=shutil.ignore_patterns("__pycache__"),
                copy_function=copy,
                dirs_exist_ok=True,
            )
            fresh.chmod(0o755)
            if goal.exists() or goal.is_symlink():
                goal.rename(old)
            try:
                fresh.rename(goal)
            except OSError:
                if old.exists():
                    old.rename(goal)
                raise
        except (OSError, shutil.Error) as error:
            raise CommandFailed(f"{self.name}: cannot copy {source} to {target}", evidence=str(error)) from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
            if old.is_symlink() or old.is_file():
                old.unlink()
            shutil.rmtree(old, ignore_errors=True)

    def upload(
        self, source: str, target: str, *, sha256: str, on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        goal = Path(target)
        part = goal.with_name(goal.name + ".part")
        try:
            goal.parent.mkdir(parents=True, exist_ok=True)
            part.unlink(missing_ok=True)
            try:
                part.hardlink_to(source)  # the same bytes, at no cost
            except OSError:
                shutil.copyfile(source, part)
            with part.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != sha256:
                part.unlink()
                raise wrong_digest(self.name, source, sha256, found)
            part.replace(goal)
            # Two links to one file are not renamed over each other.
            part.unlink(missing_ok=True)
            size = goal.stat().st_size
        except OSError as error:
            raise CommandFailed(
                f"{self.name}: cannot write {target}",
                evidence=str(error),
                hint=f"check the owner of and the space in {goal.parent}",
            ) from error
        if on_progress is not None:
            on_progress(size, size)

    @contextlib.contextmanager
    def forward(self, remote_port: int, remote_host: str = "127.0.0.1") -> Iterator[int]:
        if remote_host in ("127.0.0.1", "localhost"):
            yield remote_port
            return

        def reach() -> tuple[Stream, Callable[[], object]]:
            far = socket.create_connection((remote_host, remote_port), timeout=10)
            far.settimeout(None)
            return far, lambda: far.shutdown(socket.SHUT_WR)

        with serve_port(reach) as port:
            yield port

    def follow(self, path: str, *, offset: int = 0, poll_s: float = 0.25) -> Iterator[bytes]:
        return follow_file(Path(path), offset, poll_s)

    def close(self) -> None:
        """Nothing to close."""


def tree_bytes(source: str) -> int:
    """Bytes of the files that a copy of ``source`` takes along.

    Raises:
        CommandFailed: ``source`` is no folder.
    """
    root = Path(source)
    if not root.is_dir():
        raise CommandFailed(f"{source} is no folder", hint="name a folder that exists")
    return sum(
        p.lstat().st_size for p in root.rglob("*") if "__pycache__" not in p.parts and (p.is_symlink() or p.is_file())
    )


def follow_file(path: Path, offset: int, poll_s: float) -> Iterator[bytes]:
    """See :meth:`~dflash_deploy.host.base.Host.follow`."""
    handle = None
    try:
        while True:
            if handle is None and path.is_file():
                handle = path.open("rb")
                handle.seek(offset if offset <= os.fstat(handle.fileno()).st_size else 0)
                offset = 0
            if handle is not None:
                if chunk := handle.read(65536):
                    yield chunk
                    continue
                try:
                    now = path.stat()
                    mine = os.fstat(handle.fileno())
                    if (now.st_dev, now.st_ino) != (mine.st_dev, mine.st_ino):
                        # Whatever was written between our read and the rotation.
                        while chunk := handle.read(65536):
                            yield chunk
                        handle.close()
                        handle = None
                        continue
                    if mine.st_size < handle.tell():
                        handle.seek(0)
                        continue
                except FileNotFoundError:
                    pass  # rotated away, the new one is not there yet
            yield b""
            time.sleep(poll_s)
    finally:
        if handle is not None:
            handle.close()


def _pending(process: subprocess.Popen[bytes], collector: Collector) -> bool:
    """Output, or its end, that nobody has read yet."""
    streams = {"stdout": process.stdout, "stderr": process.stderr}
    unread = [stream for name, stream in streams.items() if stream and name in collector.open]
    ready, _, _ = select.select(unread, [], [], 0)
    return bool(ready)


def _pump(process: subprocess.Popen[bytes], feed: Iterable[bytes], broken: list[BaseException]) -> None:
    """Write ``feed`` to the process; what its source raises ends the process and is kept."""
    assert process.stdin is not None
    try:
        for data in feed:
            process.stdin.write(data)
        process.stdin.close()
    except (OSError, ValueError):
        pass  # it reads no further; its exit code says why
    except BaseException as error:
        broken.append(error)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _feed(sink: object, data: bytes) -> None:
    view = memoryview(data)
    with contextlib.suppress(OSError, ValueError):
        while view:
            view = view[sink.write(view) :]  # type: ignore[attr-defined]
    with contextlib.suppress(OSError, ValueError):
        sink.close()  # type: ignore[attr-defined]


def _timed_out(name: str, words: Sequence[str], timeout_s: float, collector: Collector) -> CommandTimeout:
    tail = (
        bytes(collector.data["stderr"] or collector.data["stdout"])[-2000:].decode("utf-8", "replace").splitlines()[-5:]
    )
    return CommandTimeout(
        f"{name}: {words[0]} did not end within {timeout_s:g} s and was ended",
        evidence=tail,
        hint="look at the host's load",
    )


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the process group, SIGKILL half a second later, so that no grandchild outlives the deadline."""
    for sig, wait_s in ((signal.SIGTERM, 0.5), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, sig)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
