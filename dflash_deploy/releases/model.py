"""What lies below a deployment's root, as data.

::

    <root>/releases/<id>/manifest.json      what the release is made of; never changed
                         config/            service files, settings.json, launch.json: how it is started
                         venv               link to its environment
                         patched.json       the patch manifest of that environment
                         outcome.json       how its last start ended
                         log/               of its service
           releases/history                 ids in the order in which they were proved
           venvs/<pins>                     environment as installed, shared by all releases with these pins
           venvs/<pins>-<patches>           the same, patched: big files are hard links, the patched package is its own
           current -> releases/<id>         the last release that was proved healthy
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_deploy.patching.manifest import Manifest

ADOPTED = "0000-adopted"
"""A service that was started before there were releases."""


@dataclass(frozen=True)
class Release:
    """One release as its files say."""

    id: str
    """``<number>-<first digits of the fingerprint>``; numbers order releases, whatever the clocks say."""
    fingerprint: str = ""
    venv: str = ""
    stack: str = ""
    pins: str = ""
    patches: str = ""
    created: str = ""
    complete: bool = False
    """Every file is there; one that was cut off while it was written is not."""
    failed: str = ""
    """Why its last start failed; ``""``: it did not, or was never started."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    launch: Mapping[str, Any] = field(default_factory=dict)
    """``argv``, ``mode``, ``service``, ``unit``: how its service is started."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Digests of its configuration and ``patched.json``, by path relative to its folder."""

    @property
    def number(self) -> int:
        return number_of(self.id)

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Release:
        """From one entry of the look's answer."""
        manifest, outcome = raw.get("manifest") or {}, raw.get("outcome") or {}
        settings, launch = raw.get("settings") or {}, raw.get("launch") or {}
        text = {key: str(manifest.get(key) or "") for key in ("fingerprint", "venv", "stack", "pins", "patches")}
        return cls(
            id=str(raw["id"]),
            created=str(manifest.get("created") or ""),
            complete=bool(manifest and launch and raw.get("venv_there")),
            failed=str(outcome.get("failed") or ""),
            settings=settings,
            launch=launch,
            files=raw.get("files") or {},
            **text,
        )

    def as_dict(self, look: Look) -> dict[str, Any]:
        """JSON data."""
        return {
            "id": self.id,
            "current": self.id == look.current,
            "proved": self.id in look.history,
            "running": look.running_release is self,
            "serving": look.serving_release is self,
            "complete": self.complete,
            "failed": self.failed,
            "created": self.created,
            "stack": self.stack,
            "patches": self.patches,
            "venv": self.venv,
        }


@dataclass(frozen=True)
class VenvLook:
    """An environment on the host."""

    path: str
    stamp: Mapping[str, Any] = field(default_factory=dict)
    """``pins``; and once it was patched ``patches`` (what came out) and ``inputs`` (what went in)."""
    exists: bool = False
    python: tuple[int, int, int] | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    manifest: Manifest | None = None
    intact: bool = False
    """Every patched file is as the manifest says, and nothing was left unfinished."""


@dataclass(frozen=True)
class Look:
    """What one round trip found."""

    root: str
    exists: bool
    current: str
    """Id of the current release; ``""``: none."""
    history: tuple[str, ...]
    """Ids in the order in which they were proved."""
    releases: tuple[Release, ...]
    venvs: Mapping[str, VenvLook]
    """By path: those below ``venvs/``, stamp only, and those that were asked for."""
    lock: Mapping[str, Any] | None
    lock_age: float
    """Seconds since the lock was taken, by the host's clock."""
    services: Mapping[str, Mapping[str, Any]]
    """By name: the runner's ``record``, systemd's properties under ``system`` and ``user``."""
    files: Mapping[str, str]
    trees: Mapping[str, Mapping[str, str]]
    models: Mapping[str, bool]
    legacy: bool
    """Service files of the layout before releases are there."""

    def release(self, name: str) -> Release | None:
        return next((each for each in self.releases if each.id == name), None)

    @property
    def current_release(self) -> Release | None:
        return self.release(self.current) if self.current else None

    @property
    def running_release(self) -> Release | None:
        """The release whose runner is there, serving or between two tries: what is ended before another one starts."""
        return self._of_runner(lambda record: record.get("fingerprint") if record.get("running") else "")

    @property
    def serving_release(self) -> Release | None:
        """The release that is being served."""
        return self._of_runner(lambda record: record.get("serves"))

    def _of_runner(self, told: Callable[[Mapping[str, Any]], Any]) -> Release | None:
        """The release with the fingerprint that a runner's record tells."""
        for service in self.services.values():
            fingerprint = told(service.get("record") or {})
            found = [each for each in self.releases if fingerprint and each.fingerprint == fingerprint]
            if found:
                return found[-1]
        return None

    def next_id(self, fingerprint: str) -> str:
        """Id of a release with this fingerprint: an unfinished or earlier one of the same content, else a new one."""
        same = [each.id for each in self.releases if each.id.endswith(f"-{fingerprint[:8]}")]
        if same:
            return same[-1]
        highest = max((each.number for each in self.releases), default=0)
        return f"{highest + 1:04d}-{fingerprint[:8]}"

    def previous(self) -> str:
        """The release that was proved before the current one, if it is still there; else ``""``."""
        there = [name for name in self.history if name != self.current and self.release(name) is not None]
        return there[-1] if there else (ADOPTED if self.release(ADOPTED) and self.current != ADOPTED else "")


def number_of(name: str) -> int:
    """The number in an id; 0 for a folder of another name."""
    head = name.partition("-")[0]
    return int(head) if head.isdigit() else 0


def folder_of(root: str, name: str) -> str:
    """A release's folder."""
    return posixpath.join(root, "releases", name)
