"""The width policy on simulated servers, and its counters against a plain count."""

from __future__ import annotations

import math
import random

import pytest

torch = pytest.importorskip("torch")
from dflash_kernels.accepted import Accepted  # noqa: E402
from dflash_kernels.ddtree.widths import WidthPolicy, count_below, told_apart  # noqa: E402

WIDTHS = (1, 8, 16, 32, 64)
DRAFTS = {1: 0.0, 8: 1.69, 16: 1.93, 32: 2.11, 64: 2.34}


def serve(policy: WidthPolicy, seconds: dict[int, float], bs: int, steps: int, seed: int = 0) -> list[int]:
    """A server whose steps of a width take so long, on a machine whose speed drifts by half, in noise; its choices."""
    noise = random.Random(seed)
    chosen = []
    for at in range(steps):
        width = policy.choose(bs)
        chosen.append(width)
        drift = 1.25 + 0.25 * math.sin(at / 60)
        policy.took(width, bs, seconds[width] * drift * noise.uniform(0.9, 1.2) * (10 if at % 97 == 0 else 1))
        text = bs * noise.uniform(0.7, 1.3)  # one text is easier to draft than another, for every width
        policy.accepted(width, bs, [round(text * DRAFTS[w] + noise.uniform(-0.5, 0.5)) for w in WIDTHS])
    return chosen


def best(seconds: dict[int, float]) -> int:
    return max(WIDTHS, key=lambda w: (1 + DRAFTS[w]) / seconds[w])


@pytest.mark.parametrize("bs", [1, 8, 32])
@pytest.mark.parametrize(
    "seconds",
    [
        {1: 1.5, 8: 3.0, 16: 3.0, 32: 3.1, 64: 3.2},  # bound by launches: wide trees are free
        {1: 1.0, 8: 1.8, 16: 2.2, 32: 3.9, 64: 7.5},  # bound by compute
        {1: 1.0, 8: 4.0, 16: 5.0, 32: 9.0, 64: 17.0},  # a draft never pays
        {1: 2.0, 8: 2.2, 16: 2.4, 32: 4.4, 64: 8.0},
    ],
)
def test_settles_on_the_best_width(seconds: dict[int, float], bs: int) -> None:
    """The floors are what the GPU alone needs: a quarter of the step here, as where the host sets the pace."""
    seconds = {w: t * 1e-3 for w, t in seconds.items()}
    policy = WidthPolicy(WIDTHS, (1, 8, 32), {(w, s): t * 0.25 for w, t in seconds.items() for s in (1, 8, 32)})
    chosen = serve(policy, seconds, bs, 1500)
    rates = {w: (1 + DRAFTS[w]) / seconds[w] for w in WIDTHS}
    late = chosen[200:]
    got = sum(1 + DRAFTS[w] for w in late) / sum(seconds[w] for w in late)
    assert got >= 0.97 * max(rates.values()), (chosen[-10:], rates)


def test_hopeless_widths_are_never_tried() -> None:
    """A width whose lower bound already loses is not tried once the best is known."""
    seconds = {1: 1e-3, 8: 2e-3, 16: 2e-3, 32: 20e-3, 64: 40e-3}
    policy = WidthPolicy(WIDTHS, (32,), {(w, 32): t for w, t in seconds.items()})
    assert not {32, 64} & set(serve(policy, seconds, 32, 300))


def test_a_short_load_pays_little_for_trials() -> None:
    """Step times as served at 32 requests (README), in waves that thin out; all steps count, trials included."""
    ms = {1: 2.87, 8: 5.3, 16: 5.64, 32: 6.62, 64: 7.28}
    captured = [*range(1, 9), *range(10, 33, 2)]
    policy = WidthPolicy(WIDTHS, told_apart(captured), {(w, s): 0.8e-3 * t for w, t in ms.items() for s in captured})
    seconds = {w: t * 1e-3 for w, t in ms.items()}
    chosen: list[int] = []
    for wave in range(4):
        for bs, steps in ((32, 380), (29, 40), (22, 30), (11, 20), (3, 20)):
            chosen += serve(policy, seconds, bs, steps, seed=wave)
    got = sum(1 + DRAFTS[w] for w in chosen) / sum(seconds[w] for w in chosen)
    assert got >= 0.98 * max((1 + DRAFTS[w]) / seconds[w] for w in WIDTHS)


def test_sizes_told_apart() -> None:
    assert told_apart([*range(1, 9), *range(10, 33, 2)]) == [1, 2, 3, 4, 6, 8, 12, 18, 24, 32]
    assert told_apart([5]) == [5]


def test_follows_a_change_of_load() -> None:
    """Each batch size has its own best; coming back to one needs no new trials."""
    small, large = {1: 1.5, 8: 3.0, 16: 3.0, 32: 3.1, 64: 3.2}, {1: 1.0, 8: 4.0, 16: 5.0, 32: 9.0, 64: 17.0}
    policy = WidthPolicy(WIDTHS, (1, 32), {(w, s): 1e-4 for w in WIDTHS for s in (1, 32)})
    for _ in range(2):
        assert serve(policy, {w: t * 1e-3 for w, t in small.items()}, 1, 200)[-1] == best(small)
        assert serve(policy, {w: t * 1e-3 for w, t in large.items()}, 32, 200)[-1] == best(large)
    assert serve(policy, {w: t * 1e-3 for w, t in large.items()}, 32, 5) == [best(large)] * 5


def test_counts_below_each_limit_without_padding_rows() -> None:
    limits = torch.tensor([1, 8, 16], dtype=torch.int32)
    index = torch.tensor([[0, 3, 9, 15, -1], [0, 7, 8, -1, -1], [0, 1, 2, 3, 4]], dtype=torch.int32)
    accepted = Accepted(index, torch.zeros(3, dtype=torch.int32), torch.zeros_like(index))
    slots = torch.tensor([[5, 6], [9, 10], [0, 0]])  # the third request is padding: the dummy slot
    counts = torch.zeros(4, dtype=torch.int64)
    for times in (1, 2):
        count_below(accepted, slots, limits, counts)
        assert counts.tolist() == [0, 2 * times, 5 * times, 2 * times]
