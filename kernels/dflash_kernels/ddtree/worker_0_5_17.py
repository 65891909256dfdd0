"""The DDTREE worker for SGLang 0.5.17 and 0.5.18: that of 0.5.19 with the names of before.

DFLASH's worker still reads its block size from ``server_args`` here, and 0.5.17 configures the drafter from a copy of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from . import worker, worker_0_5_19

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2


class DDTreeWorker(worker_0_5_19.DDTreeWorker):
    """As its base."""

    @contextmanager
    def _as_drafter(self, server_args: ServerArgs) -> Iterator[ServerArgs]:
        nodes = server_args.speculative_num_draft_tokens
        # Past the guard against assignments to published arguments: they are as they were when the drafter is made.
        object.__setattr__(server_args, "speculative_num_draft_tokens", self.shape.block)
        try:
            with super()._as_drafter(server_args) as draft_args:
                yield draft_args
        finally:
            object.__setattr__(server_args, "speculative_num_draft_tokens", nodes)

    def _reserved(self, draft_input: DFlashDraftInputV2) -> Tensor | None:
        return worker.DDTreeWorker._reserved(self, draft_input)

    def _compact_bound(self, batch: ScheduleBatch, draft_input: DFlashDraftInputV2, lens: Tensor, out: Tensor) -> None:
        worker.DDTreeWorker._compact_bound(self, batch, draft_input, lens, out)
