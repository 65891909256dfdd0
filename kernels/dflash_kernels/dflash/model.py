"""The DFlash draft model, from SGLang's own Qwen3 decoder layers.

A drafter has no embedding and no head: tokens go in through the target's embedding and come out through its head. It
keeps keys and values of the *target's* hidden states, one row for each committed token (``write_context``); a pass
sees those rows and, in both directions, its own block ``[bonus, MASK, ...]``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.models.qwen3 import Qwen3DecoderLayer
from torch import Tensor, nn

from .config import ARCHITECTURE, DFlashConfig

STACKED = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""Tensors of the checkpoint that SGLang's layers keep as parts of one."""

NOT_OURS = ("embed_tokens.", "lm_head.", "rotary_emb.")
"""Tensors that some checkpoints carry and a drafter does not read: the target's are used."""


class DFlashDraftModel(nn.Module):
    """Draft pass over blocks, and the projection of target features into the drafter's KV cache."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        if quant_config is not None:
            raise ValueError("a quantised DFlash drafter is not served")
        self.config = config
        own = getattr(config, "dflash_config", None) or {}
        layers = own.get("target_layer_ids") or getattr(config, "target_layer_ids", None)
        features = config.num_hidden_layers if layers is None else len(layers)
        self.fc = ReplicatedLinear(features * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(config, layer_id=at, prefix=f"layers.{at}") for at in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        for layer in self.layers:
            layer.self_attn.attn.attn_type = AttentionType.ENCODER_ONLY
        self._drafter: DFlashConfig | None = None
        self._embed: nn.Module
        self._head: Tensor

    def attach(self, target: nn.Module, drafter: DFlashConfig) -> None:
        """Borrow the target's embedding and head; a draft pass is possible from now on.

        Raises:
            RuntimeError: the head is not one dense matrix.
        """
        head: Any = getattr(target, "lm_head", None)
        weight = getattr(head, "weight", None)
        if weight is None or not torch.is_floating_point(weight):
            raise RuntimeError(
                f"DFLASH drafts through the target's lm_head and needs it dense; it is {type(head).__name__}"
            )
        shard = getattr(head, "shard_indices", None)
        if shard is not None and int(shard.num_added_elements):
            raise RuntimeError("DFLASH does not draft from an lm_head with added vocabulary")
        rows = int(weight.shape[0]) if shard is None else int(shard.num_org_elements)
        embed = target.get_input_embeddings() if hasattr(target, "get_input_embeddings") else target.model.embed_tokens
        # Past nn.Module's bookkeeping: the target's modules are not parts of this one.
        self.__dict__.update(_drafter=drafter, _embed=embed, _head=weight[:rows])

    @torch.no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any, **_: Any) -> LogitsProcessorOutput:
        """input_ids, positions: int [bs * F]. Logits [bs * (F - 1), vocab]: what slots 1 to F - 1 predict."""
        drafter = self._drafter
        if drafter is None:
            raise RuntimeError("the draft model is not attached to a target yet")
        hidden = self._embed(input_ids)
        if drafter.embedding_scale != 1.0:
            hidden = hidden * drafter.embedding_scale
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, forward_batch, residual)
        hidden, _ = self.norm(hidden, residual)
        slots = hidden.view(-1, drafter.block, hidden.shape[-1])[:, 1:].reshape(-1, hidden.shape[-1])
        logits = torch.matmul(slots.to(self._head.dtype), self._head.T)
        if drafter.output_multiplier != 1.0:
            logits = logits * drafter.output_multiplier
        if drafter.softcap:
            logits = torch.tanh(logits / drafter.softcap) * drafter.softcap
        return LogitsProcessorOutput(next_token_logits=logits)

    @torch.no_grad()
    def write_context(self, features: Tensor, positions: Tensor, slots: Tensor, pool: Any) -> None:
        """Keys and values of committed tokens into the drafter's ``pool``.

        features: [T, features * hidden], the target's hidden states. positions, slots: int64 [T].
        """
        hidden, _ = self.fc(features.to(self.fc.weight.dtype))
        hidden = self.hidden_norm(hidden)
        for layer in self.layers:
            attention = layer.self_attn
            wide, narrow, head = attention.q_size, attention.kv_size, attention.head_dim
            projection = attention.qkv_proj
            bias = projection.bias
            keys, values = F.linear(hidden, projection.weight[wide:], None if bias is None else bias[wide:]).split(
                [narrow, narrow], dim=-1
            )
            keys = attention.k_norm(keys.reshape(-1, head)).view(-1, narrow)
            # The rotation turns queries as well, and there are none: what comes out beside the keys is dropped.
            _, keys = attention.rotary_emb(positions, torch.zeros_like(keys), keys)
            pool.set_kv_buffer(
                attention.attn, slots, keys.view(-1, narrow // head, head), values.reshape(-1, narrow // head, head)
            )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raises ValueError for a tensor that the model has no place for, and for one that the checkpoint lacks."""
        parameters = dict(self.named_parameters())
        missing, unknown = set(parameters), []
        for full_name, tensor in weights:
            name = full_name.removeprefix("model.")
            if name.startswith(NOT_OURS) or ".rotary_emb." in name:
                continue
            shard: tuple[Any, ...] = ()
            part = next((part for part in STACKED if f".{part}." in name), None)
            if part is not None:
                whole, which = STACKED[part]
                name, shard = name.replace(part, whole), (which,)
            parameter = parameters.get(name)
            if parameter is None:
                unknown.append(full_name)
                continue
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor, *shard)
            missing.discard(name)
        if unknown or missing:
            raise ValueError(
                f"the drafter's weights do not fit {ARCHITECTURE}: unknown {sorted(unknown)[:4]}, "
                f"missing {sorted(missing)[:4]} ({len(unknown)} and {len(missing)} in all)"
            )


EntryClass = DFlashDraftModel
