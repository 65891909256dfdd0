"""A hybrid target (Qwen3-Next's architecture: GDN linear attention and full attention) and a DFlash drafter, at random.

Neither was trained, so the vocabulary is small: a tree that holds half of all tokens as the root's children gets half
of its first drafts accepted, and siblings below them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "vocab_size": 12,
}
"""For a CPU, whose interpreter needs a second for a tree in one layer: two GDN layers and two of full attention."""
QUARTER: dict[str, Any] = {
    **TINY,
    "hidden_size": 2048,
    "num_hidden_layers": 12,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
"""A quarter of the layers of Qwen3-Next-80B-A3B (its published config.json), and a few of its experts."""
NARROW: dict[str, Any] = {**QUARTER, "head_dim": 128}
"""For float32, in which SGLang's attention over heads of 256 does not fit the shared memory of an H200."""
SIZES = {"tiny": TINY, "quarter": QUARTER, "narrow": NARROW}


def target_config(size: str) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_act": "silu",
        "intermediate_size": 2 * SIZES[size]["hidden_size"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
        "dtype": "float32",
        **SIZES[size],
    }


def drafter_config(size: str, block: int = 8) -> dict[str, Any]:
    """Two layers, fed by three of the target's."""
    target = target_config(size)
    layers = target["num_hidden_layers"]
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": target["hidden_size"],
        "intermediate_size": target["intermediate_size"],
        "num_hidden_layers": 2,
        "num_attention_heads": target["num_attention_heads"],
        "num_key_value_heads": target["num_key_value_heads"],
        "head_dim": target["head_dim"],
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "layer_types": ["full_attention"] * 2,
        "vocab_size": target["vocab_size"],
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
        "dtype": "float32",
        "block_size": block,
        "num_target_layers": layers,
        "dflash_config": {
            "mask_token_id": target["vocab_size"] - 1,
            "target_layer_ids": [0, layers // 2 - 1, layers - 2],
        },
    }


