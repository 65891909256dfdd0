"""Files made small before they are parsed losslessly: what an edit cannot touch becomes one line.

libcst takes a second per 10,000 lines, the standard parser a tenth of that. An edit looks into its scope and never into
other definitions, so their bodies are taken out first and put back, byte for byte, into what the edit made. So are the
assignments of a class or module in which no edit looks at every statement.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

_HOLE = b"dflash-deploy-hole"
_HOLES = re.compile(rb'^([ \t]*)"dflash-deploy-hole (\d+)"\r?\n', re.M)
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")
_Hole = tuple[int, int, tuple[ast.stmt, ...]]
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Import, ast.ImportFrom, ast.Assert, ast.Pass)
_HOLDS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.TryStar, ast.Match, ast.ExceptHandler, ast.match_case)
_COOKIE = re.compile(rb"^[ \t\f]*#.*?coding[:=]", re.M)


@dataclass(frozen=True)
class Hollow:
    """A file without the bodies of some definitions, and those bodies."""

    source: bytes
    bodies: tuple[bytes, ...] = ()
    indents: tuple[bytes, ...] = ()
    statements: tuple[tuple[ast.stmt, ...], ...] = field(default=(), repr=False)
    """The bodies as syntax trees."""

    def filled(self, data: bytes) -> bytes | None:
        """``data``, in which every hole is still there once, in order and as deep, with the bodies again; else None."""
        found = _HOLES.findall(data)
        if found != [(indent, b"%d" % number) for number, indent in enumerate(self.indents)]:
            return None
        return _HOLES.sub(lambda match: self.bodies[int(match[2])], data) if found else data

    def filled_tree(self, tree: ast.Module) -> ast.Module:
        """The tree of a source that :meth:`filled` fills, filled likewise. Lines count differently in what was out."""
        stack: list[ast.AST] = [tree] if self.bodies else []
        while stack:
            node = stack.pop()
            for name in _BLOCKS:
                block = getattr(node, name, None)
                if not isinstance(block, list):  # the body of a lambda
                    continue
                full: list[ast.AST] = []
                for child in block:
                    number = _number(child)
                    if number is None:
                        full.append(child)
                        stack.append(child)
                    else:
                        full += self.statements[number]
                setattr(node, name, full)
        return tree


def _number(node: ast.AST) -> int | None:
    """Which hole a statement is; None: it is code."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        head, _, number = node.value.value.rpartition(" ")
        return int(number) if head == _HOLE.decode() else None
    return None


def words(edits: Iterable[object]) -> frozenset[str] | None:
    """Every identifier in the edits' data: a definition of another name is none of theirs. None: an edit is no data."""
    names: set[str] = set()
    for edit in edits:
        if not dataclasses.is_dataclass(edit):
            return None
        names.update(re.findall(r"\w+", repr(edit)))
    return frozenset(names)


def hollow(
    source: bytes,
    tree: ast.Module,
    keep: frozenset[str] | None,
    whole: frozenset[str] = frozenset(),
    looked: frozenset[str] | None = None,
) -> Hollow:
    """``source`` without definitions, and without assignments, that are not named in ``keep``.

    Args:
        whole: qualified names of classes, and ``""`` for the module, that keep all their assignments.
        looked: those in whose blocks an edit looks for statements; of others only definitions of ``keep`` stay. None:
            it may look anywhere.

    Sources whose lines or letters are not plain (other encodings, lone carriage returns, no last line end) stay whole.
    """
    if keep is None or not source.endswith(b"\n") or _HOLE in source or source.startswith(b"\xef\xbb\xbf"):
        return Hollow(source)
    head = b"\n".join(source.split(b"\n", 2)[:2])
    if b"\f" in source or b"\r" in source.replace(b"\r\n", b"") or _COOKIE.search(head):
        return Hollow(source)
    lines = source.split(b"\n")
    parts: list[bytes] = []
    bodies: list[bytes] = []
    indents: list[bytes] = []
    out: list[tuple[ast.stmt, ...]] = []
    at = 0
    for first, last, statements in _View(lines, keep, whole, looked).holes(tree):
        indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
        end = b"\r" if lines[last].endswith(b"\r") else b""
        parts += lines[at:first]
        parts.append(b'%s"%s %d"%s' % (indent, _HOLE, len(bodies), end))
        bodies.append(b"\n".join(lines[first : last + 1]) + b"\n")
        indents.append(indent)
        out.append(statements)
        at = last + 1
    return Hollow(b"\n".join([*parts, *lines[at:]]), tuple(bodies), tuple(indents), tuple(out))


