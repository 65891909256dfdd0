"""The tiny pair in plain PyTorch: a Qwen3- or Llama-shaped target and its DFlash drafter, as in their HF folders.

Conventions, those of the published DFlash drafters and of SGLang 0.5.16 (``srt/models/dflash.py``):

- feature of a token = the residual stream after each of ``target_layer_ids`` (before the final norm), concatenated;
- context = ``hidden_norm(fc(feature))``; every drafter layer projects it with its own ``k_proj``/``v_proj``, K gets
  ``k_norm`` and RoPE at the token's own position; the context has no queries;
- block = [bonus, MASK, ...] embedded by the target, at the positions that follow the context, attending to all of the
  context and, in both directions, to the block;
- slot k >= 1 of the block predicts the token k places after the bonus, through the target's head; slot 0 nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

Cache = list[tuple[Tensor, Tensor]]

# Byte b is token b; the rest is special. The vocabulary is padded to a multiple of 64, as servers pad it.
IM_START, IM_END, MASK, PAD, VOCAB = 256, 257, 258, 259, 320


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(tokens: list[int]) -> str:
    """Text of the byte tokens; special tokens are left out, broken UTF-8 is replaced."""
    return bytes(t for t in tokens if t < 256).decode(errors="replace")


def chat(question: str) -> list[int]:
    """The tokens that the chat template of the target makes of one user message."""
    return [IM_START, *encode(f"user\n{question}"), IM_END, *encode("\n"), IM_START, *encode("assistant\n")]


@dataclass(frozen=True)
class Shape:
    """What a config.json says about a decoder."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    vocab: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(f"rope type {kind!r} is not supported here")
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            inner=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            eps=config["rms_norm_eps"],
            theta=float(rope.get("rope_theta") or config["rope_theta"]),
            vocab=config["vocab_size"],
        )


def rotary(positions: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin of ``positions`` [B, T], each [B, 1, T, head_dim], half-split ("neox") order."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = positions[..., None].float() * (1.0 / shape.theta**steps)
    angles = torch.cat([angles, angles], -1)[:, None]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    half = x.shape[-1] // 2
    return x * turn[0] + torch.cat([-x[..., half:], x[..., :half]], -1) * turn[1]


class Attention(nn.Module):
    def __init__(self, shape: Shape, qk_norm: bool, bias: bool) -> None:
        super().__init__()
        self.shape = shape
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, wide, bias=bias)
        self.k_proj = nn.Linear(shape.hidden, narrow, bias=bias)
        self.v_proj = nn.Linear(shape.hidden, narrow, bias=bias)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, shape.eps) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(shape.head_dim, shape.eps) if qk_norm else nn.Identity()

    def keys(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """K (normed, rotated) and V of ``x`` [B, T, hidden], each [B, kv_heads, T, head_dim]."""
        split = (*x.shape[:2], self.shape.kv_heads, self.shape.head_dim)
        k = self.k_norm(self.k_proj(x).view(split)).transpose(1, 2)
        return rotate(k, turn), self.v_proj(x).view(split).transpose(1, 2)

    def forward(
        self, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None, before: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Any]:
        """``before``: K and V that stand before those of ``x``.

        ``mask`` [B or 1, 1, T, keys], True = may see; None = causal.
        """
        q = self.q_norm(self.q_proj(x).view(*x.shape[:2], self.shape.heads, self.shape.head_dim)).transpose(1, 2)
        k, v = self.keys(x, turn)
        if before is not None:
            k, v = torch.cat([before[0], k], 2), torch.cat([before[1], v], 2)
        share = self.shape.heads // self.shape.kv_heads
        out = F.scaled_dot_product_attention(
            rotate(q, turn),
            k.repeat_interleave(share, 1),
            v.repeat_interleave(share, 1),
            attn_mask=mask,
            is_causal=mask is None,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2)), (k, v)


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape, qk_norm: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape, qk_norm, bias)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.mlp = Mlp(shape)

    def forward(
        self, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None, before: Any = None
    ) -> tuple[Tensor, Any]:
        seen, kv = self.self_attn(self.input_layernorm(x), turn, mask, before)
        x = x + seen
        return x + self.mlp(self.post_attention_layernorm(x)), kv


