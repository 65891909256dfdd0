"""Served greedy tokens and accepted lengths against a replay that shares no code with the server.

Two servers that agree are no proof, so everything is held against ``tests.tiny_pair.replay``: the answer of plain
greedy decoding, and the drafts that each verify step of a chain or a tree accepts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from json import dumps, loads
from pathlib import Path

import pytest

from tests.e2e.server import DFLASH, PAIR, Answer, Server, ddtree, serve
from tests.scope import costly
from tests.tiny_pair.model import IM_END, IM_START, chat, encode

torch = pytest.importorskip("torch")
from tests.tiny_pair import replay  # noqa: E402
from tests.tiny_pair.model import load_drafter, load_target  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

LIMIT = 40
NODES, MORE_NODES = 16, 24
STORY = "Once there was a red fox named Hugo who lived in the den. One Friday Hugo went to the"
BIAS = {"logit_bias": {str(ord("e")): -60.0}}
STOPS = {"stop": ["e "], "stop_token_ids": [ord("n")]}


@dataclass(frozen=True)
class Case:
    """A prompt, the greedy answer to it, and by way (``chain``, ``tree 16``) the tokens each verify step commits."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    gap: float
    commits: dict[str, tuple[int, ...]]


class Replay:
    """Works cases out, with one thread: the server wants the other core."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.target, self.drafter = load_target(PAIR / "target"), load_drafter(PAIR / "drafter")
        self.stop = replay.stop_tokens(self.target)

    def case(self, prompt: Sequence[int], limit: int = LIMIT, trees: Sequence[int] = (NODES,)) -> Case:
        ways = {"chain": replay.chain_step(self.target, self.drafter)}
        ways |= {f"tree {nodes}": replay.tree_step(self.target, self.drafter, nodes, 8) for nodes in trees}
        greedy = replay.greedy(self.target, list(prompt), limit, self.stop)
        commits = {}
        for way, step in ways.items():
            done = replay.speculate(self.target, step, list(prompt), limit, self.stop)
            assert done.tokens == greedy.tokens, "the replay itself must be lossless"
            commits[way] = done.commits
        return Case(tuple(prompt), greedy.tokens, greedy.gap, commits)


@pytest.fixture(scope="module")
def replayed() -> Replay:
    return Replay()


@pytest.fixture(scope="module")
def first_wave(replayed: Replay) -> list[Case]:
    """Prompts of which many begin alike, so that later ones find the prefixes of earlier ones cached."""
    rows = replay.read_prompts(PAIR / "prompts.jsonl")
    return [replayed.case(prompt) for prompt in [*rows[0:32:2], *rows[31:35], *rows[38:40]]]


@pytest.fixture(scope="module")
def second_wave(replayed: Replay, first_wave: list[Case]) -> list[Case]:
    """Second turns: they begin with a whole first conversation, whose answer was cached as decoding left it."""
    turns = [case for case in first_wave if case.prompt[0] == IM_START][-4:]
    questions = ["What is 3 + 4?", "Tell me a story about an owl."]
    return [
        replayed.case([*case.prompt, *case.tokens, *encode("\n"), *chat(questions[at % 2])])
        for at, case in enumerate(turns)
    ]


def differences(cases: Sequence[Case], answers: Sequence[Answer], way: str | None) -> list[str]:
    """What the served answers have that the replay has not: tokens first, then accepted lengths."""
    out = []
    for case, answer in zip(cases, answers, strict=True):
        if answer.tokens != case.tokens:
            out.append(f"tokens of {case.prompt[-12:]}: {answer.tokens} is not {case.tokens}")
        if way is None:
            continue
        accepted = Counter(commit - 1 for commit in case.commits[way])
        served = {drafts: steps for drafts, steps in enumerate(answer.histogram) if steps}
        if served != dict(accepted) or answer.steps != len(case.commits[way]):
            out.append(f"accepted drafts of {case.prompt[-12:]}: {served} in {answer.steps} is not {dict(accepted)}")
    return out


def tell(name: str, server: Server, answers: Sequence[Answer], seconds: float) -> None:
    """Figures for whoever runs this with -s."""
    tokens, steps = sum(len(a.tokens) for a in answers), sum(a.steps for a in answers)
    drafts = sum(at * count for a in answers for at, count in enumerate(a.histogram))
    rate = f", {steps} steps, {1 + drafts / steps:.2f} tokens a step" if steps else ""
    print(
        f"\n{name}: ready in {server.started_s:.0f} s; {len(answers)} answers: {tokens} tokens{rate} in {seconds:.0f} s"
    )


def check_waves(server: Server, first: list[Case], second: list[Case], way: str | None) -> None:
    began = time.monotonic()
    one = server.generate_all([case.prompt for case in first], LIMIT)
    two = server.generate_all([case.prompt for case in second], LIMIT)
    # And once more, each wholly cached: prompts and the KV of answers must come back as they were.
    again = server.generate_all([case.prompt for case in first[-4:]], LIMIT)
    tell(way or "no speculation", server, [*one, *two, *again], time.monotonic() - began)
    assert differences(first, one, way) == []
    assert differences(second, two, way) == []
    assert differences(first[-4:], again, way) == []
    assert sum(answer.cached > 0 for answer in one) >= 8
    # Beyond the first turn's prompt lies KV that decoding wrote, and that a tree's accepted path was moved to.
    turns = [case for case in first if case.prompt[0] == IM_START][-4:]
    assert [a.cached > len(t.prompt) + 1 for a, t in zip(two, turns, strict=True)] == [True] * len(two)
    assert all(answer.cached >= len(case.prompt) - 1 for answer, case in zip(again, first[-4:], strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lossless")


@pytest.fixture(scope="module")
def odd_cases(first_wave: list[Case]) -> list[tuple[int, ...]]:
    """Prompts for requests that are more than plain greedy: under ``STOPS`` one answer ends as ever, one at the token
    and one at the string."""
    return [first_wave[at].prompt for at in (4, 10, 13)]


@dataclass(frozen=True)
class Plain:
    """What the server without speculation answers: to the waves, and to requests that the replay does not know."""

    stops: list[Answer]
    biased: list[Answer]


@pytest.fixture(scope="module")
def plain(
    cpu_venv: Path, folder: Path, first_wave: list[Case], second_wave: list[Case], odd_cases: list[tuple[int, ...]]
) -> Plain:
    """The server without speculation is checked against the replay, then kept as answers only.

    Its attention is PyTorch's own: as exact in float32, many times as fast as the interpreter's, and one more
    implementation that the tree must agree with.
    """
    with serve(cpu_venv, folder / "plain.log", ["--attention-backend", "torch_native"]) as server:
        check_waves(server, first_wave, second_wave, None)
        return Plain(
            stops=server.generate_all(odd_cases, LIMIT, **STOPS),
            biased=server.generate_all(odd_cases, LIMIT, **BIAS),
        )


@pytest.fixture(scope="module")
def dflash(cpu_venv: Path, folder: Path, plain: Plain) -> Iterator[Server]:
    with serve(cpu_venv, folder / "dflash.log", DFLASH) as server:
        yield server


@pytest.fixture(scope="module")
def tree(cpu_venv: Path, folder: Path, plain: Plain) -> Iterator[Server]:
    with serve(cpu_venv, folder / "ddtree.log", ddtree(NODES)) as server:
        yield server


def test_the_prompts_tell_something(first_wave: list[Case], second_wave: list[Case]) -> None:
    cases = [*first_wave, *second_wave]
    assert len({case.prompt for case in cases}) == len(cases) >= 20
    # Nothing may hang on float32's rounding, and a tree must be worth its nodes.
    assert min(case.gap for case in cases) > 1e-3
    chain, trees = (sum(len(case.commits[way]) for case in cases) for way in ("chain", f"tree {NODES}"))
    assert trees < chain < sum(len(case.tokens) for case in cases) / 1.5


def test_attention_is_that_of_the_kernels(cpu_venv: Path) -> None:
    """What a CPU server runs in place of the interpreted kernels computes what they compute, tree masks included."""
    python, script = cpu_venv / "bin" / "python", Path(__file__).with_name("attention_twins.py")
    env = {"PATH": os.environ["PATH"], "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([str(python), str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = loads(done.stdout)
    assert len(found) == 5 and all(difference < 1e-5 for difference in found.values()), found


def test_no_speculation(plain: Plain) -> None:
    """Without speculation the server equals the replay (checked while ``plain`` was made), and stops where asked."""
    assert {answer.finish for answer in plain.stops} == {"stop"}
    ends = [answer.tokens[-1] for answer in plain.stops]
    assert (ends[0], ends[1], ends[2]) == (IM_END, ord("n"), ord(" "))


def test_chain(dflash: Server, first_wave: list[Case], second_wave: list[Case]) -> None:
    check_waves(dflash, first_wave, second_wave, "chain")


def test_chain_stops(dflash: Server, plain: Plain, odd_cases: list[tuple[int, ...]]) -> None:
    check_stops(dflash, plain, odd_cases)


def test_chain_refuses(dflash: Server, odd_cases: list[tuple[int, ...]]) -> None:
    check_refusals(dflash, odd_cases[0], "DFLASH")


def test_tree(tree: Server, first_wave: list[Case], second_wave: list[Case]) -> None:
    check_waves(tree, first_wave, second_wave, f"tree {NODES}")


def test_tree_stops(tree: Server, plain: Plain, odd_cases: list[tuple[int, ...]]) -> None:
    check_stops(tree, plain, odd_cases)


def test_a_stop_and_the_limit_in_one_step(tree: Server, first_wave: list[Case]) -> None:
    """Where one step accepts the stop and reaches the limit, nothing that follows the stop is answered."""
    ended = [case for case in first_wave if case.tokens[-1] == IM_END and len(case.tokens) < LIMIT][:3]
    assert len(ended) == 3
    for case in ended:
        for more in (1, 2, 3):
            answer = tree.generate(case.prompt, len(case.tokens) + more)
            assert (answer.tokens, answer.finish) == (case.tokens, "stop"), more


def test_tree_refuses(tree: Server, odd_cases: list[tuple[int, ...]]) -> None:
    check_refusals(tree, odd_cases[0], "DDTREE")


def test_logit_bias(tree: Server, plain: Plain, odd_cases: list[tuple[int, ...]]) -> None:
    """A bias on one token holds in every node, so the answers are those of the server without speculation."""
    got = [answer.tokens for answer in tree.generate_all(odd_cases, LIMIT, **BIAS)]
    assert got == [answer.tokens for answer in plain.biased]
    assert got != [answer.tokens for answer in tree.generate_all(odd_cases, LIMIT)]


def check_stops(server: Server, plain: Plain, prompts: Sequence[tuple[int, ...]]) -> None:
    """A stop inside an accepted path cuts the answer there."""
    got = server.generate_all(prompts, LIMIT, **STOPS)
    assert [(a.tokens, a.text, a.finish) for a in got] == [(a.tokens, a.text, a.finish) for a in plain.stops]


def check_refusals(server: Server, prompt: Sequence[int], algorithm: str) -> None:
    """What a tree cannot serve is refused, in words that name it, and the next request is served."""
    body = {"input_ids": list(prompt), "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    schema = dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
    sampling = body["sampling_params"]
    refused = [
        ("logprob", {**body, "return_logprob": True}),
        ("gramma", {**body, "sampling_params": {**sampling, "regex": "[ab]+"}}),
        ("gramma", {**body, "sampling_params": {**sampling, "json_schema": schema}}),
    ]
    if algorithm == "DDTREE":
        refused += [
            (name, {**body, "sampling_params": {**sampling, name: value}})
            for name, value in (("frequency_penalty", 0.5), ("repetition_penalty", 1.2), ("min_new_tokens", 3))
        ]
    for named, request in refused:
        status, said = server.post("/generate", request)
        assert status == 400 and named in str(said).lower() and algorithm in str(said), f"{named}: {status} {said}"
    assert len(server.generate(prompt, 4).tokens) == 4


def test_abort(tree: Server, first_wave: list[Case]) -> None:
    """Clients that go away in the middle of an answer leave a server that answers the others, and their own prompt."""
    longest = max(first_wave, key=lambda case: len(case.tokens))
    body = {
        "input_ids": longest.prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True},
        "stream": True,
    }
    request = urllib.request.Request(tree.url + "/generate", dumps(body).encode(), {"Content-Type": "application/json"})
    for _ in range(2):
        reply = urllib.request.urlopen(request, timeout=120)
        assert reply.readline().startswith(b"data:")
        reply.close()
    status, said = tree.post("/abort_request", {"rid": "", "abort_all": True})
    assert status == 200, said
    began = time.monotonic()
    some = [longest, *first_wave[:7]]
    assert differences(some, tree.generate_all([case.prompt for case in some], LIMIT), f"tree {NODES}") == []
    print(f"\nafter aborts: {time.monotonic() - began:.0f} s")


def test_ignored_mask_is_found(cpu_venv: Path, folder: Path, first_wave: list[Case]) -> None:
    """A backend that ignores the mask lets each node see all nodes before it, siblings included: that must show here.

    The server gets a copy of its kernels whose mask is causal, and the checks of this module must find it out.
    """
    python = str(cpu_venv / "bin" / "python")
    where = "import importlib.util as u; print(u.find_spec('dflash_kernels').submodule_search_locations[0])"
    kernels = Path(subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip())
    copy = folder / "causal" / "dflash_kernels"
    shutil.copytree(kernels, copy, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "tree_mask" / "__init__.py").open("a") as module:
        module.write(CAUSAL)
    some = [first_wave[at] for at in (4, 7, 10, 12)]
    with serve(cpu_venv, folder / "causal.log", ddtree(NODES), python_path=copy.parent) as server:
        answers = server.generate_all([case.prompt for case in some], LIMIT)
        assert "a causal mask" in server.log.read_text()
    found = differences(some, answers, f"tree {NODES}")
    print(f"\nignored mask: {len(found)} differences in {len(some)} answers")
    # Tokens may come out right all the same: the accepted lengths are what gives it away.
    assert any(line.startswith("accepted") for line in found)


CAUSAL = """

