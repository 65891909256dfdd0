"""Make the tiny pair: ``python -m tests.tiny_pair.train --out templates/tiny-pair``.

Writes the byte-level tokenizer, the target (trained on ``data.py``) and the drafter (trained on the target's features
of text that the target itself wrote and of text it was trained on). Takes about a quarter of an hour on two idle CPU
cores, or a minute with ``--device cuda``, with which the shipped weights were made. Seeds are fixed; other devices,
thread counts and versions of PyTorch give other last digits, and so other weights.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.tiny_pair import data
from tests.tiny_pair.model import IM_END, IM_START, MASK, PAD, VOCAB, Drafter, Target, chat, encode, load_target

ROW = 384
FEATURE_LAYERS = (0, 1, 2)
BLOCK = 8
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def common_config(layers: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "layer_types": ["full_attention"] * layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": layers,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": IM_END,
        "pad_token_id": PAD,
        "use_cache": True,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def target_config() -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"], **common_config(4)}


def drafter_config() -> dict[str, Any]:
    own = {"mask_token_id": MASK, "target_layer_ids": list(FEATURE_LAYERS)}
    return {
        "architectures": ["DFlashDraftModel"],
        **common_config(2),
        "block_size": BLOCK,
        "num_target_layers": 4,
        "dflash_config": own,
    }


def byte_letters() -> dict[int, str]:
    """The printable letter that byte-level tokenizers write for each byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {b: chr(b) for b in plain}
    letters |= {b: chr(256 + n) for n, b in enumerate(b for b in range(256) if b not in letters)}
    return letters


def write_tokenizer(folder: Path) -> None:
    specials = {"<|im_start|>": IM_START, "<|im_end|>": IM_END, "<|MASK|>": MASK, "<|pad|>": PAD}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": text, **flags} for text, number in specials.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: byte for byte, letter in sorted(byte_letters().items())},
            "merges": [],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "mask_token": "<|MASK|>",
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer.json", tokenizer)
    write_json(folder / "tokenizer_config.json", settings)


def write_json(file: Path, value: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, indent=1, ensure_ascii=True) + "\n")


