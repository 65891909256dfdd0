"""The map of the real release: what a text search there misses, and what it wrongly finds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
from dflash_patches import registry

from dflash_deploy.cli.map import payload
from dflash_deploy.mapping import source
from dflash_deploy.mapping.build import build
from dflash_deploy.mapping.cover import concerned, cover, gaps
from dflash_deploy.mapping.model import Cover, Kind, Map, Site
from tests.patches.wheels import wheel

pytestmark = pytest.mark.wheels

VERSION = "0.5.16"
TEXT = re.compile(
    r"(?i)spec_?algo|speculative_algo|\bis_(eagle3?|dflash|dspark|ngram|standalone|none|some|speculative)|eagle_topk|"
    r"['\"](EAGLE3?|DFLASH|DSPARK|NGRAM|STANDALONE|NEXTN)['\"]"
)
"""A diligent search for algorithm dispatch."""


@pytest.fixture(scope="module")
def found() -> Map:
    return build(wheel("sglang", VERSION))


@pytest.fixture(scope="module")
def text() -> dict[str, list[str]]:
    tree = source.load(wheel("sglang", VERSION), "sglang")
    return {file: data.decode().splitlines() for file, data in tree.files.items()}


def at(found: Map, file: str, scope: str, kind: Kind) -> list[Site]:
    return [s for s in found.sites if s.file == file and s.scope == scope and s.kind is kind]


FLAGS = """
srt/mem_cache/kv_cache_configurator.py KVCacheConfigurator._handle_max_mamba_cache has_spec_dec is_none
srt/managers/scheduler.py Scheduler._forward_isolation snapshot_v2_full is_none
srt/layers/communicator.py AttnTpContext.use_input_scattered self.allow_input_scattered EAGLE3
srt/model_executor/runner/prefill_cuda_graph_runner.py PrefillCudaGraphRunner.__init__ needs_full_hidden_states \
is_dflash_family
srt/managers/overlap_utils.py FutureMap.stash self.need_topk need_topk
""".replace("\\\n", "")
"""File, definition and flag that decides there, made elsewhere from what an algorithm answered."""


@pytest.mark.parametrize(("file", "scope", "code", "names"), [line.split() for line in FLAGS.split("\n")[1:-1]])
def test_a_text_search_misses(
    found: Map, text: dict[str, list[str]], file: str, scope: str, code: str, names: str
) -> None:
    sites = [s for s in at(found, file, scope, Kind.PREDICATE) if s.code == code and names in s.names]
    assert sites and all(s.via == code for s in sites)
    assert not any(TEXT.search(text[file][s.line - 1]) for s in sites)


def test_the_top_k_of_drafts_and_not_of_experts(found: Map, text: dict[str, list[str]]) -> None:
    gates = at(
        found, "srt/layers/attention/flashattention_backend.py", "FlashAttentionBackend.forward_extend", Kind.TOPK
    )
    assert ("self.topk > 1", "self.topk") in [(s.code, s.via) for s in gates]
    experts = "srt/layers/moe/moe_runner/triton_utils/fused_moe.py"
    assert any("topk == 1" in line for line in text[experts])
    assert not [s for s in found.sites if s.file == experts]


def test_what_a_text_search_finds_and_is_no_site(found: Map, text: dict[str, list[str]]) -> None:
    sites = {(s.file, s.line) for s in found.sites}
    hits = [
        (f, n, line) for f, lines in text.items() for n, line in enumerate(lines, 1) if re.search("(?i)dflash", line)
    ]
    wrong = [(f, n, line) for f, n, line in hits if (f, n) not in sites]
    comments = [line for _, _, line in wrong if line.strip().startswith("#")]
    docstrings = [line for _, _, line in wrong if "DFLASH speculative decoding worker" in line]
    messages = [line for _, _, line in wrong if "logger" in line or "raise" in line]
    assert comments and docstrings and messages and len(wrong) > len(hits) / 2
    # the method of the expert router's own enum has the same name
    router = "srt/layers/moe/utils.py"
    assert any("get_moe_a2a_backend().is_none()" in line for line in text[router])
    assert not [s for s in found.sites if s.file == router and "is_none" in s.names]


def test_every_predicate_call_by_the_parser_is_a_site(found: Map, text: dict[str, list[str]]) -> None:
    """An independent count: these words between a dot and a parenthesis, outside strings and comments."""
    asked = {(s.file, s.line) for s in found.sites if s.kind is Kind.PREDICATE}
    word = re.compile(r"is_(eagle|eagle3|dflash|dflash_family|dspark|frozen_kv_mtp|ngram|standalone)")
    called = set()
    for file, lines in text.items():
        if not any(word.search(line) for line in lines):
            continue
        tokens = list(tokenize.generate_tokens(iter([f"{line}\n" for line in lines]).__next__))
        for before, token, after in zip(tokens, tokens[1:], tokens[2:], strict=False):
            if word.fullmatch(token.string) and (before.string, after.string) == (".", "("):
                called.add((file, token.start[0]))
    # a call that spans lines starts above the line on which its name stands
    missing = {(f, n) for f, n in called if not any((f, n - back) in asked for back in range(5))}
    assert len(called) > 100 and not missing


def test_known_traps_are_on_the_map(found: Map) -> None:
    runner = "srt/model_executor/runner/decode_cuda_graph_runner.py"
    assert at(found, runner, "DecodeCudaGraphRunner.get_spec_info", Kind.MASK)
    assert [
        s for s in at(found, "srt/speculative/spec_info.py", "create_dummy_verify_input", Kind.MASK) if s.role == "none"
    ]
    (strings,) = at(found, "srt/speculative/spec_utils.py", "spec_need_hidden_states", Kind.NAME)
    assert strings.names == ("STANDALONE", "DFLASH", "DSPARK")
    linear = "srt/layers/attention/hybrid_linear_attn_backend.py"
    assert any(s.role == "gate" for s in at(found, linear, "MambaAttnBackendBase._forward_metadata", Kind.TOPK))
    assert {s.kind for s in found.sites} == set(Kind) and not found.unreadable


def test_what_the_sets_do(found: Map) -> None:
    sets = [s for s in registry.all_sets() if s.supports(VERSION)]
    covered = cover(found, sets, payload())
    by_place = {(c.site.file, c.site.scope, c.site.kind): c for c in covered}
    hidden = by_place["srt/speculative/spec_utils.py", "spec_need_hidden_states", Kind.NAME]
    assert hidden.cover is Cover.EDITED and "ddtree:ddtree-hidden-states" in hidden.by
    asked = by_place["srt/model_executor/pool_configurator.py", "DefaultPoolConfigurator.__init__", Kind.PREDICATE]
    assert asked.cover is Cover.ANSWERED and asked.by == ("ddtree:ddtree-is-dflash",)
    replaced = by_place[
        "srt/speculative/dflash_worker_v2.py", "DFlashWorkerV2.forward_batch_generation", Kind.PREDICATE
    ]
    assert replaced.cover is not Cover.NONE
    # Every place that names DFLASH or asks for it is covered; plugins' stand-in class, which DDTREE is not, aside.
    open_ = gaps(covered, concerned(found, sets))
    assert {c.site.file for c in open_} <= {"srt/speculative/spec_registry.py"}, open_


def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from dflash_deploy.cli import main; main()", "map"]
    done = subprocess.run(
        [*command, "--sglang-path", str(wheel("sglang", VERSION)), "--uncovered", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["version"] == VERSION and {"ddtree", "cpu"} <= set(document["sets"])
    assert document["sites"] and all(site["cover"] == "none" for site in document["sites"])
    bad = subprocess.run([*command, "--sglang-path", "nowhere"], capture_output=True, text=True, timeout=60)
    assert bad.returncode == 2 and "neither a path" in bad.stderr and "Traceback" not in bad.stderr
    bad = subprocess.run(
        [*command, "--sglang-path", str(tmp_path), "--kind", "x"], capture_output=True, text=True, timeout=60
    )
    assert bad.returncode == 2 and "choose from" in bad.stderr