def tree_mask_full(tree, prefix, out, backend="auto"):
    print("a causal mask", flush=True)
    nodes, start = tree.token_ids.shape[1], 0
    for length in prefix.tolist():
        size = nodes * (length + nodes)
        out[start : start + size].view(nodes, length + nodes)[:, length:] = torch.ones(nodes, nodes).tril().bool()
        start += size
    return out
"""


def test_pages_chunks_window(cpu_venv: Path, folder: Path, replayed: Replay, first_wave: list[Case]) -> None:
    """Pages of four slots, prefill in chunks, a drafter that sees 32 tokens, another tree: the same tokens."""
    words = [*ddtree(MORE_NODES), "--page-size", "4", "--chunked-prefill-size", "32"]
    words += ["--speculative-draft-window-size", "32"]
    long = [case for case in first_wave if len(case.prompt) > 40][:5]
    assert len(long) == 5
    # Where all fits in the window, it changes nothing: the accepted lengths are the replay's.
    short = [replayed.case(encode(text), 16, [MORE_NODES]) for text in ("def add(", "The capital of")]
    with serve(cpu_venv, folder / "pages.log", words) as server:
        answers = server.generate_all([case.prompt for case in long], LIMIT)
        few = server.generate_all([case.prompt for case in short], 16)
    assert differences(long, answers, None) == []
    assert differences(short, few, f"tree {MORE_NODES}") == []
    assert all(sum(answer.histogram[1:]) > 0 for answer in answers)


@costly
def test_two_ranks(cpu_venv: Path, folder: Path, first_wave: list[Case]) -> None:
    """The vocabulary split between two processes: drafts and choices come from both, tokens and steps do not change."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two ranks need a core each")
    # Without a GPU the ranks meet through gloo; a CUDA build of torch would bring NCCL along, which needs one.
    ranks = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_NCCL_SO_PATH": "none"}
    words = [*ddtree(NODES), "--tp-size", "2"]
    cases = first_wave[::3]
    with serve(cpu_venv, folder / "ranks.log", words, **ranks) as server:
        answers = server.generate_all([case.prompt for case in cases], LIMIT)
        assert "TP1" in server.log.read_text(errors="replace")
    assert differences(cases, answers, f"tree {NODES}") == []
