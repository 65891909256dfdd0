"""Source bytes as a lossless tree, nodes with their way back to the root, and patterns compared as syntax trees.

Edits rebuild only the spine from the changed node to the module; nothing else is touched, so encodings, line ends and
odd spacing survive.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import libcst as cst

from dflash_deploy.errors import InvalidResult

_RENDER = cst.Module([])


@dataclass(frozen=True)
class At:
    """A node and where it hangs: ``path`` leads from the root to its parent as (parent, field, index or None)."""

    node: cst.CSTNode
    path: tuple[tuple[cst.CSTNode, str, int | None], ...] = ()

    def replaced(self, *new: cst.CSTNode) -> cst.Module:
        """The module with this node replaced by ``new`` (exactly one node where the field holds one)."""
        nodes: Sequence[cst.CSTNode] = new
        for parent, field, index in reversed(self.path):
            if index is None:
                (node,) = nodes
                changed = parent.with_changes(**{field: node})
            else:
                items = list(getattr(parent, field))
                items[index : index + 1] = nodes
                changed = parent.with_changes(**{field: items})
            nodes = (changed,)
        (root,) = nodes
        assert isinstance(root, cst.Module)
        return root

    def child(self, field: str, index: int | None = None) -> At:
        """The node in ``field``."""
        value = getattr(self.node, field)
        return At(value if index is None else value[index], (*self.path, (self.node, field, index)))

    @property
    def statement(self) -> At:
        """The innermost statement that holds this node."""
        at = self
        while not isinstance(at.node, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
            parent, _, _ = at.path[-1]
            at = At(parent, at.path[:-1])
        return at


@functools.lru_cache(maxsize=8)
def parse(source: bytes, file: str = "the file") -> cst.Module:
    """The tree of ``source``.

    Raises:
        InvalidResult: not Python.
    """
    try:
        return cst.parse_module(source)
    except (cst.ParserSyntaxError, UnicodeError, LookupError, SyntaxError) as error:
        raise InvalidResult(f"{file} cannot be parsed as Python", evidence=str(error).splitlines()[:4]) from error


@functools.cache
def _fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


_SPACE = (cst.BaseParenthesizableWhitespace, cst.EmptyLine, cst.TrailingWhitespace, cst.Newline)


def children(at: At, without: tuple[type[cst.CSTNode], ...] = ()) -> Iterator[At]:
    """Direct child nodes, in order; none of the kinds ``without``."""
    node, path = at.node, at.path
    for name in _fields(type(node)):
        value = getattr(node, name)
        if isinstance(value, cst.CSTNode):
            if not isinstance(value, without):
                yield At(value, (*path, (node, name, None)))
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                if isinstance(item, cst.CSTNode) and not isinstance(item, without):
                    yield At(item, (*path, (node, name, index)))


def walk(at: At) -> Iterator[At]:
    """Nodes below ``at``, nested definitions entered not at all (they are scopes of their own)."""
    for below in children(at, _SPACE):
        yield below
        if not isinstance(below.node, (cst.FunctionDef, cst.ClassDef)):
            yield from walk(below)


def statements(scope: At) -> Iterator[At]:
    """Every statement of a scope in textual order, nested blocks included; of nested definitions only themselves."""
    stack = list(children(scope, _SPACE))[::-1]
    while stack:
        at = stack.pop()
        if isinstance(at.node, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
            yield at
            if isinstance(at.node, (cst.FunctionDef, cst.ClassDef, cst.SimpleStatementLine)):
                continue
        elif not isinstance(
            at.node, (cst.BaseSuite, cst.Else, cst.ExceptHandler, cst.ExceptStarHandler, cst.Finally, cst.MatchCase)
        ):
            continue
        stack.extend(list(children(at, _SPACE))[::-1])


def expressions(scope: At) -> Iterator[At]:
    """Every expression of a scope."""
    return (at for at in walk(scope) if isinstance(at.node, cst.BaseExpression))


_COMPOUND: dict[type[ast.stmt], type[cst.CSTNode]] = {
    ast.If: cst.If,
    ast.For: cst.For,
    ast.AsyncFor: cst.For,
    ast.While: cst.While,
    ast.Try: cst.Try,
    ast.With: cst.With,
    ast.AsyncWith: cst.With,
    ast.FunctionDef: cst.FunctionDef,
    ast.AsyncFunctionDef: cst.FunctionDef,
    ast.ClassDef: cst.ClassDef,
}
_SIMPLE: dict[type[ast.stmt], type[cst.CSTNode]] = {
    ast.Assign: cst.Assign,
    ast.AnnAssign: cst.AnnAssign,
    ast.AugAssign: cst.AugAssign,
    ast.Expr: cst.Expr,
    ast.Return: cst.Return,
    ast.Raise: cst.Raise,
    ast.Import: cst.Import,
    ast.ImportFrom: cst.ImportFrom,
    ast.Pass: cst.Pass,
    ast.Assert: cst.Assert,
    ast.Delete: cst.Del,
}


def could_be(node: cst.CSTNode, pattern: ast.stmt) -> bool:
    """Whether a statement is of the pattern's kind (and name), seen without rendering it."""
    kind = type(pattern)
    if kind in _SIMPLE:
        return (
            isinstance(node, cst.SimpleStatementLine)
            and len(node.body) == 1
            and isinstance(node.body[0], _SIMPLE[kind])
            and (not isinstance(pattern, ast.AnnAssign) or may_assign(node, pattern.target))
        )
    if kind in _COMPOUND and not isinstance(node, _COMPOUND[kind]):
        return False
    if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
        return node.name.value == getattr(pattern, "name", node.name.value)
    return isinstance(node, cst.BaseCompoundStatement) or kind not in _COMPOUND


