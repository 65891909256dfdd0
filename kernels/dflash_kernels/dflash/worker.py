"""The DFLASH worker of SGLang 0.5.10.post1: its first generation, which is called with the scheduler's own batch.

Step: draft a block of F tokens in one pass; let the target see them; follow the target's own choices; hand the hidden
states of what was accepted to the drafter; finish requests here, as this generation's scheduler expects. Target and
drafter share slot numbers: a slot's target KV is valid exactly when its draft KV is, so the radix cache serves both.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.server_args import set_global_server_args_for_scheduler
from torch import Tensor

from ..accepted import Accepted
from ..ddtree.commit import Committed, commit_step
from ..ddtree.prepare import StepBuffers, prepare_step
from ..interpreter import skip_overflow_checks
from ..tree import Tree
from ..tree_mask import tree_mask_full, tree_positions
from ..verify import verify_tree
from .capture import drafter_of
from .chain import chain_tree
from .config import ARCHITECTURE
from .inputs import DFlashDraftInput, DFlashVerifyInput
from .model import DFlashDraftModel
from .slots import reserve

logger = logging.getLogger(__name__)


class DFlashWorker(TpModelWorker):
    """Owns the drafter; the target's worker is the scheduler's."""

    def __init__(self, server_args: Any, target_worker: Any, **ranks: Any) -> None:
        target = target_worker.model_runner
        self.drafter = drafter_of(server_args, target.model_config)
        self.nodes = int(server_args.speculative_num_draft_tokens)
        self.target_worker = target_worker
        _refuse_unproven(target)
        skip_overflow_checks()
        ModelRegistry.models[ARCHITECTURE] = DFlashDraftModel
        pools = target_worker.get_memory_pool()
        try:
            super().__init__(
                server_args=self._draft_args(server_args),
                pp_rank=0,
                is_draft_worker=True,
                req_to_token_pool=pools[0],
                token_to_kv_pool_allocator=pools[1],
                memory_pool_config=target.memory_pool_config,
                **ranks,
            )
        finally:
            # A ModelRunner publishes its arguments; the scheduler reads the target's.
            set_global_server_args_for_scheduler(server_args)
        self.server_args = server_args
        self.model_runner.model.attach(target.model, self.drafter)
        # Not before: a captured pass needs the target's embedding and head.
        self.model_runner.server_args.disable_cuda_graph = server_args.disable_cuda_graph
        self.model_runner.init_device_graphs()
        self._fill_draft_mask()
        if self.tp_rank == 0:
            logger.info("%s ready: %s", server_args.speculative_algorithm, self.describe())

    def describe(self) -> str:
        return f"draft block {self.drafter.block}, a chain of {self.drafter.depths} drafts."

    def _draft_args(self, server_args: Any) -> Any:
        """The arguments that the drafter's runner and its attention backend read: F where the server's say N."""
        args = copy.copy(server_args)
        args.speculative_num_draft_tokens = self.drafter.block
        args.context_length = self.target_worker.model_runner.model_config.context_len
        args.disable_cuda_graph = True
        args.skip_tokenizer_init = True
        args.kv_cache_dtype = "auto"
        args.moe_runner_backend = "auto"
        args.speculative_draft_model_quantization = None
        if args.speculative_draft_load_format is not None:
            args.load_format = args.speculative_draft_load_format
        return args

    def _fill_draft_mask(self) -> None:
        """A captured draft pass reads a mask, though its block sees everything: all ones, for good."""
        if self.model_runner.graph_runner is not None:
            self.model_runner.attn_backend.cuda_graph_custom_mask.fill_(1)

    def clear_cache_pool(self) -> None:
        """Slots are the target's to clear, and a slot's draft KV is rewritten with its target KV."""

    def forward_batch_generation(self, batch: Any, *_: Any, **__: Any) -> GenerationBatchResult:
        """batch: the ScheduleBatch; its lengths, requests and draft state are advanced here."""
        if batch.forward_mode.is_extend():
            return self._prefill(batch)
        if batch.forward_mode.is_idle():
            return self.target_worker.forward_batch_generation(batch.get_model_worker_batch())
        with torch.inference_mode():
            return self._decode(batch)

    def _prefill(self, batch: Any) -> GenerationBatchResult:
        work = batch.get_model_worker_batch()
        work.capture_hidden_mode = CaptureHiddenMode.FULL
        result = self.target_worker.forward_batch_generation(work)
        spans = [
            np.arange(first, first + count) for first, count in zip(batch.prefix_lens, batch.extend_lens, strict=True)
        ]
        positions = torch.from_numpy(np.concatenate(spans)).to(self.device, non_blocking=True)
        self._write_context(result.logits_output.hidden_states, positions, batch.out_cache_loc)
        result.logits_output.hidden_states = None
        batch.spec_info = DFlashDraftInput(result.next_token_ids.to(torch.int64))
        return GenerationBatchResult(
            logits_output=result.logits_output,
            next_token_ids=result.next_token_ids,
            can_run_cuda_graph=result.can_run_cuda_graph,
        )

    def _write_context(self, features: Tensor | None, positions: Tensor, slots: Tensor) -> None:
        if features is None:
            raise RuntimeError("the target returned no hidden states for the drafter")
        self.model_runner.model.write_context(features, positions, slots, self.model_runner.token_to_kv_pool)

    def _decode(self, batch: Any) -> GenerationBatchResult:
        block = self.drafter.block
        bs, prefix, bonus = len(batch.reqs), batch.seq_lens, batch.spec_info.bonus
        for req in batch.reqs:
            req.decode_batch_idx += 1
        reserve(batch, self.nodes)

        step = StepBuffers.empty(bs, block, self.nodes, self.device)
        prepare_step(
            bonus,
            prefix,
            batch.req_pool_indices,
            batch.req_to_token_pool.req_to_token,
            self.drafter.mask_token,
            step,
        )
        tree = self._grow(bonus, self._draft(batch, step.block_ids, step.block_positions, step.draft_slots))
        logits, features, graph = self._verify(batch, tree, step.slots)
        accepted = self._accept(batch, tree, logits)
        committed = commit_step(accepted, prefix, self.nodes)
        self._move(step.slots, accepted)
        # Rows behind a path fill slots that are not committed; the next step writes them again before anyone looks.
        self._write_context(
            features.index_select(0, committed.rows), step.block_positions.reshape(-1), step.draft_slots.reshape(-1)
        )
        return self._commit(batch, committed, graph)

    def _draft(self, batch: Any, block_ids: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """One pass over the blocks: logits [bs * (F - 1), vocab]."""
        runner = self.model_runner
        out = runner.forward(
            ForwardBatch(
                forward_mode=ForwardMode.TARGET_VERIFY,
                batch_size=len(batch.reqs),
                input_ids=block_ids.reshape(-1),
                req_pool_indices=batch.req_pool_indices,
                seq_lens=batch.seq_lens,
                seq_lens_cpu=batch.seq_lens_cpu,
                seq_lens_sum=batch.seq_lens_sum,
                out_cache_loc=slots.reshape(-1),
                positions=positions.reshape(-1),
                req_to_token_pool=runner.req_to_token_pool,
                token_to_kv_pool=runner.token_to_kv_pool,
                attn_backend=runner.attn_backend,
                spec_algorithm=batch.spec_algorithm,
                spec_info=DFlashVerifyInput(
                    self.drafter.block, custom_mask=None if runner.graph_runner is None else self._no_copy(runner)
                ),
                capture_hidden_mode=CaptureHiddenMode.NULL,
            )
        )
        logits: Tensor = out.logits_output.next_token_logits
        return logits[: len(batch.reqs) * self.drafter.depths]

    @staticmethod
    def _no_copy(runner: Any) -> Tensor:
        """An empty mask: the graph's own buffer is filled already and nothing is copied over it."""
        mask: Tensor = runner.attn_backend.cuda_graph_custom_mask
        return mask[:0]

    def _grow(self, bonus: Tensor, logits: Tensor) -> Tree:
        """What the target is asked about, from the drafter's logits [bs * (F - 1), vocab]."""
        return chain_tree(bonus, torch.argmax(logits, dim=-1).view(len(bonus), self.drafter.depths))

    def _needs_mask(self, graph: bool) -> bool:
        """The layers' own causal rule is a chain's; a graph reads a mask all the same."""
        return graph

    def _verify(self, batch: Any, tree: Tree, slots: Tensor) -> tuple[Tensor, Tensor, bool]:
        """The target over all nodes: logits [bs * N, vocab], hidden states [bs * N, features], whether a graph ran."""
        target = self.target_worker.model_runner
        prefix = batch.seq_lens
        batch.input_ids = tree.token_ids.reshape(-1).to(torch.int64)
        batch.out_cache_loc = slots.reshape(-1)
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        verify = DFlashVerifyInput(self.nodes, tree_positions(tree, prefix).reshape(-1), capture=True)
        batch.spec_info = verify
        try:
            forward = ForwardBatch.init_new(batch.get_model_worker_batch(), target)
        finally:
            batch.forward_mode = ForwardMode.DECODE
        graph = bool(target.device != "cpu" and target.graph_runner and target.graph_runner.can_run(forward))
        if self._needs_mask(graph):
            if graph:
                mask = target.attn_backend.cuda_graph_custom_mask
            else:
                bs, nodes = len(batch.reqs), self.nodes
                mask = torch.ones((batch.seq_lens_sum + bs * nodes) * nodes, dtype=torch.bool, device=self.device)
            tree_mask_full(tree, prefix, mask)
            verify.custom_mask = self._no_copy(target) if graph else mask
        result = self.target_worker.forward_batch_generation(None, forward_batch=forward, is_verify=True)
        out = result.logits_output
        return out.next_token_logits, out.hidden_states, result.can_run_cuda_graph

    def _accept(self, batch: Any, tree: Tree, logits: Tensor) -> Accepted:
        """The path of the target's own choices: its arg-max, or its samples when a request samples."""
        sampling, depths = batch.sampling_info, self.drafter.depths
        if sampling.logit_bias is not None:
            logits = logits + sampling.logit_bias.repeat_interleave(self.nodes, dim=0)
        return verify_tree(tree, logits, sampling, batch.seq_lens, depths)

    def _move(self, slots: Tensor, accepted: Accepted) -> None:
        """A chain's accepted KV lies in order already."""

    def _commit(self, batch: Any, committed: Committed, graph: bool) -> GenerationBatchResult:
        """Appends the tokens to their requests, up to the one that ends a request, and advances the batch."""
        # The step's only copy to the host.
        rows = torch.cat([committed.tokens, committed.lens.unsqueeze(1)], dim=1).tolist()
        tokens, kept_drafts = [], []
        for req, row in zip(batch.reqs, rows, strict=True):
            drafts, kept = row[-1] - 1, 0
            for token in row[: row[-1]]:
                req.output_ids.append(token)
                kept += 1
                req.check_finished()
                if req.finished():
                    break
            req.kv_committed_len += kept
            req.spec_verify_ct += 1
            req.spec_accepted_tokens += drafts
            req.update_spec_acceptance_histogram(drafts)
            tokens += row[:kept]
            kept_drafts.append(kept - 1)
        batch.seq_lens = committed.seq_lens
        batch.seq_lens_cpu = batch.seq_lens_cpu + torch.tensor([row[-1] for row in rows])
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        batch.spec_info = DFlashDraftInput(committed.bonus)
        return GenerationBatchResult(
            next_token_ids=torch.tensor(tokens, device=self.device),
            num_accepted_tokens=sum(kept_drafts),
            accept_length_per_req_cpu=kept_drafts,
            accept_lens=committed.lens,
            can_run_cuda_graph=graph,
        )


def _refuse_unproven(target: Any) -> None:
    """Stop the start where a draft would be verified wrongly and plausibly.

    Raises:
        RuntimeError: another attention backend, recurrent layers, a sliding window, or multimodal positions.
    """
    backend = type(target.attn_backend).__name__
    window = target.sliding_window_size
    reasons = {
        f"its attention backend is {backend}, not TritonAttnBackend": backend != "TritonAttnBackend",
        "it has recurrent layers": target.mambaish_config is not None,
        f"it has sliding-window attention (window {window})": bool(target.is_hybrid_swa) or (window or 0) > 0,
        "its positions are multimodal (M-RoPE)": bool(target.model_is_mrope),
        "it uses multi-head latent attention": bool(target.use_mla_backend),
    }
    wrong = [reason for reason, yes in reasons.items() if yes]
    if wrong:
        raise RuntimeError(f"DFLASH and DDTREE do not serve this target: {'; '.join(wrong)}")
