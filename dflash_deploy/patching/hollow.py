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
from dataclasses import dataclass

_HOLE = b"dflash-deploy-hole"
_HOLES = re.compile(rb'^[ \t]*"dflash-deploy-hole (\d+)"\r?\n', re.M)
_COOKIE = re.compile(rb"^[ \t\f]*#.*?coding[:=]", re.M)


@dataclass(frozen=True)
class Hollow:
    """A file without the bodies of some definitions, and those bodies."""

    source: bytes
    bodies: tuple[bytes, ...] = ()

    def filled(self, data: bytes) -> bytes | None:
        """``data``, in which every hole is still there once and in order, with the bodies again; else None."""
        found = [int(number) for number in _HOLES.findall(data)]
        if found != list(range(len(self.bodies))):
            return None
        return _HOLES.sub(lambda match: self.bodies[int(match[1])], data) if found else data


def words(edits: Iterable[object]) -> frozenset[str] | None:
    """Every identifier in the edits' data: a definition of another name is none of theirs. None: an edit is no data."""
    names: set[str] = set()
    for edit in edits:
        if not dataclasses.is_dataclass(edit):
            return None
        names.update(re.findall(r"\w+", repr(edit)))
    return frozenset(names)


def hollow(source: bytes, tree: ast.Module, keep: frozenset[str] | None, whole: frozenset[str] = frozenset()) -> Hollow:
    """``source`` without the bodies of definitions, and without assignments, that are not named in ``keep``.

    Args:
        whole: qualified names of classes, and ``""`` for the module, that keep all their assignments.

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
    at = 0
    for first, last in _holes(tree, keep, whole, lines):
        indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
        end = b"\r" if lines[last].endswith(b"\r") else b""
        parts += lines[at:first]
        parts.append(b'%s"%s %d"%s' % (indent, _HOLE, len(bodies), end))
        bodies.append(b"\n".join(lines[first : last + 1]) + b"\n")
        at = last + 1
    return Hollow(b"\n".join([*parts, *lines[at:]]), tuple(bodies))


def _holes(
    node: ast.AST, keep: frozenset[str], whole: frozenset[str], lines: list[bytes], name: str = ""
) -> Iterator[tuple[int, int]]:
    """(first, last) line, from 0, of everything to take out, in order."""
    run: tuple[int, int] | None = None
    for index, child in enumerate(_blocks(node)):
        if run is not None and not _assigns_other(child, keep):
            yield run
            run = None
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _in_definition(child, keep, whole, lines, f"{name}.{child.name}" if name else child.name)
        elif not isinstance(node, (ast.Module, ast.ClassDef)) or name in whole or not _assigns_other(child, keep):
            yield from _holes(child, keep, whole | {name}, lines, name)
        elif index and isinstance(child, ast.stmt):  # a string that stands first would be a docstring
            start, end = child.lineno - 1, (child.end_lineno or 0) - 1
            alone = not lines[start][: child.col_offset].strip() and not lines[end][child.end_col_offset :].strip()
            if alone:
                run = (run[0] if run else start, end)
            elif run is not None:
                yield run
                run = None
    if run is not None:
        yield run


def _assigns_other(node: ast.AST, keep: frozenset[str]) -> bool:
    if not isinstance(node, (ast.Assign, ast.AnnAssign)):
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return all(isinstance(t, ast.Name) and t.id not in keep for t in targets)


def _in_definition(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef,
    keep: frozenset[str],
    whole: frozenset[str],
    lines: list[bytes],
    name: str,
) -> Iterator[tuple[int, int]]:
    if node.name in keep:
        if isinstance(node, ast.ClassDef):
            yield from _holes(node, keep, whole, lines, name)
        return
    top = node.body[0]
    first = min([top.lineno, *(d.lineno for d in getattr(top, "decorator_list", ()))]) - 1
    last = (node.end_lineno or 0) - 1
    if last - first > 1 and not lines[first][: top.col_offset].strip() and first >= node.lineno:
        yield first, last


def _blocks(node: ast.AST) -> Iterator[ast.AST]:
    """Statements directly in the blocks of a statement (or module), in order."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, field, None) or ():
            if isinstance(child, ast.AST) and isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
                yield child
