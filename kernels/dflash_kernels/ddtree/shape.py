"""The two widths of a DDTREE step, and how the server's arguments say them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_NODES = 512
"""Parents are packed in nine bits by the tree builder."""
MAX_TOPK = 63
"""Ranks are packed in six bits by the tree builder."""
MAX_BLOCK = 16
"""Depths are packed in four bits by the tree builder, the root's depth 0 included."""


@dataclass(frozen=True)
class TreeShape:
    """Sizes of one step. F and Q are different numbers: never read one for the other."""

    block: int
    """F: tokens the drafter sees and writes, the bonus token included; F - 1 depths."""
    nodes: int
    """Q: tokens the target verifies, the root included."""
    topk: int
    """K: candidates kept per depth."""

    def __post_init__(self) -> None:
        if not 2 <= self.block <= MAX_BLOCK:
            raise ValueError(f"DDTREE needs a draft block of 2 to {MAX_BLOCK} tokens; this drafter's is {self.block}")
        if not 2 <= self.nodes <= MAX_NODES:
            raise ValueError(
                f"--speculative-ddtree-budget must be 2 to {MAX_NODES} nodes, root included; got {self.nodes}"
            )
        if not 1 <= self.topk <= MAX_TOPK:
            raise ValueError(f"--speculative-ddtree-topk must be 1 to {MAX_TOPK}; got {self.topk}")

    @property
    def depths(self) -> int:
        """L: most drafts that one step can accept."""
        return self.block - 1

    @property
    def reserved(self) -> int:
        """KV slots that a step touches behind the committed prefix: draft and verify share them."""
        return max(self.block, self.nodes)


def default_topk(nodes: int) -> int:
    """Ranks that an optimal tree of this size can use, as measured: 8 loses nothing up to 64 nodes, 16 up to 128."""
    return 8 if nodes <= 64 else 16


AUTO = "auto"
AUTO_TOPK = 8
"""Its candidates share the drafter's pass: at 128 nodes 8 ranks cost 0.05 tokens a step, 16 would cost every step time."""
AUTO_WIDTHS = (1, 8, 16, 32, 64, 128)
"""Candidates of ``--speculative-ddtree-budget auto``; one node is no draft, eight is about what a short chain costs."""


def widths_of(speculative: Any, shape: TreeShape) -> tuple[int, ...]:
    """Node counts that the server is started for, ascending; the last is ``shape.nodes``."""
    if speculative.speculative_ddtree_budget != AUTO:
        return (shape.nodes,)
    return (*(width for width in AUTO_WIDTHS if width < shape.nodes), shape.nodes)
