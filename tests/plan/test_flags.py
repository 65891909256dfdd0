"""The lint of arguments against a release: what argparse and SGLang's own handlers would refuse, before a start."""

from __future__ import annotations

import pytest
from packaging.version import Version

from dflash_deploy.facts import Facts, Gpu
from dflash_deploy.model import Severity
from dflash_deploy.plan.flags import Flags, history, lint

TABLE = {
    "--model-path": {"takes": "one"},
    "--host": {"takes": "one"},
    "--port": {"takes": "one", "number": "int"},
    "--device": {"takes": "one"},
    "--tp-size": {"takes": "one", "number": "int"},
    "--mem-fraction-static": {"takes": "one", "number": "float"},
    "--attention-backend": {"takes": "one", "choices": ["triton", "flashinfer", "fa3"]},
    "--disable-cuda-graph": {"takes": "none"},
    "--disable-radix-cache": {"takes": "none"},
    "--enable-hierarchical-cache": {"takes": "none"},
    "--cuda-graph-max-bs-decode": {"takes": "one", "number": "int"},
    "--cuda-graph-max-bs-prefill": {"takes": "one", "number": "int"},
    "--served-model-name": {"takes": "one"},
    "--nsa-decode-backend": {"takes": "one", "deprecated": True, "new": "--dsa-decode-backend"},
    "--dsa-decode-backend": {"takes": "one"},
    "--bucket": {"takes": "many"},
    "--speculative-algorithm": {"takes": "one"},
    "--speculative-draft-model-path": {"takes": "one"},
    "--speculative-num-draft-tokens": {"takes": "one", "number": "int"},
    "--speculative-dflash-block-size": {"takes": "one", "number": "int"},
    "--speculative-eagle-topk": {"takes": "one", "number": "int"},
    "--speculative-ddtree-budget": {"takes": "one", "number": "int"},
    "--pp-size": {"takes": "one", "number": "int"},
    "--enable-dp-attention": {"takes": "none"},
}
FLAGS = Flags("0.5.16", TABLE)
TREE = "--speculative-algorithm DDTREE --speculative-draft-model-path /d"
CHAIN = "--speculative-algorithm DFLASH --speculative-draft-model-path /d"


def told(words: str, flags: Flags = FLAGS, facts: Facts | None = None, **weights: int) -> list[str]:
    sizes = {f"/{name}": mib for name, mib in weights.items()}
    return [f"{f.severity} {f.message} | {f.remedy}" for f in lint(words.split(), flags, facts, sizes)]


def test_good_arguments_say_nothing() -> None:
    assert (
        told(f"--model-path /m --port 1 --bucket 1 2 -3.5 --disable-cuda-graph {TREE} --attention-backend triton") == []
    )


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--frobnicate 1", "fail --frobnicate is unknown"),
        ("--serve-model-name x", "did you mean --served-model-name"),
        ("--port 1 --port_x", "fail --port_x is unknown"),
        ("--model_path /m", "SGLang spells it --model-path"),
        ("--cuda-graph-max-bs 8", "fail --cuda-graph-max-bs was renamed"),
        ("--cuda-graph-max 8", "fail --cuda-graph-max is ambiguous"),
        ("--served-model x", "warn --served-model is taken as an abbreviation"),
        ("--enable-nan-detection", "fail --enable-nan-detection is gone"),
        ("--nsa-decode-backend x", "warn --nsa-decode-backend is deprecated in 0.5.16 | use --dsa-decode-backend"),
        ("--port x", "fail --port x: no whole number"),
        ("--port", "fail --port takes one value and got no value"),
        ("--host a b", "fail --host takes one value and got 2 values"),
        ("--disable-cuda-graph 1", "fail --disable-cuda-graph takes no value"),
        ("stray", "fail stray: a word that belongs to no argument"),
        ("--attention-backend trition", "did you mean triton?"),
        ("--mem-fraction-static 80", "a share between 0 and 1"),
        ("--disable-radix-cache --enable-hierarchical-cache", "exclude each other"),
        ("--disable-cuda-graph --cuda-graph-max-bs-decode 4", "warn --cuda-graph-max-bs-decode does nothing"),
        ("--speculative-algorithm DFLASH", "fail DFLASH needs --speculative-draft-model-path"),
        (f"{CHAIN} --pp-size 2", "fail DFLASH is refused with --pp-size 2"),
        (f"{CHAIN} --enable-dp-attention", "fail DFLASH is refused with --enable-dp-attention in 0.5.16"),
        (f"{CHAIN} --speculative-eagle-topk 4", "warn --speculative-eagle-topk 4 is overridden"),
        (f"{CHAIN} --speculative-num-draft-tokens 8 --speculative-dflash-block-size 16", "must be the same"),
        (f"{TREE} --attention-backend fa3", "fail DDTREE is refused with --attention-backend fa3"),
        (f"{TREE} --speculative-num-draft-tokens 8 --speculative-ddtree-budget 16", "differ"),
        ("--speculative-draft-model-path /d", "without --speculative-algorithm"),
    ],
)
def test_each_fault_is_named(words: str, wanted: str) -> None:
    lines = told(words)
    assert any(wanted in line for line in lines), lines
    assert len(lines) == 1, lines


