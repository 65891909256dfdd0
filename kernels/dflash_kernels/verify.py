"""The path that the target itself chooses through a tree: what every worker does with its logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .accepted import Accepted
from .tree import Tree
from .verify_greedy import verify_greedy
from .verify_sampling import coins_from_seeds, verify_sampling


def verify_tree(
    tree: Tree,
    logits: Tensor,
    sampling: Any,
    seq_lens: Tensor,
    depths: int,
    same: Callable[[Tensor], Tensor] = lambda drawn: drawn,
) -> Accepted:
    """Follow the target's arg-max from the root, or its samples when a request of the batch samples.

    logits: [bs * N, vocab], adjusted already. sampling: SGLang's ``SamplingBatchInfo``, or None: greedy. seq_lens: int
    [bs], the positions that seeded requests draw for. depths: the most drafts to accept. same: gives every
    rank the same random numbers.
    """
    if sampling is None or sampling.is_all_greedy:
        return verify_greedy(tree, torch.argmax(logits, dim=-1).view(tree.token_ids.shape), depths)
    if sampling.sampling_seed is None:
        coins = same(torch.rand((len(seq_lens), depths + 1), device=logits.device))
    else:
        coins = coins_from_seeds(sampling.sampling_seed, seq_lens, depths)
    return verify_sampling(
        tree,
        logits,
        sampling.temperatures.view(-1),
        sampling.top_ks,
        sampling.top_ps,
        sampling.min_ps,
        coins,
        depths,
        filtered=sampling.need_top_k_sampling or sampling.need_top_p_sampling or sampling.need_min_p_sampling,
    )
