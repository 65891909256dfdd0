"""Trees of a first-order drafter, ``[depth][state][rank]``: exact against every prefix there is."""

from __future__ import annotations

import itertools

import pytest
import torch
from dflash_kernels.build_tree import build_tree
from dflash_kernels.tree import empty_tree

from tests.kernels.test_tree import BACKENDS, assert_equal, poison

CASES = [(12, 3, 3, 2), (24, 4, 3, 3), (31, 3, 4, 5), (40, 5, 2, 4), (9, 4, 1, 3)]
"""(nodes, depths, ranks, states)."""


def tables(depths: int, ranks: int, states: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logprobs, ids, next_state) of [1, depths, states, ranks], ranks falling, all prefixes' scores different."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = torch.log_softmax(torch.randn(1, depths, states, 50, generator=generator) * 2, -1)
    logprobs, ids = logprobs.topk(ranks, -1)
    following = torch.randint(0, states, logprobs.shape, generator=generator, dtype=torch.int32)
    return logprobs.contiguous(), ids.int().contiguous(), following


def every_prefix(
    logprobs: torch.Tensor, ids: torch.Tensor, following: torch.Tensor
) -> list[tuple[float, tuple[int, ...]]]:
    """(score, ranks) of every prefix, best first, by walking the chain for each: no tree, no heap."""
    depths, _, ranks = logprobs.shape[1:]
    found = []
    for length in range(1, depths + 1):
        for path in itertools.product(range(ranks), repeat=length):
            state, score = 0, 0.0
            for depth, rank in enumerate(path):
                score += float(logprobs[0, depth, state, rank])
                state = int(following[0, depth, state, rank])
            found.append((score, path))
    return sorted(found, reverse=True)


def tokens(path: tuple[int, ...], ids: torch.Tensor, following: torch.Tensor) -> tuple[int, ...]:
    state, found = 0, []
    for depth, rank in enumerate(path):
        found.append(int(ids[0, depth, state, rank]))
        state = int(following[0, depth, state, rank])
    return tuple(found)


@pytest.mark.parametrize(
    ("nodes", "depths", "ranks", "states", "backend"),
    [(*case, "naive") for case in CASES] + [(*case, "triton") for case in CASES[:2]],  # interpreted: a second a tree
)
def test_the_tree_holds_the_best_prefixes(
    nodes: int, depths: int, ranks: int, states: int, backend: str, device: str
) -> None:
    for seed in range(4 if backend == "naive" else 1):
        logprobs, ids, following = tables(depths, ranks, states, seed)
        root = torch.tensor([7], dtype=torch.int32)
        tree = poison(empty_tree(1, nodes, device))
        build_tree(
            *(t.to(device) for t in (logprobs, ids, root)),
            nodes,
            out=tree,
            next_state=following.to(device),
            backend=backend,
        )
        count = int(tree.valid_count[0])
        parent, token = tree.parent[0].tolist(), tree.token_ids[0].tolist()
        paths = {}
        for node in range(1, count):
            above, path = node, []
            while above > 0:
                path.append(token[above])
                above = parent[above]
            paths[node] = tuple(reversed(path))
        best = every_prefix(logprobs, ids, following)[: nodes - 1]
        assert count == 1 + len(best)
        assert sorted(paths.values()) == sorted(tokens(path, ids, following) for _, path in best)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_state_is_the_marginal_tree(backend: str, device: str) -> None:
    logprobs, ids, following = (t.to(device) for t in tables(4, 3, 1, 0))
    root = torch.tensor([7], dtype=torch.int32, device=device)
    markov = build_tree(logprobs, ids, root, 20, next_state=following, backend=backend)
    assert_equal(markov, build_tree(logprobs[:, :, 0], ids[:, :, 0].contiguous(), root, 20, backend=backend))


def test_a_chain_whose_best_start_leads_nowhere(device: str) -> None:
    """The marginal tree follows the likelier first token; the Markov tree sees that what follows it is a coin toss."""
    logprobs = torch.tensor([[[[0.6, 0.4], [0.5, 0.5]], [[0.51, 0.49], [0.99, 0.01]]]]).log().to(device)
    ids = torch.tensor([[[[1, 2], [1, 2]], [[3, 4], [5, 6]]]], dtype=torch.int32, device=device)
    following = torch.tensor([[[[0, 1], [0, 1]], [[0, 0], [1, 1]]]], dtype=torch.int32, device=device)
    root = torch.tensor([7], dtype=torch.int32, device=device)
    tree = build_tree(logprobs, ids, root, 4, next_state=following, backend="naive")
    assert tree.token_ids[0].tolist() == [7, 1, 2, 5]
