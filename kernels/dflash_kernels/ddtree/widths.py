"""How wide the next tree should be: the width with the most expected tokens per second (``--speculative-ddtree-budget auto``).

The nodes of a best-first tree are in order of their probability, so a tree of w nodes is the first w nodes of any wider
one. One verified tree therefore tells what every narrower one would have accepted: the path's nodes below w.
Times come from two sources: graph replays at start (what the GPU alone needs, a lower bound), and the intervals between
decode steps while serving (what the server really needs, launches and scheduling included).
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..accepted import Accepted

TRIALS = 12
"""Steps that a candidate is timed before its interval is believed, and for which a trial holds."""
CLOSE = 0.8
"""A candidate at this part of the best rate is timed again now and then; one below it, seldom."""
CLOSE_STEPS, FAR_STEPS = 400, 4000
PATIENCE = 8
"""How many times as long it waits at most: the wait doubles with every trial that does not make it the best."""
HOLD = 16
"""Steps for which a choice among timed candidates is kept, and for which several ranks keep the first one's: weighing them
costs the host more than it can change."""
MEMORY = 400
"""Verified trees over which a text's drafts are averaged."""
PRIOR_DRAFTS, PRIOR_GAIN = 20.0, 1.1
"""What a doubled width is believed to add, and how many drafts that belief is worth."""
PRIOR, WEIGHT = 24, 200
"""Steps that the common part of all widths' times is worth against a width's own, and the most that those are worth."""
APART = 1.3
"""Batch sizes that are told apart differ by this factor: every one has to be learned by itself."""
QUICK, SLOW = 0.05, 0.01
"""How fast the machine's drift and a width's own cost are followed."""


@dataclass
class _Cost:
    """Seconds of a step as if the machine were always as fast as when it was first timed."""

    seconds: float = 0.0
    seen: int = 0
    last_step: int = 0
    patience: int = 1
    trial: list[float] = field(default_factory=list)

    def add(self, seconds: float, step: int) -> None:
        """The median of the first steps, then an average in which a pause of the scheduler counts as twice a step."""
        self.seen += 1
        self.last_step = step
        if self.seen <= TRIALS:
            self.trial.append(seconds)
            self.seconds = statistics.median(self.trial)
        else:
            self.seconds += SLOW * (min(seconds, 2.0 * self.seconds) - self.seconds)


def told_apart(captured: Sequence[int]) -> list[int]:
    """Of ascending captured batch sizes, the largest and those below it by :data:`APART` each."""
    kept: list[int] = []
    for size in reversed(captured):
        if not kept or size * APART <= kept[-1]:
            kept.append(size)
    return kept[::-1]


