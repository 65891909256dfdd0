"""A host in memory, for tests and dry runs. Strict: a command that nobody scripted is an error, never an empty
success."""

from __future__ import annotations

import contextlib
import hashlib
import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dflash_deploy.errors import CommandFailed, CommandTimeout
from dflash_deploy.host.streams import Collector, check_command, wrong_digest
from dflash_deploy.model import Result


class UnscriptedCommand(AssertionError):
    """A command, port or folder that the test did not script."""


@dataclass(frozen=True)
class Call:
    """One command as it was asked for."""

    argv: tuple[str, ...]
    input: bytes | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 60.0


Answer = Result | str | bytes | int | Exception | Callable[[Call], "Result | str | bytes | int"]
"""What a script answers: a Result; text or bytes (stdout, exit 0); a number (exit code); an exception (raised); or a
function of the call."""


class FakeHost:
    """In-memory files and scripted commands.

    ``script(argv, answer)`` answers one exact argv; ``script((..., Ellipsis), answer)``, a tuple that ends in
    ``...``, any argv with that
    beginning. The newest script that fits wins. ``files`` maps paths to bytes, ``modes`` to permission bits,
    ``ports`` remote to local ports.
    """

    def __init__(
        self, name: str = "fake", home: str = "/home/tester", files: Mapping[str, bytes] | None = None
    ) -> None:
        self.name = name
        self.home = home
        self.files: dict[str, bytes] = dict(files or {})
        self.modes: dict[str, int] = {}
        self.ports: dict[int, int] = {}
        self.calls: list[Call] = []
        self.read_only: set[str] = set()
        """Folders in which a write fails."""
        self._scripts: list[tuple[tuple[object, ...], Answer]] = []

    def script(self, argv: Sequence[object], answer: Answer) -> None:
        """Answer ``argv`` with ``answer`` from now on."""
        self._scripts.insert(0, (tuple(argv), answer))

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
        call = Call(words, input, dict(env or {}), timeout_s)
        self.calls.append(call)
        for pattern, answer in self._scripts:
            if pattern == words or (pattern[-1:] == (...,) and words[: len(pattern) - 1] == pattern[:-1]):
                result = self._result(call, answer)
                break
        else:
            raise UnscriptedCommand(f"{self.name}: nobody scripted {list(words)}")
        if result.seconds > timeout_s:
            raise CommandTimeout(f"{self.name}: {words[0]} did not end within {timeout_s:g} s and was ended")
        collector = Collector(on_line)
        for stream, data in (("stdout", result.stdout), ("stderr", result.stderr)):
            for chunk in (data, b"") if data else (b"",):
                collector.lines(stream, chunk)
        return result

    def pipe(self, argv: Sequence[str], feed: Iterable[bytes] = (), *, timeout_s: float = 3600.0) -> Iterator[bytes]:
        result = self.run(argv, input=b"".join(feed), timeout_s=timeout_s)
        if not result.ok:
            raise CommandFailed(f"{self.name}: {argv[0]} ended with {result.exit_code}", evidence=result.err)
        if result.stdout:
            yield result.stdout

    @staticmethod
    def _result(call: Call, answer: Answer) -> Result:
        if isinstance(answer, Exception):
            raise answer
        value = answer(call) if callable(answer) else answer
        if isinstance(value, Result):
            return Result(call.argv, value.exit_code, value.stdout, value.stderr, value.seconds)
        if isinstance(value, int):
            return Result(call.argv, value)
        return Result(call.argv, 0, value.encode() if isinstance(value, str) else value)

    def _is_folder(self, path: str) -> bool:
        return any(name.startswith(path.rstrip("/") + "/") for name in self.files)

    def read(self, path: str) -> bytes | None:
        if self._is_folder(path):
            raise CommandFailed(f"{self.name}: cannot read {path}", evidence="is a folder")
        return self.files.get(path)

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        folder = posixpath.dirname(path)
        if self._is_folder(path) or any(folder == r or folder.startswith(r.rstrip("/") + "/") for r in self.read_only):
            raise CommandFailed(f"{self.name}: cannot write {path}", evidence="read-only, or a folder")
        self.files[path] = bytes(data)
        self.modes[path] = self.modes.get(path, 0o644) if mode == -1 else mode

    def copy_tree(self, source: str, target: str, *, on_progress: Callable[[int, int], None] | None = None) -> None:
        root = Path(source)
        if not root.is_dir():
            raise CommandFailed(f"{source} is no folder", hint="name a folder that exists")
        found = [p for p in sorted(root.rglob("*")) if p.is_file() and "__pycache__" not in p.parts]
        fresh = {posixpath.join(target, p.relative_to(root).as_posix()): p for p in found}
        total, done = sum(p.stat().st_size for p in found), 0
        for name in [n for n in self.files if n.startswith(target.rstrip("/") + "/")]:
            del self.files[name]
        for name, path in fresh.items():
            self.write(name, path.read_bytes(), mode=path.stat().st_mode & 0o777)
            done += path.stat().st_size
            if on_progress is not None:
                on_progress(done, total)

    def upload(
        self, source: str, target: str, *, sha256: str, on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        data = Path(source).read_bytes()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise wrong_digest(self.name, source, sha256, hashlib.sha256(data).hexdigest())
        self.write(target, data)
        if on_progress is not None:
            on_progress(len(data), len(data))

    @contextlib.contextmanager
    def forward(self, remote_port: int, remote_host: str = "127.0.0.1") -> Iterator[int]:
        if remote_port not in self.ports:
            raise UnscriptedCommand(f"{self.name}: nobody scripted port {remote_host}:{remote_port}")
        yield self.ports[remote_port]

    def follow(self, path: str, *, offset: int = 0, poll_s: float = 0.25) -> Iterator[bytes]:
        while True:
            data = self.files.get(path, b"")
            if len(data) < offset:
                offset = 0
            chunk, offset = data[offset:], len(data)
            yield chunk

    def close(self) -> None:
        """Nothing to close."""
