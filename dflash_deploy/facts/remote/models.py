"""Model and draft folders: configuration, shards, tokenizer. Weights are not read beyond their headers."""

from __future__ import annotations

import json
import os
import re
import struct
from typing import Any

from dflash_deploy.facts.remote.tools import list_dir, read_bytes

LFS = b"version https://git-lfs"
CONFIG_KEYS = (
    "architectures",
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "torch_dtype",
    "dtype",
    "block_size",
    "num_target_layers",
    "dflash_config",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "tie_word_embeddings",
    "quantization_config",
    "transformers_version",
    "auto_map",
    "bos_token_id",
    "eos_token_id",
)
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "tokenizer_config.json",
    "tekken.json",
    "tiktoken.model",
)


def load_json(path: str, limit: int = 64 << 20) -> tuple[Any, str | None]:
    """(value, problem)"""
    data = read_bytes(path, limit)
    if data is None:
        return None, "unreadable"
    if data.startswith(LFS):
        return None, "is a Git LFS pointer"
    try:
        return json.loads(data.decode("utf-8-sig")), None
    except (ValueError, RecursionError) as error:
        return None, "is not JSON: " + str(error)[:120]


def shard(path: str) -> dict[str, Any]:
    """Size of one weight file and what is wrong with it, from its first bytes and its header's own arithmetic."""
    found: dict[str, Any] = {"name": os.path.basename(path), "size": None, "problem": None}
    try:
        found["size"] = os.stat(path).st_size
    except OSError:
        found["problem"] = "missing"
        return found
    head = read_bytes(path, 8) or b""
    if (read_bytes(path, 200) or b"").startswith(LFS):
        found["problem"] = "is a Git LFS pointer"
    elif path.endswith(".safetensors"):
        if len(head) < 8:
            found["problem"] = "truncated: %d bytes" % len(head)
            return found
        length = struct.unpack("<Q", head)[0]
        if length > 100 << 20 or length + 8 > found["size"]:
            found["problem"] = "header of %d bytes in a file of %d" % (length, found["size"])
            return found
        text = (read_bytes(path, 8 + length) or b"")[8:].decode("utf-8", "replace")
        ends = [int(end) for end in re.findall(r'"data_offsets"\s*:\s*\[\s*\d+\s*,\s*(\d+)\s*\]', text)]
        expected = 8 + length + max(ends or [0])
        if expected != found["size"]:
            found["problem"] = "%d bytes, its header says %d" % (found["size"], expected)
    elif not found["size"]:
        found["problem"] = "empty"
    return found


def weights(path: str) -> dict[str, Any]:
    """Weight files: those that the index names, else those that are there."""
    index, problem = None, None
    names: list[str] = []
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if os.path.lexists(os.path.join(path, name)):
            value, problem = load_json(os.path.join(path, name))
            index = name
            mapping = value.get("weight_map") if isinstance(value, dict) else None
            if isinstance(mapping, dict):
                names = sorted({str(item) for item in mapping.values() if isinstance(item, str)})
            elif problem is None:
                problem = "has no weight_map"
            break
    present = [
        name
        for name in list_dir(path)
        if name.endswith((".safetensors", ".bin", ".gguf", ".pt")) and not name.startswith("training_args")
    ]
    # A name in the index must not lead out of the folder.
    listed = [name for name in names if os.path.basename(name) == name]
    files = [shard(os.path.join(path, name)) for name in (listed or present)[:2000]]
    numbered: dict[tuple[str, int], set[int]] = {}
    for name in present:
        match = re.match(r"(.*)-(\d{5})-of-(\d{5})\.", name)
        if match:
            numbered.setdefault((match.group(1), int(match.group(3))), set()).add(int(match.group(2)))
    absent = [
        "%s-%05d-of-%05d" % (stem, i, total)
        for (stem, total), have in numbered.items()
        for i in range(1, min(total, 2000) + 1)
        if i not in have
    ]
    return {
        "index": index,
        "index_problem": problem,
        "files": files,
        "absent_by_number": absent[:20],
        "total_bytes": sum(f["size"] or 0 for f in files),
    }


def tokenizer(path: str) -> dict[str, Any]:
    """Tokenizer files, and how many tokens tokenizer.json really holds."""
    found: dict[str, Any] = {"files": {}, "vocab_entries": None, "problem": None}
    for name in TOKENIZERS:
        place = os.path.join(path, name)
        if os.path.isfile(place):
            pointer = (read_bytes(place, 200) or b"").startswith(LFS)
            found["files"][name] = "lfs pointer" if pointer else os.path.getsize(place)
    if isinstance(found["files"].get("tokenizer.json"), int):
        value, problem = load_json(os.path.join(path, "tokenizer.json"))
        found["problem"] = problem
        if isinstance(value, dict):
            model = value.get("model")
            vocab = model.get("vocab") if isinstance(model, dict) else None
            found["vocab_entries"] = len(vocab) if isinstance(vocab, (dict, list)) else 0
    return found


def model_facts(path: str) -> dict[str, Any]:
    """Everything that can be told of a model folder without loading it."""
    if not os.path.isdir(path):
        return {"path": path, "exists": False}
    value, problem = load_json(os.path.join(path, "config.json"), 8 << 20)
    config: dict[str, Any] = {}
    if isinstance(value, dict):
        text = value.get("text_config")
        config = {key: value[key] for key in CONFIG_KEYS if key in value}
        if isinstance(text, dict):
            # A multimodal target: the language model's numbers are the ones that a drafter meets.
            config["text_config"] = {key: text[key] for key in CONFIG_KEYS if key in text}
        if isinstance(config.get("quantization_config"), dict):
            config["quantization_config"] = {
                key: config["quantization_config"].get(key) for key in ("quant_method", "fmt", "bits")
            }
    elif problem is None:
        problem = "is not an object"
    return {
        "path": path,
        "exists": True,
        "config": config,
        "config_problem": problem,
        "weights": weights(path),
        "tokenizer": tokenizer(path),
        "code": [name for name in list_dir(path) if name.endswith(".py")][:20],
    }
