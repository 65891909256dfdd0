"""Lint of the server's command line against the release that is installed, before anything is started. Pure.

The release's own arguments are facts (read from its source by ``launch/remote_flags.py``). ``flag_history.json`` says
in which of the releases 0.5.8 to 0.5.23 an argument existed that others lack, and what replaced it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from dflash_deploy.facts import Facts
from dflash_deploy.model import Finding, Severity, Where

RULE = "flags-accepted"
KV_FLOOR_MIB = 512
"""Less than this for the KV cache serves no request of useful length."""
REST_MIB = 1536
"""Activations, graphs and library handles outside the static share, at the least."""


@dataclass(frozen=True)
class Flags:
    """Arguments of one installed release: ``{"--name": {"takes", "choices", "number", "deprecated", "new"}}``."""

    version: str
    table: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, data: Any) -> Flags | None:
        """From the probe's answer; None when no release was found, or one whose arguments cannot be read."""
        if not isinstance(data, dict) or not isinstance(data.get("flags"), dict) or "--model-path" not in data["flags"]:
            return None
        return cls(str(data.get("version") or ""), data["flags"])


@dataclass(frozen=True)
class Word:
    """One argument as given."""

    given: str
    name: str
    """As the release spells it: abbreviations are spelled out."""
    values: tuple[str, ...]


@cache
def history() -> Mapping[str, Mapping[str, str]]:
    """Arguments that not every known release has: ``{"--name": {"first", "last", "new"}}``."""
    text = resources.files("dflash_deploy.plan").joinpath("flag_history.json").read_text("utf-8")
    found: dict[str, dict[str, str]] = json.loads(text)
    return found


def lint(
    argv: Sequence[str], flags: Flags, facts: Facts | None = None, weights_mib: Mapping[str, int] | None = None
) -> list[Finding]:
    """What this release would not accept, or not do as meant.

    Args:
        argv: the server's arguments, from the first ``--name`` on.
        facts: of the host, for GPU count and measured memory.
        weights_mib: size of the weight files by the model folder's path.
    """
    words, found = parse(argv, flags)
    found += _values(words, flags)
    given = {word.name: word for word in words}
    found += _conflicts(given, flags)
    found += _speculation(given, flags)
    if facts is not None:
        found += _machine(given, facts, weights_mib or {})
    return found


def _finding(severity: Severity, message: str, remedy: str = "", where: Where = Where.VENV) -> Finding:
    return Finding(RULE, severity, message, (), remedy, where)


def fail(message: str, remedy: str = "") -> Finding:
    return _finding(Severity.FAIL, message, remedy)


def warn(message: str, remedy: str = "") -> Finding:
    return _finding(Severity.WARN, message, remedy)


def parse(argv: Sequence[str], flags: Flags) -> tuple[list[Word], list[Finding]]:
    """The words as argparse takes them (the last of several wins), and the names that it would refuse."""
    words: dict[str, Word] = {}
    found: list[Finding] = []
    at = 0
    while at < len(argv):
        given, mark, value = argv[at].partition("=")
        at += 1
        if not given.startswith("-") or _is_number(given):
            found.append(fail(f"{given}: a word that belongs to no argument", "quote values that hold spaces"))
            continue
        values = [value] if mark else []
        while not mark and at < len(argv) and (not argv[at].startswith("-") or _is_number(argv[at])):
            values.append(argv[at])
            at += 1
        name, problem = _resolve(given, flags)
        if problem is not None:
            found.append(problem)
        if name:
            words[name] = Word(given, name, tuple(values))
    return list(words.values()), found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _resolve(given: str, flags: Flags) -> tuple[str, Finding | None]:
    """The release's name for what was given; ``""`` when it has none."""
    spelled = given.replace("_", "-")
    if given in flags.table:
        item = flags.table[given]
        if item.get("deprecated"):
            new = item.get("new")
            return given, warn(
                f"{given} is deprecated in {flags.version}", f"use {new}" if new else "drop it: it does nothing"
            )
        return given, None
    if spelled in flags.table:
        return "", fail(f"{given}: SGLang spells it {spelled}", f"use {spelled}")
    past = history().get(given)
    if past is not None:
        when = f"it was there from {past['first']} to {past['last']}"
        new = past.get("new", "")
        if new and new.partition("=")[0] in flags.table:
            return "", fail(f"{given} was renamed: {flags.version} does not have it, {when}", f"use {new}")
        if not new and _later(past["first"], flags.version):
            return "", fail(f"{given} comes with {past['first']}; {flags.version} does not have it", f"drop {given}")
    long = [name for name in flags.table if name.startswith(given) and given.startswith("--")]
    if len(long) == 1:
        return long[0], warn(
            f"{given} is taken as an abbreviation of {long[0]}", f"write {long[0]}: the next release may not"
        )
    if len(long) > 1:
        return "", fail(f"{given} is ambiguous in {flags.version}", f"use one of {', '.join(sorted(long)[:4])}")
    if given.startswith("--speculative-ddtree"):
        return "", fail(
            f"{given}: the installed SGLang {flags.version} is not patched", "dflash-deploy patch HOST, then launch"
        )
    if past is not None:
        return "", fail(f"{given} is gone: {flags.version} does not have it, {when}", f"drop {given}")
    near = difflib.get_close_matches(given, flags.table, 3, 0.75)
    return "", fail(
        f"{given} is unknown to SGLang {flags.version}", f"did you mean {' or '.join(near)}?" if near else "drop it"
    )


