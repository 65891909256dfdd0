"""What the map holds: sites, what covers them, and how two releases differ. Frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """What a site decides or describes."""

    PREDICATE = "predicate"
    """An algorithm is asked what it is: ``is_*()``, a comparison with an enum member, a flag made from either."""
    NAME = "name"
    """An algorithm's name as a string: compared, looked up, registered, passed on."""
    TYPE = "type"
    """A SpecInput class or type tag: made, tested, declared."""
    BRANCH = "branch"
    """Verify and draft passes told apart: by forward mode, or by being the draft worker."""
    MASK = "mask"
    """A custom attention mask is produced or consumed."""
    HIDDEN = "hidden"
    """Which hidden states a pass captures."""
    TOKENS = "tokens"
    """How many draft tokens a request has in one step."""
    TOPK = "topk"
    """The branching width of the draft."""


class Cover(StrEnum):
    """What the patch sets do at a site."""

    EDITED = "edited"
    """A patch changes this definition."""
    ANSWERED = "answered"
    """The site asks a definition that a patch changes, directly or through others."""
    REPLACED = "replaced"
    """The payload overrides this method in a class of its own."""
    RELIED = "relied on"
    """A patch's contract holds the definition to its present shape."""
    NONE = "none"


@dataclass(frozen=True, order=True)
class Site:
    """One place in one file."""

    file: str
    """POSIX path relative to the package's folder."""
    line: int
    kind: Kind
    role: str
    """What is done there: ``ask``, ``flag``, ``compare``, ``lookup``, ``make``, ``set``, ``use``, ``gate``..."""
    scope: str
    """Qualified name of the innermost definition; ``""`` at module level."""
    code: str
    """The expression, on one line."""
    names: tuple[str, ...] = ()
    """Predicates, algorithms or types that the site names, as the tree's own enums spell them."""
    via: str = ""
    """The alias through which the site was found; ``""``: the word itself stands there."""

    @property
    def qualified(self) -> str:
        """``package.module.Class.method`` of the site."""
        module = self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return f"{module}.{self.scope}" if self.scope else module

    def as_dict(self) -> dict[str, Any]:
        """JSON data."""
        return {**asdict(self), "kind": str(self.kind), "qualified": self.qualified, "names": list(self.names)}


@dataclass(frozen=True)
class Covered:
    """A site, and what the sets do there."""

    site: Site
    cover: Cover = Cover.NONE
    by: tuple[str, ...] = ()
    """``set:patch`` or the payload's ``module.Class.method``."""

    def as_dict(self) -> dict[str, Any]:
        """JSON data."""
        return {**self.site.as_dict(), "cover": str(self.cover), "by": list(self.by)}


@dataclass(frozen=True)
class Map:
    """Every site of one tree."""

    source: str
    """Folder or wheel."""
    version: str | None
    sites: tuple[Site, ...]
    algorithms: tuple[str, ...] = ()
    """Members of the algorithm enum."""
    predicates: tuple[str, ...] = ()
    """Methods by which an algorithm is asked."""
    calls: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Predicates that each method of the algorithm asks."""
    unreadable: tuple[str, ...] = ()
    """Files that are not Python for this interpreter."""
    files: int = 0
    """Files that were looked through."""
