"""Seeded edits of a patch's target file: what an upstream commit might do, with what the patch must answer.

A harmless edit must still take the patch, and the patch must add the very lines that it adds to the release. A harmful
one must be refused.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dflash_deploy.patching import anchors, syntax
from dflash_deploy.patching.anchors import Shape
from dflash_deploy.patching.edits import (
    AddBranchFirst,
    AddElement,
    GuardStatement,
    InsertStatements,
    ReplaceExpression,
    WrapCondition,
)
from dflash_deploy.patching.patch import Patch

RENAMED = "renamed_"
_Def = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Mutation:
    """One edit of a file."""

    kind: str
    harmful: bool
    source: str


@dataclass(frozen=True)
class Place:
    """Where a patch holds on in a source. Lines count from 1."""

    source: str
    tree: ast.Module
    scope: ast.AST
    outer: tuple[ast.AST, ...]
    anchor: ast.stmt | None

    @property
    def lines(self) -> list[str]:
        return self.source.splitlines(keepends=True)


def _start(node: ast.AST) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])  # type: ignore[attr-defined]


def _scope(tree: ast.Module, name: str) -> tuple[ast.AST, tuple[ast.AST, ...]]:
    node: ast.AST = tree
    outer: list[ast.AST] = []
    for part in name.split(".") if name else ():
        outer.append(node)
        node = next(n for n in node.body if isinstance(n, _Def) and n.name == part)  # type: ignore[attr-defined]
    return node, tuple(outer)


def reduced(source: str, patch: Patch, near: int = 40) -> str:
    """The file without definitions that have nothing to do with the patch: the same anchors in a tenth of the time."""
    tree = ast.parse(source)
    scope, outer = _scope(tree, patch.edit.scope)
    keep = {id(n) for n in (*outer, scope)}
    lines = source.splitlines(keepends=True)
    drop: list[ast.AST] = []
    for around in outer:
        fields = ast.AnnAssign if isinstance(around, ast.ClassDef) else _Def
        drop += [n for n in around.body if isinstance(n, (_Def, fields)) and id(n) not in keep]  # type: ignore[attr-defined]
    place = located(source, patch)
    if isinstance(scope, ast.Module):
        at = place.anchor.lineno if place.anchor is not None else 0
        drop += [n for n in scope.body[1:] if isinstance(n, _Def) and n.lineno != at]
    if isinstance(scope, ast.ClassDef) and place.anchor is not None:
        line = place.anchor.lineno
        drop += [n for n in scope.body if n is not scope.body[0] and abs(n.lineno - line) > near and _droppable(n)]
    if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)) and place.anchor is not None:
        # Hundreds of calls in a row, as functions that declare options have them.
        line = place.anchor.lineno
        drop += [n for n in scope.body[1:] if isinstance(n, ast.Expr) and abs(n.lineno - line) > near]
    for node in drop:
        for number in range(_start(node) - 1, node.end_lineno):  # type: ignore[attr-defined]
            lines[number] = ""
    return "".join(lines)


def _droppable(node: ast.stmt) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.AnnAssign))


def _shape(patch: Patch) -> Shape | None:
    match edit := patch.edit:
        case InsertStatements():
            return getattr(edit.at, "shape", None)
        case GuardStatement():
            return edit.statement
        case WrapCondition():
            return anchors.IfTest(edit.test)
        case AddBranchFirst():
            return edit.before
        case ReplaceExpression():
            return anchors.Expr(edit.old)
        case AddElement():
            literal = ", ".join(edit.holds)
            return _Literal(literal)
    return None


@dataclass(frozen=True)
class _Literal:
    """A literal that begins with these elements."""

    pattern: str

    def candidates(self, where: syntax.At) -> Iterator[syntax.At]:
        return syntax.expressions(where)

    def matches(self, at: syntax.At) -> bool:
        found = syntax.tree(at.node)
        if not isinstance(found, (ast.Tuple, ast.List, ast.Set)):
            return False
        have = {ast.dump(e) for e in found.elts}
        return {ast.dump(e) for e in ast.parse(f"[{self.pattern}]", mode="eval").body.elts} <= have  # type: ignore[attr-defined]

    def difference(self, at: syntax.At) -> str:
        return "" if self.matches(at) else "another literal"


def located(source: str, patch: Patch) -> Place:
    """Find the patch's scope and the statement that its anchor is or is in."""
    tree = ast.parse(source)
    scope, outer = _scope(tree, patch.edit.scope)
    shape = _shape(patch)
    anchor = None
    if shape is not None:
        module = syntax.parse(source.encode(), "m.py")
        at = anchors.find(anchors.scope(module, patch.edit.scope), shape, patch.edit.scope).statement
        wanted = ast.dump(syntax.tree(at.node) or ast.Pass())
        anchor = next(n for n in ast.walk(scope) if isinstance(n, ast.stmt) and ast.dump(n) == wanted)
    return Place(source, tree, scope, outer, anchor)


