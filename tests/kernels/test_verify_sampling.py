"""Sampling walk: the output's distribution against the target's own; a biased rule is the control that must fail."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest
import torch
from dflash_kernels.build_tree import build_tree
from dflash_kernels.tree import Tree
from dflash_kernels.verify_greedy import verify_greedy
from dflash_kernels.verify_sampling import coins_from_seeds, verify_sampling, verify_sampling_rows

VOCAB, DEPTHS, NODES, SAMPLES = 8, 3, 14, 40_000
PREFIXES = [path for n in range(DEPTHS) for path in itertools.product(range(VOCAB), repeat=n)]
FILTERS = {"none": (0, 1.0, 0.0), "top-k": (3, 1.0, 0.0), "top-p": (0, 0.85, 0.0), "all": (5, 0.9, 0.08)}


def target_table(seed: int = 3) -> dict[tuple[int, ...], list[float]]:
    """Target logits after each prefix; a longer prefix ends the round."""
    chooser = random.Random(seed)
    return {path: [chooser.gauss(0, 0.6) for _ in range(VOCAB)] for path in PREFIXES}


def expected_row(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """SGLang's filter on a sorted softmax, written from its definition."""
    probs = [math.exp(x / temperature) for x in logits]
    probs = [p / sum(probs) for p in probs]
    order = sorted(range(VOCAB), key=lambda i: -probs[i])
    kept: dict[int, float] = {}
    for rank, token in enumerate(order):
        inside = (not top_k or rank < top_k) and sum(probs[t] for t in order[:rank]) <= top_p
        if inside and probs[token] >= min_p * max(probs):
            kept[token] = probs[token]
    return [kept.get(token, 0.0) / sum(kept.values()) for token in range(VOCAB)]


def draft_tree() -> tuple[Tree, list[tuple[int, ...]]]:
    """A tree from marginals unlike the target's, and the path of each node."""
    generator = torch.Generator().manual_seed(5)
    best = torch.log_softmax(torch.randn(1, DEPTHS, VOCAB, generator=generator) * 1.5, -1).sort(-1, descending=True)
    tree = build_tree(best.values, best.indices.int(), torch.zeros(1, dtype=torch.int32), NODES, backend="naive")
    found: list[tuple[int, ...]] = [()]
    for node in range(1, NODES):
        found.append((*found[int(tree.parent[0, node])], int(tree.token_ids[0, node])))
    return tree, found


def repeated(tree: Tree, times: int) -> Tree:
    return Tree(**{name: value.expand(times, *value.shape[1:]) for name, value in vars(tree).items()})


def node_logits(table, found) -> torch.Tensor:
    return torch.tensor([table.get(path, [0.0] * VOCAB) for path in found])


def completed(outputs: list[tuple[int, ...]], rows: dict[tuple[int, ...], list[float]]) -> Counter[tuple[int, ...]]:
    """Each round's tokens, continued by plain sampling or cut to DEPTHS tokens."""
    chooser, counts = random.Random(11), Counter()
    for output in outputs:
        while len(output) < DEPTHS:
            output = (*output, chooser.choices(range(VOCAB), rows[output])[0])
        counts[output[:DEPTHS]] += 1
    return counts


def excess(counts: Counter[tuple[int, ...]], rows: dict[tuple[int, ...], list[float]]) -> float:
    """Pearson's chi-square as a standard normal (Wilson and Hilferty); cells that expect under 5 are pooled."""
    total, statistic, cells, rest = sum(counts.values()), 0.0, 0, [0.0, 0.0]
    for path in itertools.product(range(VOCAB), repeat=DEPTHS):
        expected = total * math.prod(rows[path[:d]][path[d]] for d in range(DEPTHS))
        if expected == 0 and counts[path]:
            return math.inf
        if expected < 5:
            rest = [rest[0] + expected, rest[1] + counts[path]]
            continue
        statistic += (counts[path] - expected) ** 2 / expected
        cells += 1
    if rest[0] >= 5:
        statistic += (rest[1] - rest[0]) ** 2 / rest[0]
        cells += 1
    scale = 2 / (9 * (cells - 1))
    return ((statistic / (cells - 1)) ** (1 / 3) - (1 - scale)) / math.sqrt(scale)


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("name", FILTERS)
def test_output_is_distributed_as_the_targets_own_samples(name: str, temperature: float, device: str) -> None:
    table, (tree, found) = target_table(), draft_tree()
    rows = {path: expected_row(logits, temperature, *FILTERS[name]) for path, logits in table.items()}
    top_k, top_p, min_p = (torch.full((SAMPLES,), value, device=device) for value in FILTERS[name])
    batch = repeated(tree, SAMPLES)
    batch = Tree(**{field: value.to(device) for field, value in vars(batch).items()})
    coins = torch.rand(SAMPLES, DEPTHS + 1, generator=torch.Generator().manual_seed(1)).to(device)
    accepted = verify_sampling_rows(
        batch,
        node_logits(table, found).repeat(SAMPLES, 1).to(device),
        torch.full((SAMPLES,), temperature, device=device),
        top_k,
        top_p,
        min_p,
        coins,
        DEPTHS,
        filtered=name != "none",
    )
    lengths = accepted.length.tolist()
    outputs = [tuple(row[: n + 1]) for row, n in zip(accepted.tokens.tolist(), lengths, strict=True)]
    assert excess(completed(outputs, rows), rows) < 4
    # The mean accepted length is the tree's mass under the target: no rule can accept more from this tree.
    mass = [math.prod(rows[path[:d]][path[d]] for d in range(len(path))) for path in found[1:]]
    mean = sum(lengths) / SAMPLES
    spread = math.sqrt(sum((n - mean) ** 2 for n in lengths)) / SAMPLES
    assert abs(mean - sum(mass)) < 4.5 * spread


