"""Model and draft folders, and the server arguments that belong to them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dflash_deploy.audit.rules.base import Case, Verdict, fail, ok, rule, unknown, version_of, warn
from dflash_deploy.audit.stacks import STACKS
from dflash_deploy.facts.parse import integer, rows, section, texts
from dflash_deploy.model import Where


def folders(case: Case) -> list[Mapping[str, Any]]:
    """The model folders that were asked for; none where no model is meant to be served."""
    if not (case.model or case.draft) and not case.raw.get("models"):
        return []
    return case.items("models")


def of(case: Case, path: str) -> Mapping[str, Any] | None:
    return next((item for item in folders(case) if item.get("path") == path), None)


def text_config(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's numbers, also of a multimodal configuration."""
    config = section(item, "config")
    return {**config, **section(config, "text_config")}


@rule(
    "model-folder-readable",
    Where.MODEL,
    weight=5,
    explains=("shards-complete", "tokenizer-present", "draft-fits-target"),
)
def model_folder_readable(case: Case) -> Iterator[Verdict]:
    """Each model folder must exist and hold a config.json that parses."""
    for item in folders(case):
        if item.get("exists") is False:
            yield fail(f"{item.get('path')} is not there", (), "download the model to the host first")
        elif item.get("config_problem"):
            yield fail(f"{item.get('path')}: config.json {item.get('config_problem')}", (), "download the folder again")
        else:
            yield ok(f"{item.get('path')}: {', '.join(texts(section(item, 'config').get('architectures')) or ['?'])}")


@rule("shards-complete", Where.MODEL, references=("microsoft/OmniParser#34", "hiyouga/LlamaFactory#327"), weight=8)
def shards_complete(case: Case) -> Iterator[Verdict]:
    """Every shard that the index names must be there, whole, and weights rather than a Git LFS pointer (a file of about
    135 bytes; loading it says HeaderTooLarge)."""
    for item in folders(case):
        if item.get("exists") is False:
            continue
        weights = item.get("weights")
        if not isinstance(weights, Mapping):
            yield unknown(f"{item.get('path')}: its weights were not looked at")
            continue
        broken = [
            f"{file.get('name')}: {file.get('problem')}" for file in rows(weights.get("files")) if file.get("problem")
        ]
        broken += [
            f"{name}: missing"
            for name in texts(weights.get("absent_by_number"))
            if not any(name in line for line in broken)
        ]
        if weights.get("index_problem"):
            broken.insert(0, f"{weights.get('index')} {weights.get('index_problem')}")
        if broken:
            pointer = any("LFS" in line for line in broken)
            yield fail(
                f"{item.get('path')}: weights are not complete",
                broken[:6],
                "git lfs pull" if pointer else "download the missing files again",
            )
        elif not rows(weights.get("files")):
            yield fail(f"{item.get('path')}: no weights", (), "download the model")
        else:
            yield ok(
                f"{item.get('path')}: {len(rows(weights.get('files')))} weight file(s), "
                f"{(integer(weights.get('total_bytes')) or 0) >> 20} MiB"
            )


@rule("tokenizer-present", Where.MODEL, references=("syv-ai/qwen38-27b-rtx3090 verify.sh",), weight=9)
def tokenizer_present(case: Case) -> Iterator[Verdict]:
    """The target needs a tokenizer with a vocabulary; without tokenizer.json some loaders make an empty one that
    encodes everything to nothing. A drafter needs none."""
    for item in folders(case):
        architectures = " ".join(texts(section(item, "config").get("architectures")))
        if item.get("exists") is False or item.get("path") == case.draft or "DFlash" in architectures:
            continue
        tokenizer = item.get("tokenizer")
        if not isinstance(tokenizer, Mapping) or "config" not in item:
            yield unknown(f"{item.get('path')}: its tokenizer was not looked at")
            continue
        files = section(tokenizer, "files")
        pointers = [name for name, size in files.items() if size == "lfs pointer"]
        vocabulary = [
            name
            for name in files
            if name in ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model")
        ]
        if pointers:
            yield fail(f"{item.get('path')}: {', '.join(pointers)} is a Git LFS pointer", (), "git lfs pull")
        elif tokenizer.get("problem"):
            yield fail(f"{item.get('path')}: tokenizer.json {tokenizer.get('problem')}", (), "download it again")
        elif tokenizer.get("vocab_entries") == 0:
            yield fail(f"{item.get('path')}: tokenizer.json has no vocabulary", (), "download it again")
        elif not vocabulary:
            yield fail(
                f"{item.get('path')}: no tokenizer",
                [f"found: {', '.join(files) or 'nothing'}"],
                "add the target's tokenizer.json, or give --tokenizer-path",
            )
        else:
            yield ok(f"{item.get('path')}: {', '.join(vocabulary)}")


