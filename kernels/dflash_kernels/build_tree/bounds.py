"""What fits into the builder's packed 31-bit selection key."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

SCORE_BITS = 20
MAX_NODES = 512
MAX_RANKS = 64


@dataclass(frozen=True)
class Bounds:
    """Sizes of one launch and the widths of the fields of its selection key."""

    depths: int
    states: int
    ranks: int
    num_nodes: int
    depth_bits: int
    rank_bits: int
    state_bits: int
    node_bits: int
    floor: float  # smallest log-prob of one edge, so that a path of `depths` edges stays inside int32


def edge_floor(depths: int) -> float:
    """-130 nats (below any fp32 softmax that matters) up to 15 depths, and as low as int32 path sums allow beyond."""
    return -float(min(130, 2047 // depths))


def check_bounds(logprobs: Tensor, ids: Tensor, root_ids: Tensor, num_nodes: int, next_state: Tensor | None) -> Bounds:
    """Raises ValueError when shapes disagree or the key would not fit."""
    rank = 3 if next_state is None else 4
    if logprobs.dim() != rank or logprobs.shape != ids.shape:
        raise ValueError(f"logprobs {tuple(logprobs.shape)} and ids {tuple(ids.shape)} must agree in {rank} dimensions")
    if next_state is not None and next_state.shape != logprobs.shape:
        raise ValueError(f"next_state {tuple(next_state.shape)} and logprobs {tuple(logprobs.shape)} must agree")
    bs, depths, ranks = logprobs.shape[0], logprobs.shape[1], logprobs.shape[-1]
    states = 1 if next_state is None else logprobs.shape[2]
    if root_ids.shape != (bs,):
        raise ValueError(f"root_ids has shape {tuple(root_ids.shape)}, not {(bs,)}")
    if not 1 <= num_nodes <= MAX_NODES or not 1 <= ranks <= MAX_RANKS or depths < 1 or states < 1:
        raise ValueError(f"a tree takes 1..{MAX_NODES} nodes, 1..{MAX_RANKS} ranks and at least one depth")
    bounds = Bounds(
        depths=depths,
        states=states,
        ranks=ranks,
        num_nodes=num_nodes,
        depth_bits=depths.bit_length(),
        rank_bits=(ranks - 1).bit_length(),
        state_bits=(states - 1).bit_length(),
        node_bits=(num_nodes - 1).bit_length(),
        floor=edge_floor(depths),
    )
    bits = bounds.depth_bits + 2 * bounds.node_bits + bounds.rank_bits + bounds.state_bits
    if bits > 31:
        sizes = f"{num_nodes} nodes, {depths} depths, {ranks} ranks, {states} states"
        raise ValueError(f"{sizes} need a key of {bits} > 31 bits")
    return bounds