def _own_statements(place: Place) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    stack: list[ast.AST] = [place.scope]
    while stack:
        node = stack.pop()
        for field in ("body", "orelse", "finalbody", "handlers"):
            for child in getattr(node, field, None) or ():
                if isinstance(child, ast.stmt):
                    found.append(child)
                if not isinstance(child, _Def):
                    stack.append(child)
    body = place.scope.body  # type: ignore[attr-defined]
    docstring = body[0] if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) else None
    return sorted((s for s in found if s is not docstring and not _elif(place, s)), key=lambda s: s.lineno)


def _elif(place: Place, statement: ast.stmt) -> bool:
    return place.lines[statement.lineno - 1].lstrip().startswith("elif")


def _insert(place: Place, before: ast.stmt, text: str) -> str:
    lines = place.lines
    indent = " " * before.col_offset
    lines.insert(_start(before) - 1, "".join(f"{indent}{line}\n" for line in text.splitlines()))
    return "".join(lines)


def _replace(place: Place, node: ast.stmt, text: str) -> str:
    lines = place.lines
    indent = " " * node.col_offset
    lines[_start(node) - 1 : node.end_lineno] = [f"{indent}{line}\n" for line in text.splitlines()]
    return "".join(lines)


def _text(place: Place, node: ast.stmt) -> str:
    return "".join(place.lines[_start(node) - 1 : node.end_lineno])


# Harmless


def comment(place: Place, rng: random.Random, patch: Patch) -> str:
    return _insert(place, rng.choice(_own_statements(place)), f"# note {rng.random()}")


def reformat(place: Place, rng: random.Random, patch: Patch) -> str:
    return ast.unparse(place.tree) + "\n"


def statement(place: Place, rng: random.Random, patch: Patch) -> str:
    return _insert(place, rng.choice(_own_statements(place)), f"noise_{rng.randrange(10**6)} = {rng.randrange(99)}")


def neighbour(place: Place, rng: random.Random, patch: Patch) -> str:
    text = f"def noise_{rng.randrange(10**6)}(argument=None):\n    return argument\n"
    return place.source.rstrip("\n") + "\n\n\n" + text


def moved(place: Place, rng: random.Random, patch: Patch) -> str | None:
    """The edited definition moves to the end of its module or class."""
    if not place.outer or isinstance(place.scope, ast.Module):
        return None
    lines = place.lines
    node = place.scope
    start, end = _start(node) - 1, node.end_lineno  # type: ignore[attr-defined]
    text = lines[start:end]
    last = place.outer[-1].body[-1].end_lineno  # type: ignore[attr-defined]
    new = [*lines[:start], *lines[end:last], "\n", *text, *lines[last:]]
    return None if last == end else "".join(new)


