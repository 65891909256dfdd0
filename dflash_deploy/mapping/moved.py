"""Two maps → what moved between two releases. Line numbers alone are no difference."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dflash_deploy.mapping.model import Map, Site


class How(StrEnum):
    """What became of a site."""

    SAME = "same"
    MOVED = "moved"
    """The same code, in another file or definition."""
    CHANGED = "changed"
    """Other code of the same kind and role in the same definition."""
    GONE = "gone"
    NEW = "new"


@dataclass(frozen=True)
class Difference:
    """One site before and after."""

    how: How
    before: Site | None
    after: Site | None

    def as_dict(self) -> dict[str, Any]:
        """JSON data."""
        return {
            "how": str(self.how),
            "before": self.before.as_dict() if self.before else None,
            "after": self.after.as_dict() if self.after else None,
        }


_ROUNDS: tuple[tuple[How, Callable[[Site], Hashable]], ...] = (
    (How.SAME, lambda s: (s.kind, s.role, s.file, s.scope, s.code)),
    (How.MOVED, lambda s: (s.kind, s.role, s.scope, s.code)),
    (How.MOVED, lambda s: (s.kind, s.role, s.scope.rpartition(".")[2], s.code)),
    (How.CHANGED, lambda s: (s.kind, s.role, s.file, s.scope)),
    (How.CHANGED, lambda s: (s.kind, s.role, s.scope) if s.scope else None),
)
"""From the strictest to the loosest: what agrees in a round is no candidate for the next."""


def compare(before: Map, after: Map) -> tuple[Difference, ...]:
    """Every site of both maps once, in the order of ``before``, then what is new."""
    found: list[Difference] = []
    olds, news = list(before.sites), list(after.sites)
    for how, key in _ROUNDS:
        olds, news, pairs = _paired(olds, news, key)
        found += [Difference(how, old, new) for old, new in pairs]
    found += [Difference(How.GONE, old, None) for old in olds]
    found += [Difference(How.NEW, None, new) for new in news]
    return tuple(sorted(found, key=lambda d: (d.before is None, d.before or d.after)))


def _paired(
    olds: Iterable[Site], news: Iterable[Site], key: Callable[[Site], Hashable]
) -> tuple[list[Site], list[Site], list[tuple[Site, Site]]]:
    waiting: dict[Hashable, list[Site]] = {}
    for new in news:
        waiting.setdefault(key(new), []).append(new)
    left, pairs = [], []
    for old in olds:
        queue = waiting.get(key(old)) if key(old) is not None else None
        if queue:
            pairs.append((old, queue.pop(0)))
        else:
            left.append(old)
    return left, [new for queue in waiting.values() for new in queue], pairs
