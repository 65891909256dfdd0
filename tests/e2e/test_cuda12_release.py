"""SGLang 0.5.10.post1, the last release for CUDA 12.8, which has no DFLASH: served with ours, held against the replay.

Served on the 0.5.16 stack's torch and packages, with only this release and its transformers beside them: gigabytes less
to install, and the same code that a stack of its own would run.
"""

from __future__ import annotations

import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from json import dumps
from pathlib import Path

import pytest

from tests.e2e.conftest import release_venv
from tests.e2e.server import ARGUMENTS, DFLASH, PAIR, Server, ddtree, serve
from tests.tiny_pair.model import chat, encode

torch = pytest.importorskip("torch")
from tests.e2e.test_lossless import Case, Replay, differences, tell  # noqa: E402
from tests.tiny_pair import replay  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

VERSION, TRANSFORMERS = "0.5.10.post1", "transformers==5.3.0"
NODES, LIMIT = 16, 40
WAVE = 16
"""Prompts of the first wave; eight requests run at once."""


@pytest.fixture(scope="module")
def venv(cpu_venv: Path) -> Path:
    return release_venv(cpu_venv, VERSION, [TRANSFORMERS])


@pytest.fixture(scope="module")
def replayed() -> Replay:
    return Replay()


@pytest.fixture(scope="module")
def wave(replayed: Replay) -> list[Case]:
    rows = replay.read_prompts(PAIR / "prompts.jsonl")
    return [replayed.case(prompt, LIMIT, [NODES]) for prompt in [*rows[0 : 2 * WAVE - 2 : 2], rows[31]]]


@pytest.fixture(scope="module")
def turns(replayed: Replay, wave: list[Case]) -> list[Case]:
    """Second turns, which find the KV of whole first conversations cached, as decoding left it."""
    talks = [case for case in wave if case.prompt[0] == chat("")[0]][-2:]
    return [
        replayed.case([*case.prompt, *case.tokens, *encode("\n"), *chat("What is 3 + 4?")], LIMIT, [NODES])
        for case in talks
    ]


def check(server: Server, wave: list[Case], turns: list[Case], way: str) -> None:
    """Greedy tokens and accepted lengths are the replay's, with eight requests at once and with a warm radix cache."""
    began = time.monotonic()
    one = server.generate_all([case.prompt for case in wave], LIMIT)
    two = server.generate_all([case.prompt for case in turns], LIMIT)
    tell(f"{VERSION} {way}", server, [*one, *two], time.monotonic() - began)
    assert differences(wave, one, way) == []
    assert differences(turns, two, way) == []
    talks = [case for case in wave if case.prompt[0] == chat("")[0]][-2:]
    assert [a.cached > len(t.prompt) + 1 for a, t in zip(two, talks, strict=True)] == [True] * len(turns)


@pytest.fixture(scope="module")
def tree(venv: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(venv, tmp_path_factory.mktemp("tree") / "ddtree.log", ddtree(NODES)) as server:
        yield server


def test_the_prompts_tell_something(wave: list[Case], turns: list[Case]) -> None:
    cases = [*wave, *turns]
    assert min(case.gap for case in cases) > 1e-3 and len(turns) == 2
    chain, trees = (sum(len(case.commits[way]) for case in cases) for way in ("chain", f"tree {NODES}"))
    assert trees < chain < sum(len(case.tokens) for case in cases) / 1.5


def test_tree(tree: Server, wave: list[Case], turns: list[Case]) -> None:
    check(tree, wave, turns, f"tree {NODES}")
    assert "DDTREE ready: draft block 8, a tree of 16 nodes, top-8 per depth." in tree.log.read_text()


def test_refused_requests(tree: Server, wave: list[Case]) -> None:
    """What a draft cannot honour is named, and the next request is served."""
    greedy = {"temperature": 0, "max_new_tokens": 4}
    body = {"input_ids": list(wave[0].prompt), "sampling_params": greedy}
    for named, request in (
        ("logprobs", {**body, "return_logprob": True}),
        ("frequency_penalty", {**body, "sampling_params": {**greedy, "frequency_penalty": 0.5}}),
        ("min_new_tokens", {**body, "sampling_params": {**greedy, "min_new_tokens": 3}}),
        ("grammar", {**body, "sampling_params": {**greedy, "regex": "[ab]+"}}),
    ):
        status, said = tree.post("/generate", request)
        assert status == 400 and named in str(said) and "DDTREE" in str(said), f"{named}: {status} {said}"
    assert tree.generate(wave[0].prompt, 4).tokens == wave[0].tokens[:4]


def test_abort(tree: Server, wave: list[Case]) -> None:
    """Clients that go away in the middle of an answer leave a server that answers the others."""
    endless = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
    body = dumps({"input_ids": wave[-1].prompt, "sampling_params": endless, "stream": True}).encode()
    request = urllib.request.Request(tree.url + "/generate", body, {"Content-Type": "application/json"})
    reply = urllib.request.urlopen(request, timeout=120)
    assert reply.readline().startswith(b"data:")
    reply.close()
    status, said = tree.post("/abort_request", {"rid": "", "abort_all": True})
    assert status == 200, said
    some = wave[-2:]
    assert differences(some, tree.generate_all([case.prompt for case in some], LIMIT), f"tree {NODES}") == []


def test_sampled_requests(tree: Server, wave: list[Case]) -> None:
    """A nucleus that holds one token leaves no choice: the sampling verifier walks as the greedy one."""
    some = wave[:2]
    narrow = tree.generate_all([case.prompt for case in some], LIMIT, temperature=1.0, top_p=1e-6)
    assert differences(some, narrow, f"tree {NODES}") == []
    free = tree.generate(wave[0].prompt, 12, temperature=1.5, ignore_eos=True)
    assert len(free.tokens) == 12 and free.steps > 0


def test_chain(venv: Path, tmp_path_factory: pytest.TempPathFactory, wave: list[Case], turns: list[Case]) -> None:
    with serve(venv, tmp_path_factory.mktemp("chain") / "dflash.log", DFLASH) as server:
        check(server, wave, turns, "chain")


def test_refused_at_start(venv: Path, tmp_path: Path) -> None:
    """Arguments that are not served end the start before a model is loaded, all of them in one message."""
    words = [*ARGUMENTS, *ddtree(NODES), "--tp-size", "2", "--speculative-accept-threshold-single", "0.5"]
    done = subprocess.run(
        [str(venv / "bin" / "python"), "-m", "sglang.launch_server", *words],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    said = done.stderr.strip().splitlines()[-1]
    assert "DDTREE cannot be served with these arguments" in said
    assert "--tp-size above 1" in said and "acceptance thresholds" in said
