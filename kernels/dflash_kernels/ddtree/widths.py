"""How wide the next tree should be: the width with the most expected tokens per second (``--speculative-ddtree-budget auto``).

The nodes of a best-first tree are in order of their probability, so a tree of w nodes is the first w nodes of any wider
one. One verified tree therefore tells what every narrower one would have accepted: the path's nodes below w.
Times come from two sources: graph replays at start (what the GPU alone needs, a lower bound), and the intervals between
decode steps while serving (what the server really needs, launches and scheduling included).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..accepted import Accepted

TRIALS = 12
"""Steps that a candidate is timed before its own interval is believed."""
FRESH_STEPS = 4000
"""Steps after which a candidate that was given up may be tried again: loads change."""
SMOOTH = 0.1


@dataclass
class _Interval:
    """Seconds between steps, smoothed; outliers are cut, so that a pause of the scheduler does not count."""

    seconds: float = 0.0
    seen: int = 0
    last_step: int = 0

    def add(self, seconds: float, step: int) -> None:
        if self.seen >= TRIALS:
            seconds = min(seconds, 3.0 * self.seconds)
        weight = max(SMOOTH, 1.0 / (self.seen + 1))
        self.seconds += weight * (seconds - self.seconds)
        self.seen += 1
        self.last_step = step


@dataclass
class WidthPolicy:
    """Chooses among captured widths; pure bookkeeping, no device work.

    widths: ascending node counts, 1 (no draft) among them. sizes: ascending captured batch sizes. floor: seconds that the
    GPU alone needs for a step of (width, size).
    """

    widths: Sequence[int]
    sizes: Sequence[int]
    floor: Mapping[tuple[int, int], float]
    _drafts: dict[int, float] = field(default_factory=dict)
    _intervals: dict[tuple[int, int], _Interval] = field(default_factory=dict)
    _steps: int = 0

    def bucket(self, bs: int) -> int:
        """The captured size that a batch of ``bs`` is padded to."""
        return self.sizes[min(bisect_left(self.sizes, bs), len(self.sizes) - 1)]

    def drafts(self, width: int) -> float:
        """Expected accepted drafts a step. Before anything is known: those of a drafter that is right half the time."""
        if width in self._drafts:
            return self._drafts[width]
        known = [w for w in self._drafts if w < width]
        if known and max(known) > 1:
            return self._drafts[max(known)] * 1.1
        return 0.0 if width == 1 else min(2.0, 0.5 * width.bit_length())

    def rate(self, width: int, size: int) -> float:
        """Expected tokens a second of one request."""
        measured = self._intervals.get((width, size))
        floor = self.floor.get((width, size), 0.0)
        seconds = floor if measured is None or measured.seen < TRIALS else max(measured.seconds, floor)
        return (1.0 + self.drafts(width)) / max(seconds, 1e-6)

    def choose(self, bs: int) -> int:
        """The width for a batch of ``bs`` requests.

        A candidate that was never timed is rated by its lower bound: it is tried only where it could win, and then it is
        timed. So the choice settles on the best after at most :data:`TRIALS` steps of each serious candidate.
        """
        size = self.bucket(bs)
        self._steps += 1
        for width in self.widths:
            found = self._intervals.get((width, size))
            if found is not None and self._steps - found.last_step > FRESH_STEPS:
                del self._intervals[width, size]
        return max(self.widths, key=lambda width: (self.rate(width, size), -width))

    def took(self, width: int, bs: int, seconds: float) -> None:
        """A step of ``width`` was followed by the next after ``seconds``."""
        self._intervals.setdefault((width, self.bucket(bs)), _Interval()).add(seconds, self._steps)

    def accepted(self, width: int, requests: int, drafts: Sequence[int]) -> None:
        """``requests`` trees of ``width`` nodes were verified; ``drafts[k]`` of their drafts lie below ``widths[k]``."""
        if requests <= 0:
            return
        for narrower, count in zip(self.widths, drafts, strict=True):
            if narrower > width:
                continue
            # Many requests weigh more than few, but the past never less than half.
            weight = min(0.5, requests / (requests + 200.0))
            before = self._drafts.get(narrower)
            mean = count / requests
            self._drafts[narrower] = mean if before is None else before + weight * (mean - before)

    @property
    def steps(self) -> int:
        """Choices made so far."""
        return self._steps

    def summary(self) -> dict[str, object]:
        """What is known, for the log and for whoever asks the server."""
        return {
            "drafts": {str(w): round(self._drafts[w], 3) for w in self.widths if w in self._drafts},
            "step_ms": {
                f"{w}x{s}": round(1e3 * i.seconds, 3)
                for (w, s), i in sorted(self._intervals.items())
                if i.seen >= TRIALS
            },
            "best": {
                str(s): max(self.widths, key=lambda w: self.rate(w, s)) for s in sorted({s for _, s in self._intervals})
            },
        }


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