@dataclass
class WidthPolicy:
    """Chooses among captured widths; pure bookkeeping, no device work.

    Steps are timed one after the other on a machine whose speed drifts more than widths differ. So what drifts is kept
    apart from what the widths cost: one factor for each batch size follows the machine, costs are taken relative to it,
    and since a wider tree is never cheaper, costs that say otherwise are noise and are averaged (isotonic regression).

    widths: ascending node counts, 1 (no draft) among them. sizes: ascending batch sizes that are told apart. floor:
    seconds that the GPU alone needs for a step of (width, size).
    """

    widths: Sequence[int]
    sizes: Sequence[int]
    floor: Mapping[tuple[int, int], float]
    _level: float = 1.0
    _told: int = 0
    _gain: dict[int, tuple[float, float]] = field(default_factory=dict)
    _costs: dict[tuple[int, int], _Cost] = field(default_factory=dict)
    _drift: dict[int, float] = field(default_factory=dict)
    _trial: dict[int, tuple[int, int]] = field(default_factory=dict)
    _held: dict[int, tuple[int, int]] = field(default_factory=dict)
    steps: int = 0

    def bucket(self, bs: int) -> int:
        """The size that a batch of ``bs`` counts as: the next larger one."""
        return self.sizes[min(bisect_left(self.sizes, bs), len(self.sizes) - 1)]

    def drafts(self, width: int) -> float:
        """Expected accepted drafts a step: the narrowest tree's, times what each next width was seen to add."""
        drafts = 0.0 if width == 1 else self._level
        for step, (low, high) in enumerate(pairwise(w for w in self.widths if w > 1)):
            if low < width and high <= width:
                narrow, wide = self._gain.get(step, (PRIOR_DRAFTS, PRIOR_GAIN * PRIOR_DRAFTS))
                drafts *= wide / narrow
        return drafts

    def seconds(self, size: int) -> dict[int, float]:
        """Seconds of a step of each width; for one that was never timed, about the least that it can take.

        That is what the GPU needs, and where it sets the pace, as much beyond that as timed trees take (half, undrafted).
        """
        drift = self._drift.get(size, 1.0)
        floor = {w: self.floor.get((w, size), 0.0) for w in self.widths}
        timed = [w for w in self.widths if w > 1 and self._timed(w, size)]
        seen = {w: min(self._costs[w, size].seen, WEIGHT) for w in timed}
        taken = {w: self._costs[w, size].seconds * drift for w in timed}
        whole, gpu = (sum(seen[w] * part[w] for w in timed) / max(1, sum(seen.values())) for part in (taken, floor))
        # Where the GPU sets the pace, widths differ little beyond what it needs, so that the others tell of each.
        paced = gpu >= whole / 2
        beyond, prior = (whole - gpu, PRIOR) if paced else (0.0, 0)
        told = [(prior * (floor[w] + beyond) + seen[w] * taken[w]) / (prior + seen[w]) for w in timed]
        pooled = dict(zip(timed, _isotonic(told, list(seen.values())), strict=True))
        if self._timed(1, size):
            pooled[1] = self._costs[1, size].seconds * drift
        out, least = {}, 0.0
        for width in self.widths:
            if width in pooled:
                out[width] = max(pooled[width], floor[width])
                least = out[width] if width > 1 else 0.0
            else:
                out[width] = max(floor[width] + max(0.0, beyond) * (1.0 if width > 1 else 0.5), least, 1e-6)
        return out

    def _timed(self, width: int, size: int) -> bool:
        cost = self._costs.get((width, size))
        return cost is not None and cost.seen >= TRIALS

    def rates(self, size: int) -> dict[int, float]:
        """Expected tokens a second of one request, by width."""
        return {w: (1.0 + self.drafts(w)) / seconds for w, seconds in self.seconds(size).items()}

    def choose(self, bs: int) -> int:
        """The width for a batch of ``bs`` requests.

        A candidate that was never timed is rated by the least that it can take: it is tried only where it could win, and
        then it is timed. So the choice settles after :data:`TRIALS` steps of each serious candidate.
        """
        size = self.bucket(bs)
        self.steps += 1
        width, left = self._trial.get(size, (0, 0))
        if left > 0:
            self._trial[size] = (width, left - 1)
            return width
        width, until = self._held.get(size, (0, 0))
        if self.steps < until:
            return width
        rates = self.rates(size)
        best = max(self.widths, key=lambda w: (rates[w], -w))
        chosen = best
        if self._timed(best, size):
            self._costs[best, size].patience = 1
            for other in self.widths:
                if other == best or not self._timed(other, size):
                    continue
                cost = self._costs[other, size]
                wait = CLOSE_STEPS if rates[other] > CLOSE * rates[best] else FAR_STEPS
                if self.steps - cost.last_step > wait * cost.patience:
                    cost.patience = min(2 * cost.patience, PATIENCE)
                    chosen = other
                    break
        if chosen != best or not self._timed(best, size):
            self._trial[size] = (chosen, TRIALS - 1)
        else:
            self._held[size] = (chosen, self.steps + HOLD)
        return chosen

    def took(self, width: int, bs: int, seconds: float) -> None:
        """A step of ``width`` was followed by the next after ``seconds``."""
        size = self.bucket(bs)
        drift = self._drift.setdefault(size, 1.0)
        cost = self._costs.setdefault((width, size), _Cost())
        if cost.seen >= TRIALS:
            self._drift[size] = drift + QUICK * (min(seconds / cost.seconds, 2.0 * drift) - drift)
        cost.add(seconds / drift, self.steps)

    def accepted(self, width: int, requests: int, drafts: Sequence[int]) -> None:
        """``requests`` trees of ``width`` nodes were verified; ``drafts[k]`` of their drafts lie below ``widths[k]``.

        Texts differ in how well they can be drafted, far more than the gain of a width does. So gains are taken within
        the same trees, and only the narrowest tree's drafts, which every draft tells, follow the text.
        """
        if requests <= 0 or width == 1:
            return
        inside = [(w, count) for w, count in zip(self.widths, drafts, strict=True) if 1 < w <= width]
        self._told = min(self._told + requests, MEMORY)
        self._level += min(1.0, requests / self._told) * (inside[0][1] / requests - self._level)
        for step, ((_, low), (_, high)) in enumerate(pairwise(inside)):
            narrow, wide = self._gain.get(step, (PRIOR_DRAFTS, PRIOR_GAIN * PRIOR_DRAFTS))
            fade = 0.5 if narrow > 10 * MEMORY else 1.0
            self._gain[step] = (fade * narrow + low, fade * wide + high)

    def summary(self) -> dict[str, object]:
        """What is known, for the log."""
        sizes = sorted({size for _, size in self._costs})
        return {
            "drafts": {w: round(self.drafts(w), 2) for w in self.widths},
            "ms": {s: {w: round(1e3 * t, 2) for w, t in self.seconds(s).items() if self._timed(w, s)} for s in sizes},
            "best": {s: max(self.widths, key=lambda w: self.rates(s)[w]) for s in sizes},
        }