def test_an_unpatched_release_is_told_from_a_mistake() -> None:
    bare = Flags("0.5.16", {k: v for k, v in TABLE.items() if "ddtree" not in k})
    assert "not patched" in told("--speculative-ddtree-budget 16", bare)[0]
    closed = {**bare.table, "--speculative-algorithm": {"takes": "one", "choices": ["EAGLE", "DFLASH"]}}
    assert "dflash-deploy patch" in told(TREE, Flags("0.5.11", closed))[0]


def test_memory_is_measured(facts: Facts) -> None:
    gpus = tuple(Gpu(i, "G", (9, 0), 98304, free) for i, free in enumerate((96000, 40000)))
    machine = Facts("h", "x86_64", "Linux", "/h", "me", 1000, gpus=gpus)
    fits = "--model-path /m --mem-fraction-static 0.8"
    assert told(fits, facts=machine, m=60000) == []
    wrong = told("--model-path /m --mem-fraction-static 0.5", facts=machine, m=60000)
    assert (
        len(wrong) == 1
        and "GPU 0: 60000 MiB of weights" in wrong[0]
        and "--mem-fraction-static 0.66 or more" in wrong[0]
    )
    # The draft counts, whole, on every rank; a share of the target does. The second card is half taken.
    wrong = told(f"{fits} --tp-size 2 {CHAIN}", facts=machine, m=60000, d=2000)
    assert len(wrong) == 1 and "GPU 1: 32000 MiB" in wrong[0]
    assert "leaves 960 MiB" in told("--model-path /m --mem-fraction-static 0.99", facts=machine, m=60000)[0]
    assert "2 are there" in told(f"{fits} --tp-size 4", facts=machine)[0]
    assert "shows no GPU" in told(f"{fits} --device cuda", facts=facts)[0]


def test_history_is_sound() -> None:
    for name, entry in history().items():
        assert name.startswith("-") and set(entry) <= {"first", "last", "new"} and entry["first"].startswith("0.5."), (
            name
        )
    assert history()["--cuda-graph-max-bs"]["new"] == "--cuda-graph-max-bs-decode"


@pytest.mark.wheels
def test_a_real_release_is_read_whole() -> None:
    """SGLang 0.5.16 from its wheel: our stack's own arguments pass, once it is patched or not."""
    from dflash_deploy.audit.stacks import get_stack
    from tests.launch.flag_history import flags_of
    from tests.patches.wheels import wheel

    answer = flags_of(wheel("sglang", "0.5.16"))
    flags = Flags.of(answer)
    assert flags is not None and flags.version == "0.5.16" and len(flags.table) > 450
    argv = ["--model-path", "/m", *get_stack("sglang-0.5.16-cpu").server_args, *CHAIN.split()]
    assert [f for f in lint(argv, flags) if f.severity is Severity.FAIL] == []
    assert flags.table["--attention-backend"]["choices"] and flags.table["--disable-radix-cache"]["takes"] == "none"
    for name, entry in history().items():
        if name in flags.table:
            assert Version(entry["first"]) <= Version("0.5.16") <= Version(entry["last"]), (name, entry)
