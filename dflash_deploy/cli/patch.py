"""``patch``: put the patch sets into an installed package, take them out again, say where a tree stands.

The one place that knows the sets: everything else gets them passed in.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_deploy.cli.common import JsonOption, emit_json
from dflash_deploy.errors import CHANGES_PENDING, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from dflash_deploy.host import Host
    from dflash_deploy.model import StepOutcome
    from dflash_deploy.patching.judge import TreeState
    from dflash_deploy.patching.patch import PatchSet

PACKAGE = "sglang"
EXIT_BLOCKED = 7


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
    from dflash_deploy.patching import tree

    if sum((check, show_diff, do_revert, show_status)) > 1:
        raise UsageError("--check, --diff, --revert and --status exclude each other")
    target = resolve(host)
    path = sglang_path or str(target.options.get("venv", ""))
    if not path:
        raise UsageError("which environment?", hint="name it: --sglang-path PATH (or venv = PATH in hosts.toml)")
    machine = connect(target, on_notice=_talk)
    try:
        if do_revert:
            _done(tree.revert(machine, path, package=PACKAGE), as_json)
            return
        path, sets = choose_sets(machine, path, set_names, allow_untested=allow_untested, applied=show_status)
        payload = payload_of(sets)
        if not (check or show_diff or show_status):
            _talk(f"{machine.name}: checking {', '.join(s.name for s in sets)} against {path}")
            options: dict[str, Any] = {"allow_dirty": allow_dirty, "allow_untested": allow_untested}
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
        )
        if show_status:
            _show_status(state, as_json)
        _show_pending(state, show_diff, as_json)
    finally:
        machine.close()


def choose_sets(
    host: Host, path: str, names: Sequence[str] | None = None, *, allow_untested: bool = False, applied: bool = False
) -> tuple[str, list[PatchSet]]:
    """(site folder, sets) for an environment: the named ones, else the manifest's (``applied``), else the defaults.

    Raises:
        UsageError, UnsupportedVersion, Incompatible
    """
    from dflash_patches import registry

    from dflash_deploy.errors import UnsupportedVersion
    from dflash_deploy.patching import tree
    from dflash_deploy.patching.judge import check_sets

    facts = tree.read(host, path, PACKAGE)
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
        wanted = [name for name in ("ddtree", *(() if facts.gpu else ("cpu",))) if name in registry.names()]
    sets = [registry.find(facts.version, name, allow_untested=allow_untested) for name in dict.fromkeys(wanted)]
    check_sets(sets, gpu=facts.gpu)
    return facts.site, sets


def payload_of(sets: Sequence[PatchSet]) -> Path | None:
    """Folder of the payload, where a set's injected code imports it; else None."""
    from dflash_deploy.assets import payload_dir

    return payload_dir() if any(each.payload for each in sets) else None


def _talk(text: str) -> None:
    print(text, file=sys.stderr)


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
