"""Earlier starts of a deployment on its host, and what they teach: how long each phase is silent there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_deploy.diagnose.follow import STALL_LIMITS, Outcome
from dflash_deploy.diagnose.watch import Phase
from dflash_deploy.execute import Journal
from dflash_deploy.host.base import Host

REMEMBERED = 10
"""Starts that count."""


def record_start(host: Host, path: str, key: str, outcome: Outcome) -> None:
    """Append one start to the JSON-lines file ``path`` on the host.

    Args:
        key: what was started (stack, model, algorithm): starts of other things teach nothing about it.
    """
    Journal(host, path).add(
        "start",
        key=key,
        kind=outcome.kind,
        seconds=round(outcome.seconds, 2),
        phases={phase: round(s, 2) for phase, s in outcome.phases.items()},
        silences={phase: round(s, 2) for phase, s in outcome.silences.items()},
    )


def read_starts(host: Host, path: str, key: str = "") -> list[dict[str, Any]]:
    """The recorded starts, oldest first; lines that cannot be read are left out."""
    found = []
    for line in (host.read(path) or b"").splitlines():
        try:
            row = json.loads(line)
            if row["event"] == "start" and (not key or row["key"] == key):
                found.append({**row, "silences": dict(row["silences"]), "phases": dict(row["phases"])})
        except (ValueError, KeyError, TypeError):
            continue
    return found


def learned_limits(
    starts: Sequence[Mapping[str, Any]], base: Mapping[Phase, float] = STALL_LIMITS
) -> dict[Phase, float]:
    """Stall limits in seconds from the starts that became ready: ten times the longest silence of the phase, at least
    a third of the limit that holds without experience. No experience: that limit.
    """
    limits = dict(base)
    ready = [start for start in starts if start["kind"] == "ready"][-REMEMBERED:]
    for phase, limit in base.items():
        silences = [float(start["silences"][phase.value]) for start in ready if phase.value in start["silences"]]
        if silences:
            limits[phase] = max(10.0 * max(silences), limit / 3)
    return limits