class Target(nn.Module):
    """A causal language model with Qwen3's or Llama's layers."""

    def __init__(self, config: dict[str, Any], qk_norm: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.config, self.shape = config, Shape.of(config)
        self.embed_tokens = nn.Embedding(self.shape.vocab, self.shape.hidden)
        self.layers = nn.ModuleList(Layer(self.shape, qk_norm, bias) for _ in range(self.shape.layers))
        self.norm = nn.RMSNorm(self.shape.hidden, self.shape.eps)
        self.lm_head = (
            None if config.get("tie_word_embeddings") else nn.Linear(self.shape.hidden, self.shape.vocab, bias=False)
        )

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab] of final hidden states, the target's or a drafter's."""
        return F.linear(hidden, self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight)

    def forward(
        self,
        tokens: Tensor,
        feature_layers: tuple[int, ...] = (),
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, T, vocab] and features [B, T, len(feature_layers) * hidden] of ``tokens`` [B, T].

        ``cache`` holds K and V of the earlier tokens, one pair a layer, and is extended in place; ``positions`` then
        must be given.
        """
        positions = torch.arange(tokens.shape[1])[None] if positions is None else positions
        turn = rotary(positions, self.shape)
        x = self.embed_tokens(tokens)
        features = []
        for at, layer in enumerate(self.layers):
            before = cache[at] if cache is not None and at < len(cache) else None
            x, kv = layer(x, turn, mask, before)
            if cache is not None:
                cache[at : at + 1] = [kv]
            if at in feature_layers:
                features.append(x)
        return self.head(self.norm(x)), torch.cat(features, -1) if features else x[..., :0]


class Drafter(nn.Module):
    """A DFlash drafter: no embedding and no head of its own."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.shape = config, Shape.of(config)
        own = config["dflash_config"]
        self.feature_layers = tuple(own["target_layer_ids"])
        self.mask_token = int(own["mask_token_id"])
        self.block_size = int(own.get("block_size") or config["block_size"])
        self.fc = nn.Linear(len(self.feature_layers) * self.shape.hidden, self.shape.hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(self.shape.hidden, self.shape.eps)
        self.layers = nn.ModuleList(Layer(self.shape) for _ in range(self.shape.layers))
        self.norm = nn.RMSNorm(self.shape.hidden, self.shape.eps)

    def forward(self, features: Tensor, embedded: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Final hidden states [B, Q, hidden] of the block slots.

        ``features`` [B, T, F] of the tokens at positions 0..T-1; ``embedded`` [B, Q, hidden] and ``positions`` [B, Q]
        of the slots; ``mask`` [B or 1, 1, Q, T + Q], True = may see.
        """
        context = self.hidden_norm(self.fc(features))
        past = rotary(torch.arange(features.shape[1])[None], self.shape)
        turn = rotary(positions, self.shape)
        x = embedded
        for layer in self.layers:
            assert isinstance(layer, Layer)
            x, _ = layer(x, turn, mask, layer.self_attn.keys(context, past))
        hidden: Tensor = self.norm(x)
        return hidden


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and all weights, in float32."""
    config = json.loads((folder / "config.json").read_text())
    weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights.update(load_file(file))
    if not weights:
        raise FileNotFoundError(f"no *.safetensors in {folder}")
    return config, {name.removeprefix("model."): value.float() for name, value in weights.items()}


def load_target(folder: Path) -> Target:
    config, weights = read_folder(folder)
    first = "layers.0.self_attn."
    target = Target(config, qk_norm=first + "q_norm.weight" in weights, bias=first + "q_proj.bias" in weights)
    if target.lm_head is None:
        weights.pop("lm_head.weight", None)
    target.load_state_dict(weights)
    return target.eval()


def load_drafter(folder: Path) -> Drafter:
    config, weights = read_folder(folder)
    drafter = Drafter(config)
    drafter.load_state_dict(weights)
    return drafter.eval()
