"""The DDTREE worker of SGLang 0.5.10.post1: DFLASH's drafter, and a tree of its marginals instead of a chain.

The K best tokens of each depth, the tree of the Q most probable prefixes (arXiv 2604.12989), one pass of the target
under the tree's mask; then the accepted path's KV moves to the front of its slots.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..accepted import Accepted
from ..build_tree import build_tree
from ..ddtree.move import AcceptedMover
from ..topk_logprobs import topk_logprobs
from ..tree import Tree
from .worker import DFlashWorker


class DDTreeWorker(DFlashWorker):
    def __init__(self, server_args: Any, target_worker: Any, **ranks: Any) -> None:
        self.topk = int(server_args.speculative_ddtree_topk)
        self._mover = AcceptedMover(target_worker.model_runner)
        self._mover.bind()
        super().__init__(server_args, target_worker, **ranks)

    def describe(self) -> str:
        return f"draft block {self.drafter.block}, a tree of {self.nodes} nodes, top-{self.topk} per depth."

    def _grow(self, bonus: Tensor, logits: Tensor) -> Tree:
        logprobs, ids = topk_logprobs(logits, self.topk)
        shape = (len(bonus), self.drafter.depths, self.topk)
        return build_tree(logprobs.view(shape), ids.view(shape), bonus, self.nodes)

    def _needs_mask(self, graph: bool) -> bool:
        return True

    def _move(self, slots: Tensor, accepted: Accepted) -> None:
        self._mover.move(slots, accepted)
