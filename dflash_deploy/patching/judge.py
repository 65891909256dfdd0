"""Facts about a tree and wanted sets → where the tree stands and which bytes each file should have. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_deploy.errors import ForeignEdit, HostChanged, Incompatible, PatchError, UnsupportedVersion, UsageError
from dflash_deploy.patching import engine
from dflash_deploy.patching.engine import Outcome
from dflash_deploy.patching.manifest import Entry, Manifest, digest, payload_digest
from dflash_deploy.patching.patch import PatchSet, State, Verdict


@dataclass(frozen=True)
class TreeFacts:
    """What was read from the target. Paths are relative to ``site``."""

    site: str
    package: str
    version: str | None
    files: Mapping[str, bytes | None] = field(repr=False)
    record: Mapping[str, str] | None = None
    """SHA-256 by path from the installed distribution's RECORD; None: not an installed distribution."""
    links: Mapping[str, int] = field(default_factory=dict)
    manifest: Manifest | None = None
    pristine: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Stored bytes by digest."""
    patched: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """What we wrote, by digest, for files that somebody changed since."""
    interrupted: str = ""
    """``apply`` or ``revert`` when a journal waits, ``preparation`` when a run ended before that."""
    checkout: str = ""
    """Root of the git work tree that holds the package."""
    gpu: bool = False


@dataclass(frozen=True)
class Change:
    """One file to write (``after``) or to remove (None)."""

    path: str
    before: bytes | None = field(repr=False)
    after: bytes | None = field(repr=False)

    @property
    def before_sha256(self) -> str:
        return digest(self.before)

    @property
    def after_sha256(self) -> str:
        return digest(self.after)

    def diff(self) -> str:
        """Unified diff, empty context of three lines."""
        return diff(self.path, self.before, self.after)


@dataclass(frozen=True)
class TreeState:
    """Where a tree stands against the wanted sets."""

    facts: TreeFacts
    sets: tuple[PatchSet, ...]
    verdicts: tuple[Verdict, ...] = ()
    changes: tuple[Change, ...] = ()
    """What an apply would write, in order. Empty: nothing to do."""
    manifest: Manifest | None = None
    """The manifest after an apply."""
    overwritten: tuple[str, ...] = ()
    """Files that were patched once and are pristine again (a reinstallation)."""
    foreign: tuple[tuple[str, str], ...] = ()
    """(path, short diff) of files that are neither pristine nor patched."""
    payload_changed: bool = False
    """The payload on the target is not the one that this tool carries."""
    obstacles: tuple[PatchError | HostChanged | Incompatible, ...] = field(default=(), repr=False)

    @property
    def status(self) -> str:
        """``interrupted``, ``foreign``, ``blocked``, ``overwritten``, ``applied``, ``outdated`` or ``absent``."""
        if self.facts.interrupted:
            return "interrupted"
        if self.foreign:
            return "foreign"
        if self.overwritten:
            return "overwritten"
        if self.obstacles:
            return "blocked"
        if self.facts.manifest is None:
            return "absent" if self.changes else "applied"
        return "outdated" if self.changes else "applied"

    def check(self) -> None:
        """Raise the first obstacle to an apply; nothing when it can go on."""
        for error in self.obstacles:
            raise error

    def as_dict(self) -> dict[str, Any]:
        """JSON data."""
        return {
            "status": self.status,
            "site": self.facts.site,
            "package": self.facts.package,
            "version": self.facts.version,
            "sets": [s.name for s in self.sets],
            "patches": [
                {
                    "name": v.patch,
                    "file": v.file,
                    "state": str(v.state),
                    "detail": v.detail,
                    "evidence": list(v.evidence),
                }
                for v in self.verdicts
            ],
            "would_change": [c.path for c in self.changes],
            "overwritten": list(self.overwritten),
            "foreign": [{"file": p, "diff": d} for p, d in self.foreign],
            "payload_changed": self.payload_changed,
            "interrupted": self.facts.interrupted,
            "applied_sets": list(self.facts.manifest.sets) if self.facts.manifest else [],
            "obstacles": [e.as_dict() for e in self.obstacles],
        }


def diff(path: str, before: bytes | None, after: bytes | None, *, limit: int | None = None) -> str:
    """Unified diff of two versions of a file, at most ``limit`` lines."""
    sides = [
        [] if data is None else data.decode("utf-8", "replace").splitlines(keepends=True) for data in (before, after)
    ]
    names = ["/dev/null" if data is None else f"{side}/{path}" for side, data in (("a", before), ("b", after))]
    lines = []
    for line in difflib.unified_diff(sides[0], sides[1], names[0], names[1]):
        lines.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    if limit is not None and len(lines) > limit:
        lines = [*lines[:limit], f"... {len(lines) - limit} more lines\n"]
    return "".join(lines)


def check_sets(sets: Sequence[PatchSet], *, gpu: bool) -> None:
    """Sets that exclude each other, need others, or are not for this device.

    Raises:
        UsageError, Incompatible
    """
    names = {s.name for s in sets}
    for each in sets:
        missing = [r for r in each.requires if r not in names]
        if missing:
            raise UsageError(f"the set {each.name} needs {', '.join(missing)}", hint=f"add --set {missing[0]}")
        clash = [c for c in each.conflicts if c in names]
        if clash:
            raise UsageError(f"the sets {each.name} and {clash[0]} exclude each other")
        if each.device == "cpu" and gpu:
            raise Incompatible(
                f"the set {each.name} is for hosts without a GPU, and this one has one",
                hint=f"leave out --set {each.name}",
            )
        if each.device == "cuda" and not gpu:
            raise Incompatible(
                f"the set {each.name} needs a GPU, and this host has none", hint=f"leave out --set {each.name}"
            )


def judge(
    facts: TreeFacts,
    sets: Sequence[PatchSet],
    payload: Mapping[str, bytes] | None = None,
    *,
    allow_dirty: bool = False,
    allow_untested: bool = False,
    tool: str = "",
    rules: str = "",
) -> TreeState:
    """Where the tree stands against ``sets``. Obstacles are collected, not raised.

    Args:
        payload: files to bring, by path relative to the site folder; None: leave the payload as it is.
    """
    old = facts.manifest
    base, foreign, overwritten = _pristine(facts)
    obstacles: list[PatchError | HostChanged | Incompatible] = [*_tree_obstacles(facts, foreign, allow_dirty)]
    prefix = f"{facts.package}/"
    inside = {path.removeprefix(prefix): data for path, data in base.items() if path.startswith(prefix)}
    upstream = [each for each in sets if engine.superseded(inside, each)]
    live = [each for each in sets if each not in upstream]
    if payload is not None and not any(each.payload for each in live):
        payload = {}
    for each in live:
        if facts.version is None or (not each.supports(facts.version) and not allow_untested):
            obstacles.append(
                UnsupportedVersion(
                    f"the set {each.name} is not written for {facts.package} {facts.version or '(unknown version)'}",
                    evidence=f"supported: {facts.package} {each.versions} (tested: {', '.join(each.tested)})",
                    hint="install a supported release, or try --allow-untested",
                )
            )
    outcome = _remembering(engine.run(inside, engine.patches_of(live)), live)
    if not any(isinstance(o, (ForeignEdit, UnsupportedVersion)) for o in obstacles):
        try:
            outcome.check()
        except PatchError as error:
            obstacles.append(error)
    wanted: dict[str, bytes | None] = {prefix + path: data for path, data in outcome.files.items()}
    ours = {p for p, e in (old.files if old else {}).items()}
    brought = (
        dict(payload)
        if payload is not None
        else {p: facts.files.get(p) for p in ours if old and not old.files[p].pristine}
    )
    for path, data in brought.items():
        present = facts.files.get(path)
        if path in ours or present is None:
            wanted[path] = data
        elif present != data:
            obstacles.append(
                ForeignEdit(
                    f"{path} is there already and was not brought by this tool", hint="remove that package first"
                )
            )
    changes, entries = [], {}
    for path in sorted(ours | set(wanted)):
        pristine = base.get(path) if path.startswith(prefix) else None
        target = wanted.get(path, pristine)
        present = facts.files.get(path)
        if target != present:
            changes.append(Change(path, present, target))
        if target != pristine:
            entries[path] = Entry(digest(pristine), digest(target))
    pending = {change.path for change in changes}
    verdicts = tuple(
        replace(v, state=State.APPLIED) if v.state is State.ABSENT and prefix + v.file not in pending else v
        for v in (*outcome.verdicts, *(v for each in upstream for v in _upstream(each)))
    )
    hash_ = payload_digest(payload) if payload is not None else (old.payload if old else "")
    manifest = Manifest(
        facts.package,
        facts.version or "",
        tuple(s.name for s in sets),
        entries,
        patches={v.patch: prefix + v.file for v in outcome.verdicts},
        payload=hash_,
        tool=tool,
        rules=rules,
        seen={p: digest(d) for p, d in sorted(facts.files.items()) if p.startswith(prefix) and p not in entries},
    )
    payload_changed = bool(payload and old and old.payload) and any(
        facts.files.get(p) != d for p, d in (payload or {}).items()
    )
    # Payload first: the hooks must never stand without what they import.
    changes.sort(key=lambda c: (c.path.startswith(prefix), c.path))
    return TreeState(
        facts,
        tuple(sets),
        verdicts,
        tuple(changes),
        manifest,
        overwritten,
        foreign,
        payload_changed,
        tuple(obstacles),
    )


def _upstream(each: PatchSet) -> list[Verdict]:
    assert each.superseded is not None
    detail = f"upstream has {each.superseded.name}: the set {each.name} is not needed"
    return [Verdict(patch.name, patch.file, State.SUPERSEDED, detail) for patch in each.patches]


def _remembering(outcome: Outcome, sets: Sequence[PatchSet]) -> Outcome:
    """The outcome, where each obstacle also says in which releases its anchor was last seen."""
    seen = {patch: releases for each in sets for patch, releases in each.seen.items()}

    def told(verdict: Verdict) -> Verdict:
        if verdict.state not in (State.CONFLICT, State.AMBIGUOUS) or not seen.get(verdict.patch):
            return verdict
        releases = seen[verdict.patch]
        span = releases[-1] if len(releases) == 1 else f"{releases[0]} to {releases[-1]} ({len(releases)} releases)"
        return replace(verdict, evidence=(*verdict.evidence, f"this anchor was last seen in: {span}"))

    return replace(outcome, verdicts=tuple(told(v) for v in outcome.verdicts))


def _pristine(facts: TreeFacts) -> tuple[dict[str, bytes | None], tuple[tuple[str, str], ...], tuple[str, ...]]:
    """(pristine bytes by path, foreign edits, files that became pristine again)."""
    base: dict[str, bytes | None] = {}
    foreign, overwritten = [], []
    entries = facts.manifest.files if facts.manifest else {}
    for path, present in facts.files.items():
        entry, now = entries.get(path), digest(present)
        recorded = (facts.record or {}).get(path)
        if entry is None:
            base[path] = present
            if recorded is not None and now != recorded:
                foreign.append((path, "the file differs from the installed release's RECORD\n"))
        elif not entry.pristine:
            if now != entry.patched:
                overwritten.append(path) if present is None else foreign.append((path, "a payload file was edited\n"))
            base[path] = None
        elif now == entry.patched:
            base[path] = facts.pristine.get(entry.pristine, present)
            if entry.pristine not in facts.pristine:
                foreign.append((path, f"its pristine bytes {entry.pristine[:12]} are missing\n"))
        elif now in (entry.pristine, recorded):
            base[path] = present
            overwritten.append(path)
        else:
            base[path] = facts.pristine.get(entry.pristine, present)
            written = facts.patched.get(entry.patched, facts.pristine.get(entry.pristine))
            foreign.append((path, diff(path, written, present, limit=24)))
    return base, tuple(foreign), tuple(overwritten)


def _tree_obstacles(
    facts: TreeFacts, foreign: Sequence[tuple[str, str]], allow_dirty: bool
) -> list[PatchError | HostChanged | Incompatible]:
    found: list[PatchError | HostChanged | Incompatible] = []
    if facts.checkout and not allow_dirty:
        found.append(
            ForeignEdit(
                f"{facts.package} in {facts.site} is a git work tree ({facts.checkout}), not an installed release",
                hint="install the release as a wheel, or say --allow-dirty",
            )
        )
    if foreign:
        lines = [line for path, text in foreign for line in (f"{path}:", *(f"  {x}" for x in text.splitlines()))]
        found.append(
            ForeignEdit(
                f"{foreign[0][0]} was changed by somebody else; nothing was changed",
                evidence=lines[:60],
                hint=f"pip install --force-reinstall --no-deps {facts.package}=={facts.version}, then patch again",
            )
        )
    return found


def reversal(facts: TreeFacts) -> tuple[Change, ...]:
    """What a revert would write: pristine bytes by hash, files that we brought removed. Needs no patch set.

    Raises:
        ForeignEdit: a file is neither pristine nor patched, or its pristine bytes are gone.
    """
    _, foreign, _ = _pristine(facts)
    ours = facts.manifest.files if facts.manifest else {}
    lines = [
        line for path, text in foreign if path in ours for line in (f"{path}:", *(f"  {x}" for x in text.splitlines()))
    ]
    if lines:
        raise ForeignEdit(
            f"{lines[0].rstrip(':')} was changed by somebody else; nothing was changed",
            evidence=lines[:60],
            hint="undo that edit, or reinstall the release; then revert again",
        )
    changes = []
    for path, entry in sorted(ours.items(), reverse=True):
        present = facts.files.get(path)
        if digest(present) == entry.patched:
            changes.append(Change(path, present, facts.pristine[entry.pristine] if entry.pristine else None))
    # Hooks first, then what they import.
    return tuple(sorted(changes, key=lambda c: not c.path.startswith(f"{facts.package}/")))
