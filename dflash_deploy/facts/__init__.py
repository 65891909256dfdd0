"""Facts about a host, read by one small probe over one connection. Absence is a value (``None`` or empty), never an
exception.

The probe (:mod:`dflash_deploy.facts.remote`) prints JSON; :meth:`Facts.from_json` types what planners need. Rules read
:attr:`Facts.raw` for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver describes it."""

    index: int
    name: str
    compute_capability: tuple[int, int] | None
    """(major, minor), e.g. (9, 0)."""
    memory_mib: int | None
    memory_free_mib: int | None = None


@dataclass(frozen=True)
class PythonInterpreter:
    """A Python on the host that could make a venv."""

    path: str
    version: tuple[int, int, int]
    has_venv: bool
    """The venv and ensurepip modules are both there."""
    has_headers: bool = False


@dataclass(frozen=True)
class Facts:
    """What the probe saw."""

    host: str
    arch: str
    """``uname -m``"""
    system: str
    """``uname -s``"""
    home: str
    user: str
    uid: int
    glibc: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    driver: tuple[int, ...] | None = None
    """Kernel module version, e.g. (580, 159, 4). None: no NVIDIA driver."""
    driver_text: str = "none"
    """The same as NVIDIA writes it, e.g. ``580.159.04``."""
    pythons: tuple[PythonInterpreter, ...] = ()
    """Newest first."""
    uv: str | None = None
    """Path of uv."""
    systemd: str | None = None
    """``system``: systemd is PID 1 and this user may manage system units (root or passwordless sudo); ``user``: this
    user's own manager answers (``linger`` says whether it outlives the session); None: neither."""
    linger: bool = False
    """The user's units are started at boot and survive logout."""
    sudo: bool = False
    """Passwordless sudo works."""
    container: str | None = None
    """``systemd-detect-virt --container`` or what was found without it."""
    memory_mib: int | None = None
    """Memory of the machine, or of the control group when that is less."""
    disk_free_mib: Mapping[str, int] = field(default_factory=dict)
    """Free space by path asked for; home and /tmp are always there."""
    cpu_count: int | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)
    """The probe's whole answer."""

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], host: str = "") -> Facts:
        """Type a probe's answer (or a saved one).

        Raises:
            UnreadableFact: not an answer of a probe that this version understands.
        """
        from dflash_deploy.facts.parse import facts_from_json

        return facts_from_json(raw, host)

    def to_json(self) -> dict[str, Any]:
        """The probe's answer with the host's name, as ``audit --save`` writes it and :meth:`from_json` reads it."""
        return {**self.raw, "name": self.host}


from dflash_deploy.facts.gather import gather  # noqa: E402  (it needs the classes above)

__all__ = ["Facts", "Gpu", "PythonInterpreter", "gather"]
