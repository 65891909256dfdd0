"""Tree builder and greedy walk: published cases, brute force, the naive twin against the kernel on poisoned outputs."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields

import pytest
import torch
from dflash_kernels.accepted import empty_accepted
from dflash_kernels.build_tree import build_tree
from dflash_kernels.tree import Tree, empty_tree
from dflash_kernels.verify_greedy import verify_greedy

BACKENDS = ["naive", "triton"]


def poison(buffers):
    for field in fields(buffers):
        tensor = getattr(buffers, field.name)
        tensor.fill_(77 if tensor.dtype == torch.uint8 else -987654)
    return buffers


def assert_equal(left, right) -> None:
    for field in fields(left):
        assert torch.equal(getattr(left, field.name), getattr(right, field.name)), field.name


def from_probs(rows: list[list[float]], num_nodes: int, backend: str, device: str) -> Tree:
    logprobs = torch.tensor([rows], dtype=torch.float64, device=device).log().float()
    ids = torch.arange(logprobs.shape[2], dtype=torch.int32, device=device).expand(logprobs.shape).contiguous()
    root = torch.tensor([9], dtype=torch.int32, device=device)
    return build_tree(logprobs, ids, root, num_nodes, backend=backend)


def paths(tree: Tree, b: int = 0) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for node in range(1, int(tree.valid_count[b])):
        found.append((*found[int(tree.parent[b, node])], int(tree.token_ids[b, node])))
    return found[1:]


def mass(tree: Tree, rows: list[list[float]]) -> float:
    return sum(math.prod(rows[d][token] for d, token in enumerate(path)) for path in paths(tree))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_best_prefixes_come_in_order_of_probability(backend: str, device: str) -> None:
    tree = from_probs([[0.6, 0.3, 0.1], [0.7, 0.2, 0.1]], 8, backend, device)
    assert paths(tree) == [(0,), (0, 0), (1,), (1, 0), (0, 1), (2,), (2, 0)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("rows", "budget", "expected"),
    [
        ([[0.6, 0.3, 0.1], [0.7, 0.2, 0.1]], 8, 1.88),
        ([[0.9, 0.1]] * 3, 3, 2.439),
        ([[0.9, 0.1]] * 3, 6, 2.719),
        ([[0.5, 0.5]] * 3, 3, 1.25),
        ([[0.5, 0.5]] * 3, 14, 3.0),
        ([[0.4, 0.35, 0.25], [0.9, 0.1, 1e-30], [0.8, 0.2, 1e-30]], 4, 1.425),
        ([[0.4, 0.35, 0.25], [0.9, 0.1, 1e-30], [0.8, 0.2, 1e-30]], 10, 2.692),
    ],
)
def test_expected_acceptance_of_known_cases(rows, budget, expected, backend: str, device: str) -> None:
    assert mass(from_probs(rows, budget + 1, backend, device), rows) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_single_rank_gives_a_chain_and_unreachable_padding(backend: str, device: str) -> None:
    tree = from_probs([[0.5], [0.5]], 5, backend, device)
    assert tree.valid_count.tolist() == [3] and tree.truncated.tolist() == [1]
    assert tree.parent.tolist() == [[-1, 0, 1, -1, -1]] and tree.first_child.tolist() == [[1, 2, -1, -1, -1]]
    assert tree.ancestors.tolist() == [[[1], [3], [7], [8], [16]]]
    assert tree.token_ids.tolist() == [[9, 0, 0, 0, 0]] and tree.next_sibling.tolist() == [[-1] * 5]


def test_no_prefix_outside_the_tree_is_better_than_one_inside() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(30):
        rows = torch.softmax(torch.randn(3, 4, generator=generator, dtype=torch.float64) * 2, 1)
        rows = rows.sort(dim=1, descending=True).values.tolist()
        prefixes = [path for n in (1, 2, 3) for path in itertools.product(range(4), repeat=n)]
        best = sorted((math.prod(rows[d][t] for d, t in enumerate(path)) for path in prefixes), reverse=True)
        for budget in (1, 5, 20):
            tree = from_probs(rows, budget + 1, "naive", "cpu")
            assert mass(tree, rows) == pytest.approx(sum(best[:budget]), abs=1e-5)


def random_case(bs: int, depths: int, ranks: int, states: int, seed: int, device: str):
    """bf16 logits of a small vocabulary, so that equal scores are common."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(bs, depths, states, 80, generator=generator) * 3).bfloat16().float()
    logprobs, ids = torch.log_softmax(logits, -1).topk(ranks, -1)
    following = torch.randint(0, states, logprobs.shape, generator=generator, dtype=torch.int32) if states > 1 else None
    if following is None:
        logprobs, ids = logprobs[:, :, 0], ids[:, :, 0]
    else:
        following = following.to(device)
    root = torch.randint(0, 80, (bs,), generator=generator, dtype=torch.int32)
    return logprobs.contiguous().to(device), ids.int().contiguous().to(device), root.to(device), following