@rule("draft-fits-target", Where.MODEL, references=("sgl-project/sglang#40144",), weight=10)
def draft_fits_target(case: Case) -> Iterator[Verdict]:
    """A DFlash drafter is trained for one target: its target_layer_ids must lie in the target, its hidden and
    vocabulary sizes equal the target's, its mask token lie in the vocabulary, and its block hold at least two
    tokens."""
    if not case.draft:
        return
    draft, target = of(case, case.draft), of(case, case.model)
    if draft is None or ("config" not in draft and draft.get("exists", True)):
        yield unknown(f"{case.draft} was not looked at")
        return
    if not draft.get("exists", True):
        return
    mine = text_config(draft)
    special = section(mine, "dflash_config")
    problems: list[str] = []
    if not special:
        problems.append("config.json has no dflash_config")
    layers = special.get("target_layer_ids")
    vocab = integer(mine.get("vocab_size"))
    mask = integer(special.get("mask_token_id"))
    block = integer(mine.get("block_size", special.get("block_size")))
    if special and (not isinstance(layers, list) or not layers or not all(isinstance(layer, int) for layer in layers)):
        problems.append(f"target_layer_ids is {layers!r}")
        layers = []
    if special and mask is None:
        problems.append("no mask_token_id")
    if mask is not None and vocab is not None and not 0 <= mask < vocab:
        problems.append(f"mask_token_id {mask} is outside the vocabulary of {vocab}")
    if block is None or block < 2:
        problems.append(f"block_size is {block}")
    types = mine.get("layer_types")
    if isinstance(types, list):
        if len(types) != mine.get("num_hidden_layers"):
            problems.append(f"{len(types)} layer_types for {mine.get('num_hidden_layers')} layers")
        if any(kind == "sliding_attention" for kind in types) and not mine.get("sliding_window"):
            problems.append("sliding_attention layers without a sliding_window")
    if target is not None and target.get("exists", True):
        theirs = text_config(target)
        count = integer(theirs.get("num_hidden_layers"))
        for layer in layers or []:
            if count is not None and isinstance(layer, int) and not 0 <= layer < count:
                problems.append(f"target_layer_ids has {layer}, the target has {count} layers")
        for key in ("hidden_size", "vocab_size"):
            if mine.get(key) is not None and theirs.get(key) is not None and mine[key] != theirs[key]:
                problems.append(f"{key}: draft {mine[key]}, target {theirs[key]}")
        wanted = integer(mine.get("num_target_layers"))
        if wanted is not None and count is not None and wanted != count:
            problems.append(f"num_target_layers: draft {wanted}, target {count}")
    if problems:
        yield fail(
            f"{case.draft} does not fit {case.model or 'its target'}",
            problems,
            "use the drafter that was trained for this target",
        )
    elif target is None:
        yield unknown("no target to compare the drafter with")
    else:
        yield ok(f"{len(layers or [])} target layers, block of {block}")


@rule("model-path-neutral", Where.MODEL, references=("syv-ai/qwen38-27b-rtx3090 docs/gotchas.md #17",), weight=20)
def model_path_neutral(case: Case) -> Iterator[Verdict]:
    """The target's path should not contain the name of a speculative method: some engines choose the method from the
    path."""
    if not case.model:
        return
    hits = re.findall(r"dflash|eagle|medusa|mtp|ddtree", case.model, re.I)
    if hits:
        yield warn(f"the target's path contains {hits[0]!r}", [case.model], "rename or link the folder")
    else:
        yield ok("the path names no method")


