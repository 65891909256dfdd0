"""The signature table: what a line of a log or report says about the cause of a failure.

The table is data (``signatures.toml``). Keys of an entry: ``id`` (stable, kebab-case); ``rule`` (the audit rule that
would have caught it, or
empty); ``kind`` (``cause``: mend this; ``symptom``: real, but a cause found beside it explains it; ``consequence``:
never the reason; ``degraded``: it serves on, less well, so it comes last);
``title``, ``cause``, ``where`` (host, container, venv, model, service), ``next``, ``ref``; ``any`` (one pattern
suffices) and ``not``
(none may be in the line).
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

KINDS = ("cause", "symptom", "consequence", "degraded")
"""In the order of rank. Degraded: it serves on, less well; where it has ended, something else was the cause."""


@dataclass(frozen=True)
class Signature:
    """One known way to fail."""

    id: str
    title: str
    cause: str
    where: str
    next: str
    kind: str = "cause"
    rule: str = ""
    ref: tuple[str, ...] = ()
    patterns: tuple[re.Pattern[str], ...] = field(default=(), repr=False)
    unless: tuple[re.Pattern[str], ...] = field(default=(), repr=False)

    def matches(self, line: str) -> bool:
        """Whether this line shows the signature."""
        return any(p.search(line) for p in self.patterns) and not any(p.search(line) for p in self.unless)


@cache
def table() -> tuple[Signature, ...]:
    """All signatures, in the order of the file."""
    data = tomllib.loads(resources.files("dflash_deploy.diagnose").joinpath("signatures.toml").read_text("utf-8"))
    return tuple(
        Signature(
            id=entry["id"],
            title=entry["title"],
            cause=entry["cause"],
            where=entry["where"],
            next=entry["next"],
            kind=entry.get("kind", "cause"),
            rule=entry.get("rule", ""),
            ref=tuple(entry.get("ref", ())),
            patterns=tuple(re.compile(p, re.IGNORECASE) for p in entry["any"]),
            unless=tuple(re.compile(p, re.IGNORECASE) for p in entry.get("not", ())),
        )
        for entry in data["signature"]
    )


def by_id(identity: str) -> Signature:
    """The signature with this id.

    Raises:
        KeyError: there is none.
    """
    for signature in table():
        if signature.id == identity:
            return signature
    raise KeyError(identity)


def match_line(line: str) -> list[Signature]:
    """Every signature that this line shows."""
    return [s for s in table() if s.matches(line)]
