"""DDTREE on a hybrid target: a random pair of Qwen3-Next's architecture, served on a CPU by SGLang's own kernels.

Only the chunked prefill and the experts, which take half precision only, are replaced (``tests/bench/float32``).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.serving import FLOAT32
from tests.e2e.server import Answer, Server, serve
from tests.scope import costly

pytest.importorskip("torch")
from tests.bench.hybrid_pair import TINY, make_hybrid_pair

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800), costly]

LIMIT = 48
NODES, TOPK = 24, 8


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_hybrid_pair(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = random.Random(2)
    return [[draw.randrange(TINY["vocab_size"] - 1) for _ in range(draw.randint(3, 12))] for _ in range(8)]


def served(venv: Path, log: Path, pair: tuple[Path, Path], *words: str) -> Iterator[Server]:
    # The convolution's window is kept in bfloat16 by default, and rounded at other steps than without speculation.
    common = ("--model-path", str(pair[0]), "--disable-radix-cache")
    with serve(venv, log, (*common, *words), FLOAT32, SGLANG_MAMBA_CONV_DTYPE="float32") as server:
        yield server


def drafted(pair: tuple[Path, Path], algorithm: str) -> list[str]:
    draft = ("--speculative-draft-model-path", str(pair[1]), "--speculative-draft-attention-backend", "triton")
    return ["--speculative-algorithm", algorithm, *draft]


@pytest.fixture(scope="module")
def plain(
    cpu_venv: Path, pair: tuple[Path, Path], prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> list[Answer]:
    """What the target says without speculation."""
    for server in served(cpu_venv, tmp_path_factory.mktemp("plain") / "server.log", pair):
        return server.generate_all(prompts, LIMIT)
    raise AssertionError("no server")


@pytest.mark.parametrize(
    ("algorithm", "words", "least"),
    [
        ("DDTREE", ("--speculative-ddtree-budget", str(NODES), "--speculative-ddtree-topk", str(TOPK)), 1.3),
        ("DFLASH", (), 1.0),
    ],
)
def test_the_same_tokens_as_without_speculation(
    cpu_venv: Path,
    pair: tuple[Path, Path],
    prompts: list[list[int]],
    plain: list[Answer],
    tmp_path: Path,
    algorithm: str,
    words: tuple[str, ...],
    least: float,
) -> None:
    """Eight requests at once. The drafter knows nothing, so what is accepted lies all over the tree."""
    for server in served(cpu_venv, tmp_path / "server.log", pair, *drafted(pair, algorithm), *words):
        answers = server.generate_all(prompts, LIMIT)
        for answer, wanted in zip(answers, plain, strict=True):
            assert len(wanted.tokens) == LIMIT and answer.tokens == wanted.tokens
        accepted = Counter[int]()
        for answer in answers:
            accepted.update(dict(enumerate(answer.histogram)))
        steps = sum(accepted.values())
        tokens_a_step = 1 + sum(drafts * count for drafts, count in accepted.items()) / steps
        print(algorithm, "accepted drafts of", steps, "steps:", dict(accepted))
        assert tokens_a_step > least, accepted
        if algorithm == "DDTREE":
            assert accepted[2] + accepted[3] > 5, "paths with siblings below the first depth"
        # One request alone, after others have left their states in the slots.
        assert server.generate(prompts[0], 12).tokens == plain[0].tokens[:12]
