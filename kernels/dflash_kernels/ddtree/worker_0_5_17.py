"""The DDTREE worker for SGLang 0.5.17 and 0.5.18: that of 0.5.19 with the names of before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from . import worker, worker_0_5_19

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2


class DDTreeWorker(worker_0_5_19.DDTreeWorker):
    """As its base."""

    def _reserved(self, draft_input: DFlashDraftInputV2) -> Tensor | None:
        return worker.DDTreeWorker._reserved(self, draft_input)

    def _compact_bound(self, batch: ScheduleBatch, draft_input: DFlashDraftInputV2, lens: Tensor, out: Tensor) -> None:
        worker.DDTreeWorker._compact_bound(self, batch, draft_input, lens, out)