SHAPES = [(1, 4, 3, 1), (2, 1, 1, 1), (16, 7, 8, 1), (17, 15, 8, 1), (16, 7, 4, 4), (40, 31, 2, 1), (65, 15, 8, 1)]


@pytest.mark.parametrize(("nodes", "depths", "ranks", "states"), SHAPES)
def test_kernel_equals_the_heap_in_every_field(nodes, depths, ranks, states, device: str) -> None:
    for seed in range(2 if nodes <= 17 else 1):
        logprobs, ids, root, following = random_case(2, depths, ranks, states, seed, device)
        out = poison(empty_tree(2, nodes, device))
        build_tree(logprobs, ids, root, nodes, out=out, next_state=following, backend="triton")
        assert_equal(out, build_tree(logprobs, ids, root, nodes, next_state=following, backend="naive"))


def test_nan_and_infinite_log_probs_order_last(device: str) -> None:
    logprobs = torch.tensor([[[-0.1, -math.inf, math.nan], [-0.5, -140.0, math.nan]]], device=device)
    ids = torch.arange(6, dtype=torch.int32, device=device).reshape(1, 2, 3)
    root = torch.zeros(1, dtype=torch.int32, device=device)
    kernel, naive = (build_tree(logprobs, ids, root, 12, backend=backend) for backend in ("triton", "naive"))
    assert_equal(kernel, naive)
    assert paths(naive)[:2] == [(0,), (0, 3)]


@pytest.mark.parametrize("seed", range(5))
def test_structure(seed: int) -> None:
    nodes = 70
    logprobs, ids, root, _ = random_case(3, 15, 8, 1, seed, "cpu")
    tree = build_tree(logprobs, ids, root, nodes, backend="naive")
    smaller = build_tree(logprobs, ids, root, nodes - 1, backend="naive")
    for b in range(3):
        assert paths(tree, b)[: nodes - 2] == paths(smaller, b)
        for node in range(1, nodes):
            p = int(tree.parent[b, node])
            assert 0 <= p < node and tree.depth[b, node] == tree.depth[b, p] + 1
            bits = sum((int(w) & (2**64 - 1)).bit_count() for w in tree.ancestors[b, node])
            assert bits == int(tree.depth[b, node]) + 1
            sibling = int(tree.next_sibling[b, node])
            assert sibling == -1 or (sibling > node and tree.parent[b, sibling] == p)
        assert len(set(paths(tree, b))) == nodes - 1
        alone = build_tree(logprobs[b : b + 1], ids[b : b + 1], root[b : b + 1], nodes, backend="naive")
        assert torch.equal(alone.parent[0], tree.parent[b])


def test_sizes_beyond_the_key_are_refused() -> None:
    with pytest.raises(ValueError, match="nodes"):
        small = torch.zeros(1, 2, 2)
        build_tree(small, small.int(), torch.zeros(1, dtype=torch.int32), 513)
    table = torch.zeros(1, 15, 64, 64)
    with pytest.raises(ValueError, match="31 bits"):
        build_tree(table, table.int(), torch.zeros(1, dtype=torch.int32), 256, next_state=table.int())


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_walk_by_hand(backend: str, device: str) -> None:
    tree = from_probs([[0.6, 0.3, 0.1], [0.7, 0.2, 0.1]], 8, backend, device)  # node 3 is (1,), node 4 is (1, 0)
    target = torch.tensor([[1, 7, 7, 0, 5, 7, 7, 7]], dtype=torch.int32, device=device)
    accepted = verify_greedy(tree, target, 2, backend=backend)
    assert accepted.index.tolist() == [[0, 3, 4]] and accepted.length.tolist() == [2]
    assert accepted.tokens.tolist() == [[1, 0, 5]]
    target[0, 0] = 8
    missed = verify_greedy(tree, target, 2, backend=backend)
    assert missed.index.tolist() == [[0, -1, -1]] and missed.length.tolist() == [0]
    assert missed.tokens.tolist() == [[8, 0, 0]]


@pytest.mark.parametrize("nodes", [1, 16, 33])
@pytest.mark.parametrize("depths", [3, 7])
def test_greedy_walk_kernel_equals_naive(nodes: int, depths: int, device: str) -> None:
    logprobs, ids, root, _ = random_case(6, 7, 4, 1, nodes, device)
    tree = build_tree(logprobs, ids, root, nodes, backend="naive")
    generator = torch.Generator().manual_seed(depths)
    target = torch.randint(0, 80, (6, nodes), generator=generator, dtype=torch.int32)
    for b, node in itertools.product(range(6), range(1, nodes)):  # most nodes agree with one of their children
        if torch.rand((), generator=generator) < 0.6:
            target[b, tree.parent[b, node]] = tree.token_ids[b, node].cpu()
    target = target.to(device)
    naive = verify_greedy(tree, target, depths, backend="naive")
    out = poison(empty_accepted(6, depths, device))
    assert_equal(verify_greedy(tree, target, depths, out=out, backend="triton"), naive)
    assert nodes == 1 or int(naive.length.max()) > 0
