"""``map``: where an SGLang tree dispatches on speculative decoding, what each patch set does there, and what moved."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_deploy.cli.common import JsonOption, emit_json
from dflash_deploy.errors import CommandFailed, UsageError

if TYPE_CHECKING:
    from dflash_deploy.mapping.model import Covered, Map
    from dflash_deploy.mapping.moved import Difference
    from dflash_deploy.patching.patch import PatchSet

PACKAGE = "sglang"


def register(app: typer.Typer) -> None:
    """Add this group's commands to ``app``."""
    app.command("map")(show_map)


def show_map(
    sglang_path: Annotated[
        str,
        typer.Option(
            "--sglang-path",
            "--venv",
            help="The sglang folder, the folder that holds it, a virtual environment, a wheel, or a version.",
        ),
    ],
    against: Annotated[
        str, typer.Option("--against", metavar="VERSION|PATH", help="Show what moved from there to --sglang-path.")
    ] = "",
    kinds: Annotated[
        list[str] | None, typer.Option("--kind", help="Only sites of this kind, repeatable: predicate, name, ...")
    ] = None,
    uncovered: Annotated[bool, typer.Option("--uncovered", help="Only sites that no patch covers.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Index every site where speculative decoding is dispatched or described, by structure and not by text.

    A version is downloaded as a wheel. Nothing is changed anywhere.
    """
    from dflash_deploy.mapping.build import build
    from dflash_deploy.mapping.cover import concerned, cover, gaps
    from dflash_deploy.mapping.model import Cover, Kind

    unknown = sorted(set(kinds or ()) - {str(k) for k in Kind})
    if unknown:
        raise UsageError(f"there is no kind {unknown[0]}", hint=f"choose from: {', '.join(Kind)}")
    wanted = set(kinds or Kind)
    place = located(sglang_path)
    _talk(f"reading {place}")
    found = build(place, PACKAGE)
    sets = sets_for(found.version)
    covered = [c for c in cover(found, sets, payload()) if c.site.kind in wanted]
    names = concerned(found, sets)
    missing = gaps(covered, names)
    shown = [c for c in covered if not uncovered or c.cover is Cover.NONE]
    differences: tuple[Difference, ...] = ()
    old: Map | None = None
    if against:
        from dflash_deploy.mapping.moved import compare

        other = located(against)
        _talk(f"reading {other}")
        old = build(other, PACKAGE)
        differences = tuple(
            d
            for d in compare(old, found)
            if (d.before or d.after).kind in wanted  # type: ignore[union-attr]
        )
    if as_json:
        emit_json(_document(found, sets, shown, names, missing, old, differences))
    elif old is not None:
        _print_moved(old, found, differences)
    else:
        _print_map(found, sets, covered, shown, names, missing)


def located(text: str) -> Path:
    """A path that is there, or the wheel of a release of that version.

    Raises:
        UsageError, CommandFailed
    """
    from packaging.version import InvalidVersion, Version

    path = Path(text).expanduser().absolute()
    if path.exists():
        return path
    try:
        version = str(Version(text))
    except InvalidVersion:
        raise UsageError(f"{text} is neither a path that is there nor a version") from None
    return release_wheel(version)


def release_wheel(version: str) -> Path:
    """The wheel of a release, downloaded by pip when it is not in the user's cache.

    Raises:
        CommandFailed: pip is not there or finds no wheel.
    """
    import shutil

    from dflash_deploy.host.local import LocalHost

    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = base / "dflash-deploy" / "wheels"
    cache.mkdir(parents=True, exist_ok=True)
    pattern = f"{PACKAGE}-{version}-*.whl"
    if found := sorted(cache.glob(pattern)):
        return found[0]
    _talk(f"downloading {PACKAGE} {version}")
    fresh = cache / f".{PACKAGE}-{version}.{os.getpid()}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(fresh)]
    # The files are only read: where no wheel is for this machine, one for another does.
    foreign = ["--platform", "manylinux_2_34_x86_64", "--python-version", "3.11", "--implementation", "cp"]
    try:
        for options in ([], foreign):
            done = LocalHost().run([*pip, *options, f"{PACKAGE}=={version}"], timeout_s=600)
            for wheel in fresh.glob(pattern) if done.ok else ():
                wheel.replace(cache / wheel.name)
                return cache / wheel.name
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    raise CommandFailed(
        f"pip found no wheel of {PACKAGE} {version}",
        evidence=done.err.splitlines()[-4:],
        hint="download the wheel elsewhere and give its path",
    )


def sets_for(version: str | None) -> list[PatchSet]:
    """Every set that is written for this release."""
    from dflash_patches import registry

    return [each for each in registry.all_sets() if version is not None and each.supports(version)]


def payload() -> dict[str, bytes]:
    """Python files of the payload that the sets import."""
    from dflash_deploy.assets import payload_dir
    from dflash_deploy.patching.manifest import load_payload

    return load_payload(payload_dir())


def _talk(text: str) -> None:
    print(text, file=sys.stderr)


def _document(
    found: Map,
    sets: Sequence[PatchSet],
    shown: Sequence[Covered],
    names: frozenset[str],
    missing: Sequence[Covered],
    old: Map | None,
    differences: Sequence[Difference],
) -> dict[str, Any]:
    head = {
        "source": found.source,
        "version": found.version,
        "algorithms": list(found.algorithms),
        "predicates": list(found.predicates),
        "unreadable": list(found.unreadable),
    }
    if old is not None:
        counts = Counter(str(d.how) for d in differences)
        before = {"source": old.source, "version": old.version}
        return {**head, "against": before, "counts": counts, "differences": [d.as_dict() for d in differences]}
    return {
        **head,
        "sets": [s.name for s in sets],
        "concerned": sorted(names),
        "sites": [c.as_dict() for c in shown],
        "gaps": [c.as_dict() for c in missing],
    }


def _print_map(
    found: Map,
    sets: Sequence[PatchSet],
    covered: Sequence[Covered],
    shown: Sequence[Covered],
    names: frozenset[str],
    missing: Sequence[Covered],
) -> None:
    from dflash_deploy.mapping.model import Cover, Kind

    for kind in Kind:
        mine = [c for c in shown if c.site.kind is kind]
        if mine:
            print(f"{kind}: {len(mine)} sites")
        file = ""
        for each in mine:
            site = each.site
            if site.file != file:
                file = site.file
                print(f"  {file}")
            via = f"  (through {site.via})" if site.via else ""
            by = f"  <- {each.cover}: {', '.join(each.by)}" if each.by else ""
            print(f"    {site.line:>5}  {site.role:<8} {site.scope or 'module'}: {site.code[:90]}{via}{by}")
    columns = [*Cover]
    print(f"{'sites of ' + str(found.version):<18}" + "".join(f"{c:>11}" for c in columns))
    counts = Counter((c.site.kind, c.cover) for c in covered)
    for kind in Kind:
        if any(counts[kind, c] for c in columns):
            print(f"  {kind:<16}" + "".join(f"{counts[kind, c]:>11}" for c in columns))
    if not sets:
        _talk(f"no patch set is written for {found.version}")
        return
    print(f"sites that name {', '.join(sorted(names))}, and that no patch covers: {len(missing)}")
    for each in missing:
        print(f"  {each.site.file}:{each.site.line}  {each.site.scope or 'module'}: {each.site.code[:90]}")


def _print_moved(old: Map, new: Map, differences: Sequence[Difference]) -> None:
    from dflash_deploy.mapping.moved import How

    counts = Counter(d.how for d in differences)
    for how in (How.MOVED, How.CHANGED, How.GONE, How.NEW):
        mine = [d for d in differences if d.how is how]
        if mine:
            print(f"{how}: {len(mine)} sites")
        for each in mine:
            site = each.before or each.after
            assert site is not None
            print(f"  {site.kind:<9} {site.file}:{site.line}  {site.scope or 'module'}: {site.code[:90]}")
            if each.before is not None and each.after is not None:
                after = each.after
                print(f"  {'':<9} -> {after.file}:{after.line}  {after.scope or 'module'}: {after.code[:90]}")
    text = ", ".join(f"{counts[how]} {how}" for how in How)
    print(f"{old.version} -> {new.version}: {text}")