@dataclass(frozen=True)
class _View:
    """What the edits of a file can see of it."""

    lines: list[bytes]
    keep: frozenset[str]
    whole: frozenset[str]
    looked: frozenset[str] | None

    def holes(self, node: ast.AST, name: str = "", nested: bool = False) -> Iterator[_Hole]:
        """(first line, last line, statements), lines from 0, of everything to take out, in order.

        Args:
            name: qualified name of the class that holds the blocks of ``node``.
            nested: they are under an ``if`` or the like.
        """
        for block in _BLOCKS:
            run: _Hole | None = None
            for index, child in enumerate(getattr(node, block, None) or ()):
                # A string that stands first would be a docstring.
                lines = self._lines(child) if index and self._unseen(child, name, nested) else None
                if lines is not None:
                    run = (run[0], lines[1], (*run[2], child)) if run else (*lines, (child,))
                    continue
                if run is not None:
                    yield run
                    run = None
                if isinstance(child, _DEFINITIONS):
                    yield from self._in_definition(child, f"{name}.{child.name}" if name else child.name)
                elif isinstance(child, _HOLDS):
                    yield from self.holes(child, name, nested=True)
            if run is not None:
                yield run

    def _unseen(self, node: ast.AST, name: str, nested: bool) -> bool:
        """Whether no edit looks at a statement of the class ``name``, nor into it."""
        if isinstance(node, _DEFINITIONS):
            return node.name not in self.keep
        if not isinstance(node, ast.stmt):
            return False
        if self.looked is not None and name not in self.looked:
            return not any(isinstance(n, _DEFINITIONS) and n.name in self.keep for n in ast.walk(node))
        return not nested and name not in self.whole and _assigns_other(node, self.keep)

    def _lines(self, node: ast.stmt) -> tuple[int, int] | None:
        """First and last line of a statement, with the comments that stand deeper below it; None: not alone on them."""
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]) - 1
        last = (node.end_lineno or 0) - 1
        after = self.lines[last][node.end_col_offset :].strip()
        if self.lines[first][: node.col_offset].strip(b" \t@") or (after and not after.startswith(b"#")):
            return None
        if not isinstance(node, _SIMPLE):
            for number in range(last + 1, len(self.lines)):
                text = self.lines[number].strip()
                deep = len(self.lines[number]) - len(self.lines[number].lstrip()) > node.col_offset
                if text and not (text.startswith(b"#") and deep):
                    break
                last = number if text else last
        return first, last

    def _in_definition(self, node: _Definition, name: str) -> Iterator[_Hole]:
        if node.name in self.keep:
            if isinstance(node, ast.ClassDef):
                yield from self.holes(node, name)
            return
        top = node.body[0]
        first = min([top.lineno, *(d.lineno for d in getattr(top, "decorator_list", ()))]) - 1
        last = (node.end_lineno or 0) - 1
        if last - first > 1 and not self.lines[first][: top.col_offset].strip() and first >= node.lineno:
            yield first, last, tuple(node.body)


def _assigns_other(node: ast.AST, keep: frozenset[str]) -> bool:
    if not isinstance(node, (ast.Assign, ast.AnnAssign)):
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return all(isinstance(t, ast.Name) and t.id not in keep for t in targets)
