"""The DDTREE worker for SGLang 0.5.19 to 0.5.21: the step of :mod:`.worker`, the seams of these releases.

Resolved arguments are in the process's configuration, not on ``server_args``, and a drafter has no copy of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
from torch import Tensor

from . import worker

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2


class DDTreeWorker(worker.DDTreeWorker):
    """As its base; a drafter whose depths depend on each other is refused."""

    switches_width = False
    captures_loading = False
    serves_hybrids = False

    def __init__(self, server_args: ServerArgs, **kwargs: Any) -> None:
        super().__init__(server_args, **kwargs)
        # What the draft model has, whatever its checkpoint's configuration called it. Not every release has every part.
        kinds = {"selector": "a candidate selector", "lilicorr": "a LiLiCorr head", "_is_domino": "a Domino head"}
        for attribute, kind in kinds.items():
            if getattr(self, attribute, None):
                raise RuntimeError(f"DDTREE draws each depth by itself; this drafter has {kind}. Use DFLASH with it")

    def _speculative(self, server_args: ServerArgs) -> Any:
        return get_spec()

    def _graph_config(self) -> Any:
        return get_exec().graph.cuda_graph_config

    def _rank(self) -> int:
        return int(get_parallel().tp_rank)

    @contextmanager
    def _as_drafter(self, server_args: ServerArgs) -> Iterator[ServerArgs]:
        # Afterwards the drafter's runner asks the algorithm for its width: see the patch ddtree-draft-width.
        with get_spec().override(speculative_num_draft_tokens=self.shape.block):
            yield server_args

    def _embed(self, block_ids: Tensor) -> Tensor:
        embeds = super()._embed(block_ids)
        scale: float = getattr(self, "_noise_embed_scale", 1.0)
        return embeds if scale == 1.0 else embeds * scale

    def _reserved(self, draft_input: DFlashDraftInputV2) -> Tensor | None:
        lens: Tensor | None = draft_input.nxt_kv_lens_cpu
        return lens

    def _compact_bound(self, batch: ScheduleBatch, draft_input: DFlashDraftInputV2, lens: Tensor, out: Tensor) -> None:
        self._fill_compact_seq_lens_cpu_bound(
            batch_seq_lens_cpu=batch.seq_lens_cpu,
            nxt_kv_lens_cpu=self._reserved(draft_input),
            draft_prefix_lens=lens,
            out=out,
        )

    def _mask_buffer(self, backend: Any) -> Tensor | None:
        mask = backend.verify_mask
        return None if mask is None else mask.buffer

    def prewarm_sampling(self) -> Any:
        """Rehearses the target's sampling alone: a tree is verified without DFLASH's probability matrices."""
        return self.target_worker.model_runner.prewarm_sampling()
