"""A package's tree on a host: inspect, apply, revert. One round trip to read, one to write; all or nothing.

The target's Python runs :mod:`dflash_deploy.patching.agent`; libcst and the sets stay on this side.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from dflash_deploy import errors
from dflash_deploy.errors import UnreadableFact
from dflash_deploy.model import Status, StepOutcome
from dflash_deploy.patching import manifest
from dflash_deploy.patching.judge import Change, TreeFacts, TreeState, check_sets, judge, reversal
from dflash_deploy.patching.manifest import load_payload
from dflash_deploy.patching.patch import PatchSet, State
from dflash_deploy.patching.remote import TreeHost, ask


def _tool_version() -> str:
    try:
        return metadata.version("dflash-deploy")
    except metadata.PackageNotFoundError:
        return ""


def read(host: TreeHost, path: str, package: str, files: Sequence[str] = (), payload: Sequence[str] = ()) -> TreeFacts:
    """Read the tree's facts in one round trip.

    Args:
        path: the package's folder, the folder that holds it, or a virtual environment.
        files: paths relative to the package; those in a manifest come in any case.
        payload: paths relative to the site folder.
    """
    request = {"op": "examine", "path": path, "package": package, "files": list(files), "payload": list(payload)}
    answer = ask(host, path, request)
    try:
        return TreeFacts(
            site=answer["site"],
            package=package,
            version=answer["version"],
            files={name: _decoded(data) for name, data in answer["files"].items()},
            record=answer["record"],
            links=answer["links"],
            manifest=manifest.parse(answer["manifest"]),
            pristine={name: data for name, text in answer["pristine"].items() if (data := _decoded(text)) is not None},
            patched={name: data for name, text in answer["patched"].items() if (data := _decoded(text)) is not None},
            interrupted=str(answer["unfinished"]),
            checkout=answer["checkout"] or "",
            gpu=bool(answer["gpu"]),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UnreadableFact(f"{host.name}: the patch agent's answer cannot be read", evidence=repr(error)) from error


def _decoded(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


def inspect(
    host: TreeHost,
    site_packages: str,
    sets: Sequence[PatchSet],
    *,
    package: str = "sglang",
    payload: Path | None = None,
    allow_dirty: bool = False,
    allow_untested: bool = False,
    device: str | None = None,
    rules: str = "",
) -> TreeState:
    """Where the tree stands against ``sets``. Changes nothing; obstacles are in the state.

    Args:
        payload: folder of the payload package on this side, brought when a set imports it.
        device: ``cuda`` or ``cpu`` where the caller knows; else the target's device files decide.
        rules: digest of the sets and the engine, kept in the manifest for :func:`.unchanged.unchanged`.

    Raises:
        Incompatible: a set is not for this host's device.
    """
    bring = load_payload(payload) if payload is not None and any(s.payload for s in sets) else {}
    files = sorted({file for each in sets for file in each.files})
    facts = read(host, site_packages, package, files, sorted(bring))
    check_sets(sets, gpu=facts.gpu if device is None else device == "cuda")
    return judge(
        facts,
        sets,
        bring,
        allow_dirty=allow_dirty,
        allow_untested=allow_untested,
        tool=_tool_version(),
        rules=rules,
    )


def recover(host: TreeHost, facts: TreeFacts) -> StepOutcome | None:
    """Carry an interrupted change to its end; None when there was none."""
    if not facts.interrupted:
        return None
    what = ask(host, facts.site, {"op": "finish", "site": facts.site})["finished"] or facts.interrupted
    if what == "preparation":
        return StepOutcome("recover", Status.CHANGED, "rolled back an interrupted run that had changed nothing yet")
    return StepOutcome("recover", Status.CHANGED, f"completed the interrupted {what}")


def apply(
    host: TreeHost,
    site_packages: str,
    sets: Sequence[PatchSet],
    *,
    package: str = "sglang",
    payload: Path | None = None,
    allow_dirty: bool = False,
    allow_untested: bool = False,
    device: str | None = None,
    rules: str = "",
) -> list[StepOutcome]:
    """Bring the tree to exactly ``sets``; others that were applied are taken out. Nothing to do: one outcome, ``ok``.

    Raises:
        PatchError, HostChanged, Incompatible: nothing was changed.
    """

    def look() -> TreeState:
        return inspect(
            host,
            site_packages,
            sets,
            package=package,
            payload=payload,
            allow_dirty=allow_dirty,
            allow_untested=allow_untested,
            device=device,
            rules=rules,
        )

    began = time.monotonic()
    outcomes = []
    state = look()
    if (outcome := recover(host, state.facts)) is not None:
        outcomes.append(outcome)
        state = look()
    state.check()
    names = ", ".join(s.name for s in sets) or "none"
    if not state.changes:
        if state.manifest is not None and state.facts.manifest is not None and state.manifest != state.facts.manifest:
            # Only what the next run is told has changed, as after an update of the tool.
            _commit(host, state.facts, "apply", (), state.manifest)
        upstream = sorted({v.detail for v in state.verdicts if v.state is State.SUPERSEDED and "the set" in v.detail})
        detail = "; ".join([f"{names}: nothing to do", *upstream])
        return [*outcomes, StepOutcome("patch", Status.OK, detail, time.monotonic() - began)]
    assert state.manifest is not None
    _commit(host, state.facts, "apply", state.changes, state.manifest)
    detail = f"{names}: {len(state.changes)} files"
    return [*outcomes, StepOutcome("patch", Status.CHANGED, detail, time.monotonic() - began, state.as_dict())]


def revert(host: TreeHost, site_packages: str, *, package: str = "sglang") -> list[StepOutcome]:
    """Restore every pristine byte and remove what was brought; needs only the manifest and the stored bytes.

    Raises:
        ForeignEdit: nothing was changed.
    """
    began = time.monotonic()
    outcomes = []
    facts = read(host, site_packages, package)
    if (outcome := recover(host, facts)) is not None:
        outcomes.append(outcome)
        facts = read(host, site_packages, package)
    if facts.manifest is None:
        return [*outcomes, StepOutcome("revert", Status.OK, "nothing is applied", time.monotonic() - began)]
    changes = reversal(facts)
    _commit(host, facts, "revert", changes, None)
    detail = f"{len(changes)} files restored or removed"
    return [*outcomes, StepOutcome("revert", Status.CHANGED, detail, time.monotonic() - began)]


def _commit(
    host: TreeHost, facts: TreeFacts, op: str, changes: Sequence[Change], after: manifest.Manifest | None
) -> None:
    request = {
        "op": op,
        "site": facts.site,
        "files": [
            {
                "path": change.path,
                "before": change.before_sha256,
                "after": change.after_sha256,
                "data": None if change.after is None else base64.b64encode(change.after).decode(),
            }
            for change in changes
        ],
        "manifest": None if after is None else after.as_dict(),
    }
    answer = ask(host, facts.site, request)
    if answer["finished"]:
        raise errors.HostChanged(
            f"{host.name}: another run left a change unfinished; it was completed", hint="run again"
        )
