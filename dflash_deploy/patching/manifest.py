"""What is applied to a tree: ``<site>/.dflash-deploy/manifest.json``.

With the pristine bytes beside it, it is enough to revert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_deploy.errors import PatchError, UnreadableFact

SCHEMA = 1


@dataclass(frozen=True)
class Entry:
    """One file, by SHA-256 digests in hex. ``pristine`` is ``""`` for a file that we brought."""

    pristine: str
    patched: str


@dataclass(frozen=True)
class Manifest:
    """The applied state of one site folder."""

    package: str
    version: str
    sets: tuple[str, ...]
    files: Mapping[str, Entry]
    """By path relative to the site folder."""
    patches: Mapping[str, str] = field(default_factory=dict)
    """Patch name → file relative to the site folder."""
    payload: str = ""
    """Content hash of the payload that the injected code imports; ``""``: none brought."""
    tool: str = ""
    """Version of the tool that wrote it."""

    def as_dict(self) -> dict[str, Any]:
        """JSON data."""
        return {
            "schema": SCHEMA,
            "package": self.package,
            "version": self.version,
            "sets": list(self.sets),
            "files": {p: {"pristine": e.pristine, "patched": e.patched} for p, e in sorted(self.files.items())},
            "patches": dict(self.patches),
            "payload": self.payload,
            "tool": self.tool,
        }


def parse(data: Mapping[str, Any] | None) -> Manifest | None:
    """A manifest from JSON data of this or any earlier schema; None when there is none.

    Raises:
        PatchError: written by a later schema.
        UnreadableFact: not a manifest.
    """
    if data is None:
        return None
    try:
        schema = int(data["schema"])
        if schema > SCHEMA:
            raise PatchError(
                f"the tree was patched by a later dflash-deploy (manifest schema {schema}, known: {SCHEMA})",
                hint="use that version or a later one",
            )
        return Manifest(
            package=str(data["package"]),
            version=str(data["version"]),
            sets=tuple(map(str, data["sets"])),
            files={str(p): Entry(str(e["pristine"]), str(e["patched"])) for p, e in data["files"].items()},
            patches={str(k): str(v) for k, v in data.get("patches", {}).items()},
            payload=str(data.get("payload", "")),
            tool=str(data.get("tool", "")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnreadableFact("the patch manifest cannot be read", evidence=repr(error)) from error
