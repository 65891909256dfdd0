"""Where a patch holds on: a scope (qualified name) and a shape in it, which together match exactly once. No fuzz.

When they do not, the error names the nearest candidates and the first structural difference.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import libcst as cst

from dflash_deploy.errors import AnchorAmbiguous, AnchorMissing
from dflash_deploy.patching import syntax
from dflash_deploy.patching.syntax import At


def scopes(root: At, prefix: str = "") -> Iterator[tuple[str, At]]:
    """(qualified name, node) of every class and function below ``root``, also those under ``if`` or ``try``."""
    for at in syntax.statements(root):
        if isinstance(at.node, (cst.FunctionDef, cst.ClassDef)):
            name = f"{prefix}{at.node.name.value}"
            yield name, at
            yield from scopes(at, f"{name}.")


def scope(module: cst.Module, name: str, file: str = "the file") -> At:
    """The one definition called ``name``; the module for ``""``. Several of one name (overloads) are ambiguous.

    Raises:
        AnchorMissing, AnchorAmbiguous
    """
    root = At(module)
    if not name:
        return root
    found = [root]
    for part in name.split("."):
        found = [
            at
            for around in found
            for at in syntax.statements(around)
            if isinstance(at.node, (cst.FunctionDef, cst.ClassDef)) and at.node.name.value == part
        ]
    if len(found) == 1:
        return found[0]
    if found:
        raise AnchorAmbiguous(
            f"{name} is defined {len(found)} times in {file}", evidence=[_head(at.node) for at in found]
        )
    names = list(dict.fromkeys(qualified for qualified, _ in scopes(root)))
    last = name.rsplit(".", 1)[-1]
    near = [n for n in names if n.rsplit(".", 1)[-1] == last]
    near += [n for n in difflib.get_close_matches(name, names, n=3, cutoff=0.6) if n not in near]
    evidence = [f"nearest: {n}" for n in near[:3]] or ["no definition has a similar name"]
    if near:
        evidence.append(f"first difference: name: expected {name}, found {near[0]}")
    raise AnchorMissing(f"{name} is not defined in {file}", evidence=evidence)


def _head(node: cst.CSTNode) -> str:
    lines = [
        line for line in syntax.code(node).splitlines() if line.strip() and not line.strip().startswith(("#", "@"))
    ]
    return lines[0].strip()[:110] if lines else ""


class Shape(Protocol):
    """What an anchor looks like inside its scope."""

    def matches(self, at: At) -> bool:
        """Whether the statement or expression ``at`` has this shape."""
        ...

    def candidates(self, where: At) -> Iterator[At]:
        """Nodes of the kind that this shape describes."""
        ...

    def difference(self, at: At) -> str:
        """First structural difference of a candidate."""
        ...

    def __str__(self) -> str: ...


@dataclass(frozen=True)
class Stmt:
    """A statement of this pattern: ``raise ValueError(...)``, ``x = ...``, ``if not a.b: ...``, ``for x in y: ...``."""

    pattern: str

    def candidates(self, where: At) -> Iterator[At]:
        wanted = syntax.statement_pattern(self.pattern)
        return (at for at in syntax.statements(where) if syntax.could_be(at.node, wanted))

    def difference(self, at: At) -> str:
        return syntax.difference(syntax.statement_pattern(self.pattern), syntax.tree(at.node)) or ""

    def matches(self, at: At) -> bool:
        return not self.difference(at)

    def __str__(self) -> str:
        return f"statement `{self.pattern.strip()}`"


@dataclass(frozen=True)
class IfTest:
    """An ``if`` or ``elif`` whose test has this pattern."""

    test: str

    def candidates(self, where: At) -> Iterator[At]:
        return (at for at in syntax.statements(where) if isinstance(at.node, cst.If))

    def difference(self, at: At) -> str:
        assert isinstance(at.node, cst.If)
        return syntax.difference(syntax.expression_pattern(self.test), syntax.tree(at.node.test), "test") or ""

    def matches(self, at: At) -> bool:
        return not self.difference(at)

    def __str__(self) -> str:
        return f"`if {self.test}`"


@dataclass(frozen=True)
class Assign:
    """An assignment to this target, annotated or not: ``x``, ``self.x``. Augmented assignments do not count."""

    target: str

    def candidates(self, where: At) -> Iterator[At]:
        return (
            at
            for at in syntax.statements(where)
            if isinstance(at.node, cst.SimpleStatementLine)
            and len(at.node.body) == 1
            and isinstance(at.node.body[0], (cst.Assign, cst.AnnAssign))
        )

    def difference(self, at: At) -> str:
        found = syntax.tree(at.node)
        wanted = syntax.expression_pattern(self.target)
        targets = (
            found.targets
            if isinstance(found, ast.Assign)
            else [found.target]
            if isinstance(found, ast.AnnAssign)
            else []
        )
        texts = [syntax.difference(wanted, target, "target") for target in targets]
        return "" if None in texts else texts[0] or ""

    def matches(self, at: At) -> bool:
        return syntax.may_assign(at.node, syntax.expression_pattern(self.target)) and not self.difference(at)

    def __str__(self) -> str:
        return f"assignment to `{self.target}`"


@dataclass(frozen=True)
class Calls:
    """A simple statement that holds a call of this callee: ``init_lora``, ``self.model.load``."""

    callee: str

    def candidates(self, where: At) -> Iterator[At]:
        return (
            at for at in syntax.statements(where) if isinstance(at.node, cst.SimpleStatementLine) and self._callees(at)
        )

    def _callees(self, at: At) -> list[ast.expr]:
        found = syntax.tree(at.node)
        return [n.func for n in ast.walk(found) if isinstance(n, ast.Call)] if found is not None else []

    def difference(self, at: At) -> str:
        texts = [
            syntax.difference(syntax.expression_pattern(self.callee), callee, "callee") for callee in self._callees(at)
        ]
        return "" if None in texts else texts[0] or "no call"

    def matches(self, at: At) -> bool:
        return not self.difference(at)

    def __str__(self) -> str:
        return f"statement that calls `{self.callee}`"


@dataclass(frozen=True)
class Def:
    """A nested definition (function or class) of this name."""

    name: str

    def candidates(self, where: At) -> Iterator[At]:
        return (at for at in syntax.statements(where) if isinstance(at.node, (cst.FunctionDef, cst.ClassDef)))

    def difference(self, at: At) -> str:
        assert isinstance(at.node, (cst.FunctionDef, cst.ClassDef))
        found = at.node.name.value
        return "" if found == self.name else f"name: expected {self.name}, found {found}"

    def matches(self, at: At) -> bool:
        return not self.difference(at)

    def __str__(self) -> str:
        return f"definition of `{self.name}`"


@dataclass(frozen=True)
class Expr:
    """An expression of this pattern, anywhere in the scope."""

    pattern: str

    def candidates(self, where: At) -> Iterator[At]:
        return syntax.expressions_like(where, syntax.expression_pattern(self.pattern))

    def difference(self, at: At) -> str:
        return syntax.difference(syntax.expression_pattern(self.pattern), syntax.tree(at.node)) or ""

    def matches(self, at: At) -> bool:
        return not self.difference(at)

    def __str__(self) -> str:
        return f"expression `{self.pattern}`"


@dataclass(frozen=True)
class First:
    """Before the first statement after the docstring (and, in a module, after ``from __future__`` imports)."""


@dataclass(frozen=True)
class Last:
    """After the last statement of the scope."""


@dataclass(frozen=True)
class Before:
    """Directly before the statement of this shape."""

    shape: Shape


@dataclass(frozen=True)
class After:
    """Directly after the statement of this shape."""

    shape: Shape


Position = First | Last | Before | After


def find(where: At, shape: Shape, name: str) -> At:
    """The one node of this shape in the scope ``where``.

    Raises:
        AnchorMissing: with the nearest candidates and the first difference.
        AnchorAmbiguous: with every match.
    """
    candidates = list(shape.candidates(where))
    found = [at for at in candidates if shape.matches(at)]
    if len(found) == 1:
        return found[0]
    place = name or "the module's body"
    if found:
        raise AnchorAmbiguous(
            f"{shape} stands {len(found)} times in {place}",
            evidence=[f"match: {_head(at.statement.node)}" for at in found[:5]],
        )
    text = str(shape)
    ranked = sorted(candidates, key=lambda at: -difflib.SequenceMatcher(None, text, _head(at.node)).ratio())[:3]
    evidence = [f"nearest: {_head(at.node)}" for at in ranked] or [f"nothing of this kind stands in {place}"]
    if ranked:
        evidence.append(f"first difference: {shape.difference(ranked[0])}")
    raise AnchorMissing(f"{shape} is not in {place}", evidence=evidence)
