"""What a patch is: data, plus one small edit. Knows no package.

A patch adds *hooks only* (an enum member, an import, a branch); behaviour lives in the payload. A worked example::

    from dflash_deploy.patching.anchors import Before, IfTest
    from dflash_deploy.patching.edits import AddClassField, InsertStatements
    from dflash_deploy.patching.patch import Contract, Example, Patch, PatchSet, Present, Refusal

    MEMBER = Patch(
        name="algorithm-member",
        file="srt/speculative/spec_info.py",  # relative to the package's folder
        why="the algorithm needs a name that the command line accepts",
        edit=AddClassField("SpeculativeAlgorithm", "DDTREE = auto()", after="DFLASH"),
        superseded=Present("srt/speculative/spec_info.py", "SpeculativeAlgorithm.DDTREE"),
        examples=(
            Example(
                before='''
                    from enum import Enum, auto

                    class SpeculativeAlgorithm(Enum):
                        DFLASH = auto()
                ''',
                after='''
                    from enum import Enum, auto

                    class SpeculativeAlgorithm(Enum):
                        DFLASH = auto()
                        DDTREE = auto()  # dflash-deploy: algorithm-member
                ''',
            ),
        ),
        refuses=(Refusal("class SpeculativeAlgorithm(Enum):\\n    EAGLE = auto()\\n", "AnchorMissing"),),
    )
    WORKER = Patch(
        name="worker-factory",
        file="srt/speculative/spec_info.py",
        why="the scheduler asks the algorithm for its worker class",
        edit=InsertStatements(
            "SpeculativeAlgorithm.create_worker",
            '''
            if self.is_ddtree():
                from dflash_kernels.ddtree.worker import DDTreeWorker

                return DDTreeWorker
            ''',
            at=Before(IfTest("self.is_dflash()")),  # or First(), Last(), After(Assign("x")), Before(Stmt("return ..."))
        ),
        # Everything that the injected code calls, also code that other patches of the set write:
        contract=(Contract("srt/speculative/spec_info.py", "SpeculativeAlgorithm.is_ddtree", params=()),),
        examples=(...,),
        refuses=(...,),
    )
    DDTREE = PatchSet("ddtree", package="sglang", versions="==0.5.16", patches=(MEMBER, WORKER), tested=("0.5.16",))

Patterns (``Stmt``, ``IfTest``, ``Expr``...) are Python source compared as syntax trees: layout, comments, quotes and
parentheses do not count, and ``...`` stands for anything (an expression, all arguments of a call, the rest of a block).
Every pattern must match exactly once in its scope. A scope is a qualified name, ``""`` for the module; nested
definitions are scopes of their own. Names that injected code uses must be bound where it lands, so an example defines
them too. Lines of this set's own name are marked with a trailing comment, which an example shows.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet
from packaging.version import Version

if TYPE_CHECKING:
    from dflash_deploy.patching.edits import Edit

MARKER = "dflash-deploy:"
"""Starts the trailing comment on the first injected line, before the patch's name."""


class State(StrEnum):
    """Where a patch stands in a tree."""

    ABSENT = "absent"
    """Not there; every anchor and contract holds, so it can be applied."""
    APPLIED = "applied"
    SUPERSEDED = "superseded"
    """Upstream has it now."""
    DRIFTED = "drifted"
    """Lines carry the patch's marker but are not what this patch writes."""
    AMBIGUOUS = "ambiguous"
    """An anchor matches more than once."""
    CONFLICT = "conflict"
    """An anchor or a contract is missing."""

    @property
    def ok(self) -> bool:
        """The tree is fit for the patch, or has it."""
        return self in (State.ABSENT, State.APPLIED, State.SUPERSEDED)


@dataclass(frozen=True)
class Contract:
    """What injected code relies on elsewhere. Checked against the tree as it is after the whole set."""

    file: str
    name: str
    """Qualified name of a function, class or assigned name."""
    params: tuple[str, ...] | None = None
    """Parameters that are passed, without ``self``: each must be accepted, and no other may be required.
    ``None``: not called."""
    positional: int = 0
    """The first so many of ``params`` are passed by position, so they must come first and in this order."""
    attributes: tuple[str, ...] = ()
    """Of a class: names bound in its body or assigned on ``self`` in its methods (bases in the same file included)."""


@dataclass(frozen=True)
class Present:
    """True when ``file`` defines ``name`` (qualified)."""

    file: str
    name: str


def _block(text: str) -> str:
    return textwrap.dedent(text.removeprefix("\n")).rstrip(" ")


@dataclass(frozen=True)
class Example:
    """Applying the patch's edit to ``before`` gives exactly ``after``. Written as indented blocks, if you like."""

    before: str
    after: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "before", _block(self.before))
        object.__setattr__(self, "after", _block(self.after))


@dataclass(frozen=True)
class Refusal:
    """Applying the patch's edit to ``before`` raises the error of this class name."""

    before: str
    error: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "before", _block(self.before))


@dataclass(frozen=True)
class Patch:
    """One edit of one file."""

    name: str
    file: str
    """POSIX path relative to the package's folder."""
    why: str
    edit: Edit
    contract: tuple[Contract, ...] = ()
    superseded: Present | None = None
    examples: tuple[Example, ...] = ()
    refuses: tuple[Refusal, ...] = ()

    @property
    def marker(self) -> str:
        """The comment that marks the first injected line."""
        return f"# {MARKER} {self.name}"


@dataclass(frozen=True)
class PatchSet:
    """Patches that go onto a range of releases together."""

    name: str
    package: str
    """Import and distribution name, e.g. ``sglang``."""
    versions: str
    """PEP 440 specifier of the releases that it is written for."""
    patches: tuple[Patch, ...]
    tested: tuple[str, ...] = ()
    """Releases on whose own files the whole set was applied and compiled, and every contract held."""
    requires: tuple[str, ...] = ()
    """Names of sets that must be applied as well."""
    conflicts: tuple[str, ...] = ()
    device: str = "any"
    """``cpu``: never on a host with a GPU. ``cuda``: never on one without. ``any``."""
    payload: bool = False
    """The injected code imports the payload package."""
    summary: str = ""
    superseded: Present | None = None
    """What upstream would define if it had what this set is for: then none of its patches is applied."""
    seen: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False)
    """Patch name → releases, oldest first, whose trees held its anchor when the sets were last tried on all."""

    def supports(self, version: str) -> bool:
        """Whether ``version`` is in the range (pre- and post-releases included)."""
        return SpecifierSet(self.versions).contains(Version(version), prereleases=True)

    @property
    def files(self) -> tuple[str, ...]:
        """Every file that is edited or read for a contract, sorted."""
        names = {p.file for p in self.patches}
        if self.superseded is not None:
            names.add(self.superseded.file)
        for patch in self.patches:
            names.update(c.file for c in patch.contract)
            if patch.superseded is not None:
                names.add(patch.superseded.file)
        return tuple(sorted(names))


@dataclass(frozen=True)
class Verdict:
    """What the engine found for one patch."""

    patch: str
    file: str
    state: State
    detail: str = ""
    evidence: tuple[str, ...] = ()
    """Nearest candidates and the first structural difference."""


def worst(verdicts: Sequence[Verdict]) -> Verdict | None:
    """The first verdict that stops an application, or None."""
    return next((v for v in verdicts if not v.state.ok), None)
