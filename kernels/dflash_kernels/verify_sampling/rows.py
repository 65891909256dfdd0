"""The sampling walk as tensor operations on one row of logits per request and level."""

from __future__ import annotations

import torch
from torch import Tensor

from ..accepted import Accepted, empty_accepted
from ..tree import Tree


def verify_sampling_rows(
    tree: Tree,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    coins: Tensor,
    depths: int,
    filtered: bool = True,
    out: Accepted | None = None,
) -> Accepted:
    """See ``verify_sampling``. Levels behind a request's end are computed and dropped: nobody asks the device."""
    bs, nodes = tree.token_ids.shape
    if out is None:
        out = empty_accepted(bs, depths, logits.device)
    node = torch.arange(nodes, device=logits.device)
    first = torch.arange(bs, device=logits.device) * nodes
    at = torch.zeros_like(first)
    alive = torch.ones_like(first, dtype=torch.bool)
    out.index.fill_(-1)
    out.index[:, 0] = 0
    out.length.zero_()
    for level in range(depths + 1):
        row = logits.index_select(0, first + at).float()
        row = torch.nan_to_num(row, nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf)
        weights = torch.exp((row - row.amax(1, keepdim=True)) / temperature.float().clamp(min=1e-6).unsqueeze(1))
        if filtered:
            weights = _filter(row, weights, top_k, top_p, min_p)
        token = _draw(weights, coins[:, level])
        out.tokens[:, level] = token.where(alive, 0).to(out.tokens.dtype)
        if level == depths:
            break
        taken = (tree.parent == at.unsqueeze(1)) & (tree.token_ids == token.unsqueeze(1)) & alive.unsqueeze(1)
        child = node.where(taken, -1).amax(1)
        alive = child >= 0
        at = child.where(alive, at)
        out.index[:, level + 1] = child.to(out.index.dtype)
        out.length.add_(alive)
    return out


def _filter(row: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    order = torch.sort(row, dim=1, descending=True, stable=True).indices
    ordered = weights.gather(1, order)
    mass = ordered.cumsum(1)
    rank = torch.arange(row.shape[1], device=row.device)
    keep = (rank < top_k.unsqueeze(1)) | (top_k <= 0).unsqueeze(1)
    keep &= (mass - ordered <= top_p.unsqueeze(1) * mass[:, -1:]) | (top_p >= 1).unsqueeze(1)
    keep &= ordered >= min_p.unsqueeze(1)  # weights are relative to the largest probability
    return torch.zeros_like(weights).scatter_(1, order, ordered.where(keep, 0))


def _draw(weights: Tensor, coin: Tensor) -> Tensor:
    mass = weights.cumsum(1)
    wanted = coin.unsqueeze(1) * mass[:, -1:]
    # Rounding may lift coin * total to the total: then the last token with any weight is the one.
    last = (mass < mass[:, -1:]).sum(1)
    return torch.minimum((mass <= wanted).sum(1), last)
