"""The DDTREE worker for SGLang 0.5.22: that of 0.5.19; a forward pass is told its KV slots by a plan."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from sglang.srt.speculative.spec_utils import draft_tp_context
from torch import Tensor

from . import worker_0_5_19

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2


class DDTreeWorker(worker_0_5_19.DDTreeWorker):
    """As its base."""

    def _draft_ranks(self) -> AbstractContextManager[Any]:
        ranks: AbstractContextManager[Any] = draft_tp_context(self.draft_owns_attention)
        return ranks

    def _compact_bound(self, batch: ScheduleBatch, draft_input: DFlashDraftInputV2, lens: Tensor, out: Tensor) -> None:
        self._fill_compact_seq_lens_cpu_bound(
            batch_seq_lens_cpu=batch.seq_lens_cpu, nxt_kv_lens_cpu=self._reserved(draft_input), out=out
        )

    def _bind_draft(self, forward_batch: ForwardBatch) -> None:
        reader = self.draft_model_runner.kv_index_translator
        plan = reader.plan(
            req_pool_indices=forward_batch.req_pool_indices,
            seq_lens=forward_batch.seq_lens,
            seq_lens_cpu=forward_batch.seq_lens_cpu,
            write_virtual=forward_batch.out_cache_loc,
            read_extent=self.shape.block,
        )
        plan.bind(forward_batch, reader)
        forward_batch.global_num_token_non_padded_cpu = forward_batch.batch_size * self.shape.block
