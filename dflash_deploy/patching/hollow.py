"""Files made small before they are parsed losslessly: definitions that an edit cannot touch become one line each.

libcst takes a second per 10,000 lines, the standard parser a tenth of that. An edit looks into its scope and never into
other definitions, so their bodies are taken out first and put back, byte for byte, into what the edit made.
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


def hollow(source: bytes, tree: ast.Module, keep: frozenset[str] | None) -> Hollow:
    """``source`` without the bodies of definitions that are not named in ``keep``.

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
    for first, last in _bodies(tree, keep, lines):
        indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
        end = b"\r" if lines[last].endswith(b"\r") else b""
        parts += lines[at:first]
        parts.append(b'%s"%s %d"%s' % (indent, _HOLE, len(bodies), end))
        bodies.append(b"\n".join(lines[first : last + 1]) + b"\n")
        at = last + 1
    return Hollow(b"\n".join([*parts, *lines[at:]]), tuple(bodies))


def _bodies(node: ast.AST, keep: frozenset[str], lines: list[bytes]) -> Iterator[tuple[int, int]]:
    """(first, last) line, from 0, of every body to take out: outermost definitions only, in order."""
    for child in _blocks(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _bodies(child, keep, lines)
        elif child.name in keep:
            if isinstance(child, ast.ClassDef):
                yield from _bodies(child, keep, lines)
        else:
            top = child.body[0]
            first = min([top.lineno, *(d.lineno for d in getattr(top, "decorator_list", ()))]) - 1
            last = (child.end_lineno or 0) - 1
            blank = lines[first][: top.col_offset].strip() == b""
            if last - first > 1 and blank and first >= child.lineno:
                yield first, last


def _blocks(node: ast.AST) -> Iterator[ast.AST]:
    """Statements directly in the blocks of a statement (or module), in order."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, field, None) or ():
            if isinstance(child, ast.AST) and isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
                yield child