def other_local(place: Place, rng: random.Random, patch: Patch) -> str | None:
    """A local name that the patch has nothing to do with is renamed."""
    if not isinstance(place.scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    used = _used(place, patch)
    assigned = {n.id for n in ast.walk(place.scope) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    names = sorted(assigned - used)
    return _renamed(place, rng.choice(names)) if names else None


def branches(place: Place, rng: random.Random, patch: Patch) -> str | None:
    """An ``if`` with an ``else`` is written the other way round; not the anchor, nor an ``elif`` chain."""
    swaps = [
        s
        for s in _own_statements(place)
        if isinstance(s, ast.If)
        and s.orelse
        and not isinstance(s.orelse[0], ast.If)
        and s is not place.anchor
        and not _elif(place, s)
    ]
    if not swaps:
        return None
    node = rng.choice(swaps)
    swapped = ast.If(ast.UnaryOp(ast.Not(), node.test), node.orelse, node.body)
    return _replace(place, node, ast.unparse(ast.fix_missing_locations(swapped)))


# Harmful


def scope_renamed(place: Place, rng: random.Random, patch: Patch) -> str | None:
    if isinstance(place.scope, ast.Module):
        return None
    lines = place.lines
    node = place.scope
    number = node.lineno - 1  # type: ignore[attr-defined]
    name = patch.edit.scope.rsplit(".", 1)[-1]
    lines[number] = lines[number].replace(name, f"{name}_{rng.choice(['v2', 'impl', 'inner'])}", 1)
    return "".join(lines)


def scope_twice(place: Place, rng: random.Random, patch: Patch) -> str | None:
    if isinstance(place.scope, ast.Module):
        return None
    assert isinstance(place.scope, _Def)
    return _insert(place, place.scope, _dedented(_text(place, place.scope)) + "\n")


def anchor_removed(place: Place, rng: random.Random, patch: Patch) -> str | None:
    return None if place.anchor is None or _elif(place, place.anchor) else _replace(place, place.anchor, "pass")


def anchor_twice(place: Place, rng: random.Random, patch: Patch) -> str | None:
    if place.anchor is None or _elif(place, place.anchor):
        return None
    return _insert(place, place.anchor, _dedented(_text(place, place.anchor)))


def used_name(place: Place, rng: random.Random, patch: Patch) -> str | None:
    """A parameter or local that the anchor or the injected code uses gets another name."""
    if not isinstance(place.scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    a = place.scope.args
    own = {x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)}
    own |= {n.id for n in ast.walk(place.scope) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    names = sorted((own & _used(place, patch)) - {"self"})
    return _renamed(place, rng.choice(names)) if names else None


def unreachable(place: Place, rng: random.Random, patch: Patch) -> str | None:
    """The function leaves before the injected code."""
    if place.anchor is None or not isinstance(place.scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    if _elif(place, place.anchor):
        return None
    return _insert(place, place.anchor, rng.choice(["return None", "raise NotImplementedError"]))


def anchor_changed(place: Place, rng: random.Random, patch: Patch) -> str | None:
    """An attribute or string that the anchor's pattern names gets another name."""
    shape = _shape(patch)
    text = getattr(shape, "pattern", None) or getattr(shape, "test", None) or getattr(shape, "callee", None)
    if place.anchor is None or text is None or isinstance(place.anchor, _Def):
        return None
    words = {n.attr for n in ast.walk(ast.parse(text.replace(": ...", ": pass"))) if isinstance(n, ast.Attribute)}
    words |= {
        n.value
        for n in ast.walk(ast.parse(text.replace(": ...", ": pass")))
        if isinstance(n, ast.Constant) and isinstance(n.value, str)
    }
    if not words:
        return None
    word = rng.choice(sorted(words))
    lines = place.lines
    span = slice(place.anchor.lineno - 1, _head_end(place.anchor))
    old = "".join(lines[span])
    new = old.replace(word, f"{word}_v2")
    lines[span] = [new]
    return None if old == new else "".join(lines)


def _head_end(node: ast.stmt) -> int:
    body = getattr(node, "body", None)
    return body[0].lineno - 1 if body else node.end_lineno or node.lineno


def _dedented(text: str) -> str:
    lines = text.splitlines()
    width = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[width:] for line in lines)


def _used(place: Place, patch: Patch) -> set[str]:
    trees: list[ast.AST] = list(patch.edit.injected)
    if place.anchor is not None:
        trees.append(place.anchor)
    return {n.id for t in trees for n in ast.walk(t) if isinstance(n, ast.Name)} - _only_in_bodies(place, patch)


def _only_in_bodies(place: Place, patch: Patch) -> set[str]:
    """Names in the anchor statement that neither its pattern nor the injected code mentions."""
    shape = _shape(patch)
    text = " ".join(str(getattr(shape, f, "")) for f in ("pattern", "test", "callee", "target"))
    injected = {n.id for t in patch.edit.injected for n in ast.walk(t) if isinstance(n, ast.Name)}
    everywhere = {n.id for n in ast.walk(place.anchor) if isinstance(n, ast.Name)} if place.anchor else set()
    words = set("".join(c if c.isidentifier() or c.isdigit() else " " for c in text).split())
    return everywhere - injected - words


def _renamed(place: Place, name: str) -> str:
    lines = place.lines
    node = place.scope
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    spots = {(n.lineno, n.col_offset) for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == name}
    spots |= {(n.lineno, n.col_offset) for n in ast.walk(node) if isinstance(n, ast.arg) and n.arg == name}
    for line, column in sorted(spots, reverse=True):
        raw = lines[line - 1].encode()
        lines[line - 1] = (raw[:column] + RENAMED.encode() + raw[column:]).decode()
    return "".join(lines)


Kind = Callable[[Place, random.Random, Patch], str | None]
HARMLESS: tuple[Kind, ...] = (comment, reformat, statement, neighbour, moved, other_local, branches)
HARMFUL: tuple[Kind, ...] = (
    scope_renamed,
    scope_twice,
    anchor_removed,
    anchor_twice,
    used_name,
    unreachable,
    anchor_changed,
)


def mutations(source: str, patch: Patch, count: int, seed: int) -> Iterator[Mutation]:
    """``count`` edits: every kind that fits the patch in turn, places by the seed; half of them harmless."""
    rng = random.Random(f"{seed} {patch.name}")
    place = located(source, patch)
    made = turn = 0
    while made < count and turn < 20 * count:
        kinds, harmful = (HARMFUL, True) if turn % 2 else (HARMLESS, False)
        kind = kinds[(turn // 2) % len(kinds)]
        turn += 1
        text = kind(place, rng, patch)
        if text is None or text == source:
            continue
        made += 1
        yield Mutation(kind.__name__, harmful, text)


def change(before: str, after: str, name: str) -> tuple[Counter[str], Counter[str]]:
    """(lines gone, lines new) of a scope as the standard library prints them: comments, layout and our renamings do not
    count."""
    old, new = _pieces(before.replace(RENAMED, ""), name), _pieces(after.replace(RENAMED, ""), name)
    for end in (0, -1):  # what stands before and after the difference need not be printed
        while old and new and old[end][0] == new[end][0]:
            del old[end], new[end]
    gone, come = (Counter(line for _, node in side for line in _printed(node)) for side in (old, new))
    return gone - come, come - gone


def _pieces(source: str, name: str) -> list[tuple[str, ast.AST]]:
    """(text, node) of a scope's head and of each statement in it."""
    node = _scope(ast.parse(source), name)[0]
    lines = source.splitlines()
    body: list[ast.stmt] = node.body  # type: ignore[attr-defined]
    pieces: list[tuple[str, ast.AST]] = [("\n".join(lines[_start(s) - 1 : s.end_lineno]), s) for s in body]
    if not isinstance(node, ast.Module):
        node.body = [ast.Pass()]  # type: ignore[attr-defined]
        pieces.insert(0, ("\n".join(lines[_start(node) - 1 : _start(body[0]) - 1]), node))
    return pieces


def _printed(node: ast.AST) -> list[str]:
    return [line.strip() for line in ast.unparse(node).splitlines() if line.strip()]
