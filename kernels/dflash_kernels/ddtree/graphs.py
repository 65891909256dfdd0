"""What of a step runs inside SGLang's captured graphs: the tree at the draft graph's tail, the walk at the verify graph's.

Both tails read and write the same static buffers, so that between the two graphs nothing is computed eagerly and nothing
is copied to the host.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..accepted import Accepted, empty_accepted
from ..build_tree import build_tree
from ..tree import Tree, empty_tree
from ..tree_mask import tree_mask_full, tree_positions
from ..verify_greedy import verify_greedy
from .draft_head import DraftHead
from .shape import TreeShape

_Rows = TypeVar("_Rows", Tree, Accepted)


def _first(value: _Rows, rows: int) -> _Rows:
    """The first ``rows`` requests of a batch of trees or paths, as views."""
    return replace(value, **{f.name: getattr(value, f.name)[:rows] for f in fields(value)})


class GraphTails:
    """Static buffers for ``max_bs`` requests and the two capture hooks that fill them."""

    def __init__(self, shape: TreeShape, head: DraftHead, max_bs: int, device: Any) -> None:
        self._shape = shape
        self._head = head
        self._tree = empty_tree(max_bs, shape.nodes, device, index_dtype=torch.int64)
        for field in fields(self._tree):
            getattr(self._tree, field.name).zero_()
        self._positions = torch.zeros((max_bs, shape.nodes), dtype=torch.int64, device=device)
        self._accepted = empty_accepted(max_bs, shape.depths, device)
        self.mask: Tensor | None = None
        """The target backend's captured mask buffer, flat; known once the target's graphs are captured."""
        self.drafts = False
        """The draft graph has been captured with its tail."""
        self.walks = False
        """The verify graph has been captured with its tail."""

    def tree(self, bs: int) -> tuple[Tree, Tensor]:
        """Tree and positions int64 [bs, Q] that the last draft replay left."""
        return _first(self._tree, bs), self._positions[:bs]

    def accepted(self, bs: int) -> Accepted:
        """Greedy path that the last verify replay left."""
        return _first(self._accepted, bs)

    def draft_tail(self, runner: Any, out: Any, forward_batch: Any, num_tokens: int) -> None:
        """After the drafter's layers: head, top-k, tree, positions and mask."""
        block = self._shape.block
        bs = num_tokens // block
        logprobs, ids = self._head(out.hidden_states[:num_tokens].view(bs, block, -1))
        prefix = forward_batch.positions[:num_tokens].view(bs, block)[:, 0].contiguous()
        roots = forward_batch.input_ids[:num_tokens].view(bs, block)[:, 0].contiguous()
        tree, positions = self.tree(bs)
        build_tree(logprobs, ids, roots, self._shape.nodes, out=tree)
        tree_positions(tree, prefix, out=positions)
        if self.mask is not None:
            tree_mask_full(tree, prefix, self.mask)
        self.drafts = True

    def verify_tail(self, runner: Any, out: Any, forward_batch: Any, num_tokens: int) -> None:
        """After the target's head: arg-max of every node and the greedy walk."""
        bs = num_tokens // self._shape.nodes
        choice = torch.argmax(out.next_token_logits[:num_tokens], dim=-1).view(bs, self._shape.nodes)
        tree, _ = self.tree(bs)
        verify_greedy(tree, choice, self._shape.depths, out=self.accepted(bs))
        self.walks = True
