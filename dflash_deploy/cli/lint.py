"""The planned arguments against the release that is installed, before anything is started."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from typing import TYPE_CHECKING, Any

from dflash_deploy.cli.deployment import Deployment, talk
from dflash_deploy.model import Finding, Severity

if TYPE_CHECKING:
    from dflash_deploy.plan.flags import Flags


def flags_of(here: Deployment) -> Flags | None:
    """The installed release's own arguments, read from its source on the host; None where there is none to read."""
    from dflash_deploy.plan.flags import Flags

    script = resources.files("dflash_deploy.launch").joinpath("remote_flags.py").read_bytes()
    lib = posixpath.join(here.settings.venv, "lib")
    result = here.host.run([here.settings.python, "-I", "-", lib], input=script, timeout_s=60)
    try:
        return Flags.of(json.loads(result.out)) if result.ok else None
    except ValueError:
        return None


MODEL_RULES = ("model-folder-readable", "shards-complete", "tokenizer-present", "draft-fits-target")


def models_of(here: Deployment) -> Sequence[Mapping[str, Any]]:
    """What the probe says of the model folders that are to be served."""
    from dflash_deploy.facts import gather
    from dflash_deploy.facts.parse import rows

    settings = here.settings
    paths = [settings.model, settings.draft_model if settings.speculative else ""]
    paths = [path for path in paths if path.startswith("/")]
    seen = rows(here.facts.raw.get("models"))
    if not set(paths) <= {str(item.get("path")) for item in seen}:
        seen = rows(gather(here.host, models=paths, discover=False).raw.get("models"))
    return [item for item in seen if item.get("path") in paths]


def lint_findings(here: Deployment) -> list[Finding]:
    """What the release would not accept, or serve wrongly without a word; empty when nothing is installed yet. That
    the stack's own arguments are deprecated is known and left out."""
    from dflash_deploy.audit.request import build_case
    from dflash_deploy.audit.rules import RULES
    from dflash_deploy.facts.parse import section
    from dflash_deploy.plan.flags import lint

    flags = flags_of(here)
    if flags is None:
        return []
    settings = here.settings
    argv = settings.server_argv()[3:]
    models = [] if settings.tiny_pair else models_of(here)
    weights = {str(i.get("path")): int(section(i, "weights").get("total_bytes") or 0) >> 20 for i in models}
    found = lint(argv, flags, here.facts, weights)
    own = [word for word in settings.stack.server_args if word.startswith("--")]
    found = [f for f in found if f.severity is Severity.FAIL or f.message.split()[0] not in own]
    if models:
        # SGLang serves a folder that lacks a shard, with whatever lay in memory for its weights.
        draft = settings.draft_model if settings.speculative else ""
        facts = replace(here.facts, raw={**here.facts.raw, "models": models})
        case = build_case(facts, stack=settings.stack.name, model=settings.model, draft=draft, args=argv, env={})
        judged = (finding for name in MODEL_RULES if name in RULES for finding in RULES[name].run(case))
        found += [each for each in judged if each.severity is Severity.FAIL]
    return found


def check_arguments(here: Deployment) -> None:
    """Warnings are told; what would keep the server from starting is an error, all of it at once.

    Raises:
        Incompatible
    """
    from dflash_deploy.errors import Incompatible

    found = lint_findings(here)
    for each in found:
        if each.severity is Severity.WARN:
            talk(f"  warning: {each.message}" + (f": {each.remedy}" if each.remedy else ""))
    wrong = [each for each in found if each.severity is Severity.FAIL]
    if wrong:
        raise Incompatible(
            f"SGLang {here.settings.stack.sglang} does not serve this with these arguments",
            evidence=[
                "; ".join((each.message, *each.evidence[:3])) + (f": {each.remedy}" if each.remedy else "")
                for each in wrong
            ],
            hint="--server-arg, --model or --draft-model, or the host's table in hosts.toml",
        )
