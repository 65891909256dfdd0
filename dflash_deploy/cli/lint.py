"""The planned arguments against the release that is installed, before anything is started."""

from __future__ import annotations

import json
import posixpath
from importlib import resources
from typing import TYPE_CHECKING

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


def weights_of(here: Deployment) -> dict[str, int]:
    """MiB of weight files by folder. Nothing for the tiny pair, which fits anywhere."""
    from dflash_deploy.facts import gather
    from dflash_deploy.facts.parse import rows, section

    settings = here.settings
    paths = [p for p in (settings.model, settings.draft_model) if p.startswith("/")]
    if settings.tiny_pair or not paths:
        return {}
    raw = gather(here.host, models=paths, discover=False).raw
    found = {}
    for item in rows(raw.get("models")):
        found[str(item.get("path"))] = int(section(item, "weights").get("total_bytes") or 0) >> 20
    return found


def lint_findings(here: Deployment) -> list[Finding]:
    """What the release would not accept; empty when nothing is installed yet. That the stack's own arguments are
    deprecated is known and left out."""
    from dflash_deploy.plan.flags import lint

    flags = flags_of(here)
    if flags is None:
        return []
    argv = here.settings.server_argv()[3:]
    found = lint(argv, flags, here.facts, weights_of(here))
    own = [word for word in here.settings.stack.server_args if word.startswith("--")]
    return [f for f in found if f.severity is Severity.FAIL or f.message.split()[0] not in own]


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
            f"SGLang {here.settings.stack.sglang} does not start with these arguments",
            evidence=[each.message + (f": {each.remedy}" if each.remedy else "") for each in wrong],
            hint="--server-arg, or server_args of the host in hosts.toml",
        )
