"""The DDTREE worker for SGLang 0.5.23: that of 0.5.22; the drafter may be split among other ranks than the target."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_utils import draft_tp_context

from . import worker_0_5_22

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


class DDTreeWorker(worker_0_5_22.DDTreeWorker):
    """As its base."""

    def __init__(self, server_args: ServerArgs, **kwargs: Any) -> None:
        # Refused by DFLASH itself in earlier releases.
        if get_parallel().attn_dp_enabled:
            raise RuntimeError("DDTREE does not run with data-parallel attention; use DFLASH, or no attention replicas")
        super().__init__(server_args, **kwargs)

    def _draft_ranks(self) -> AbstractContextManager[Any]:
        ranks: AbstractContextManager[Any] = draft_tp_context(self.draft_parallel_layout)
        return ranks

    def _defer_target_verify_gather(self) -> None:
        """Every node's logits are wanted whole: DFLASH would let a rank keep its part and ask for an arg-max."""
        return None