@rule("offline-model-is-local", Where.MODEL, references=("vllm-project/vllm#23684",), weight=9)
def offline_model_is_local(case: Case) -> Iterator[Verdict]:
    """Offline (HF_HUB_OFFLINE=1), model and drafter must be absolute paths of folders that are there: anything else is
    taken for a hub name."""
    if case.variable("HF_HUB_OFFLINE") not in ("1", "true", "TRUE") and case.variable("TRANSFORMERS_OFFLINE") not in (
        "1",
        "true",
    ):
        return
    for path in filter(None, (case.model, case.draft)):
        item = of(case, path)
        if not path.startswith("/"):
            yield fail(
                f"{path} is no absolute path, and the hub is switched off",
                ["HF_HUB_OFFLINE=1"],
                "give the folder's absolute path",
            )
        elif item is not None and item.get("exists") is False:
            yield fail(
                f"{path} is not there, and the hub is switched off",
                ["HF_HUB_OFFLINE=1"],
                "bring the folder to the host",
            )
        else:
            yield ok(path)


@rule(
    "dflash-arguments-allowed",
    Where.VENV,
    references=("sgl-project/sglang#36140", "sgl-project/sglang 0.5.11 to 0.5.23"),
    weight=11,
)
def dflash_arguments_allowed(case: Case) -> Iterator[Verdict]:
    """DFLASH (and DDTREE on it) needs a draft model, pipeline size 1 and no disaggregated prefill; before 0.5.18 no
    data-parallel attention either."""
    algorithm = case.argument("--speculative-algorithm")
    if algorithm not in ("DFLASH", "DDTREE"):
        return
    problems = []
    if not case.argument("--speculative-draft-model-path"):
        problems.append("--speculative-draft-model-path is missing")
    for flag in ("--pp-size", "--pipeline-parallel-size"):
        size = case.argument(flag)
        if size not in (None, "1"):
            problems.append(f"{flag} {size}: only 1 is supported")
    if case.argument("--disaggregation-mode") not in (None, "null"):
        problems.append("--disaggregation-mode: DFLASH does not run disaggregated")
    versions = [version_of(environment, "sglang") for environment in case.environments]
    release = case.stack.sglang if case.stack else next(filter(None, versions), "")
    if case.argument("--enable-dp-attention") is not None and release.startswith(
        ("0.5.11", "0.5.12", "0.5.13", "0.5.14", "0.5.15", "0.5.16")
    ):
        problems.append(f"--enable-dp-attention: not with DFLASH in {release}")
    patched = any(stack.sglang == release and stack.patch_sets for stack in STACKS)
    if re.match(r"0\.5\.([0-9]|10)(\.|$)", release or "") and not patched:
        problems.append(f"SGLang {release} has no DFLASH (first in 0.5.11), and no patch set brings it")
    if problems:
        yield fail(f"{algorithm} cannot start with these arguments", problems, "change the arguments named above")
    else:
        yield ok(f"{algorithm} with these arguments")


@rule("host-argument-explicit", Where.VENV, references=("sgl-project/sglang#18201",), weight=19)
def host_argument_explicit(case: Case) -> Iterator[Verdict]:
    """--host must be an address: the warm-up uses it as part of a URL, and an empty one fails."""
    if not case.args:
        return
    host = case.argument("--host")
    if host == "":
        yield fail("--host is empty", (), "--host 127.0.0.1 (or 0.0.0.0 with --skip-server-warmup)")
    else:
        yield ok(f"--host {host or 'default'}")


@rule("allocator-fits-all-reduce", Where.VENV, references=("sjug/rtx6kpro inference-engines/sglang.md",), weight=18)
def allocator_fits_all_reduce(case: Case) -> Iterator[Verdict]:
    """expandable_segments:True cannot be shared by IPC handles, which the one-shot PCIe all-reduce uses."""
    if case.argument("--enable-pcie-oneshot-allreduce") is None:
        return
    value = case.variable("PYTORCH_CUDA_ALLOC_CONF") or case.variable("PYTORCH_ALLOC_CONF")
    if "expandable_segments:true" in value.lower():
        yield fail(
            "one-shot all-reduce with expandable segments", [f"PYTORCH_CUDA_ALLOC_CONF={value}"], "drop one of the two"
        )
    else:
        yield ok("no expandable segments")
