"""What both real hosts share: collecting two streams at once, and serving a local port."""

from __future__ import annotations

import codecs
import contextlib
import posixpath
import queue
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from dflash_deploy.errors import CommandFailed

EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127
SILENCE_S = 2.0
"""A command that ended while a child of it still holds its output open is waited for this long, counted from its end or
the last output, whichever is later."""

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def check_command(argv: Sequence[str], env: Mapping[str, str] | None) -> tuple[str, ...]:
    """``argv`` as a tuple.

    Raises:
        ValueError: it is empty, a string, holds a NUL, or ``env`` has a name that no shell could export.
    """
    if isinstance(argv, str) or not argv:
        raise ValueError(f"argv is a non-empty list of words, not {argv!r}")
    for word in (*argv, *(env or {}).values()):
        if "\0" in word:
            raise ValueError("a command's words and variables cannot hold NUL")
    for name in env or ():
        if not _ENV_NAME.match(name):
            raise ValueError(f"not a variable name: {name!r}")
    return tuple(argv)


def wrong_digest(host: str, source: str, wanted: str, found: str) -> CommandFailed:
    """An upload that is not what was sent."""
    return CommandFailed(
        f"{host}: {posixpath.basename(source)} has a wrong hash",
        evidence=[f"wanted sha256 {wanted}", f"arrived with {found or 'none'}"],
        hint="the file here is damaged, or the disk there is; what arrived was removed",
    )


class Collector:
    """Gathers two streams, filled by one reader thread each, and cuts them into lines for ``on_line`` in the caller's
    thread."""

    def __init__(self, on_line: Callable[[str, str], None] | None) -> None:
        self.data: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._queue: queue.Queue[tuple[str, bytes]] = queue.Queue(maxsize=64)
        self._on_line = on_line
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in self.data}
        self._rest = dict.fromkeys(self.data, "")
        self._open = set(self.data)
        self._stopped = threading.Event()
        self.last = time.monotonic()

    def reader(self, stream: str, recv: Callable[[int], bytes]) -> threading.Thread:
        """Start the thread that reads ``stream`` until ``recv`` gives nothing more."""

        def pump() -> None:
            chunk = b"start"
            while chunk and not self._stopped.is_set():
                try:
                    chunk = recv(65536)
                except (OSError, ValueError):
                    chunk = b""
                while not self._stopped.is_set():
                    with contextlib.suppress(queue.Full):
                        self._queue.put((stream, chunk), timeout=0.5)
                        break

        thread = threading.Thread(target=pump, name=f"read-{stream}", daemon=True)
        thread.start()
        return thread

    def take(self, timeout_s: float) -> bool:
        """Take one chunk, waiting at most ``timeout_s``. False when none came."""
        try:
            stream, chunk = self._queue.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return False
        self.last = time.monotonic()
        if not chunk:
            self._open.discard(stream)
        self.data[stream] += chunk
        self.lines(stream, chunk)
        return True

    def lines(self, stream: str, chunk: bytes) -> None:
        """Pass the complete lines on; an empty chunk flushes the rest."""
        if self._on_line is None:
            return
        text = self._rest[stream] + self._decoders[stream].decode(chunk, final=not chunk)
        *whole, self._rest[stream] = text.split("\n")
        for line in whole:
            self._on_line(stream, line.rstrip("\r"))
        if not chunk and self._rest[stream]:
            self._on_line(stream, self._rest[stream])
            self._rest[stream] = ""

    @property
    def ended(self) -> bool:
        """Both streams came to their end."""
        return not self._open

    @property
    def open(self) -> frozenset[str]:
        """Streams whose end has not come."""
        return frozenset(self._open)

    def stop(self) -> None:
        """Let the reader threads go."""
        self._stopped.set()


class Stream(Protocol):
    """A socket, or a paramiko channel, as far as the forwarder needs it."""

    def recv(self, size: int, /) -> bytes: ...
    def sendall(self, data: bytes, /) -> None: ...
    def close(self) -> None: ...


def _pump(source: Stream, sink: Stream, half_close: Callable[[], object]) -> None:
    with contextlib.suppress(OSError, EOFError):
        while chunk := source.recv(65536):
            sink.sendall(chunk)
    with contextlib.suppress(OSError, EOFError):
        half_close()


@contextlib.contextmanager
def serve_port(open_stream: Callable[[], tuple[Stream, Callable[[], object]]]) -> Iterator[int]:
    """A listening port on 127.0.0.1; each connection is joined to what ``open_stream`` gives (a stream and its
    write-side shutdown).
    A connection whose far side cannot be opened is closed."""
    listener = socket.create_server(("127.0.0.1", 0))
    wake, waker = socket.socketpair()
    live: set[Stream] = set()

    def serve(client: socket.socket) -> None:
        try:
            far, far_shutdown = open_stream()
        except Exception:  # whatever the transport says, the client sees a closed connection, as with ssh -L
            client.close()
            return
        live.update((client, far))
        back = threading.Thread(target=_pump, args=(far, client, lambda: client.shutdown(socket.SHUT_WR)), daemon=True)
        back.start()
        _pump(client, far, far_shutdown)
        back.join()
        for stream in (client, far):
            stream.close()
            live.discard(stream)

    def accept() -> None:
        while True:
            ready, _, _ = select.select([listener, wake], [], [])
            if wake in ready:
                return
            with contextlib.suppress(OSError):
                client, _ = listener.accept()
                threading.Thread(target=serve, args=(client,), daemon=True).start()

    thread = threading.Thread(target=accept, name="forward", daemon=True)
    thread.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        waker.send(b"x")
        thread.join()
        for stream in list(live):
            with contextlib.suppress(OSError, EOFError):
                if isinstance(stream, socket.socket):
                    stream.shutdown(socket.SHUT_RDWR)
                stream.close()
        for sock in (listener, wake, waker):
            sock.close()
