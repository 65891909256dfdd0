"""Uniform numbers that depend on nothing but a request's seed and a token's position."""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant


def _mixed(z: Tensor) -> Tensor:
    """splitmix64's finaliser (Steele, Lea and Flood 2014) on int64, whose products wrap as unsigned ones do."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _signed(0x94D049BB133111EB)
    return z ^ ((z >> 31) & (2**33 - 1))


def coins_from_seeds(seeds: Tensor, prefix: Tensor, depths: int) -> Tensor:
    """fp32 [bs, depths + 1] in [0, 1): coin d of request b is a function of (seeds[b], prefix[b] + d).

    seeds, prefix: int [bs]. A position has the same coin however many drafts were accepted before it.
    """
    position = prefix.long().unsqueeze(1) + torch.arange(depths + 1, device=prefix.device)
    state = _mixed(seeds.long().unsqueeze(1) + _signed(0x9E3779B97F4A7C15))
    bits = _mixed(state + position * _signed(0x9E3779B97F4A7C15))
    return ((bits >> 40) & (2**24 - 1)).float() * 2.0**-24
