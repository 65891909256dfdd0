"""Releases beside the first: DDTREE served from the CPU stack of each, held against the replay."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_deploy.audit.stacks import get_stack
from tests.e2e.conftest import release_venv
from tests.e2e.server import PAIR, Server, ddtree, serve

torch = pytest.importorskip("torch")
from tests.e2e.test_lossless import Case, Replay, check_refusals, differences, tell  # noqa: E402
from tests.tiny_pair import replay  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

RELEASES = ("0.5.23",)
NEEDED = {"0.5.23": ["tokenizers==0.23.2"]}
"""What a resolver would change along with the pins."""
LIMIT, NODES = 24, 16


@pytest.fixture(scope="module", params=RELEASES)
def venv(request: pytest.FixtureRequest, cpu_venv: Path) -> Path:
    """The packages that the release's CPU stack has otherwise, over those of the first; patched by the command."""
    release = str(request.param)
    ours, first = get_stack(f"sglang-{release}-cpu"), get_stack("sglang-0.5.16-cpu")
    other = sorted({*ours.requirements, *ours.no_deps} - {*first.requirements, *first.no_deps})
    other += NEEDED.get(release, [])
    return release_venv(cpu_venv, release, [pin for pin in other if not pin.startswith("sglang=")])


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    rows, work = replay.read_prompts(PAIR / "prompts.jsonl"), Replay()
    return [work.case(prompt, LIMIT, [NODES]) for prompt in [*rows[0:12:2], *rows[31:33]]]


@pytest.fixture(scope="module")
def tree(venv: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(venv, tmp_path_factory.mktemp("tree") / "server.log", ddtree(NODES)) as server:
        yield server


def test_tokens_and_accepted_lengths(tree: Server, cases: list[Case]) -> None:
    """Eight requests at once, then two again on their cached KV."""
    prompts = [case.prompt for case in cases]
    answers = tree.generate_all(prompts, LIMIT)
    again = tree.generate_all(prompts[-2:], LIMIT)
    tell(f"tree {NODES}", tree, [*answers, *again], 0.0)
    assert "DDTREE ready: draft block 8, tree of 16 nodes" in tree.log.read_text(errors="replace")
    assert differences(cases, answers, f"tree {NODES}") == []
    assert differences(cases[-2:], again, f"tree {NODES}") == []
    assert all(answer.cached >= len(case.prompt) - 1 for answer, case in zip(again, cases[-2:], strict=True))
    assert sum(drafts * steps for a in answers for drafts, steps in enumerate(a.histogram)) > 0


def test_refusals(tree: Server, cases: list[Case]) -> None:
    check_refusals(tree, cases[0].prompt, "DDTREE")


def test_without_speculation(venv: Path, cases: list[Case], tmp_path: Path) -> None:
    """The release's own greedy answers, beside the replay's."""
    with serve(venv, tmp_path / "server.log") as server:
        answers = server.generate_all([case.prompt for case in cases], LIMIT)
    assert differences(cases, answers, None) == []


def test_a_drafter_that_picks_paths_is_refused(venv: Path, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(PAIR / "drafter", drafter)
    config = json.loads((drafter / "config.json").read_text())
    config["dflash_config"] |= {"selector_rank": 4, "selector_top_k": 4}
    (drafter / "config.json").write_text(json.dumps(config))
    words = ["--model-path", str(PAIR / "target"), "--device", "cpu", "--attention-backend", "triton", *ddtree(NODES)]
    words[words.index(str(PAIR / "drafter"))] = str(drafter)
    done = subprocess.run(
        [str(venv / "bin" / "python"), "-m", "sglang.launch_server", *words],
        env={"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert "DDTREE needs a drafter whose depths are independent" in done.stderr and "DFlash2" in done.stderr
