"""The only way out of the process: run a command, read a file, write a file.

Three hosts keep one contract (``tests/host/test_contract.py``): :class:`~dflash_deploy.host.local.LocalHost`,
:class:`~dflash_deploy.host.ssh.SshHost`, :class:`~dflash_deploy.host.fake.FakeHost`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from dflash_deploy.model import Result


class Host(Protocol):
    """A machine that commands run on.

    Paths are POSIX paths of that machine. ``~`` is not expanded: ask :attr:`home`.
    """

    name: str
    """What the user called it; for messages."""

    @property
    def home(self) -> str:
        """Home folder of the user that commands run as."""
        ...

    def run(
        self,
        argv: Sequence[str],
        *,
        input: bytes | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        on_line: Callable[[str, str], None] | None = None,
    ) -> Result:
        """Run ``argv`` (quoted once, never through a login shell's word splitting).

        Args:
            input: bytes for stdin; secrets travel here, never on argv.
            env: variables added for this command; values are not visible on the command line of the remote machine.
            timeout_s: own deadline in seconds; the process group is ended when it passes.
            on_line: called as ``on_line(stream, text)`` with ``stream`` in {"stdout", "stderr"} while the command runs.

        Raises:
            CommandTimeout: the deadline passed.
            ConnectionLost: the connection broke.
        """
        ...

    def pipe(
        self,
        argv: Sequence[str],
        feed: Iterable[bytes] = (),
        *,
        timeout_s: float = 3600.0,
    ) -> Iterator[bytes]:
        """Run ``argv``, write ``feed`` to its stdin, and give its stdout chunk by chunk: for data that does not fit in
        memory. Closing the iterator ends the command.

        Raises:
            CommandFailed: it ended with another exit code than 0; the evidence is its stderr.
            CommandTimeout, ConnectionLost: as :meth:`run`.
        """
        ...

    def read(self, path: str) -> bytes | None:
        """A file's bytes, or None when there is no such file.

        Raises:
            CommandFailed: it exists and cannot be read (a folder, no permission).
        """
        ...

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write atomically: a temporary file in the same folder (made when missing), fsync, rename. Owner and, for
        ``mode=-1``, mode of a
        file that was there are kept.

        Raises:
            CommandFailed: read-only, full or forbidden; the old bytes are still there.
        """
        ...

    def copy_tree(self, source: str, target: str, *, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Bring the local folder ``source`` to ``target`` on the host; ``target`` is switched by rename, never
        half-written.

        Args:
            on_progress: called as ``on_progress(bytes_done, bytes_total)``.
        """
        ...

    def upload(
        self,
        source: str,
        target: str,
        *,
        sha256: str,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Bring one local file of any size to ``target``, which appears whole, by rename, and only with that digest.
        What an earlier attempt brought (``target`` + ``.part``) is not sent again.

        Args:
            sha256: of the whole file, in hex.
            on_progress: called as ``on_progress(bytes_done, bytes_total)``.

        Raises:
            CommandFailed: what arrived has another digest (it is removed), or the host cannot take it.
            ConnectionLost: the connection broke; the next attempt goes on from there.
        """
        ...

    def forward(self, remote_port: int, remote_host: str = "127.0.0.1") -> AbstractContextManager[int]:
        """A local port, open while in the context, that leads to ``remote_host:remote_port`` as seen from the host."""
        ...

    def follow(self, path: str, *, offset: int = 0, poll_s: float = 0.25) -> Iterator[bytes]:
        """Chunks of a growing file from ``offset`` on, ``b""`` at least once per ``poll_s`` when nothing came, across
        rotation and truncation.
        Ends only when the caller stops iterating."""
        ...

    def close(self) -> None:
        """Close the connection; harmless when closed already."""
        ...
