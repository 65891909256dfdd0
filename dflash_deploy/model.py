"""Frozen data that the rooms exchange. Standard library only.

``Result`` comes from a host; ``Finding`` from the rules; ``Step`` and ``Plan`` from the planners; ``StepOutcome`` from
the executor. Facts live in :mod:`dflash_deploy.facts`, beside the probe that reads them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


@dataclass(frozen=True)
class Result:
    """What one command on a host gave back. A non-zero exit is a value, not an exception."""

    argv: tuple[str, ...]
    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def out(self) -> str:
        """Stdout as text, undecodable bytes replaced."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def err(self) -> str:
        """Stderr as text, undecodable bytes replaced."""
        return self.stderr.decode("utf-8", "replace")


class Severity(StrEnum):
    """How much a finding matters."""

    FAIL = "fail"
    WARN = "warn"
    OK = "ok"
    UNKNOWN = "unknown"
    """The rule could not look. Never counts as ok."""
    NOT_APPLICABLE = "not-applicable"


class Where(StrEnum):
    """On which level a remedy has to be applied."""

    HOST = "host"
    CONTAINER = "container"
    VENV = "venv"
    MODEL = "model"


@dataclass(frozen=True)
class Finding:
    """One rule's verdict on one set of facts."""

    rule: str
    """Stable kebab-case id, stated as what must hold: ``driver-supports-cuda``."""
    severity: Severity
    message: str
    evidence: tuple[str, ...] = ()
    remedy: str = ""
    where: Where = Where.HOST
    primary: bool = False
    """The cause to mend first; consequences name it in ``because_of``."""
    because_of: str = ""


@dataclass(frozen=True)
class Run:
    """Run a command. Skipped by the executor when ``unless`` exits 0 on the host."""

    argv: tuple[str, ...]
    title: str
    unless: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0
    ok_exits: tuple[int, ...] = (0,)

    def describe(self) -> str:
        return f"run {shlex.join(self.argv)}"


@dataclass(frozen=True)
class WriteFile:
    """Write a file atomically; refuse when the present bytes are not those that were planned on."""

    path: str
    data: bytes = field(repr=False)
    mode: int = 0o644
    expect_sha256: str | None = None
    """Digest of the present file. ``""``: must be absent. ``None``: anything goes."""
    title: str = ""

    def describe(self) -> str:
        return f"write {self.path} ({len(self.data)} bytes, mode {self.mode:o})"


@dataclass(frozen=True)
class CopyTree:
    """Bring a local folder to the host, file by file, as one atomic switch of ``target``."""

    source: str
    target: str
    title: str = ""

    def describe(self) -> str:
        return f"copy {self.source} to {self.target}"


@dataclass(frozen=True)
class Remove:
    """Remove a file or folder that the tool itself put there."""

    path: str
    title: str = ""

    def describe(self) -> str:
        return f"remove {self.path}"


@dataclass(frozen=True)
class Blob:
    """A local file and what it must be when it has arrived."""

    source: str
    """Path on this side."""
    name: str
    """For people."""
    sha256: str
    size: int


@dataclass(frozen=True)
class Upload:
    """Bring files into a folder of the host that keeps each under its digest; goes on where it was cut off."""

    blobs: tuple[Blob, ...]
    folder: str
    title: str = ""

    def describe(self) -> str:
        return f"upload {len(self.blobs)} files ({sum(blob.size for blob in self.blobs)} bytes) to {self.folder}"


Step = Run | WriteFile | CopyTree | Remove | Upload


@dataclass(frozen=True)
class Plan:
    """Steps in order. An empty plan means that the host already is as wanted."""

    name: str
    steps: tuple[Step, ...] = ()
    reason: str = ""
    """Why these steps, or why none."""

    @property
    def empty(self) -> bool:
        return not self.steps


class Status(StrEnum):
    """What became of a step."""

    OK = "ok"
    CHANGED = "changed"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True)
class StepOutcome:
    """One line of a recap or journal."""

    name: str
    status: Status
    detail: str = ""
    seconds: float = 0.0
    data: Mapping[str, Any] = field(default_factory=dict)