def test_the_biased_rule_is_noticed() -> None:
    """Acceptance with min(1, p / q), as for a drafter that samples, on a tree that was not sampled."""
    table, (tree, found) = target_table(), draft_tree()
    rows = {path: expected_row(logits, 1.0, *FILTERS["none"]) for path, logits in table.items()}
    scores = tree.score[0].tolist()
    chooser, outputs = random.Random(2), []
    children = {n: [c for c in range(1, NODES) if int(tree.parent[0, c]) == n] for n in range(NODES)}
    for _ in range(SAMPLES // 4):
        node, output = 0, ()
        while len(output) < DEPTHS:
            p, q = rows[output], [0.0] * VOCAB
            for child in children[node]:
                q[found[child][-1]] = math.exp((scores[child] - scores[node]) / 2**20)
            taken = next((c for c in children[node] if chooser.random() < p[found[c][-1]] / q[found[c][-1]]), None)
            if taken is None:
                residual = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
                output = (*output, chooser.choices(range(VOCAB), residual if sum(residual) > 0 else p)[0])
                break
            node, output = taken, (*output, found[taken][-1])
        outputs.append(output)
    assert excess(completed(outputs, rows), rows) > 20


@pytest.mark.parametrize(
    ("way", "bs", "vocab", "dtype"),
    [
        ("kernel", 4, 40, torch.bfloat16),
        ("kernel", 4, 40, torch.float32),
        ("rows", 12, 50, torch.bfloat16),
        ("rows", 12, 300, torch.float32),
    ],
)
def test_the_walks_equal_the_walk_by_hand(way: str, bs: int, vocab: int, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(vocab)
    nodes, depths = 20, 5
    best = torch.log_softmax(torch.randn(bs, 6, vocab, generator=generator) * 4, -1).topk(4, -1)
    tree = build_tree(best.values, best.indices.int(), torch.zeros(bs, dtype=torch.int32), nodes, backend="naive")
    logits = (torch.randn(bs * nodes, vocab, generator=generator) * 2).bfloat16().to(dtype)  # ties
    for b, node in itertools.product(range(bs), range(1, nodes)):
        logits[b * nodes + int(tree.parent[b, node]), int(tree.token_ids[b, node])] = 7.0
    logits[::7, 1] = math.nan
    settings = (
        torch.rand(bs, generator=generator) * 1.2 + 0.3,
        torch.tensor([0, 1, 5, 1 << 30], dtype=torch.int32).repeat(3)[:bs],
        torch.tensor([1.0, 0.9, 0.613]).repeat(4)[:bs],
        torch.tensor([0.0, 0.0, 0.07]).repeat(4)[:bs],
        torch.rand(bs, depths + 1, generator=generator),
    )
    tree = Tree(**{field: value.to(device) for field, value in vars(tree).items()})
    moved = [value.to(device) for value in settings]
    lengths = 0
    for filtered in (True, False):
        if way == "kernel":
            left = verify_sampling(tree, logits.to(device), *moved, depths, filtered=filtered, backend="triton")
        else:
            left = verify_sampling_rows(tree, logits.to(device), *moved, depths, filtered=filtered)
        right = verify_sampling(tree, logits.to(device), *moved, depths, filtered=filtered, backend="naive")
        for field in ("index", "length", "tokens"):
            assert torch.equal(getattr(left, field), getattr(right, field)), field
        lengths += int(left.length.sum())
    assert lengths > bs


def test_one_rank_is_the_greedy_walk(device: str) -> None:
    table, (tree, found) = target_table(), draft_tree()
    tree = Tree(**{field: value.to(device) for field, value in vars(tree).items()})
    logits = node_logits(table, found).to(device)
    one = torch.ones(1, device=device)
    for coin in (0.0, 0.5, 1 - 2**-24):
        coins = torch.full((1, DEPTHS + 1), coin, device=device)
        sampled = verify_sampling(tree, logits, one, one.int(), one, one * 0, coins, DEPTHS)
        greedy = verify_greedy(tree, logits.argmax(-1, keepdim=True).T.int().contiguous(), DEPTHS)
        assert torch.equal(sampled.index, greedy.index) and torch.equal(sampled.tokens, greedy.tokens)


def test_coins_belong_to_seed_and_position(device: str) -> None:
    seeds = torch.tensor([1, 1, 2], device=device)
    prefix = torch.tensor([10, 12, 10], device=device)
    coins = coins_from_seeds(seeds, prefix, 4)
    assert torch.equal(coins[0, 2:], coins[1, :3]) and not torch.equal(coins[0], coins[2])
    many = coins_from_seeds(torch.arange(2000, device=device), torch.zeros(2000, device=device).long(), 9).double()
    assert float(many.min()) >= 0 and float(many.max()) < 1
    assert abs(float(many.mean()) - 0.5) < 0.01 and abs(float(many.var()) - 1 / 12) < 0.003
    assert abs(float(torch.corrcoef(many.T)[0, 1])) < 0.08 and abs(float(torch.corrcoef(many[:2])[0, 1])) < 0.95
    assert many.flatten().unique().numel() > 19_900
