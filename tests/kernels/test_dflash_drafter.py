"""The parts of our DFLASH that need no SGLang: which drafters are served, which requests, and a chain as a tree."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from dflash_kernels.dflash.capture import LayerOutputs  # noqa: E402
from dflash_kernels.dflash.chain import chain_tree  # noqa: E402
from dflash_kernels.dflash.config import DFlashConfig, default_target_layers, read_config  # noqa: E402
from dflash_kernels.dflash.request import refusal  # noqa: E402
from dflash_kernels.tree_mask import tree_mask_dense, tree_positions  # noqa: E402
from dflash_kernels.verify_greedy import verify_greedy  # noqa: E402

PAIR = Path(__file__).resolve().parents[2] / "templates" / "tiny-pair"


def config(part: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((PAIR / part / "config.json").read_text())
    return found


def test_the_shipped_drafter() -> None:
    assert read_config(config("drafter"), config("target")) == DFlashConfig(8, 258, (0, 1, 2))


def test_published_forms() -> None:
    """Fields at the top or in dflash_config; absent ones have the published defaults."""
    target = {"num_hidden_layers": 36, "hidden_size": 2560, "vocab_size": 151936}
    drafter = {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 5,
        "hidden_size": 2560,
        "block_size": 16,
        "dflash_config": {"mask_token_id": 151669},
    }
    assert read_config(drafter, target) == DFlashConfig(16, 151669, (1, 9, 17, 25, 33))
    own = {"mask_token_id": 5, "block_size": 10, "target_layer_ids": [1, 3], "final_logit_softcapping": 30.0}
    got = read_config({**drafter, "dflash_config": {**own, "input_embedding_scale": 50.6}}, target)
    assert got == DFlashConfig(10, 5, (1, 3), embedding_scale=50.6, softcap=30.0)
    without = {key: value for key, value in drafter.items() if key != "block_size"}
    assert read_config(without, target).block == 16
    assert default_target_layers(1, 30) == (15,) and default_target_layers(5, 30) == (1, 8, 14, 20, 27)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({"dflash_config": {"mask_token_id": 258, "selector_rank": 256, "selector_top_k": 16}}, "candidate selector"),
        ({"dflash_config": {"mask_token_id": 258, "conv_kernel_size": 4}}, "dynamic convolutions"),
        ({"projector_type": "domino"}, "Domino"),
        ({"dflash_config": {"mask_token_id": 258, "lilicorr_enabled": True}}, "LiLiCorr"),
        ({"is_causal": True}, "is_causal"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_attention"),
        ({"block_size": 17}, "block_size is 17"),
        ({"dflash_config": {"mask_token_id": 320}}, "mask_token_id is 320"),
        ({"dflash_config": {"mask_token_id": 258, "target_layer_ids": [1, 3]}}, "target_layer_ids [1, 3]"),
        ({"num_target_layers": 36}, "made for a target of 36 layers"),
        ({"hidden_size": 64}, "hidden_size is 64"),
    ],
)
def test_what_is_not_served(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match="not served") as caught:
        read_config({**config("drafter"), **change}, config("target"))
    assert named in str(caught.value)


def request(**asked: Any) -> Any:
    sampling = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "json_schema": None,
        "regex": None,
    }
    own = {
        "return_logprob": False,
        "return_hidden_states": False,
        "custom_logit_processor": None,
        "input_embeds": None,
        "lora_id": None,
    }
    sampling.update({key: value for key, value in asked.items() if key in sampling})
    own.update({key: value for key, value in asked.items() if key in own})
    return SimpleNamespace(sampling_params=SimpleNamespace(**sampling), **own)


def test_refused_requests() -> None:
    assert refusal(request(), "DFLASH") is None
    said = refusal(request(return_logprob=True, min_new_tokens=2, regex="a+"), "DDTREE")
    assert said is not None and said.startswith("Invalid request: DDTREE does not serve ")
    assert "logprobs" in said and "min_new_tokens" in said and "grammar" in said and "presence" not in said


def test_a_chain_is_a_tree() -> None:
    """Lower triangular mask, positions in a row, and verification that accepts up to the first difference."""
    bonus, drafts = torch.tensor([7, 9]), torch.tensor([[1, 2, 3], [4, 5, 6]])
    tree = chain_tree(bonus, drafts)
    assert tree.token_ids.tolist() == [[7, 1, 2, 3], [9, 4, 5, 6]]
    assert torch.equal(tree_mask_dense(tree, backend="naive")[0], torch.ones(4, 4).tril().bool())
    prefix = torch.tensor([10, 0])
    assert tree_positions(tree, prefix, backend="naive").tolist() == [[10, 11, 12, 13], [0, 1, 2, 3]]
    choice = torch.tensor([[1, 2, 8, 0], [3, 0, 0, 0]])
    got = verify_greedy(tree, choice, 3, backend="naive")
    assert got.length.tolist() == [2, 0]
    assert got.tokens.tolist() == [[1, 2, 8, 0], [3, 0, 0, 0]]
    assert got.index.tolist() == [[0, 1, 2, -1], [0, -1, -1, -1]]


class Layer(torch.nn.Module):
    def __init__(self, split: bool) -> None:
        super().__init__()
        self.split = split

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> Any:
        return (hidden * 2, residual + hidden) if self.split else hidden * 2 + residual + hidden


class Processor(torch.nn.Module):
    def forward(self, ids: Any, hidden: Any, head: Any, metadata: Any, aux_hidden_states: Any = None) -> Any:
        return aux_hidden_states


class Target(torch.nn.Module):
    """A decoder as SGLang writes them, without its hook for hidden states."""

    def __init__(self, split: bool) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(Layer(split) for _ in range(4))
        self.logits_processor = Processor()

    def forward(self, hidden: torch.Tensor) -> Any:
        residual = torch.zeros_like(hidden)
        for layer in self.model.layers:
            out = layer(hidden, residual)
            hidden, residual = out if isinstance(out, tuple) else (out, torch.zeros_like(out))
        return self.logits_processor(None, hidden, None, None, None)


@pytest.mark.parametrize("split", [True, False])
def test_capture_from_a_target_without_a_hook(split: bool) -> None:
    """The residual stream after each asked layer, of this pass and no other."""
    target = Target(split)
    LayerOutputs(target, (0, 2))
    first = target(torch.ones(3, 5))
    hidden, residual, seen = torch.ones(3, 5), torch.zeros(3, 5), []
    for _ in range(4):
        out = hidden * 2 + (residual + hidden)
        hidden, residual = (hidden * 2, residual + hidden) if split else (out, torch.zeros(3, 5))
        seen.append(out)
    assert [torch.equal(a, b) for a, b in zip(first, (seen[0], seen[2]), strict=True)] == [True, True]
    second = target(torch.full((1, 5), 2.0))
    assert torch.equal(second[1], seen[2][:1] * 2)
    with pytest.raises(RuntimeError, match="no such decoder layers"):
        LayerOutputs(target, (1, 4))
