"""Positions and masks: a tree by hand, SGLang's flat layout, nothing written outside the tails."""

from __future__ import annotations

import pytest
import torch
from dflash_kernels.build_tree import build_tree
from dflash_kernels.tree import Tree
from dflash_kernels.tree_mask import tree_mask_dense, tree_mask_full, tree_positions

BACKENDS = ["naive", "triton"]


def random_tree(bs: int, nodes: int, device: str, ranks: int = 4) -> Tree:
    generator = torch.Generator().manual_seed(nodes)
    logprobs = torch.log_softmax(torch.randn(bs, 7, 40, generator=generator) * 3, -1).topk(ranks, -1)
    root = torch.zeros(bs, dtype=torch.int32, device=device)
    values, ids = logprobs.values.to(device).contiguous(), logprobs.indices.int().to(device).contiguous()
    return build_tree(values, ids, root, nodes, backend="naive")


def ancestors_by_parent(tree: Tree, b: int, node: int) -> set[int]:
    seen = set()
    while node >= 0:
        seen.add(node)
        node = int(tree.parent[b, node])
    return seen


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_are_the_paths_to_the_root(backend: str, device: str) -> None:
    tree = random_tree(2, 70, device)
    mask = tree_mask_dense(tree, backend=backend)
    assert mask.dtype == torch.bool
    for b in range(2):
        for node in range(70):
            assert set(mask[b, node].nonzero().flatten().tolist()) == ancestors_by_parent(tree, b, node)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_are_prefix_plus_depth(dtype: torch.dtype, backend: str, device: str) -> None:
    tree = random_tree(3, 9, device, ranks=1)  # one rank: nodes 8.. are padding
    prefix = torch.tensor([0, 5, 2**20], dtype=dtype, device=device)
    out = torch.full((3, 9), -7, dtype=torch.int64, device=device)
    assert tree_positions(tree, prefix, out=out, backend=backend) is out
    assert out[1].tolist() == [5, 6, 7, 8, 9, 10, 11, 12, 5]
    assert torch.equal(out, tree_positions(tree, prefix, backend="naive"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize("nodes", [1, 16, 65])
def test_flat_mask_behind_prefixes(nodes: int, dtype: torch.dtype, backend: str, device: str) -> None:
    lengths = [3, 0, 17, 6]
    tree = random_tree(4, nodes, device)
    prefix = torch.tensor(lengths, dtype=torch.int64, device=device)
    size = sum(nodes * (length + nodes) for length in lengths)
    marks = torch.randint(0, 2, (size + 11,), generator=torch.Generator().manual_seed(3)).to(dtype).to(device)
    out = tree_mask_full(tree, prefix, marks.clone(), backend=backend)
    dense = tree_mask_dense(tree, backend="naive")
    at = 0
    for b, length in enumerate(lengths):
        block, before = (x[at : at + nodes * (length + nodes)].view(nodes, -1) for x in (out, marks))
        assert torch.equal(block[:, length:].bool(), dense[b])
        assert torch.equal(block[:, :length], before[:, :length])
        at += nodes * (length + nodes)
    assert torch.equal(out[at:], marks[at:])


def test_many_requests_add_up(device: str) -> None:
    """More requests than one block of the prefix sum."""
    tree = random_tree(131, 2, device)
    prefix = torch.arange(131, device=device) * 3 % 50
    zeros = torch.zeros(2 * int((prefix + 2).sum()), dtype=torch.uint8, device=device)
    kernel, naive = (tree_mask_full(tree, prefix, zeros.clone(), backend=backend) for backend in ("triton", "naive"))
    assert torch.equal(kernel, naive)


def test_a_stale_prefix_writes_nothing_behind_the_buffer(device: str) -> None:
    tree = random_tree(2, 8, device)
    memory = torch.full((400,), 7, dtype=torch.uint8, device=device)
    tree_mask_full(tree, torch.tensor([5, 20], device=device), memory[:200], backend="triton")
    assert memory[200:].unique().tolist() == [7]
    assert torch.equal(memory[:104].view(8, 13)[:, 5:].bool(), tree_mask_dense(tree, backend="naive")[0])


def test_shapes_are_checked(device: str) -> None:
    tree = random_tree(2, 4, device)
    prefix = torch.zeros(3, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="prefix"):
        tree_positions(tree, prefix)
    with pytest.raises(ValueError, match="flat bool or uint8"):
        tree_mask_full(tree, prefix[:2], torch.zeros(99, device=device))
