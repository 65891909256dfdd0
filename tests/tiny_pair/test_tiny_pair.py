"""The shipped pair is complete, answers its probe, and drafts the way the documentation says."""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.tiny_pair import data
from tests.tiny_pair.model import MASK, Drafter, Target, chat, decode, encode, load_drafter, load_target
from tests.tiny_pair.replay import (
    Decoded,
    best_first,
    chain_step,
    greedy,
    read_prompts,
    speculate,
    stop_tokens,
    tokens_per_step,
    tree_step,
)
from tests.tiny_pair.train import byte_letters

PAIR = Path(__file__).resolve().parents[2] / "templates" / "tiny-pair"
SOME = (0, 2, 7, 11, 17, 20, 27, 33)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(PAIR / "target")


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    return load_drafter(PAIR / "drafter")


@pytest.fixture(scope="module")
def decoded(target: Target, drafter: Drafter) -> dict[str, list[Decoded]]:
    stop = stop_tokens(target)
    prompts = [read_prompts(PAIR / "prompts.jsonl")[at] for at in SOME]
    ways = {"chain": chain_step(target, drafter)} | {f"tree {n}": tree_step(target, drafter, n, 8) for n in (8, 16)}
    out = {"greedy": [greedy(target, prompt, 64, stop) for prompt in prompts]}
    return out | {way: [speculate(target, step, prompt, 64, stop) for prompt in prompts] for way, step in ways.items()}


def config(part: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((PAIR / part / "config.json").read_text())
    return read


def test_small_enough_to_ship() -> None:
    assert sum(file.stat().st_size for file in PAIR.rglob("*") if file.is_file()) <= 6_000_000


def test_configs_fit_each_other() -> None:
    target, drafter = config("target"), config("drafter")
    own = drafter["dflash_config"]
    for name in ("hidden_size", "vocab_size", "max_position_embeddings"):
        assert drafter[name] == target[name]
    assert drafter["num_target_layers"] == target["num_hidden_layers"]
    # The server captures "before layer id + 1", so the last layer can never be a feature.
    assert all(0 <= layer < target["num_hidden_layers"] - 1 for layer in own["target_layer_ids"])
    assert own["mask_token_id"] == MASK < target["vocab_size"]
    assert target["vocab_size"] % 64 == 0


@pytest.mark.parametrize("part", ["target", "drafter"])
def test_weights_are_float32_and_finite(part: str) -> None:
    with safe_open(PAIR / part / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            value = file.get_tensor(name)
            assert value.dtype == torch.float32 and bool(value.isfinite().all()), name


def test_tokenizer_is_one_token_a_byte() -> None:
    tokenizer = json.loads((PAIR / "target" / "tokenizer.json").read_text())
    assert tokenizer["model"]["merges"] == []
    assert tokenizer["model"]["vocab"] == {letter: byte for byte, letter in byte_letters().items()}
    assert len(set(tokenizer["model"]["vocab"].values())) == 256
    specials = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    settings = json.loads((PAIR / "target" / "tokenizer_config.json").read_text())
    assert specials[settings["eos_token"]] == config("target")["eos_token_id"]
    assert specials[settings["mask_token"]] == MASK
    text = "Grüße, 日本 🙂\n\t\x00"
    assert decode(encode(text)) == text


def test_prompts_are_those_of_the_recipe() -> None:
    rows = [json.loads(line) for line in (PAIR / "prompts.jsonl").read_text().splitlines()]
    assert rows == data.prompts() and len(rows) == 40


def test_probe(target: Target) -> None:
    for row in json.loads((PAIR / "probe.json").read_text()):
        prompt = chat(row["messages"][0]["content"]) if "messages" in row else encode(row["prompt"])
        answer = decode(list(greedy(target, prompt, row["max_tokens"], stop_tokens(target)).tokens))
        assert answer.startswith(row["expect"])


def test_a_cache_changes_nothing(target: Target) -> None:
    tokens = torch.tensor([chat("What is 3 + 4?")])
    whole, _ = target(tokens)
    cache: list[tuple[torch.Tensor, torch.Tensor]] = []
    for at in range(tokens.shape[1]):
        see = torch.ones(1, 1, 1, at + 1, dtype=torch.bool)
        one, _ = target(tokens[:, at : at + 1], positions=torch.tensor([[at]]), mask=see, cache=cache)
        torch.testing.assert_close(one[0, 0], whole[0, at], atol=1e-4, rtol=1e-4)


def test_speculation_is_lossless(decoded: dict[str, list[Decoded]]) -> None:
    expected = [answer.tokens for answer in decoded["greedy"]]
    for way, answers in decoded.items():
        assert [answer.tokens for answer in answers] == expected, way
        if way != "greedy":
            assert all(sum(answer.kept) == len(answer.tokens) - 1 for answer in answers)


def test_chain_accepts_and_the_tree_accepts_more(decoded: dict[str, list[Decoded]]) -> None:
    chain, small, large = (tokens_per_step(decoded[way]) for way in ("chain", "tree 8", "tree 16"))
    assert 1.5 < chain < 7.5
    assert chain < small < large


def test_answers_have_no_near_ties(decoded: dict[str, list[Decoded]]) -> None:
    """Two float32 servers differ by about 1e-5 in a logit; the prompts keep well away from that."""
    assert min(answer.gap for answer in decoded["greedy"]) > 1e-3


def test_best_first_is_the_best_of_all_paths() -> None:
    generator = torch.Generator().manual_seed(5)
    for nodes in (2, 5, 9, 17, 30):
        log_probs = torch.randn(3, 4, generator=generator, dtype=torch.float64).log_softmax(-1)
        tree = best_first(99, log_probs, nodes, 4)
        scores = [0.0]
        for node, parent in enumerate(tree.parents[1:], 1):
            assert parent < node and tree.depths[node] == tree.depths[parent] + 1
            scores.append(scores[parent] + float(log_probs[tree.depths[node] - 1, tree.tokens[node]]))
        paths = (p for depth in (1, 2, 3) for p in itertools.product(range(4), repeat=depth))
        every = [sum(float(log_probs[at, token]) for at, token in enumerate(path)) for path in paths]
        assert scores[1:] == pytest.approx(heapq.nlargest(nodes - 1, every), abs=1e-5)


def test_ties_go_to_depth_then_parent_then_rank() -> None:
    tree = best_first(99, torch.full((2, 2), 0.5, dtype=torch.float64).log(), 7, 2)
    assert tree.depths == [0, 1, 1, 2, 2, 2, 2]
    assert tree.parents == [-1, 0, 0, 1, 1, 2, 2]
    assert tree.tokens == [99, 0, 1, 0, 1, 0, 1]


def test_a_tree_that_cannot_grow_stops() -> None:
    assert len(best_first(99, torch.zeros(3, 1, dtype=torch.float64), 16, 8).tokens) == 4
