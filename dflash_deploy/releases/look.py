"""One round trip: what lies below the root, what runs, who holds the lock."""

from __future__ import annotations

import json
import posixpath
import secrets
import shlex
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from dflash_deploy.assets import templates_dir
from dflash_deploy.errors import DflashError, UnreadableFact
from dflash_deploy.facts.program import CANDIDATES
from dflash_deploy.host.base import Host
from dflash_deploy.patching import manifest
from dflash_deploy.releases.model import Look, Release, VenvLook

PACKAGE = "sglang"


def look(
    host: Host,
    root: str,
    service: str,
    *,
    bases: Sequence[str] = (),
    inputs: str = "",
    files: Sequence[str] = (),
    trees: Sequence[str] = (),
    models: Sequence[str] = (),
) -> Look:
    """Read the deployment below ``root``, changing nothing.

    Args:
        service: name of the service that is asked for; those of the releases come with it.
        bases: environments to look into (interpreter, packages, patches) unless there is one with these ``inputs``.
        inputs: digest of the patch sets that are wanted.
        files: paths whose digests are wanted.
        trees: folders whose files' digests are wanted.
        models: folders that should hold a model.

    Raises:
        HostError: the host does not answer.
        UnreadableFact: it answers, and not what was asked.
    """
    request = {
        "root": root, "service": service, "package": PACKAGE, "bases": list(bases), "inputs": inputs,
        "files": list(files), "trees": list(trees), "models": list(models),
    }  # fmt: skip
    mark = f"look-{secrets.token_hex(8)}"
    source = resources.files("dflash_deploy.releases").joinpath("remote.py").read_text("utf-8")
    serve = (templates_dir() / "serve.py").read_text("utf-8")
    program = (
        f"import json\nREQUEST = json.loads({json.dumps(request)!a})\nSERVE = {serve!a}\nMARK = {mark!a}\n{source}"
    )
    check = '"$p" -I -S -c "import sys; sys.exit(sys.version_info < (3, 8))" </dev/null >/dev/null 2>&1'
    own = " ".join(shlex.quote(f"{venv}/bin/python") for venv in bases)
    search = f'for p in {CANDIDATES} {own}; do if {check}; then exec "$p" -I -S -; fi; done; exit 127'
    result = host.run(("sh", "-c", search), input=program.encode("utf-8"), timeout_s=120.0)
    parts = result.out.split(mark)
    try:
        return parsed(root, json.loads(parts[1]))
    except (IndexError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise UnreadableFact(
            f"the deployment below {root} on {host.name} cannot be read",
            evidence=result.err.strip().splitlines()[-4:] or [repr(error)],
            hint=f"dflash-deploy audit {host.name}",
        ) from None


def parsed(root: str, raw: Mapping[str, Any]) -> Look:
    """The answer, typed."""
    venvs = {each["path"]: _venv(each) for each in [*raw["venvs"], *raw["whole"].values()]}
    releases = sorted((Release.of(each) for each in raw["releases"]), key=lambda r: (r.number, r.id))
    return Look(
        root=root,
        exists=bool(raw["root_exists"]),
        current=str(raw["current"]),
        history=tuple(raw["history"]),
        releases=tuple(releases),
        venvs=venvs,
        lock=raw["lock"],
        lock_age=float(raw["lock_age"]),
        services=raw["services"],
        files=raw["files"],
        trees=raw["trees"],
        models=raw["models"],
        legacy=bool(raw["legacy"]) and not releases,
    )


def _venv(raw: Mapping[str, Any]) -> VenvLook:
    patches = raw.get("patches") or {}
    try:
        found = manifest.parse(patches.get("manifest"))
    except DflashError:
        # Of a later schema, or damaged: the patch engine says so when it comes to it.
        found = None
    python = raw.get("python")
    return VenvLook(
        path=raw["path"],
        stamp=raw.get("stamp") or {},
        exists=bool(raw.get("exists", True)),
        python=(python[0], python[1], python[2]) if python else None,
        packages=raw.get("packages") or {},
        manifest=found,
        intact=not patches or (found is not None and not patches.get("differs") and not patches.get("unfinished")),
    )


def store(root: str, name: str) -> str:
    """Path of an environment below the root."""
    return posixpath.join(root, "venvs", name)