def _release(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.partition("+")[0].split("."):
        digits = part.removeprefix("post")
        numbers.append(int(digits) if digits.isdigit() else 0)
    return tuple(numbers)


def _later(version: str, than: str) -> bool:
    return _release(version) > _release(than)


def _values(words: Sequence[Word], flags: Flags) -> Iterator[Finding]:
    for word in words:
        item, count = flags.table[word.name], len(word.values)
        takes = item["takes"]
        if takes == "none" and count:
            yield fail(f"{word.given} takes no value and got {word.values[0]!r}", f"write {word.given} alone")
        elif takes == "one" and count != 1:
            what = "no value" if not count else f"{count} values: {' '.join(word.values)}"
            yield fail(f"{word.given} takes one value and got {what}", "quote a value that holds spaces")
        elif takes == "many" and not count:
            yield fail(f"{word.given} needs a value")
        for value in word.values:
            if item.get("choices") and value not in item["choices"] and takes != "none":
                near = difflib.get_close_matches(value, item["choices"], 1, 0.5)
                unpatched = value == "DDTREE" and "--speculative-ddtree-budget" not in flags.table
                remedy = (
                    "dflash-deploy patch HOST, then launch" if unpatched else f"did you mean {near[0]}?" * len(near)
                )
                yield fail(f"{word.given} {value}: {flags.version} takes {', '.join(item['choices'][:12])}", remedy)
            elif item.get("number") and not _is(value, item["number"]):
                yield fail(f"{word.given} {value}: no {'whole number' if item['number'] == 'int' else 'number'}")


def _is(value: str, kind: str) -> bool:
    try:
        int(value) if kind == "int" else float(value)
    except ValueError:
        return False
    return True


_Given = Mapping[str, Word]


def _value(given: _Given, *names: str) -> str | None:
    for name in names:
        word = given.get(name)
        if word is not None:
            return word.values[0] if word.values else ""
    return None


def _number(given: _Given, *names: str) -> float | None:
    value = _value(given, *names)
    try:
        return float(value) if value else None
    except ValueError:
        return None


_EXCLUDE = (
    ("--disable-radix-cache", "--enable-hierarchical-cache", "the hierarchical cache needs the radix cache"),
    ("--skip-tokenizer-init", "--enable-custom-logit-processor", "custom processors need the tokenizer"),
    ("--disable-overlap-schedule", "--enable-two-batch-overlap", "two-batch overlap needs the overlap schedule"),
    ("--disable-cuda-graph", "--enable-torch-compile", "torch.compile runs inside the graphs"),
)
_IDLE = (
    ("--disable-cuda-graph", "--cuda-graph-max-bs"),
    ("--disable-cuda-graph", "--cuda-graph-max-bs-decode"),
    ("--disable-cuda-graph", "--cuda-graph-bs"),
    ("--disable-cuda-graph", "--cuda-graph-bs-decode"),
    ("--disable-radix-cache", "--schedule-policy"),
)


def _conflicts(given: _Given, flags: Flags) -> Iterator[Finding]:
    for one, other, why in _EXCLUDE:
        if one in given and other in given:
            yield fail(f"{one} and {other} exclude each other: {why}", f"drop {one} or {other}")
    for one, other in _IDLE:
        if one in given and other in given:
            yield warn(f"{other} does nothing beside {one}", f"drop {other}")
    fraction = _number(given, "--mem-fraction-static")
    if fraction is not None and not 0 < fraction < 1:
        yield fail(f"--mem-fraction-static {fraction:g}: a share between 0 and 1")
    low, high = _number(given, "--chunked-prefill-size"), _number(given, "--max-prefill-tokens")
    if low and high and low > high:
        yield warn(f"--chunked-prefill-size {low:g} is more than --max-prefill-tokens {high:g}")


def _speculation(given: _Given, flags: Flags) -> Iterator[Finding]:
    algorithm = _value(given, "--speculative-algorithm", "--speculative-algo")
    if algorithm not in ("DFLASH", "DDTREE"):
        if algorithm is None and (strays := [n for n in given if n.startswith("--speculative-d")]):
            yield warn(f"{', '.join(strays)} without --speculative-algorithm: nothing is drafted")
        return
    if not _value(given, "--speculative-draft-model-path", "--speculative-draft-model"):
        yield fail(f"{algorithm} needs --speculative-draft-model-path", "--draft-model")
    for name in ("--pp-size", "--pipeline-parallel-size"):
        if (_number(given, name) or 1) != 1:
            yield fail(f"{algorithm} is refused with {name} {_value(given, name)}", f"{name} 1")
    if "--enable-dp-attention" in given and not _later(flags.version, "0.5.17.post9"):
        yield fail(f"{algorithm} is refused with --enable-dp-attention in {flags.version}", "drop it, or 0.5.18")
    if _value(given, "--disaggregation-mode") not in (None, "null") and not _later(flags.version, "0.5.17.post9"):
        yield fail(f"{algorithm} is refused with --disaggregation-mode in {flags.version}", "drop it")
    for name in ("--speculative-num-steps", "--speculative-eagle-topk"):
        if (_number(given, name) or 1) != 1:
            yield warn(f"{name} {_value(given, name)} is overridden to 1 by {algorithm}", f"drop {name}")
    if "--enable-mixed-chunk" in given:
        yield warn(f"--enable-mixed-chunk is switched off by {algorithm}", "drop it")
    block, width = _number(given, "--speculative-dflash-block-size"), _number(given, "--speculative-num-draft-tokens")
    if algorithm == "DFLASH" and block and width and block != width:
        yield fail(
            f"--speculative-dflash-block-size {block:g} and --speculative-num-draft-tokens {width:g} must be the same"
        )
    window = _number(given, "--speculative-draft-window-size", "--speculative-dflash-draft-window-size")
    size = block or (width if algorithm == "DFLASH" else None)
    if window is not None and (window <= 0 or (size and window < size)):
        yield fail(f"a draft window of {window:g} tokens is less than a block of {size or 1:g}", "a wider window")
    if algorithm != "DDTREE":
        return
    if (_number(given, "--tp-size", "--tensor-parallel-size", "--tp") or 1) != 1 and flags.version != "0.5.16":
        yield fail(
            f"DDTREE is refused with more than one rank in {flags.version}", "0.5.16, --algorithm DFLASH, or one GPU"
        )
    if "--enable-lora" in given or "--lora-paths" in given:
        yield fail("DDTREE is refused with LoRA adapters", "drop --enable-lora, or --algorithm NONE")
    budget = _number(given, "--speculative-ddtree-budget")
    if budget and width and budget != width:
        yield fail(f"--speculative-num-draft-tokens {width:g} and --speculative-ddtree-budget {budget:g} differ")
    for name in ("--attention-backend", "--decode-attention-backend", "--prefill-attention-backend"):
        backend = _value(given, name)
        if backend not in (None, "triton"):
            yield fail(f"DDTREE is refused with {name} {backend}: it would ignore the tree mask", f"{name} triton")
    for name in ("--speculative-accept-threshold-single", "--speculative-accept-threshold-acc"):
        if (_number(given, name) or 1.0) != 1.0:
            yield fail(f"DDTREE is refused with {name}: it is lossless", f"drop {name}")


def _machine(given: _Given, facts: Facts, weights_mib: Mapping[str, int]) -> Iterator[Finding]:
    device = _value(given, "--device") or ("cuda" if facts.gpus else "cpu")
    weights = {path: mib for path, mib in weights_mib.items() if mib}
    if device != "cuda":
        if facts.memory_mib and sum(weights.values()) > 0.9 * facts.memory_mib:
            yield fail(f"{sum(weights.values())} MiB of weights in {facts.memory_mib} MiB of memory", "a smaller model")
        return
    ranks = int((_number(given, "--tp-size", "--tensor-parallel-size", "--tp") or 1)
                * (_number(given, "--pp-size", "--pipeline-parallel-size") or 1))  # fmt: skip
    first = int(_number(given, "--base-gpu-id") or 0)
    if not facts.gpus:
        yield fail("--device cuda, and this host shows no GPU", "dflash-deploy audit HOST")
        return
    if first + ranks > len(facts.gpus):
        yield fail(f"{first + ranks} GPUs are asked for and {len(facts.gpus)} are there", "a smaller --tp-size")
        return
    target = _value(given, "--model-path", "--model") or ""
    draft = _value(given, "--speculative-draft-model-path") or ""
    need = -(-weights.get(target, 0) // ranks) + weights.get(draft, 0)
    fraction = _number(given, "--mem-fraction-static")
    for gpu in facts.gpus[first : first + ranks]:
        free = gpu.memory_free_mib if gpu.memory_free_mib is not None else gpu.memory_mib
        if not free or not gpu.memory_mib:
            continue
        # The static share is taken of what is free when the server starts.
        static = free * (fraction if fraction is not None else 0.8)
        if need and static < need + KV_FLOOR_MIB:
            least = (need + KV_FLOOR_MIB) / free
            remedy = (
                f"--mem-fraction-static {least + 0.03:.2f} or more" if least < 0.93 else "a smaller model, or more GPUs"
            )
            yield fail(
                f"GPU {gpu.index}: {need} MiB of weights and {static:.0f} MiB of static memory "
                f"({'--mem-fraction-static ' + format(fraction, 'g') if fraction else 'about 0.8'} of {free} MiB free) "
                "leave no workable KV cache",
                remedy,
            )
        elif fraction is not None and free * (1 - fraction) < REST_MIB:
            yield warn(
                f"GPU {gpu.index}: --mem-fraction-static {fraction:g} leaves {free * (1 - fraction):.0f} MiB for "
                "activations and graphs",
                f"--mem-fraction-static {max(0.1, 1 - REST_MIB / free):.2f}",
            )
