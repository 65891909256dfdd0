"""The sampling walk's truth: one request, one node, one token at a time, in Python floats."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..accepted import Accepted, empty_accepted
from ..tree import Tree


def filtered_weights(row: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """Unnormalised filtered probabilities by token id, see ``verify_sampling``."""
    logits = [-math.inf if math.isnan(x) else x for x in row]
    best = max(logits)
    weights = [math.exp((x - best) / max(temperature, 1e-6)) for x in logits]
    total = sum(weights)
    kept = [0.0] * len(row)
    before = 0.0
    for rank, token in enumerate(sorted(range(len(row)), key=lambda i: (-logits[i], i))):
        if (top_k > 0 and rank >= top_k) or (top_p < 1 and before > top_p * total) or weights[token] < min_p:
            break
        kept[token] = weights[token]
        before += weights[token]
    return kept


def draw(weights: list[float], coin: float) -> int:
    """The smallest token whose cumulative weight exceeds ``coin`` times the total."""
    wanted = coin * sum(weights)
    cumulative = 0.0
    for token, weight in enumerate(weights):
        cumulative += weight
        if cumulative > wanted:
            return token
    return max(token for token, weight in enumerate(weights) if weight > 0)


def verify_sampling_naive(
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
    """See ``verify_sampling``. Copies to the host."""
    bs, nodes = tree.token_ids.shape
    if out is None:
        out = empty_accepted(bs, depths, logits.device)
    token_ids, first_child, next_sibling = (x.tolist() for x in (tree.token_ids, tree.first_child, tree.next_sibling))
    settings = list(zip(top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True))
    heat, flips = temperature.tolist(), coins.tolist()
    for b in range(bs):
        path = [0]
        tokens: list[int] = []
        while len(path) > len(tokens):
            row = logits[b * nodes + path[-1]].tolist()
            weights = filtered_weights(row, heat[b], *(settings[b] if filtered else (0, 1.0, 0.0)))
            tokens.append(draw(weights, flips[b][len(tokens)]))
            if len(path) > depths:
                break
            child = first_child[b][path[-1]]
            while child >= 0 and token_ids[b][child] != tokens[-1]:
                child = next_sibling[b][child]
            if child >= 0:
                path.append(child)
        behind = depths + 1 - len(path)
        out.index[b] = torch.tensor(path + [-1] * behind, dtype=out.index.dtype)
        out.tokens[b] = torch.tensor(tokens + [0] * behind, dtype=out.tokens.dtype)
        out.length[b] = len(path) - 1
    return out