def write_model(folder: Path, model: nn.Module, config: dict[str, Any], prefix: str) -> None:
    write_json(folder / "config.json", config)
    weights = {prefix + name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def document(rng: random.Random) -> list[int]:
    question, answer = data.document(rng)
    lead = chat(question) if rng.random() < 0.85 else []
    return [*lead, *encode(answer), IM_END, *encode("\n")]


def rows(rng: random.Random, count: int) -> Tensor:
    """``count`` rows [count, ROW], each beginning with a whole document."""
    out = []
    for _ in range(count):
        row: list[int] = []
        while len(row) < ROW:
            row += document(rng)
        out.append(row[:ROW])
    return torch.tensor(out)


def orthogonal(matrices: Tensor) -> Tensor:
    """Nearly orthogonal factors of ``matrices`` [n, rows, columns]: the Newton-Schulz iteration of Muon, in float32."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / (x.square().sum(dim=(1, 2), keepdim=True).sqrt() + 1e-7)
    for _ in range(5):
        square = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x.transpose(1, 2) if tall else x


class Trainer:
    """Muon for the matrices of the layers, Adam for the rest; a warm-up and a cosine to a twentieth.

    Muon is written out because the one of PyTorch iterates in bfloat16, which takes longer than the whole step on a
    plain CPU.
    """

    def __init__(self, model: nn.Module, steps: int, rate: float) -> None:
        self.model, self.steps, self.rate, self.at, self.began = model, steps, rate, 0, time.monotonic()
        groups: dict[torch.Size, list[nn.Parameter]] = {}
        others = []
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                groups.setdefault(parameter.shape, []).append(parameter)
            else:
                others.append(parameter)
        self.matrices = [(group, torch.zeros(len(group), *shape)) for shape, group in groups.items()]
        self.adam = torch.optim.Adam(others, lr=rate, betas=(0.9, 0.95))

    @torch.no_grad()
    def step(self, loss: Tensor, label: str) -> None:
        with torch.enable_grad():
            torch.autograd.backward(loss)
        scale = min(1.0, (self.at + 1) / 20) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * self.at / self.steps)))
        for group, momentum in self.matrices:
            gradient = torch.stack([p.grad for p in group if p.grad is not None])
            momentum.lerp_(gradient, 0.05)
            update = orthogonal(gradient.lerp(momentum, 0.95))
            size = self.rate * scale * max(1.0, update.shape[1] / update.shape[2]) ** 0.5
            for parameter, change in zip(group, update, strict=True):
                parameter.mul_(1 - 0.01 * size).add_(change, alpha=-size)
        for settings in self.adam.param_groups:
            settings["lr"] = 0.3 * self.rate * scale
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        self.at += 1
        if self.at % 20 == 0 or self.at == self.steps:
            print(
                f"{label} {self.at}/{self.steps} loss {loss.item():.4f} {time.monotonic() - self.began:.0f} s",
                flush=True,
            )


def start(model: nn.Module, layers: int) -> None:
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            last = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=0.04 / math.sqrt(2 * layers) if last else 0.04)


def train_target(steps: int, batch: int) -> Target:
    rng = random.Random(1)
    target = Target(target_config())
    start(target, target.shape.layers)
    trainer = Trainer(target, steps, rate=0.02)
    for _ in range(steps):
        tokens = rows(rng, batch)
        logits, _ = target(tokens)
        trainer.step(F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()), "target")
    return target.eval()


@torch.no_grad()
def written(target: Target, count: int, rng: random.Random) -> tuple[Tensor, Tensor]:
    """``count`` greedy answers of the target: rows [count, ROW] and the length of each, prompt and stop included."""
    prompts = []
    for _ in range(count):
        question, answer = data.document(rng)
        prompts.append(chat(question) if rng.random() < 0.6 else encode(answer[: rng.randint(1, len(answer))]))
    tokens = torch.full((count, ROW), PAD)
    given = torch.tensor([min(len(p), ROW) for p in prompts])
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt[:ROW])
    lengths = torch.full((count,), ROW)
    cache: list[tuple[Tensor, Tensor]] = []
    done = torch.zeros(count, dtype=torch.bool)
    for at in range(ROW - 1):
        see = torch.ones(1, 1, 1, at + 1, dtype=torch.bool)
        logits, _ = target(tokens[:, at : at + 1], positions=torch.tensor([[at]]), mask=see, cache=cache)
        free = (at + 1 >= given) & ~done
        tokens[free, at + 1] = logits[free, 0].argmax(-1)
        ended = free & (tokens[:, at + 1] == IM_END)
        lengths[ended] = at + 2
        done |= ended
        if bool(done.all()):
            break
    return tokens, lengths


def train_drafter(target: Target, steps: int, batch: int, anchors: int, own_rows: int) -> Drafter:
    rng = random.Random(2)
    drafter = Drafter(drafter_config())
    start(drafter, drafter.shape.layers)
    began = time.monotonic()
    chunks = [written(target, 128, rng) for _ in range(own_rows // 128)]
    own, lengths = torch.cat([c[0] for c in chunks]), torch.cat([c[1] for c in chunks])
    print(f"the target wrote {int(lengths.sum())} tokens in {time.monotonic() - began:.0f} s", flush=True)
    trainer = Trainer(drafter, steps, rate=0.02)
    slot = torch.arange(BLOCK)
    weight = torch.exp(-(slot[1:] - 1) / 4.0)
    block_of = torch.arange(anchors * BLOCK) // BLOCK
    same_block = block_of[:, None] == block_of[None]
    generator = torch.Generator(torch.get_default_device()).manual_seed(3)
    for _ in range(steps):
        chosen = torch.randint(len(own), (batch // 2,), generator=generator)
        fresh = rows(rng, batch - len(chosen))
        tokens = torch.cat([own[chosen], fresh])
        length = torch.cat([lengths[chosen], torch.full((len(fresh),), ROW)])
        with torch.no_grad():
            _, features = target(tokens, FEATURE_LAYERS)
        anchor = 1 + (torch.rand(batch, anchors, generator=generator) * (length[:, None] - 2)).long()
        positions = (anchor[..., None] + slot).flatten(1)
        bonus = tokens.gather(1, anchor)
        block = torch.full((batch, anchors, BLOCK), MASK)
        block[..., 0] = bonus
        past = torch.arange(ROW)[None, None] < anchor.repeat_interleave(BLOCK, 1)[..., None]
        mask = torch.cat([past, same_block.expand(batch, -1, -1)], -1)[:, None]
        hidden = drafter(features, target.embed_tokens(block.flatten(1)).detach(), positions, mask)
        logits = target.head(hidden).view(batch, anchors, BLOCK, -1)[:, :, 1:]
        place = anchor[..., None] + slot[1:]
        valid = place < length[:, None, None]
        labels = tokens.gather(1, place.clamp(max=ROW - 1).flatten(1)).view_as(place)
        losses = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view_as(place)
        scaled = weight * valid
        trainer.step((losses * scaled).sum() / scaled.sum(), "drafter")
        target.zero_grad(set_to_none=True)
    return drafter.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--target-steps", type=int, default=900)
    parser.add_argument("--drafter-steps", type=int, default=500)
    parser.add_argument(
        "--keep-target", action="store_true", help="train the drafter for the target that lies in --out already"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_default_device(args.device)
    torch.manual_seed(0)
    folder = args.out / "target"
    if not args.keep_target:
        target = train_target(args.target_steps, batch=12)
        write_model(folder, target, target_config(), "model.")
        write_json(folder / "generation_config.json", {"eos_token_id": IM_END, "pad_token_id": PAD, "do_sample": False})
        write_tokenizer(folder)
    target = load_target(folder)
    torch.manual_seed(1)
    drafter = train_drafter(target, args.drafter_steps, batch=8, anchors=24, own_rows=256)
    write_model(args.out / "drafter", drafter, drafter_config(), "")
    (args.out / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data.prompts()))


if __name__ == "__main__":
    main()
