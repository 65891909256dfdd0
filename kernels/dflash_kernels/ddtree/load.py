"""What SGLang 0.5.16 does on the host before it replays a graph, as device work on static buffers that a graph can hold.

Its graph runners copy a batch into their buffers and plan its attention before every replay: hundreds of microseconds
of Python around a few kernels, twice a step. The kernels depend on nothing that only the host knows, so they are captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor

from .hybrid import recurrent_of
from .prepare import StepBuffers


def replays_alone(model_runner: Any, runner: Any) -> bool:
    """Whether a replay needs static inputs and nothing else that ``ModelRunner.forward`` would have done around it."""
    args = model_runner.server_args
    return isinstance(runner.backend, FullCudaGraphBackend) and not (
        runner.enable_two_batch_overlap
        or runner.enable_pdmux
        or runner.ragged_verify_mode
        or runner.require_gathered_buffer
        or runner.is_encoder_decoder
        or runner.use_ngram_embedding
        or runner.buffer_registry.has_slot("num_token_non_padded")
        or model_runner.model_config.model_is_mrope
        or runner.buffer_registry.has_slot("mamba_track_indices")
        or recurrent_of(model_runner.attn_backend) is not None
        or model_runner.hisparse_coordinator is not None
        or model_runner.device_timer is not None
        or model_runner.canary_manager is not None
        or model_runner.msprobe_debugger is not None
        or model_runner.eplb_manager is not None
        or model_runner.enable_elastic_ep
        or args.enable_lora
        or args.enable_return_routed_experts
        or args.enable_return_indexer_topk
        or args.expert_distribution_recorder_mode is not None
    )


def load_draft(runner: Any, info: Any, embed: Callable[[Tensor], Tensor], step: StepBuffers) -> None:
    """The drafter's inputs for a step, as many requests as ``step`` has rows: a captured size. Runs under capture.

    info: the draft pass's ``SpecInput``. embed: token ids int64 [bs, F] to [bs, F, H].
    """
    bs = step.cap
    embeds = embed(step.block_ids)
    runner.load_batch(
        ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=bs,
            input_ids=step.block_ids.flatten(),
            req_pool_indices=step.req_pool,
            seq_lens=step.prefix,
            out_cache_loc=step.draft_slots.reshape(-1),
            seq_lens_sum=0,
            seq_lens_cpu=step.seq_lens_cpu,
            positions=step.block_positions.reshape(-1),
            input_embeds=embeds.view(-1, embeds.shape[-1]),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
    )


def load_target(runner: Any, algorithm: Any, token_ids: Tensor, positions: Tensor, step: StepBuffers) -> None:
    """The target's inputs for trees int64 [bs, Q] at positions int64 [bs, Q]; the mask is in its buffer already.

    Runs under capture. algorithm: the server's ``SpeculativeAlgorithm``.
    """
    bs, nodes = token_ids.shape
    tokens = token_ids.reshape(-1)
    runner.load_batch(
        ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=bs,
            input_ids=tokens,
            req_pool_indices=step.req_pool,
            seq_lens=step.prefix,
            out_cache_loc=step.slots[:, :nodes].reshape(-1),
            seq_lens_sum=0,
            seq_lens_cpu=step.seq_lens_cpu,
            positions=positions.reshape(-1),
            spec_algorithm=algorithm,
            spec_info=DFlashVerifyInput(
                draft_token=tokens,
                positions=positions.reshape(-1),
                draft_token_num=nodes,
                custom_mask=None,
                capture_hidden_mode=CaptureHiddenMode.FULL,
            ),
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
    )
