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
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner import DecodeCudaGraphRunner
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.dflash_utils import apply_dflash_verify_logits_adjustments
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor

from ..accepted import Accepted
from ..build_tree import build_tree
from ..ranks import Ranks
from ..tree import Tree
from ..tree_mask import tree_mask_full, tree_positions
from ..verify import verify_tree
from ..verify_greedy import verify_greedy
from .commit import Committed, commit_step
from .graphs import Append, StepGraphs
from .hybrid import (
    attention_of,
    commit_states,
    link,
    recurrent_of,
    refuse_chain_backend,
    refuse_wide_tree,
    take_no_links,
)
from .move import AcceptedMover
from .prepare import StepBuffers, prepare_step
from .shape import TreeShape, widths_of
from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


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


def _refuse_unproven(model_runner: Any, hybrids: bool) -> None:
    """Stop the start where a tree would be verified wrongly and plausibly.

    hybrids: whether the release's recurrent layers are known to follow a tree.

    Raises:
        RuntimeError: an attention backend that ignores the tree mask, recurrent layers that take the tree for a chain,
            or a sliding window, whose distances the tree's flat order does not give.
    """
    backend = model_runner.attn_backend
    if hybrids and recurrent_of(backend) is not None:
        refuse_chain_backend(backend)
        backend = attention_of(backend)
    name = type(backend).__name__
    if name != "TritonAttnBackend":
        raise RuntimeError(f"DDTREE verifies trees with TritonAttnBackend only; this target runs {name}")
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

    switches_width = True
    """Whether this release's target can be captured for several widths (proven by serving)."""
    captures_loading = True
    """Whether what this release does before a replay is known to be device work (:mod:`.load`)."""
    serves_hybrids = True
    """Whether this release's recurrent layers are known to follow a tree (:mod:`.hybrid`)."""

    def __init__(self, server_args: ServerArgs, **kwargs: Any) -> None:
        self.shape = shape_of(self._speculative(server_args))
        with self._as_drafter(server_args) as draft_args:
            super().__init__(server_args=draft_args, **kwargs)
        self.server_args = server_args
        if self.serves_hybrids:
            refuse_wide_tree(self.target_worker.model_runner, self.shape.nodes)
        self._recurrent = False
        self._step = StepBuffers.empty(1, self.shape.block, self.shape.reserved, self.device)
        self._ranks = Ranks(get_tp_group())
        self._vocabulary = Vocabulary(self.target_worker.model_runner.model, self.shape, self._ranks)
        self._mover = AcceptedMover(self.target_worker.model_runner)
        self._graphs: StepGraphs | None = None
        self._widths = widths_of(self._speculative(server_args), self.shape)
        if len(self._widths) > 1 and not self.switches_width:
            logger.warning("DDTREE auto is not proven on this release; every tree has %d nodes.", self.shape.nodes)
            self._widths = (self.shape.nodes,)
        if self._rank() == 0:
            logger.info(
                "DDTREE ready: draft block %d, tree of %s nodes, top-%d per depth.",
                self.shape.block,
                "/".join(map(str, self._widths)),
                self.shape.topk,
            )

    def _maybe_build_draft_sampler(self) -> None:
        """The folded sampler keeps arg-maxima only; a tree needs the K best with their log-probs."""
        return None

    def init_attention_backends(self) -> None:
        """Also hooks the walk into the target's graphs, which the scheduler captures next."""
        super().init_attention_backends()
        target = self.target_worker.model_runner
        _refuse_unproven(target, self.serves_hybrids)
        self._recurrent = recurrent_of(target.attn_backend) is not None
        if self._recurrent:
            take_no_links()
        self._mover.bind()
        decode = self._graph_config().decode
        if decode.backend == Backend.DISABLED:
            if len(self._widths) > 1:
                logger.warning("DDTREE auto needs captured graphs; every tree has %d nodes.", self.shape.nodes)
            return
        self._step = StepBuffers.empty(max(decode.bs), self.shape.block, self.shape.reserved, self.device)
        self._graphs = StepGraphs(self.shape, self._widths, self._vocabulary, self._ranks, self._step, self.device)
        target.capture_tail_hooks.append(self._graphs.verify_tail)

    def init_cuda_graphs(self) -> None:
        """Also captures what lies around the target's and the drafter's graphs; the target's are captured by now."""
        graphs = self._graphs
        if graphs is not None:
            self.draft_model_runner.capture_tail_hooks.append(graphs.draft_tail)
        super().init_cuda_graphs()
        if graphs is None:
            return
        began = time.monotonic()
        target = self.target_worker.model_runner
        for width in graphs.widths.values():
            if width.nodes == self.shape.nodes:
                width.backend, width.runner = target.attn_backend, target.decode_cuda_graph_runner
            else:
                width.backend, width.runner = self._target_graphs(width.nodes)
            width.mask = self._mask_buffer(width.backend)
        with torch.inference_mode():
            graphs.capture(
                self._mover.move, self._graph_append(), policy=len(self._widths) > 1, **self._captured_loading(graphs)
            )
            graphs.time_widths(self.draft_model_runner.decode_cuda_graph_runner)
        if self._rank() == 0:
            logger.info(
                "DDTREE graphs captured in %.1f s; loading captured: drafter %s, target %s.",
                time.monotonic() - began,
                graphs.loads_draft,
                graphs.loads_target,
            )
            if graphs.policy is not None:
                floor = {f"{w}x{bs}": round(1e3 * t, 2) for (w, bs), t in graphs.policy.floor.items()}
                logger.info("DDTREE auto, ms a step at least, by nodes and requests: %s", floor)

    def _captured_loading(self, graphs: StepGraphs) -> dict[str, Any]:
        """The loaders whose work may be captured, for :meth:`StepGraphs.capture`."""
        if not self.captures_loading:
            return {}
        from .load import load_draft, load_target, replays_alone

        target, drafter = self.target_worker.model_runner, self.draft_model_runner
        runner, algorithm = drafter.decode_cuda_graph_runner, target.spec_algorithm
        found: dict[str, Any] = {}
        if not self.use_compact_draft_cache and replays_alone(drafter, runner):
            found["load_draft"] = lambda step: load_draft(runner, self._draft_block_spec_info, self._embed, step)
        if all(replays_alone(target, width.runner) for width in graphs.widths.values()):
            found["load_target"] = lambda of, ids, positions, step: load_target(of, algorithm, ids, positions, step)
        return found

    def _target_graphs(self, nodes: int) -> tuple[Any, Any]:
        """Attention backend and graph runner of the target for trees of ``nodes`` nodes, as adaptive EAGLE makes them."""
        target = self.target_worker.model_runner
        args = self.server_args
        keep, workspace = args.speculative_num_draft_tokens, target.init_new_workspace
        args.override("ddtree.width", speculative_num_draft_tokens=nodes)
        try:
            backend = target._get_attention_backend(init_new_workspace=True)
            return backend, DecodeCudaGraphRunner(target, attn_backend=backend, speculative_num_draft_tokens=nodes)
        finally:
            target.init_new_workspace = workspace
            args.override("ddtree.width", speculative_num_draft_tokens=keep)

    def _graph_append(self) -> Append:
        """The drafter's KV append with a workspace of its own: a long prefill makes DFLASH's grow, and move."""
        helper = copy.copy(self._fused_kv_helper)
        if helper is not None:
            helper._workspace_capacity = 0
            helper._ensure_workspace(self._step.cap * self.shape.block, helper.flat_kv_weight_t.dtype)

        def append(hidden: Tensor, slots: Tensor, positions: Tensor, lens: Tensor) -> None:
            saved, self._fused_kv_helper = self._fused_kv_helper, helper
            try:
                self._append(hidden, slots, positions, lens)
            finally:
                self._fused_kv_helper = saved

        return append

    def _append(self, hidden: Tensor, slots: Tensor, positions: Tensor, lens: Tensor) -> None:
        """hidden: [bs * C, features] of the rows of slots and positions, int64 [bs, C]; the first lens[b] of each count."""
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden,
            cache_loc=slots.reshape(-1),
            cache_loc_2d=slots,
            positions=positions.reshape(-1),
            commit_lens=lens,
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
            if self._graphs is not None:
                self._graphs.interrupted()
            return super().forward_batch_generation(batch, on_publish, **later)
        if not isinstance(batch.spec_info, DFlashDraftInputV2):
            raise RuntimeError(
                f"DDTREE expects DFLASH's draft state on the batch, got {type(batch.spec_info).__name__}"
            )
        return self._decode_step(batch, batch.spec_info, on_publish)

    def _decode_step(
        self, batch: ScheduleBatch, draft_input: DFlashDraftInputV2, on_publish: Any
    ) -> GenerationBatchResult:
        bs = len(batch.seq_lens)
        prefix = batch.seq_lens
        if prefix.is_cuda:
            prefix.record_stream(torch.cuda.current_stream())
        graphs = self._graphs if self._graphs is not None and self._graphs.covers(bs) else None
        buffers = self._step
        if graphs is None and bs > buffers.cap:
            buffers = StepBuffers.empty(bs, self.shape.block, self.shape.reserved, self.device)
            if self._graphs is None:  # captured graphs keep the addresses of theirs
                self._step = buffers
        prepare_step(
            draft_input.bonus_tokens,
            prefix,
            batch.req_pool_indices,
            self.model_runner.req_to_token_pool.req_to_token,
            int(self._mask_token_id),
            buffers,
        )
        step = buffers.rows(bs)
        nodes = self.shape.nodes if graphs is None else graphs.choose(bs)
        tree, positions, planned = self._draft(batch, draft_input, step, nodes, graphs)
        if graphs is not None and planned and graphs.loads_target:
            # The plan has read req_to_token for the last time in this step: the scheduler may write it again.
            self._tell_read()
            logits_output, in_graph = LogitsProcessorOutput(next_token_logits=graphs.verify(nodes, bs)), True
        else:
            with nullcontext() if graphs is None else graphs.target(nodes, self.target_worker.model_runner):
                logits_output, in_graph = self._verify(batch, draft_input, step, tree, positions, planned)
        hidden = logits_output.hidden_states
        if graphs is not None and in_graph:
            if not planned or _touches_logits(batch.sampling_info):
                graphs.take(self._accept(batch, tree, logits_output.next_token_logits))
            committed = graphs.commit(nodes, bs)
            if self._recurrent:
                commit_states(self.target_worker.model_runner, graphs.accepted(bs))
        else:
            if hidden is None:
                raise RuntimeError("DDTREE verify needs the target's hidden states and got none")
            accepted = self._accept(batch, tree, logits_output.next_token_logits)
            committed = self._commit(step, accepted, hidden, nodes)
            if self._recurrent:
                commit_states(self.target_worker.model_runner, accepted)
        # Destinations come from the slots gathered before the draft: nothing reads req_to_token after the verify, so the
        # scheduler may write it as early as for a chain.
        if on_publish is not None:
            on_publish(committed.seq_lens)
        logits_output.hidden_states = None
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=committed.tokens.reshape(-1),
            accept_lens=committed.lens,
            can_run_cuda_graph=in_graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=committed.bonus, new_seq_lens=committed.seq_lens
            ),
            speculative_num_draft_tokens=self.shape.block,
            new_seq_lens=committed.seq_lens,
        )

    def _tell_read(self) -> None:
        """As SGLang's runner does before a replay, so that the scheduler need not wait for the whole pass."""
        event = torch.cuda.Event()
        event.record()
        self.target_worker.model_runner.war_fastpath_read_done_event = event

    def _commit(self, step: StepBuffers, accepted: Accepted, hidden: Tensor, nodes: int) -> Committed:
        """Move, append and tell the path, without captured graphs."""
        committed = commit_step(accepted, step.prefix, nodes)
        self._mover.move(step.slots, accepted)
        self._append(hidden.index_select(0, committed.rows), step.draft_slots, step.block_positions, committed.lens)
        return committed

    def _draft(
        self,
        batch: ScheduleBatch,
        draft_input: DFlashDraftInputV2,
        step: StepBuffers,
        nodes: int,
        graphs: StepGraphs | None,
    ) -> tuple[Tree, Tensor, bool]:
        """One drafter pass over the block: the tree, its positions int64 [bs, nodes], whether a graph laid them out.

        A tree of one node needs no draft.
        """
        bs, block = step.block_ids.shape
        if graphs is not None and nodes == 1:
            return *graphs.plan(nodes, bs), True
        if graphs is not None and graphs.loads_draft:
            graphs.draft(self.draft_model_runner.decode_cuda_graph_runner, bs)
            return *graphs.plan(nodes, bs), True
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
            if out.can_run_graph and graphs is not None:
                return *graphs.plan(nodes, bs), True
            hidden = out.logits_output.hidden_states
            if hidden is None:
                raise RuntimeError("the DFLASH draft model returned no hidden states")
            logprobs, ids = self._vocabulary.draft(hidden.view(bs, block, -1))
        tree = build_tree(logprobs, ids, draft_input.bonus_tokens, nodes)
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
        step: StepBuffers,
        tree: Tree,
        positions: Tensor,
        planned: bool,
    ) -> tuple[Any, bool]:
        """The target over all nodes: logits [bs * Q, vocab] and hidden states [bs * Q, features], node by node."""
        bs, nodes = tree.token_ids.shape
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
            custom_mask=self._mask(tree, prefix, (batch.seq_lens_sum + bs * nodes) * nodes, planned),
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
        if self._recurrent:
            link(verify_input, tree)
        forward_batch, can_run_cuda_graph = verify_input.prepare_for_verify(batch, self.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = saved
        out = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )
        return out.logits_output, can_run_cuda_graph

    def _mask(self, tree: Tree, prefix: Tensor, numel: int, planned: bool) -> Tensor:
        """The mask where the backend will read it: its captured buffer when it has one, else a fresh one of ``numel``."""
        buffer = self._mask_buffer(self.target_worker.model_runner.attn_backend)
        if buffer is None:
            buffer = torch.ones(numel, dtype=torch.bool, device=prefix.device)
        elif planned:
            return buffer
        return tree_mask_full(tree, prefix, buffer)

    def _accept(self, batch: ScheduleBatch, tree: Tree, logits: Tensor) -> Accepted:
        """Walk the tree along the target's own choices: its arg-max, or its samples when a request samples."""
        sampling = batch.sampling_info
        if not _touches_logits(sampling):
            return verify_greedy(tree, self._vocabulary.argmax(logits).view(tree.token_ids.shape), self.shape.depths)
        logits = self._vocabulary.whole(logits)
        if sampling is not None:
            apply_dflash_verify_logits_adjustments(
                next_token_logits=logits, sampling_info=sampling, draft_token_num=tree.num_nodes
            )
        return verify_tree(tree, logits, sampling, batch.seq_lens, self.shape.depths, self._ranks.same)

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
            "ddtree.draft",
            speculative_num_draft_tokens=self.shape.block,
            speculative_ddtree_budget=self.shape.block,
            speculative_eagle_topk=1,
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

    def _mask_buffer(self, backend: Any) -> Tensor | None:
        """The captured mask of a backend of the target, flat uint8; None while nothing is captured."""
        buffer: Tensor | None = attention_of(backend).get_verify_buffers_to_fill_after_draft()[0]
        return buffer
