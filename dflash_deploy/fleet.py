"""The same work on several hosts at once: how many at a time, and what came of each.

One failing host never hides the others: its error is its outcome. The caller's thread alone reports, so that lines of
several hosts do not mix.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dflash_deploy.errors import DflashError

T = TypeVar("T")

PARALLEL = 16
"""Hosts at a time unless told otherwise."""


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What came of one host: a value or an error."""

    name: str
    seconds: float
    value: T | None = None
    error: DflashError | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def exit_code(self) -> int:
        """0, or that of the error."""
        return self.error.exit_code if self.error is not None else 0


def across(
    names: Sequence[str],
    work: Callable[[str], T],
    *,
    parallel: int = PARALLEL,
    on_done: Callable[[Outcome[T]], None] | None = None,
) -> list[Outcome[T]]:
    """Call ``work(name)`` for every name, at most ``parallel`` at a time.

    Args:
        on_done: called in this thread with each outcome as it comes; what it raises ends the run.

    Returns:
        One outcome a name, in the order of ``names``.

    Raises:
        Exception: ``work`` raised what is no :class:`DflashError`, a fault of ours; work that runs is not waited for,
            as after an interrupt.
    """
    todo: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    for item in enumerate(names):
        todo.put(item)
    done: queue.SimpleQueue[tuple[int, Outcome[T] | BaseException]] = queue.SimpleQueue()
    stopped = threading.Event()

    def worker() -> None:
        while not stopped.is_set():
            try:
                index, name = todo.get_nowait()
            except queue.Empty:
                return
            began = time.monotonic()
            try:
                value = work(name)
            except DflashError as error:
                done.put((index, Outcome(name, time.monotonic() - began, error=error)))
            except BaseException as error:
                done.put((index, error))
                return
            else:
                done.put((index, Outcome(name, time.monotonic() - began, value)))

    for _ in range(max(1, min(parallel, len(names)))):
        # Daemons: an interrupt must not wait for a host that hangs.
        threading.Thread(target=worker, daemon=True).start()
    found: dict[int, Outcome[T]] = {}
    try:
        for _ in names:
            index, outcome = done.get()
            if isinstance(outcome, BaseException):
                raise outcome
            found[index] = outcome
            if on_done is not None:
                on_done(outcome)
    finally:
        stopped.set()
    return [found[index] for index in range(len(names))]


def worst(codes: Iterable[int]) -> int:
    """The exit code of a run over several hosts: the highest of theirs, 0 when all went well."""
    return max(codes, default=0)
