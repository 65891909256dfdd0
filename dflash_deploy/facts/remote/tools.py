"""Run small programs of the host with a deadline, and read small files. Nothing here raises for what the host does."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

MAX_OUTPUT = 1 << 20
"""Bytes kept of a program's output; one that prints more is ended."""


def run_tool(argv: Sequence[str], timeout_s: float = 5.0) -> dict[str, Any]:
    """Run ``argv`` and give ``{status, exit, out, err}``; ``status`` in {ok, failed, absent, timeout}. Never waits past
    the deadline, even for a program that cannot be killed."""
    environment = dict(os.environ, LC_ALL="C", LANG="C")
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return {"status": "absent", "exit": None, "out": "", "err": str(error)}
    assert process.stdout is not None and process.stderr is not None
    chunks: dict[str, list[bytes]] = {"out": [], "err": []}
    total = 0
    deadline = time.monotonic() + timeout_s
    timed_out = False
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, "out")
        selector.register(process.stderr, selectors.EVENT_READ, "err")
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0 or total > MAX_OUTPUT:
                timed_out = True
                break
            for key, _ in selector.select(left):
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                    continue
                chunks[key.data].append(data)
                total += len(data)
    if not timed_out:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            timed_out = True
    if timed_out:
        try:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(0.2)
        except (OSError, subprocess.TimeoutExpired):
            pass  # in uninterruptible sleep: left to the kernel
    process.stdout.close()
    process.stderr.close()
    status = "timeout" if timed_out else ("ok" if process.returncode == 0 else "failed")
    return {
        "status": status,
        "exit": process.returncode,
        "out": b"".join(chunks["out"]).decode("utf-8", "replace"),
        "err": b"".join(chunks["err"]).decode("utf-8", "replace")[:4000],
    }


def read_bytes(path: str, limit: int = 65536) -> bytes | None:
    """The first ``limit`` bytes of a file; None when it cannot be read. A FIFO or device of that name does not hold the
    probe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    parts = []
    left = limit
    try:
        while left > 0:
            data = os.read(descriptor, left)
            if not data:
                break
            parts.append(data)
            left -= len(data)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return b"".join(parts)


def read_text(path: str, limit: int = 65536) -> str | None:
    """The first ``limit`` bytes of a file as text, undecodable bytes replaced; None when it cannot be read."""
    data = read_bytes(path, limit)
    return None if data is None else data.decode("utf-8", "replace")


def read_line(path: str) -> str | None:
    """The first line of a file, stripped; None when it cannot be read."""
    text = read_text(path, 4096)
    return None if text is None else text.strip().split("\n")[0].strip()


def list_dir(path: str, limit: int = 20000) -> list[str]:
    """Sorted names in a folder; empty when it cannot be read."""
    names = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                names.append(entry.name)
                if len(names) >= limit:
                    break
    except (OSError, ValueError):
        return []
    return sorted(names)


def which(name: str, path: str | None = None) -> str | None:
    """Path of an executable on PATH (or on the given PATH-like string)."""
    for folder in (os.environ.get("PATH", "") if path is None else path).split(os.pathsep):
        if folder:
            candidate = os.path.join(folder, name)
            if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
                return candidate
    return None


def mib(count: int) -> int:
    """Bytes as whole MiB."""
    return int(count // (1024 * 1024))
