"""What is applied to a tree: ``<site>/.dflash-deploy/manifest.json``.

With the pristine bytes beside it, it is enough to revert.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_deploy.errors import PatchError, UnreadableFact

SCHEMA = 1


def digest(data: bytes | None) -> str:
    """SHA-256 in hex; ``""`` for a file that is not there."""
    return "" if data is None else hashlib.sha256(data).hexdigest()


def payload_digest(payload: Mapping[str, bytes]) -> str:
    """One hash over names and contents."""
    lines = "".join(f"{path} {digest(data)}\n" for path, data in sorted(payload.items()))
    return digest(lines.encode())


def load_payload(folder: Path) -> dict[str, bytes]:
    """Files of a payload package on this side, by path relative to the site folder; no bytecode."""
    return {
        f"{folder.name}/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".pyc", ".pyo")
    }


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
    rules: str = ""
    """Digest of the patch sets and the engine that judged the tree; ``""``: not told."""
    seen: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the files that were only read, by path relative to the site folder; ``""``: there was none."""

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
            "rules": self.rules,
            "seen": dict(self.seen),
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
            rules=str(data.get("rules", "")),
            seen={str(k): str(v) for k, v in data.get("seen", {}).items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnreadableFact("the patch manifest cannot be read", evidence=repr(error)) from error