class _Random:
    """Weights of one model, the same for the same seed."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype = dtype

    def matrix(self, out: int, into: int, gain: float = 1.0) -> Tensor:
        return (torch.randn(out, into, generator=self._generator) * gain * into**-0.5).to(self._dtype)

    def vector(self, size: int, mean: float = 0.0, deviation: float = 0.1) -> Tensor:
        return (mean + deviation * torch.randn(size, generator=self._generator)).to(self._dtype)


def _target(config: dict[str, Any], make: _Random) -> Iterator[tuple[str, Tensor]]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    heads, kv, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    v_heads, v_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    values = v_heads * v_dim
    yield "model.embed_tokens.weight", make.matrix(vocab, hidden, hidden**0.5)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        if (layer + 1) % config["full_attention_interval"] == 0:
            yield f"{at}.self_attn.q_proj.weight", make.matrix(2 * heads * dim, hidden)
            yield f"{at}.self_attn.k_proj.weight", make.matrix(kv * dim, hidden)
            yield f"{at}.self_attn.v_proj.weight", make.matrix(kv * dim, hidden)
            yield f"{at}.self_attn.o_proj.weight", make.matrix(hidden, heads * dim, 4.0)
            yield f"{at}.self_attn.q_norm.weight", make.vector(dim)
            yield f"{at}.self_attn.k_norm.weight", make.vector(dim)
        else:
            yield f"{at}.linear_attn.in_proj_qkvz.weight", make.matrix(2 * keys + 2 * values, hidden)
            yield f"{at}.linear_attn.in_proj_ba.weight", make.matrix(2 * v_heads, hidden)
            yield f"{at}.linear_attn.conv1d.weight", make.matrix(2 * keys + values, 4).unsqueeze(1)
            # A decay of a few percent a token: the state matters, and what was committed wrongly is not soon forgotten.
            yield f"{at}.linear_attn.A_log", make.vector(v_heads, -2.0)
            yield f"{at}.linear_attn.dt_bias", make.vector(v_heads)
            yield f"{at}.linear_attn.norm.weight", make.vector(v_dim, 1.0)
            yield f"{at}.linear_attn.out_proj.weight", make.matrix(hidden, values, 2.0)
        # Qwen3-Next's norms multiply by one plus their weight.
        yield f"{at}.input_layernorm.weight", make.vector(hidden)
        yield f"{at}.post_attention_layernorm.weight", make.vector(hidden)
        shared, routed = config["shared_expert_intermediate_size"], config["moe_intermediate_size"]
        yield f"{at}.mlp.gate.weight", make.matrix(config["num_experts"], hidden)
        yield f"{at}.mlp.shared_expert_gate.weight", make.matrix(1, hidden)
        names = [(f"experts.{expert}", routed) for expert in range(config["num_experts"])]
        for name, width in [*names, ("shared_expert", shared)]:
            yield f"{at}.mlp.{name}.gate_proj.weight", make.matrix(width, hidden)
            yield f"{at}.mlp.{name}.up_proj.weight", make.matrix(width, hidden)
            yield f"{at}.mlp.{name}.down_proj.weight", make.matrix(hidden, width)
    yield "model.norm.weight", make.vector(hidden)
    yield "lm_head.weight", make.matrix(vocab, hidden, 2.0)


def _drafter(config: dict[str, Any], make: _Random) -> Iterator[tuple[str, Tensor]]:
    hidden, width = config["hidden_size"], config["intermediate_size"]
    heads, kv, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    yield "fc.weight", make.matrix(hidden, len(config["dflash_config"]["target_layer_ids"]) * hidden)
    yield "hidden_norm.weight", make.vector(hidden, 1.0)
    # Small: a drafter that knows nothing had better say so, and the tree then holds most tokens at the first depths.
    yield "norm.weight", make.vector(hidden, 0.2, 0.02)
    for layer in range(config["num_hidden_layers"]):
        at = f"layers.{layer}"
        yield f"{at}.self_attn.q_proj.weight", make.matrix(heads * dim, hidden)
        yield f"{at}.self_attn.k_proj.weight", make.matrix(kv * dim, hidden)
        yield f"{at}.self_attn.v_proj.weight", make.matrix(kv * dim, hidden)
        yield f"{at}.self_attn.o_proj.weight", make.matrix(hidden, heads * dim)
        yield f"{at}.self_attn.q_norm.weight", make.vector(dim, 1.0)
        yield f"{at}.self_attn.k_norm.weight", make.vector(dim, 1.0)
        yield f"{at}.input_layernorm.weight", make.vector(hidden, 1.0)
        yield f"{at}.post_attention_layernorm.weight", make.vector(hidden, 1.0)
        yield f"{at}.mlp.gate_proj.weight", make.matrix(width, hidden)
        yield f"{at}.mlp.up_proj.weight", make.matrix(width, hidden)
        yield f"{at}.mlp.down_proj.weight", make.matrix(hidden, width)


def _tokenizer(folder: Path, vocab: int) -> None:
    """One word per token: requests and answers are token ids, but the server wants a tokenizer."""
    words = {f"w{token}": token for token in range(vocab)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": [],
                "normalizer": None,
                "pre_tokenizer": {"type": "Whitespace"},
                "post_processor": None,
                "decoder": None,
                "model": model,
            }
        )
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def make_hybrid_pair(
    folder: Path, size: str = "tiny", dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Path, Path]:
    """Folders of a target and its drafter under ``folder``, as checkpoints that SGLang loads."""
    made = []
    for offset, (name, config, weights) in enumerate(
        (("target", target_config(size), _target), ("drafter", drafter_config(size), _drafter))
    ):
        into = folder / name
        into.mkdir(parents=True, exist_ok=True)
        (into / "config.json").write_text(json.dumps(config, indent=1))
        tensors = dict(weights(config, _Random(seed + offset, dtype)))
        save_file(tensors, str(into / "model.safetensors"), metadata={"format": "pt"})
        _tokenizer(into, config["vocab_size"])
        made.append(into)
    return made[0], made[1]
