"""Acceptance of drafted tokens, from the ``meta_info`` of requests.

SGLang 0.5.16 gives per request ``spec_verify_ct`` (verify steps), ``spec_num_correct_drafts`` and
``spec_correct_drafts_histogram`` (entry k:
steps in which k drafted tokens were accepted; older name: ``spec_accept_histogram``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Acceptance:
    """Summed over requests."""

    steps: int
    accepted: int
    """Drafted tokens that were accepted, bonus tokens not counted."""
    histogram: tuple[int, ...]
    """Entry k: steps that accepted k drafted tokens."""

    @property
    def length(self) -> float:
        """Tokens per verify step, bonus token included; 1.0 means that nothing was accepted. 0.0 without a step."""
        return 1.0 + self.accepted / self.steps if self.steps else 0.0

    @property
    def by_position(self) -> tuple[float, ...]:
        """Share of steps in which the draft was accepted up to position 1, 2, …"""
        total = sum(self.histogram)
        return tuple(sum(self.histogram[k:]) / total for k in range(1, len(self.histogram))) if total else ()


def gather_acceptance(metas: Iterable[Mapping[str, Any]]) -> Acceptance:
    """Sum of all requests' ``meta_info``; requests without speculation count nothing."""
    steps = accepted = 0
    histogram: list[int] = []
    for meta in metas:
        steps += int(meta.get("spec_verify_ct") or 0)
        accepted += int(meta.get("spec_num_correct_drafts") or meta.get("spec_accepted_drafts") or 0)
        row = meta.get("spec_correct_drafts_histogram") or meta.get("spec_accept_histogram") or ()
        histogram += [0] * (len(row) - len(histogram))
        for k, count in enumerate(row):
            histogram[k] += int(count)
    return Acceptance(steps, accepted, tuple(histogram))
