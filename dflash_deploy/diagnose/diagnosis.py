"""From a log or report to its cause: primary cause, evidence, where to act, the next command."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_deploy.diagnose.signatures import KINDS, by_id
from dflash_deploy.diagnose.watch import FirstError, Match, Phase, Watcher, WatchState

THOROUGH_BYTES = 2_000_000
"""Inputs up to this size are matched line by line; longer ones only where a line looks suspicious."""


@dataclass(frozen=True)
class Cause:
    """One recognised cause with the line that shows it."""

    id: str
    kind: str
    title: str
    cause: str
    where: str
    next: str
    rule: str
    evidence: str
    line: int
    rank: str
    ref: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {k: (list(v) if isinstance(v, tuple) else v) for k, v in self.__dict__.items()}


@dataclass(frozen=True)
class Diagnosis:
    """What a log says. ``primary`` is None when nothing is known: then ``first_errors`` and ``context`` are all there
    is.
    """

    primary: Cause | None
    others: tuple[Cause, ...]
    first_errors: tuple[FirstError, ...]
    phase: Phase
    fatal: str
    lines: int
    starts: int
    context: tuple[str, ...]
    earlier: tuple[Cause | None, ...] = ()
    """Primary causes of failed starts before the present one, oldest first; None where it is not known."""

    @property
    def failed(self) -> bool:
        """The log shows a failure, known or not."""
        return bool(self.primary or self.first_errors or self.fatal)

    def as_dict(self) -> dict[str, Any]:
        """JSON data. Keys are stable: primary, others, first_errors, phase, fatal, lines, starts, context, failed,
        earlier."""
        return {
            "failed": self.failed,
            "primary": self.primary.as_dict() if self.primary else None,
            "others": [c.as_dict() for c in self.others],
            "first_errors": [
                {"rank": e.rank, "exception": e.exception, "line": e.line, "traceback": list(e.lines)}
                for e in self.first_errors
            ],
            "phase": self.phase.value,
            "fatal": self.fatal,
            "lines": self.lines,
            "starts": self.starts,
            "context": list(self.context),
            "earlier": [c.as_dict() if c else None for c in self.earlier],
        }


def _cause(match: Match) -> Cause:
    s = match.signature
    return Cause(s.id, s.kind, s.title, s.cause, s.where, s.next, s.rule, match.text, match.line, match.rank, s.ref)


def _ranked(state: WatchState) -> list[Cause]:
    causes = sorted((_cause(m) for m in state.matches.values()), key=lambda c: (KINDS.index(c.kind), c.line))
    crash = by_id("ready-then-crash")
    if state.phase is Phase.READY and state.fatal and crash.id not in state.matches:
        # No line says it: that the ready line came before the end does. Any reason that is known tells more.
        at = next((i for i, c in enumerate(causes) if KINDS.index(c.kind) > KINDS.index(crash.kind)), len(causes))
        causes.insert(at, _cause(Match(crash, state.fatal, state.fatal_line, "")))
    return causes


def diagnose_watcher(watcher: Watcher) -> Diagnosis:
    """Judge what a watcher has seen: causes before symptoms before consequences, then the earlier line."""
    watcher.close()
    state = watcher.state
    causes = _ranked(state)
    # An exception that nobody knows tells more than the line that it brought about.
    known = causes and not (causes[0].kind == "consequence" and state.first_errors)
    return Diagnosis(
        primary=causes[0] if known else None,
        others=tuple(causes[1:] if known else causes),
        first_errors=tuple(sorted(state.first_errors.values(), key=lambda e: e.line)),
        phase=state.phase,
        fatal=state.fatal,
        lines=state.lines,
        starts=state.starts,
        context=tuple(watcher.recent),
        earlier=tuple(next(iter(_ranked(old)), None) for old in state.earlier),
    )


def diagnose(chunks: Iterable[bytes] | bytes, *, thorough: bool | None = None, notes: Sequence[str] = ()) -> Diagnosis:
    """Diagnose a log or a report.

    Args:
        notes: what was seen beside the log (:func:`dflash_deploy.launch.faults`); their line number is 0.
        chunks: the bytes, whole or in pieces of any size.
        thorough: match every line. None: do so for bytes up to ``THOROUGH_BYTES``.
    """
    if isinstance(chunks, bytes):
        deep = len(chunks) <= THOROUGH_BYTES if thorough is None else thorough
        whole = chunks
        chunks = (whole[i : i + 1_000_000] for i in range(0, len(whole), 1_000_000))
    else:
        deep = bool(thorough)
    watcher = Watcher(thorough=deep)
    for chunk in chunks:
        watcher.feed(chunk)
    for note in notes:
        watcher.note(note)
    return diagnose_watcher(watcher)
