"""Greedy and sampled requests through the one walk that all workers call."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from dflash_kernels.build_tree import build_tree  # noqa: E402
from dflash_kernels.verify import verify_tree  # noqa: E402


def test_sampling_among_one_token_is_greedy(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn((2, 4, 5), generator=generator).log_softmax(-1).sort(-1, descending=True)[0]
    ids = torch.stack([torch.randperm(20, generator=generator)[:5] for _ in range(8)]).view(2, 4, 5)
    tree = build_tree(logprobs.to(device), ids.to(device), torch.tensor([1, 2], device=device), 8)
    logits = torch.randn((16, 20), generator=generator).to(device)
    # The target agrees with the first drafts of the first request.
    logits[0, int(tree.token_ids[0, 1])] += 50.0
    lens = torch.tensor([5, 6], device=device)
    greedy = verify_tree(tree, logits, None, lens, 4)
    assert int(greedy.length[0]) >= 1
    sampling = SimpleNamespace(
        is_all_greedy=False,
        temperatures=torch.ones((2, 1), device=device),
        top_ks=torch.ones(2, dtype=torch.int32, device=device),
        top_ps=torch.ones(2, device=device),
        min_ps=torch.zeros(2, device=device),
        need_top_k_sampling=True,
        need_top_p_sampling=False,
        need_min_p_sampling=False,
    )
    for seeds in (None, torch.tensor([3, 4], device=device)):
        sampling.sampling_seed = seeds
        sampled = verify_tree(tree, logits, sampling, lens, 4)
        assert sampled.length.tolist() == greedy.length.tolist()
        assert sampled.tokens.tolist() == greedy.tokens.tolist()
    sampling.is_all_greedy = True
    assert verify_tree(tree, logits, sampling, lens, 4).tokens.tolist() == greedy.tokens.tolist()