def may_assign(node: cst.CSTNode, target: ast.expr) -> bool:
    """Whether an assignment's targets hold one of this kind and last name, seen without rendering it."""
    if not isinstance(node, cst.SimpleStatementLine) or _wild(target):
        return True
    (found,) = node.body
    targets = [t.target for t in found.targets] if isinstance(found, cst.Assign) else [getattr(found, "target", None)]
    if isinstance(target, ast.Name):
        return any(isinstance(t, cst.Name) and t.value == target.id for t in targets)
    if isinstance(target, ast.Attribute):
        return any(isinstance(t, cst.Attribute) and t.attr.value == target.attr for t in targets)
    return True


def code(node: cst.CSTNode) -> str:
    """Source of a node, as far as possible on one line and without surrounding comments."""
    return _RENDER.code_for_node(node).strip()


_KINDS: dict[type[ast.expr], tuple[type[cst.BaseExpression], ...]] = {
    ast.Call: (cst.Call,),
    ast.Compare: (cst.Comparison,),
    ast.BoolOp: (cst.BooleanOperation,),
    ast.UnaryOp: (cst.UnaryOperation,),
    ast.BinOp: (cst.BinaryOperation,),
    ast.Name: (cst.Name,),
    ast.Attribute: (cst.Attribute,),
    ast.Subscript: (cst.Subscript,),
    ast.Tuple: (cst.Tuple,),
    ast.List: (cst.List,),
    ast.Set: (cst.Set,),
    ast.Dict: (cst.Dict,),
    ast.IfExp: (cst.IfExp,),
}


def expressions_like(scope: At, pattern: ast.expr) -> Iterator[At]:
    """Expressions of the same kind as ``pattern``."""
    kinds = _KINDS.get(type(pattern), (cst.BaseExpression,))
    return (at for at in expressions(scope) if isinstance(at.node, kinds) and isinstance(tree(at.node), type(pattern)))


@functools.lru_cache(maxsize=8192)
def tree(node: cst.CSTNode) -> ast.AST | None:
    """The syntax tree of a statement or expression; None where the node does not stand alone (an ``elif`` does)."""
    text = _RENDER.code_for_node(node)
    if isinstance(node, cst.BaseExpression):
        try:
            return ast.parse(f"({text}\n)", mode="eval").body
        except SyntaxError:
            return None
    if isinstance(node, cst.If) and text.lstrip().startswith("elif"):
        text = text.lstrip()[2:]
    try:
        body = ast.parse(textwrap.dedent(text)).body
    except SyntaxError:
        return None
    return body[0] if len(body) == 1 else None


@functools.lru_cache(maxsize=512)
def statement_pattern(source: str) -> ast.stmt:
    """A pattern of one statement. ``if x: ...`` matches any body; a pattern without ``else`` says nothing about one."""
    (statement,) = ast.parse(textwrap.dedent(source)).body
    return statement


@functools.lru_cache(maxsize=512)
def expression_pattern(source: str) -> ast.expr:
    """A pattern of one expression."""
    return ast.parse(f"({source}\n)", mode="eval").body


def _wild(node: object) -> bool:
    if isinstance(node, ast.Expr):
        node = node.value
    return isinstance(node, ast.Constant) and node.value is Ellipsis


_IGNORED = frozenset({"lineno", "col_offset", "end_lineno", "end_col_offset", "type_comment", "ctx", "kind"})


def difference(pattern: object, found: object, where: str = "") -> str | None:
    """The first structural difference between a pattern and what was found, or None when it matches.

    ``...`` in the pattern matches any expression, all arguments of a call, and the rest of a block.
    """
    if _wild(pattern):
        return None
    if isinstance(pattern, ast.AST):
        if type(pattern) is not type(found):
            return f"{where or 'here'}: expected {_show(pattern)}, found {_show(found)}"
        assert isinstance(found, ast.AST)
        if isinstance(pattern, ast.Call) and len(pattern.args) == 1 and _wild(pattern.args[0]) and not pattern.keywords:
            return difference(pattern.func, found.func, f"{where}.func")  # type: ignore[attr-defined]
        for name, value in ast.iter_fields(pattern):
            if name in _IGNORED:
                continue
            if (
                isinstance(pattern, (ast.If, ast.For, ast.While, ast.Try))
                and name in ("orelse", "finalbody")
                and not value
            ):
                continue
            if (
                text := difference(value, getattr(found, name, None), f"{where}.{name}" if where else name)
            ) is not None:
                return text
        return None
    if isinstance(pattern, list):
        assert isinstance(found, list)
        for index, item in enumerate(pattern):
            if isinstance(item, ast.stmt) and _wild(item):
                return None
            if index >= len(found):
                return f"{where}: {_show(item)} is missing"
            if (text := difference(item, found[index], f"{where}[{index}]")) is not None:
                return text
        return f"{where}: unexpected {_show(found[len(pattern)])}" if len(found) > len(pattern) else None
    return None if pattern == found else f"{where}: expected {_show(pattern)}, found {_show(found)}"


def _show(value: object) -> str:
    if isinstance(value, (ast.stmt, ast.expr)):
        return "`" + ast.unparse(value).splitlines()[0][:100] + "`"
    return type(value).__name__ if isinstance(value, ast.AST) else repr(value)


def same(one: object, other: object) -> bool:
    """Equal syntax trees, without wildcards; positions do not count."""
    if type(one) is not type(other):
        return False
    if isinstance(one, ast.AST):
        return all(same(getattr(one, f, None), getattr(other, f, None)) for f in one._fields)
    if isinstance(one, list):
        assert isinstance(other, list)
        return len(one) == len(other) and all(map(same, one, other))
    return one == other
