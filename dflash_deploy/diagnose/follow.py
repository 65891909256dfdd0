"""Waits for a start by watching its log: ends when it is ready, at the first fatal line, when the process is gone, or
when a phase stalls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dflash_deploy.diagnose.watch import Event, Phase, Watcher
from dflash_deploy.host.base import Host

STALL_LIMITS: Mapping[Phase, float] = {
    Phase.SPAWN: 300.0,
    Phase.DIST_INIT: 180.0,
    Phase.WEIGHTS: 1800.0,
    Phase.KV_CACHE: 600.0,
    Phase.DRAFT_INIT: 900.0,
    Phase.GRAPHS: 1800.0,
    Phase.WARM_UP: 900.0,
    Phase.READY: 120.0,
}
"""Seconds without any new line before a phase counts as stalled. Post-load processing and JIT compilation are silent
for long, the
distributed init is not."""

_DRAIN_S = 1.5
"""Time given after a fatal line or the end of the process, for the rest of the reason to reach the log."""


@dataclass(frozen=True)
class Outcome:
    """How a start ended. ``kind``: ready, fatal, exited or stalled."""

    kind: str
    phase: Phase
    detail: str
    seconds: float
    phases: Mapping[str, float]
    """Seconds spent in each phase."""
    silences: Mapping[str, float]
    """The longest time without a new line in each phase: what later starts on that host are measured by."""
    watcher: Watcher

    @property
    def ok(self) -> bool:
        return self.kind == "ready"


def follow_until_ready(
    host: Host,
    log_path: str,
    *,
    is_alive: Callable[[], bool],
    ready: Callable[[], bool],
    on_event: Callable[[Event], None] | None = None,
    look: Callable[[], Sequence[str]] | None = None,
    limits: Mapping[Phase, float] = STALL_LIMITS,
    offset: int = 0,
    poll_s: float = 0.25,
    probe_s: float = 1.0,
    look_s: float = 5.0,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Follow the log from ``offset`` on until the start has succeeded or failed.

    Args:
        is_alive: whether the service's main process is there; asked about once per ``probe_s``, believed at the second
            "no" in a row.
        ready: whether the service answers (``health.is_ready``); asked about once per ``probe_s``.
        look: what the host itself shows to be wrong (a full disk, a stopped process, a kernel message), asked once per
            ``look_s``; believed when the same line comes twice in a row.
        limits: seconds without a new line per phase. There is no limit on the whole: a slow start that moves on is
            left alone.

    Raises:
        ConnectionLost: the host went away.
    """
    watcher, tell = Watcher(), on_event or (lambda event: None)
    began = now = last_new = last_probe = clock()
    phase, phase_began, activity = Phase.SPAWN, began, 0
    phases: dict[str, float] = {}
    silences: dict[str, float] = {}
    fatal_at: float | None = None
    gone, last_look = 0, began
    suspects: set[str] = set()

    def outcome(kind: str, detail: str) -> Outcome:
        phases[phase.value] = phases.get(phase.value, 0.0) + now - phase_began
        silences[phase.value] = max(silences.get(phase.value, 0.0), now - last_new)
        return Outcome(kind, watcher.state.phase, detail, now - began, dict(phases), dict(silences), watcher)

    for chunk in host.follow(log_path, offset=offset, poll_s=poll_s):
        now = clock()
        for event in watcher.feed(chunk) if chunk else ():
            tell(event)
        state = watcher.state
        if state.activity != activity:
            silences[phase.value] = max(silences.get(phase.value, 0.0), now - last_new)
            activity, last_new = state.activity, now
        if state.phase is not phase:
            phases[phase.value] = phases.get(phase.value, 0.0) + now - phase_began
            phase, phase_began = state.phase, now
        if state.fatal and fatal_at is None:
            fatal_at = now
        if fatal_at is not None and (now - fatal_at > _DRAIN_S or (not chunk and now - fatal_at > poll_s)):
            for event in watcher.close():
                tell(event)
            first = next(iter(state.first_errors.values()), None)
            # The runner's last word is only that it ended.
            return outcome("fatal", first.exception if first and state.fatal.startswith("[serve ") else state.fatal)
        if now - last_probe >= probe_s:
            last_probe = now
            if is_alive():
                gone = 0
                if fatal_at is None and ready():
                    return outcome("ready", "the service answers")
            else:
                gone += 1
                if gone >= 2 and not chunk:
                    for event in watcher.close():
                        tell(event)
                    first = next(iter(state.first_errors.values()), None)
                    why = first.exception if first else (watcher.recent[-1] if watcher.recent else "no line in the log")
                    return outcome("exited", f"the process ended in phase {phase.value}: {why}")
            now = clock()
        if look is not None and fatal_at is None and now - last_look >= look_s:
            last_look = now
            seen = list(look())
            wrong = [line for line in seen if line in suspects]
            suspects = set(seen)
            now = clock()
            if wrong:
                for line in wrong:
                    for event in watcher.note(line):
                        tell(event)
                return outcome("fatal", wrong[0])
        limit = limits.get(phase, STALL_LIMITS[phase])
        if fatal_at is None and now - last_new > limit:
            why = f"stalled in phase {phase.value}: no new line for {now - last_new:.0f} s (limit {limit:.0f} s)"
            for line in (why, *(look() if look is not None else ())):
                for event in watcher.note(line):
                    tell(event)
            return outcome("stalled", why)
    return outcome("exited", "the log could not be followed any longer")
