"""A vocabulary split among ranks answers as the whole one does, and the same on every rank. Real processes, gloo."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.multiprocessing as mp  # noqa: E402
from dflash_kernels.build_tree import build_tree  # noqa: E402
from dflash_kernels.ranks import Ranks, argmax_of_shards, topk_of_shards  # noqa: E402
from dflash_kernels.topk_logprobs import topk_logprobs  # noqa: E402
from dflash_kernels.verify import verify_tree  # noqa: E402

ROWS, VOCAB, K, COUNT = 30, 101, 8, 3


class Group:
    """What is used of SGLang's ``GroupCoordinator``, and how much went over the wire."""

    def __init__(self) -> None:
        self.world_size = torch.distributed.get_world_size()
        self.ranks = list(range(self.world_size))
        self.cpu_group = None
        self.bytes = 0

    def all_gather(self, mine: Any, dim: int) -> Any:
        assert dim == 0
        self.bytes += mine.numel() * mine.element_size()
        parts = [torch.empty_like(mine) for _ in self.ranks]
        torch.distributed.all_gather(parts, mine)
        return torch.cat(parts)

    def broadcast(self, drawn: Any, src: int = 0) -> None:
        torch.distributed.broadcast(drawn, src=src)


def logits_of(case: str) -> Any:
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(5))
    if case == "ties":
        logits = (logits * 2).round()
    if case == "infinite":
        logits[:, ::3] = float("-inf")
        logits[0, 7] = float("inf")
    return logits


def on_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["DFLASH_KERNELS_BACKEND"] = "naive"  # the kernels are held against it elsewhere
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=COUNT)
    torch.manual_seed(rank)
    group = Group()
    ranks = Ranks(group)
    each = -(-VOCAB // COUNT)
    out: dict[str, Any] = {}
    for case in ("plain", "ties", "infinite"):
        logits = logits_of(case)
        begin, end = rank * each, min((rank + 1) * each, VOCAB)
        mine = torch.full((ROWS, each), 1e9)  # padding behind the vocabulary: never chosen
        mine[:, : end - begin] = logits[:, begin:end]
        logprobs, ids = topk_of_shards(mine[:, : end - begin], K, begin, ranks)
        choice = argmax_of_shards(mine, begin, end - begin, ranks)
        out[f"{case} bytes"], group.bytes = [group.bytes], 0
        tree = build_tree(logprobs.view(2, 15, K), ids.view(2, 15, K), torch.tensor([1, 2]), 64)
        whole = ranks.whole(mine, VOCAB) if case == "plain" else None
        sampling = SimpleNamespace(
            is_all_greedy=False, sampling_seed=None, temperatures=torch.ones(2, 1), top_ks=torch.full((2,), VOCAB),
            top_ps=torch.ones(2), min_ps=torch.zeros(2), need_top_k_sampling=False, need_top_p_sampling=False,
            need_min_p_sampling=False,
        )  # fmt: skip
        nodes = torch.randn(128, VOCAB, generator=torch.Generator().manual_seed(6))
        path = verify_tree(tree, nodes, sampling, torch.tensor([3, 4]), 15, ranks.same)
        out[case] = {
            "logprobs": logprobs, "ids": ids, "choice": choice, "tree": tree.token_ids, "parents": tree.parent,
            "whole": whole, "path": path.tokens,
        }  # fmt: skip
    out["agree"] = [ranks.agree(10 * rank + 7)]
    torch.save(out, Path(folder) / f"{rank}.pt")


def test_ranks(tmp_path: Path) -> None:
    mp.start_processes(on_rank, (str(tmp_path),), nprocs=COUNT, start_method="fork")
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(COUNT)]
    for case in ("plain", "ties", "infinite"):
        logits = logits_of(case)
        logprobs, ids = topk_logprobs(logits, K)
        for mine in found:
            got = mine[case]
            assert torch.equal(got["ids"], ids), case
            torch.testing.assert_close(got["logprobs"], logprobs, rtol=1e-5, atol=1e-5)
            assert torch.equal(logits.gather(1, got["choice"][:, None]), logits.max(dim=1, keepdim=True).values)
            first = [int((row == row.max()).nonzero()[0]) for row in logits]
            assert got["choice"].tolist() == first
            for name in ("logprobs", "tree", "parents", "path"):
                assert torch.equal(got[name], found[0][case][name]), f"{case}: {name} differs between ranks"
    assert all(torch.equal(mine["plain"]["whole"], logits_of("plain")) for mine in found)
    # What one rank sends for a request of 15 depths and 64 nodes, whatever the vocabulary: far below 64 kB.
    assert all(mine["plain bytes"] == [ROWS * (8 * K + 8) + ROWS * 8] for mine in found)
    assert 15 * (8 * K + 8) + 64 * 8 < 2048
    assert [mine["agree"] for mine in found] == [[7]] * COUNT