def _isotonic(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    """The nearest non-decreasing sequence (pool adjacent violators)."""
    blocks: list[tuple[float, int, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            (a, m, i), (b, n, j) = blocks[-2:]
            blocks[-2:] = [((a * m + b * n) / (m + n), m + n, i + j)]
    return [mean for mean, _, length in blocks for _ in range(length)]


@triton.jit
def _count_below(
    index, slots, slot_stride, limits, counts, A: tl.constexpr, P: tl.constexpr, K: tl.constexpr, KP: tl.constexpr
):
    b = tl.program_id(0)
    j = tl.arange(0, P)
    node = tl.load(index + b * A + j, mask=j < A, other=-1)
    # Padding rows of a captured batch have the dummy slot 0; no request ever has.
    real = tl.load(slots + b * slot_stride) > 0
    k = tl.arange(0, KP)
    limit = tl.load(limits + k, mask=k < K, other=0)
    below = tl.sum(((node[:, None] > 0) & (node[:, None] < limit[None, :])).to(tl.int64), axis=0)
    one = real.to(tl.int64)
    tl.atomic_add(counts + k, below * one, mask=k < K)
    tl.atomic_add(counts + K, one)


def count_below(accepted: Accepted, slots: Tensor, limits: Tensor, counts: Tensor) -> None:
    """Add to ``counts`` how many accepted drafts lie below each limit, and how many requests there were.

    slots: int64 [bs, W]. limits: int32 [K]. counts: int64 [K + 1], the last for requests. No copy to the host.
    """
    bs, places = accepted.index.shape
    _count_below[(bs,)](
        accepted.index,
        slots,
        slots.stride(0),
        limits,
        counts,
        A=places,
        P=triton.next_power_of_2(places),
        K=limits.numel(),
        KP=triton.next_power_of_2(limits.numel()),
        num_warps=1,
    )


class AcceptanceMonitor:
    """Brings the counts of each width to the host now and then, without ever waiting for the device."""

    EVERY = 32

    def __init__(self, policy: WidthPolicy, device: torch.device | str) -> None:
        self._policy = policy
        self.limits = torch.tensor(list(policy.widths), dtype=torch.int32, device=device)
        self.counts = torch.zeros((len(policy.widths), len(policy.widths) + 1), dtype=torch.int64, device=device)
        self._host = torch.zeros(self.counts.shape, dtype=torch.int64, pin_memory=True)
        self._seen: list[list[int]] = self._host.tolist()
        self._event: torch.cuda.Event | None = None
        self._steps = 0

    def row(self, width: int) -> Tensor:
        """int64 [K + 1], the counters of trees of ``width`` nodes."""
        return self.counts[list(self._policy.widths).index(width)]

    def poll(self) -> None:
        """Called once a step: starts a copy, or reads one that has arrived."""
        self._steps += 1
        if self._event is None:
            if self._steps % self.EVERY == 0 or self._steps in (2, 4, 8, 16):
                with torch.inference_mode():  # the worker's buffers are made in it
                    self._host.copy_(self.counts, non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record()
            return
        if not self._event.query():
            return
        self._event = None
        now = self._host.tolist()
        for width, row, before in zip(self._policy.widths, now, self._seen, strict=True):
            new = [count - old for count, old in zip(row, before, strict=True)]
            self._policy.accepted(width, new[-1], new[:-1])
        self._seen = now
