"""Is all still as the last run left it? Answered from hashes, without the sets, libcst or the files' text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dflash_deploy.errors import UsageError
from dflash_deploy.patching import manifest
from dflash_deploy.patching.manifest import Manifest, load_payload, payload_digest
from dflash_deploy.patching.remote import TreeHost, ask


def rules_digest(folders: Iterable[Path]) -> str:
    """One hash over the Python files of these folders: what decides which bytes a tree gets."""
    found = hashlib.sha256()
    for folder in sorted(folders):
        for path in sorted(folder.rglob("*.py")):
            found.update(f"{folder.name}/{path.relative_to(folder).as_posix()}\0".encode())
            found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


@dataclass(frozen=True)
class Standing:
    """What is applied to a tree, and which of its files are not as they were left."""

    sets: tuple[str, ...] = ()
    overwritten: tuple[str, ...] = ()
    """Pristine again, or gone: somebody installed the package anew."""
    changed: tuple[str, ...] = ()
    """Neither pristine nor patched."""

    @property
    def as_left(self) -> bool:
        """Nothing differs."""
        return not self.overwritten and not self.changed

    def as_dict(self) -> dict[str, object]:
        """JSON data."""
        return {"sets": list(self.sets), "overwritten": list(self.overwritten), "changed": list(self.changed)}


def standing(host: TreeHost, path: str, package: str) -> Standing:
    """Where the patched files stand, in one round trip. Without a package or a manifest: nothing is applied.

    Raises:
        DflashError: the host does not answer, or the manifest cannot be read.
    """
    try:
        seen = look(host, path, package)
    except UsageError:
        return Standing()
    applied = seen.manifest
    if applied is None:
        return Standing()
    now = seen.digests
    differ = [(name, entry) for name, entry in sorted(applied.files.items()) if now.get(name) != entry.patched]
    anew = [name for name, entry in differ if now.get(name, "") in (entry.pristine, "")]
    return Standing(applied.sets, tuple(anew), tuple(name for name, _ in differ if name not in anew))


@dataclass(frozen=True)
class Look:
    """A tree as its hashes show it."""

    site: str
    version: str | None
    gpu: bool
    manifest: Manifest | None
    digests: Mapping[str, str] = field(repr=False)
    """SHA-256 now of every file that the manifest names; ``""``: there is none."""
    unfinished: str
    checkout: str | None


def look(host: TreeHost, path: str, package: str) -> Look:
    """Read the hashes of what a manifest names, in one round trip.

    Raises:
        DflashError: the host does not answer, or the manifest cannot be read.
    """
    answer = ask(host, path, {"op": "verify", "path": path, "package": package})
    return Look(
        site=answer["site"],
        version=answer["version"],
        gpu=bool(answer["gpu"]),
        manifest=manifest.parse(answer["manifest"]),
        digests=answer["digests"],
        unfinished=answer["unfinished"],
        checkout=answer["checkout"],
    )


def unchanged(
    seen: Look,
    names: Callable[[bool], Sequence[str]],
    *,
    package: str,
    rules: str,
    payload: Path,
    allow_dirty: bool = False,
) -> Manifest | None:
    """The manifest, when a full judgement would find nothing to do; None when only that can tell.

    It would when the same rules applied the same sets and payload to this release, and every file that they wrote or
    read has the bytes that they left.

    Args:
        names: the wanted sets, given whether the target has a GPU; empty: not to be decided here.
        rules: of :func:`rules_digest`.
    """
    applied = seen.manifest
    if applied is None or seen.unfinished or (seen.checkout and not allow_dirty):
        return None
    same = (
        bool(rules)
        and applied.rules == rules
        and applied.package == package
        and applied.version == seen.version
        and applied.sets == tuple(names(seen.gpu))
        and applied.payload in (payload_digest({}), payload_digest(load_payload(payload)))
    )
    wanted = {**applied.seen, **{name: entry.patched for name, entry in applied.files.items()}}
    return applied if same and seen.digests == wanted else None
