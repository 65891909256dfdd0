"""``patch``: put the patch sets into an installed package, take them out again, say where a tree stands.

The one place that knows the sets: everything else gets them passed in.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_deploy.cli.common import JsonOption, emit_json
from dflash_deploy.errors import CHANGES_PENDING, UsageError

if TYPE_CHECKING:
    from dflash_deploy.host import Host
    from dflash_deploy.model import StepOutcome
    from dflash_deploy.patching.judge import TreeState
    from dflash_deploy.patching.manifest import Manifest
    from dflash_deploy.patching.patch import PatchSet
    from dflash_deploy.patching.unchanged import Look

PACKAGE = "sglang"
EXIT_BLOCKED = 7
DEFAULT_SETS = ("ddtree", "cpu")
"""Applied when no set is named; ``cpu`` only on a host without a GPU."""


def register(app: typer.Typer) -> None:
    """Add this group's commands to ``app``."""
    app.command()(patch)


def patch(
    host: Annotated[
        str,
        typer.Argument(
            metavar="[HOST]", help="'local', a name in hosts.toml, a Host of ~/.ssh/config, or user@host:port."
        ),
    ] = "local",
    sglang_path: Annotated[
        str,
        typer.Option(
            "--sglang-path", "--venv", help="The sglang folder, the folder that holds it, or a virtual environment."
        ),
    ] = "",
    set_names: Annotated[
        list[str] | None,
        typer.Option("--set", help="Patch set, repeatable. Default: ddtree, and cpu on a host without a GPU."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 10 when something would change.")
    ] = False,
    show_diff: Annotated[
        bool, typer.Option("--diff", help="Change nothing; print the unified diff on stdout.")
    ] = False,
    do_revert: Annotated[bool, typer.Option("--revert", help="Restore the pristine bytes.")] = False,
    show_status: Annotated[bool, typer.Option("--status", help="Say where the tree stands.")] = False,
    allow_dirty: Annotated[bool, typer.Option("--allow-dirty", help="Patch a git work tree too.")] = False,
    allow_untested: Annotated[
        bool, typer.Option("--allow-untested", help="Another release, if all anchors and contracts hold there.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Patch SGLang in an environment, as one transaction that can be reverted to identical bytes.

    Exit codes: 0 applied, nothing to do or reverted; 7 the tree does not fit; 10 a dry run or --status: not as wanted.
    """
    from dflash_deploy.host import connect
    from dflash_deploy.inventory import resolve

    if sum((check, show_diff, do_revert, show_status)) > 1:
        raise UsageError("--check, --diff, --revert and --status exclude each other")
    target = resolve(host)
    path = sglang_path or str(target.options.get("venv", ""))
    if not path:
        raise UsageError("which environment?", hint="name it: --sglang-path PATH (or venv = PATH in hosts.toml)")
    machine = connect(target, on_notice=_talk)
    try:
        if target.kind == "local":
            path = str(Path(path).expanduser().absolute())
        seen = None if do_revert else look(machine, path)
        if (
            seen is not None
            and not (show_status or show_diff or (check and as_json))
            and (applied := nothing_to_do(seen, set_names, allow_dirty=allow_dirty))
        ):
            _unchanged(applied, check, as_json)
            return
        gc.disable()  # until the process ends: hundreds of classes, then trees without cycles
        from dflash_deploy.patching import tree

        if do_revert:
            _done(tree.revert(machine, path, package=PACKAGE), as_json)
            return
        path, sets = choose_sets(
            machine, path, set_names, allow_untested=allow_untested, applied=show_status, seen=seen
        )
        payload = payload_of(sets)
        if not (check or show_diff or show_status):
            _talk(f"{machine.name}: checking {', '.join(s.name for s in sets)} against {path}")
            options: dict[str, Any] = {"allow_dirty": allow_dirty, "allow_untested": allow_untested, "rules": rules()}
            _done(tree.apply(machine, path, sets, package=PACKAGE, payload=payload, **options), as_json)
            return
        state = tree.inspect(
            machine,
            path,
            sets,
            package=PACKAGE,
            payload=payload,
            allow_dirty=allow_dirty,
            allow_untested=allow_untested,
            rules=rules(),
        )
        if show_status:
            _show_status(state, as_json)
        _show_pending(state, show_diff, as_json)
    finally:
        machine.close()


def choose_sets(
    host: Host,
    path: str,
    names: Sequence[str] | None = None,
    *,
    allow_untested: bool = False,
    applied: bool = False,
    seen: Look | None = None,
) -> tuple[str, list[PatchSet]]:
    """(site folder, sets) for an environment: the named ones, else the manifest's (``applied``), else the defaults.

    Args:
        seen: what :func:`look` told, where the caller has looked already.

    Raises:
        UsageError, UnsupportedVersion, Incompatible
    """
    from dflash_patches import registry

    from dflash_deploy.errors import UnsupportedVersion
    from dflash_deploy.patching.judge import check_sets

    facts = seen or look(host, path)
    if facts.version is None:
        raise UnsupportedVersion(
            f"cannot tell which release of {PACKAGE} lies in {facts.site}", hint="install the release as a wheel"
        )
    if names is not None and not names:  # a stack without patches
        return facts.site, []
    wanted = list(names or ())
    if not wanted and applied and facts.manifest is not None:
        wanted = list(facts.manifest.sets)
    if not wanted:
        wanted = [name for name in (DEFAULT_SETS[:1] if facts.gpu else DEFAULT_SETS) if name in registry.names()]
    sets = [registry.find(facts.version, name, allow_untested=allow_untested) for name in dict.fromkeys(wanted)]
    check_sets(sets, gpu=facts.gpu)
    return facts.site, sets


def look(host: Host, path: str) -> Look:
    """The environment as hashes show it, in one round trip."""
    from dflash_deploy.patching import unchanged

    return unchanged.look(host, path, PACKAGE)


def nothing_to_do(
    seen: Look, names: Sequence[str] | None = None, *, allow_dirty: bool = False, gpu: bool | None = None
) -> Manifest | None:
    """The manifest, when these sets (else the defaults) are applied and a full judgement would change nothing.

    No parsing; None: judge.

    Args:
        gpu: what the caller knows of the host; else its device files decide.
    """
    from dflash_deploy.assets import payload_dir
    from dflash_deploy.patching.unchanged import unchanged

    def wanted(found: bool) -> Sequence[str]:
        chosen = tuple(dict.fromkeys(names or ()))
        if not chosen:
            return DEFAULT_SETS[:1] if found else DEFAULT_SETS
        return () if "cpu" in chosen and (found if gpu is None else gpu) else chosen

    return unchanged(seen, wanted, package=PACKAGE, rules=rules(), payload=payload_dir(), allow_dirty=allow_dirty)


@functools.cache
def rules() -> str:
    """Digest of the patch sets and of the engine; neither is imported for it."""
    from dflash_deploy.patching.unchanged import rules_digest

    found = [find_spec(name) for name in ("dflash_patches", "dflash_deploy.patching")]
    return rules_digest(Path(place) for spec in found if spec for place in spec.submodule_search_locations or ())


def inputs_digest(names: Sequence[str], version: str, device: str) -> str:
    """One digest (sha256, hex) of all that decides what patching comes to, computed from files on this side alone."""
    import hashlib

    from dflash_deploy.assets import payload_dir
    from dflash_deploy.patching.manifest import load_payload, payload_digest

    parts = (rules(), payload_digest(load_payload(payload_dir())), sorted(names), version, device)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def payload_of(sets: Sequence[PatchSet]) -> Path | None:
    """Folder of the payload, where a set's injected code imports it; else None."""
    from dflash_deploy.assets import payload_dir

    return payload_dir() if any(each.payload for each in sets) else None


def _talk(text: str) -> None:
    print(text, file=sys.stderr)


def _unchanged(applied: Manifest, check: bool, as_json: bool) -> None:
    """What a run says that finds everything as the last one left it."""
    detail = f"{', '.join(applied.sets)}: nothing to do"
    if as_json:
        emit_json({"ok": True, "steps": [{"name": "patch", "status": "ok", "detail": detail}]})
    elif not check:
        print(f"patch: ok: {detail}")


def _done(outcomes: Sequence[StepOutcome], as_json: bool) -> None:
    if as_json:
        emit_json({"ok": True, "steps": [{"name": o.name, "status": o.status, "detail": o.detail} for o in outcomes]})
        return
    for outcome in outcomes:
        print(f"{outcome.name}: {outcome.status}: {outcome.detail} ({outcome.seconds:.1f} s)")


def _show_status(state: TreeState, as_json: bool) -> None:
    if as_json:
        emit_json({"ok": state.status == "applied", **state.as_dict()})
    else:
        facts = state.facts
        sets = ", ".join(facts.manifest.sets) if facts.manifest else "none"
        print(f"{state.status}: {facts.package} {facts.version} in {facts.site} (applied sets: {sets})")
        for verdict in state.verdicts:
            print(f"  {verdict.state:<10} {verdict.patch}  {verdict.file}  {verdict.detail}".rstrip())
        for path in state.overwritten:
            print(f"  pristine again (reinstalled?): {path}")
        for path, text in state.foreign:
            print(f"  changed by somebody else: {path}\n{text}", end="")
        if state.payload_changed:
            print("  the payload differs from the one that this tool carries")
    blocked = state.status in ("foreign", "blocked")
    raise typer.Exit(EXIT_BLOCKED if blocked else 0 if state.status == "applied" else CHANGES_PENDING)


def _show_pending(state: TreeState, show_diff: bool, as_json: bool) -> None:
    if not state.facts.interrupted:
        state.check()
    if as_json:
        emit_json({"ok": True, **state.as_dict(), **({"diff": [c.diff() for c in state.changes]} if show_diff else {})})
    elif show_diff:
        for change in state.changes:
            sys.stdout.write(change.diff())
    else:
        for change in state.changes:
            print(f"would {'change' if change.before is not None else 'add'} {change.path}")
    if state.facts.interrupted:
        _talk(f"an {state.facts.interrupted} was interrupted here; the next patch or --revert completes it")
    raise typer.Exit(CHANGES_PENDING if state.changes or state.facts.interrupted else 0)
