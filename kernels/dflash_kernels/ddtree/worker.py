"""The DDTREE worker: a DFLASH drafter, a tree instead of a chain, one verify pass. As it stands, for SGLang 0.5.16.

Step (arXiv 2604.12989, section 3): draft a block of F tokens in one pass; keep the K best tokens of each depth; grow the
tree of the Q most probable prefixes; let the target see every node once under the tree's mask; follow the target's own
choices from the root; move the accepted path's KV to the front; hand its hidden states to the drafter.

What another generation of SGLang's DFLASH worker has otherwise is in the methods under "Seams", which an adapter
(``worker_0_5_23``) overrides; the step itself is here alone.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.dflash_utils import apply_dflash_verify_logits_adjustments
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor

from ..accepted import Accepted
from ..build_tree import build_tree
from ..tree import Tree
from ..tree_mask import tree_mask_full, tree_positions
from ..verify_greedy import verify_greedy
from ..verify_sampling import coins_from_seeds, verify_sampling
from .commit import commit_step
from .draft_head import DraftHead
from .graphs import GraphTails
from .move import AcceptedMover
from .prepare import prepare_step
from .shape import TreeShape

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


@dataclass
class _StepBuffers:
    """Reused buffers of one step, ``cap`` requests wide."""

    block_ids: Tensor  # int64 [cap, F]
    block_positions: Tensor  # int64 [cap, F]
    draft_slots: Tensor  # int64 [cap, F]
    slots: Tensor  # int64 [cap, max(F, Q)]
    seq_lens_cpu: Tensor  # int32 [cap], host


def _touches_logits(sampling: Any) -> bool:
    """Whether a request of the batch samples, or changes logits before they are judged: the walk in the graph saw neither."""
    if sampling is None:
        return False
    penalizer = getattr(sampling, "penalizer_orchestrator", None)
    return (
        not sampling.is_all_greedy
        or bool(sampling.has_custom_logit_processor)
        or getattr(sampling, "acc_linear_penalties", None) is not None
        or (penalizer is not None and bool(penalizer.is_required))
        or getattr(sampling, "vocab_mask", None) is not None
        or getattr(sampling, "grammar_mask", None) is not None
        or getattr(sampling, "logit_bias", None) is not None
    )


def _refuse_unproven(model_runner: Any) -> None:
    """Stop the start where a tree would be verified wrongly and plausibly.

    Raises:
        RuntimeError: an attention backend that ignores the tree mask, recurrent layers, or a sliding window, whose
            distances the tree's flat order does not give.
    """
    backend = type(model_runner.attn_backend).__name__
    if backend != "TritonAttnBackend":
        raise RuntimeError(f"DDTREE verifies trees with TritonAttnBackend only; this target runs {backend}")
    window = model_runner.sliding_window_size
    if window is not None and window > 0:
        raise RuntimeError(f"DDTREE does not serve targets with sliding-window attention (window {window}); use DFLASH")


def shape_of(speculative: Any) -> TreeShape:
    """The step's sizes from what ``handle_server_args`` left in the server's speculative arguments."""
    return TreeShape(
        block=int(speculative.speculative_dflash_block_size),
        nodes=int(speculative.speculative_num_draft_tokens),
        topk=int(speculative.speculative_ddtree_topk),
    )


class DDTreeWorker(DFlashWorkerV2):
    """Drafts like DFLASH, verifies a tree. Prefill and everything around a decode step are DFLASH's own."""

    def __init__(self, server_args: ServerArgs, **kwargs: Any) -> None:
        self.shape = shape_of(self._speculative(server_args))
        with self._as_drafter(server_args) as draft_args:
            super().__init__(server_args=draft_args, **kwargs)
        self.server_args = server_args
        self._buffers: _StepBuffers | None = None
        self._head = DraftHead(self.target_worker.model_runner.model, self.shape)
        self._mover = AcceptedMover(self.target_worker.model_runner)
        self._tails: GraphTails | None = None
        if self._rank() == 0:
            logger.info(
                "DDTREE ready: draft block %d, tree of %d nodes, top-%d per depth.",
                self.shape.block,
                self.shape.nodes,
                self.shape.topk,
            )

    def _maybe_build_draft_sampler(self) -> None:
        """The folded sampler keeps arg-maxima only; a tree needs the K best with their log-probs."""
        return None

    def init_attention_backends(self) -> None:
        """Also hooks the walk into the target's graphs, which the scheduler captures next."""
        super().init_attention_backends()
        _refuse_unproven(self.target_worker.model_runner)
        self._mover.bind()
        decode = self._graph_config().decode
        if decode.backend == Backend.DISABLED:
            return
        self._tails = GraphTails(self.shape, self._head, max(decode.bs), self.device)
        self.target_worker.model_runner.capture_tail_hooks.append(self._tails.verify_tail)

    def init_cuda_graphs(self) -> None:
        """Also hooks tree and mask into the drafter's graphs; the target's are captured by now."""
        if self._tails is not None:
            self._tails.mask = self._mask_buffer()
            self.draft_model_runner.capture_tail_hooks.append(self._tails.draft_tail)
        super().init_cuda_graphs()

    def _step_buffers(self, bs: int) -> _StepBuffers:
        if self._buffers is None or self._buffers.block_ids.shape[0] < bs:
            cap = max(bs, 2 * (0 if self._buffers is None else self._buffers.block_ids.shape[0]))

            def ints(width: int) -> Tensor:
                return torch.zeros((cap, width), dtype=torch.int64, device=self.device)

            self._buffers = _StepBuffers(
                block_ids=ints(self.shape.block),
                block_positions=ints(self.shape.block),
                draft_slots=ints(self.shape.block),
                slots=ints(self.shape.reserved),
                seq_lens_cpu=torch.zeros(cap, dtype=torch.int32),
            )
        b = self._buffers
        return _StepBuffers(
            b.block_ids[:bs], b.block_positions[:bs], b.draft_slots[:bs], b.slots[:bs], b.seq_lens_cpu[:bs]
        )

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish: Any = None, **later: Any
    ) -> GenerationBatchResult:
        """Prefill and idle steps are DFLASH's; a decode step drafts, verifies and commits a tree.

        ``later``: what later releases pass on to DFLASH; a tree serves no grammar and no pipeline, so it needs none of it.
        Result: ``next_token_ids`` [bs * F], each request's accepted tokens in front; ``accept_lens`` [bs], bonus included.
        """
        decode = not (batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle())
        if not decode or batch.spec_info is None:
            return super().forward_batch_generation(batch, on_publish, **later)
        if not isinstance(batch.spec_info, DFlashDraftInputV2):
            raise RuntimeError(
                f"DDTREE expects DFLASH's draft state on the batch, got {type(batch.spec_info).__name__}"
            )
        return self._decode_step(batch, batch.spec_info, on_publish)

    def _decode_step(
        self, batch: ScheduleBatch, draft_input: DFlashDraftInputV2, on_publish: Any
    ) -> GenerationBatchResult:
        bs, shape = len(batch.seq_lens), self.shape
        prefix = batch.seq_lens
        if prefix.is_cuda:
            prefix.record_stream(torch.cuda.current_stream())
        step = self._step_buffers(bs)
        prepare_step(
            draft_input.bonus_tokens,
            prefix,
            batch.req_pool_indices,
            self.model_runner.req_to_token_pool.req_to_token,
            int(self._mask_token_id),
            step.block_ids,
            step.block_positions,
            step.draft_slots,
            step.slots,
        )
        tree, positions, in_graph = self._draft(batch, draft_input, step)
        logits_output, can_run_cuda_graph = self._verify(batch, draft_input, step, tree, positions, in_graph)
        sampling = batch.sampling_info
        if (
            in_graph
            and can_run_cuda_graph
            and self._tails is not None
            and self._tails.walks
            and not _touches_logits(sampling)
        ):
            accepted = self._tails.accepted(bs)
        else:
            accepted = self._accept(batch, tree, logits_output.next_token_logits)
        committed = commit_step(accepted, prefix, shape.nodes)
        if on_publish is not None:
            on_publish(committed.seq_lens)

        # Destinations come from the slots gathered before the draft: nothing reads req_to_token after the verify, so the
        # scheduler may write it as early as for a chain.
        self._mover.move(step.slots, accepted)
        hidden = logits_output.hidden_states
        if hidden is None:
            raise RuntimeError("DDTREE verify needs the target's hidden states and got none")
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden.index_select(0, committed.rows),
            cache_loc=step.draft_slots.reshape(-1),
            cache_loc_2d=step.draft_slots,
            positions=step.block_positions.reshape(-1),
            commit_lens=committed.lens,
        )
        logits_output.hidden_states = None
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=committed.tokens.reshape(-1),
            accept_lens=committed.lens,
            can_run_cuda_graph=can_run_cuda_graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=committed.bonus, new_seq_lens=committed.seq_lens
            ),
            speculative_num_draft_tokens=shape.block,
            new_seq_lens=committed.seq_lens,
        )

    def _draft(
        self, batch: ScheduleBatch, draft_input: DFlashDraftInputV2, step: _StepBuffers
    ) -> tuple[Tree, Tensor, bool]:
        """One drafter pass over the block: the tree, its positions int64 [bs, Q], whether they are the graph's own buffers."""
        bs, block = step.block_ids.shape
        embeds = self._embed(step.block_ids)
        prefix = batch.seq_lens
        host = step.seq_lens_cpu
        if self.use_compact_draft_cache:
            draft_lens = self._compute_compact_draft_seq_lens(prefix)
            self._compact_bound(batch, draft_input, draft_lens, host)
            self._ensure_draft_block_buffers(bs)
            self._rebuild_compact_draft_cache(
                req_pool_indices=batch.req_pool_indices,
                prefix_lens=prefix,
                draft_prefix_lens=draft_lens,
                verify_out_cache_loc_2d=step.draft_slots,
                bs=bs,
                block_size=block,
            )
        else:
            draft_lens = prefix
            host.copy_(self._host_bound(batch, draft_input, block))
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=bs,
            input_ids=step.block_ids.flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=draft_lens,
            out_cache_loc=step.draft_slots.reshape(-1),
            seq_lens_sum=int(host.sum()),
            seq_lens_cpu=host,
            positions=step.block_positions.reshape(-1),
            input_embeds=embeds.view(-1, embeds.shape[-1]),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        self._bind_draft(forward_batch)
        with torch.inference_mode(), self._draft_ranks():
            out = self.draft_model_runner.forward(forward_batch)
            if out.can_run_graph and self._tails is not None and self._tails.drafts:
                return *self._tails.tree(bs), True
            hidden = out.logits_output.hidden_states
            if hidden is None:
                raise RuntimeError("the DFLASH draft model returned no hidden states")
            logprobs, ids = self._head(hidden.view(bs, block, -1))
        tree = build_tree(logprobs, ids, draft_input.bonus_tokens, self.shape.nodes)
        return tree, tree_positions(tree, prefix), False

    def _host_bound(self, batch: ScheduleBatch, draft_input: DFlashDraftInputV2, width: int) -> Tensor:
        """Upper bound of prefix + ``width`` per request, int [bs] on the host, without asking the device.

        The host's lengths lag one step under overlap; planning may only over-estimate.
        """
        if batch.seq_lens_cpu is not None:
            return batch.seq_lens_cpu + width
        reserved = self._reserved(draft_input)
        return batch.seq_lens.cpu() + width if reserved is None else reserved

    def _verify(
        self,
        batch: ScheduleBatch,
        draft_input: DFlashDraftInputV2,
        step: _StepBuffers,
        tree: Tree,
        positions: Tensor,
        in_graph: bool,
    ) -> tuple[Any, bool]:
        """The target over all nodes: logits [bs * Q, vocab] and hidden states [bs * Q, features], node by node."""
        nodes = self.shape.nodes
        bs = tree.token_ids.shape[0]
        prefix = batch.seq_lens
        batch.out_cache_loc = step.slots[:, :nodes].reshape(-1)
        saved = batch.seq_lens_cpu, batch.seq_lens_sum
        bound = self._host_bound(batch, draft_input, nodes)
        batch.seq_lens_cpu = bound
        batch.seq_lens_sum = int(bound.sum())
        verify_input = DFlashVerifyInput(
            draft_token=tree.token_ids.reshape(-1).to(torch.int64),
            positions=positions.reshape(-1),
            draft_token_num=nodes,
            custom_mask=self._mask(tree, prefix, (batch.seq_lens_sum + bs * nodes) * nodes, in_graph),
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
        forward_batch, can_run_cuda_graph = verify_input.prepare_for_verify(batch, self.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = saved
        out = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )
        return out.logits_output, can_run_cuda_graph

    def _mask(self, tree: Tree, prefix: Tensor, numel: int, in_graph: bool) -> Tensor:
        """The mask where the backend will read it: its captured buffer when it has one, else a fresh one of ``numel``."""
        buffer = self._mask_buffer()
        if buffer is None:
            buffer = torch.ones(numel, dtype=torch.bool, device=prefix.device)
        if not (in_graph and self._tails is not None and self._tails.mask is buffer):
            tree_mask_full(tree, prefix, buffer)
        return buffer

    def _accept(self, batch: ScheduleBatch, tree: Tree, logits: Tensor) -> Accepted:
        """Walk the tree along the target's own choices: its arg-max, or its samples when a request samples."""
        sampling = batch.sampling_info
        if sampling is not None:
            apply_dflash_verify_logits_adjustments(
                next_token_logits=logits, sampling_info=sampling, draft_token_num=self.shape.nodes
            )
        if sampling is None or sampling.is_all_greedy:
            choice = torch.argmax(logits, dim=-1).view(tree.token_ids.shape)
            return verify_greedy(tree, choice, self.shape.depths)
        depths = self.shape.depths
        if sampling.sampling_seed is None:
            coins = torch.rand((len(batch.seq_lens), depths + 1), device=logits.device)
        else:
            coins = coins_from_seeds(sampling.sampling_seed, batch.seq_lens, depths)
        return verify_sampling(
            tree,
            logits,
            sampling.temperatures.view(-1),
            sampling.top_ks,
            sampling.top_ps,
            sampling.min_ps,
            coins,
            depths,
            filtered=sampling.need_top_k_sampling or sampling.need_top_p_sampling or sampling.need_min_p_sampling,
        )

    # Seams

    def _speculative(self, server_args: ServerArgs) -> Any:
        """Where the resolved speculative arguments are."""
        return server_args

    def _graph_config(self) -> Any:
        """The resolved configuration of captured graphs."""
        return self.server_args.cuda_graph_config

    def _rank(self) -> int:
        return int(self.ps.tp_rank)

    @contextmanager
    def _as_drafter(self, server_args: ServerArgs) -> Iterator[ServerArgs]:
        """Server arguments in which the drafter's runner and its attention backend see F where the server has Q."""
        draft_args = copy.deepcopy(server_args)
        draft_args.override(
            "ddtree.draft", speculative_num_draft_tokens=self.shape.block, speculative_ddtree_budget=self.shape.block
        )
        yield draft_args

    def _draft_ranks(self) -> AbstractContextManager[Any]:
        """The ranks among which a drafter's pass is split, when they are not the target's."""
        return nullcontext()

    def _embed(self, block_ids: Tensor) -> Tensor:
        """int64 [bs, F] to the drafter's input [bs, F, H]: it has no embeddings of its own."""
        embeds: Tensor = self.target_worker.model_runner.model.get_input_embeddings()(block_ids)
        return embeds

    def _reserved(self, draft_input: DFlashDraftInputV2) -> Tensor | None:
        """int [bs] on the host: KV slots that each request has."""
        lens: Tensor | None = draft_input.reserved_seq_lens_cpu
        return lens

    def _compact_bound(self, batch: ScheduleBatch, draft_input: DFlashDraftInputV2, lens: Tensor, out: Tensor) -> None:
        """Fill ``out``, int [bs] on the host, with upper bounds of the windowed drafter's lengths ``lens``."""
        self._fill_compact_seq_lens_cpu_bound(
            batch_seq_lens_cpu=batch.seq_lens_cpu,
            reserved_seq_lens_cpu=self._reserved(draft_input),
            draft_prefix_lens=lens,
            out=out,
        )

    def _bind_draft(self, forward_batch: ForwardBatch) -> None:
        """Complete the drafter's batch."""

    def _mask_buffer(self) -> Tensor | None:
        """The target backend's captured mask, flat uint8; None while nothing is captured."""
        buffer: Tensor | None = self.target_worker.model_runner.attn_backend.get_verify_buffers_to_fill_after_draft()[0]
        return buffer
