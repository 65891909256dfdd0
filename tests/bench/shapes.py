"""Models of a published size without its weights: SGLang fills them at random. For step times, not for acceptance."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "32b": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
}
"""What Qwen3 of that size has (its published config.json); 8 KV heads of 128 and 151936 tokens in each."""
DUMMY = ["--load-format", "dummy"]


def make_pair(shape: str, tokenizer: Path, folder: Path) -> tuple[Path, Path]:
    """Folders of a target and of a five-layer drafter with blocks of 16; ``tokenizer``: a model folder with one."""
    common = {
        "model_type": "qwen3",
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
        "rope_theta": 1000000.0,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        **SHAPES[shape],
    }
    layers = common["num_hidden_layers"]
    taps = [1 + i * (layers - 4) // 4 for i in range(5)]
    drafter = {
        **common,
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 5,
        "block_size": 16,
        "num_target_layers": layers,
        "layer_types": ["full_attention"] * 5,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": taps},
    }
    made = []
    for name, config in (("target", {**common, "architectures": ["Qwen3ForCausalLM"]}), ("drafter", drafter)):
        into = folder / f"{shape}-{name}"
        into.mkdir(parents=True, exist_ok=True)
        (into / "config.json").write_text(json.dumps(config, indent=1))
        for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            if (tokenizer / file).exists():
                shutil.copy(tokenizer / file, into / file)
        made.append(into)
    return made[0], made[1]
