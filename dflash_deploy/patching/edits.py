"""Ready kinds of edit, so that most patches are pure data.

Each knows how to find its anchor, to write, and to see that it was written.
Own kinds implement :class:`Edit`. Every edit marks the first line that it injects with the patch's trailing comment.
"""

from __future__ import annotations

import ast
import textwrap
from dataclasses import dataclass
from typing import Protocol

import libcst as cst

from dflash_deploy.errors import AnchorAmbiguous, AnchorMissing
from dflash_deploy.patching import anchors, syntax
from dflash_deploy.patching.anchors import After, Assign, Before, Expr, First, IfTest, Last, Position, Stmt
from dflash_deploy.patching.syntax import At


class Edit(Protocol):
    """One structural change of one module."""

    @property
    def scope(self) -> str:
        """Qualified name of the definition that is edited; ``""`` for the module."""
        ...

    @property
    def injected(self) -> tuple[ast.AST, ...]:
        """Syntax trees of what is written: statements or one expression. Their names must be bound where they land."""
        ...

    def written(self, module: cst.Module) -> bool:
        """Whether the change is there already, judged by structure."""
        ...

    def apply(self, module: cst.Module, marker: str) -> cst.Module:
        """The changed module.

        Raises:
            AnchorMissing, AnchorAmbiguous
        """
        ...


def _trees(code: str) -> tuple[ast.stmt, ...]:
    return tuple(ast.parse(textwrap.dedent(code)).body)


def _marked(code: str, marker: str, like: cst.Module) -> list[cst.BaseStatement | cst.SimpleStatementLine]:
    """Statements of ``code`` with the marker at the end of the first line, laid out for the module they go into."""
    first, newline, rest = textwrap.dedent(code).strip("\n").partition("\n")
    text = f"{first}  {marker}{newline}{rest}\n"
    if [ast.dump(s) for s in ast.parse(text).body] != [ast.dump(s) for s in _trees(code)]:
        raise ValueError(f"the first line of injected code must be able to end in a comment: {first}")
    config = cst.PartialParserConfig(default_indent=like.default_indent, default_newline=like.default_newline)
    return list(cst.parse_module(text.replace("\n", like.default_newline), config).body)


def _block(at: At) -> At:
    """The statement list of a definition, with one-line bodies (``def f(): return 1``) turned into blocks."""
    if isinstance(at.node, cst.Module):
        return at
    body = at.child("body")
    if isinstance(body.node, cst.SimpleStatementSuite):
        line = cst.SimpleStatementLine(body.node.body, trailing_whitespace=body.node.trailing_whitespace)
        return At(cst.IndentedBlock([line]), body.path)
    return body


def _after_prelude(body: list[cst.CSTNode]) -> int:
    index = 0
    for index, statement in enumerate(body):
        found = syntax.tree(statement)
        docstring = (
            index == 0
            and isinstance(found, ast.Expr)
            and isinstance(found.value, ast.Constant)
            and isinstance(found.value.value, str)
        )
        future = isinstance(found, ast.ImportFrom) and found.module == "__future__"
        if not docstring and not future:
            return index
    return index + 1 if body else 0


def _insert(block: At, index: int, new: list[cst.BaseStatement | cst.SimpleStatementLine]) -> cst.Module:
    node = block.node
    assert isinstance(node, (cst.Module, cst.IndentedBlock))
    body = list(node.body)
    body[index:index] = new
    return At(node, block.path).replaced(node.with_changes(body=body))


def _runs(where: At, wanted: tuple[ast.stmt, ...]) -> list[tuple[At, int]]:
    """(block, index) of every place where exactly these statements follow each other."""
    found = []
    for at in syntax.statements(where):
        parent, field, index = at.path[-1]
        if field != "body" or index is None or not syntax.could_be(at.node, wanted[0]):
            continue
        run = list(getattr(parent, field))[index : index + len(wanted)]
        if len(run) == len(wanted) and all(
            syntax.could_be(node, w) and syntax.same(w, syntax.tree(node)) for w, node in zip(wanted, run, strict=True)
        ):
            found.append((At(parent, at.path[:-1]), index))
    return found


def _tests(node: cst.CSTNode, test: ast.expr) -> bool:
    """Whether an ``if`` has this test, of which alone the code is rendered."""
    return isinstance(node, cst.If) and syntax.same(test, syntax.tree(node.test))


def _scope_or_none(module: cst.Module, name: str) -> At | None:
    try:
        return anchors.scope(module, name)
    except (AnchorMissing, AnchorAmbiguous):
        return None


@dataclass(frozen=True)
class InsertStatements:
    """Put statements into a scope, at ``First()``, ``Last()``, ``Before(shape)`` or ``After(shape)``."""

    scope: str
    code: str
    at: Position

    @property
    def injected(self) -> tuple[ast.AST, ...]:
        return _trees(self.code)

    def written(self, module: cst.Module) -> bool:
        where = _scope_or_none(module, self.scope)
        if where is None:
            return False
        wanted = _trees(self.code)
        runs = _runs(where, wanted)
        if len(runs) != 1:
            return False
        block, start = runs[0]
        if not isinstance(self.at, (Before, After)):
            return True
        ours = {id(s) for s in list(block.node.body)[start : start + len(wanted)]}  # type: ignore[attr-defined]
        matches = [m.statement for m in self.at.shape.candidates(where) if self.at.shape.matches(m)]
        for other in matches:
            parent, _, index = other.path[-1]
            if id(other.node) in ours or parent is not block.node or index is None:
                continue
            if (index > start) == isinstance(self.at, Before):
                return True
        return False

    def apply(self, module: cst.Module, marker: str) -> cst.Module:
        where = anchors.scope(module, self.scope)
        new = _marked(self.code, marker, module)
        if isinstance(self.at, (Before, After)):
            anchor = anchors.find(where, self.at.shape, self.scope).statement
            parent, field, index = anchor.path[-1]
            if field != "body" or index is None or not isinstance(parent, (cst.Module, cst.IndentedBlock)):
                raise AnchorMissing(
                    f"{self.at.shape} in {self.scope} is not a statement of its own (an elif or a one-line body)"
                )
            block = At(parent, anchor.path[:-1])
            return _insert(block, index + isinstance(self.at, After), new)
        block = _block(where)
        body = list(block.node.body)  # type: ignore[attr-defined]
        return _insert(block, _after_prelude(body) if isinstance(self.at, First) else len(body), new)


def AppendToModule(code: str) -> InsertStatements:
    """Put statements at the end of the module."""
    return InsertStatements("", code, at=Last())


def AddMethod(scope: str, code: str) -> InsertStatements:
    """Put a method (with its decorators) at the end of a class."""
    return InsertStatements(scope, code, at=Last())


def AddClassField(scope: str, code: str, after: str) -> InsertStatements:
    """Put a field or enum member into a class body, after the assignment of the field ``after``."""
    return InsertStatements(scope, code, at=After(Assign(after)))


@dataclass(frozen=True)
class AddImport:
    """Put an import at the top of a module: after the last import that stands directly in its body."""

    code: str
    scope: str = ""

    @property
    def injected(self) -> tuple[ast.AST, ...]:
        return _trees(self.code)

    def written(self, module: cst.Module) -> bool:
        return len(_runs(At(module), _trees(self.code))) == 1

    def apply(self, module: cst.Module, marker: str) -> cst.Module:
        imports = [
            index
            for index, line in enumerate(module.body)
            if isinstance(line, cst.SimpleStatementLine)
            and any(isinstance(s, (cst.Import, cst.ImportFrom)) for s in line.body)
        ]
        index = imports[-1] + 1 if imports else _after_prelude(list(module.body))
        return _insert(At(module), index, _marked(self.code, marker, module))


def _mark(statement: At, marker: str) -> cst.Module:
    """The marker at the end of the statement's line (of its header, when it has a block)."""
    node = statement.node
    if isinstance(node, cst.SimpleStatementLine):
        holder, field = statement, "trailing_whitespace"
    else:
        body = statement.child("body")
        holder, field = body, "header" if isinstance(body.node, cst.IndentedBlock) else "trailing_whitespace"
    space = getattr(holder.node, field)
    old = space.comment.value + "  " if space.comment else ""
    comment = cst.Comment(f"{old}{marker}")
    white = space.whitespace if space.comment else cst.SimpleWhitespace("  ")
    return holder.replaced(holder.node.with_changes(**{field: space.with_changes(comment=comment, whitespace=white)}))


def _again(at: At, module: cst.Module) -> At:
    """The node at the same place in another module of the same shape."""
    node = At(module)
    for _, field, index in at.path:
        node = node.child(field, index)
    return node


@dataclass(frozen=True)
class ReplaceExpression:
    """Replace the one expression ``old`` of a scope by ``new`` (Python source, in which ``old`` may stand again)."""

    scope: str
    old: str
    new: str

    @property
    def injected(self) -> tuple[ast.AST, ...]:
        return (syntax.expression_pattern(self.new),)

    def _find(self, where: At) -> At:
        return anchors.find(where, Expr(self.old), self.scope)

    def written(self, module: cst.Module) -> bool:
        where = _scope_or_none(module, self.scope)
        if where is None:
            return False
        wanted = syntax.expression_pattern(self.new)
        return sum(syntax.same(wanted, syntax.tree(at.node)) for at in syntax.expressions_like(where, wanted)) == 1

    def apply(self, module: cst.Module, marker: str) -> cst.Module:
        at = self._find(anchors.scope(module, self.scope))
        new = cst.parse_expression(self.new)
        old = at.node
        assert isinstance(old, cst.BaseExpression)
        if old.lpar or isinstance(
            new, (cst.BooleanOperation, cst.IfExp, cst.Lambda, cst.Comparison, cst.UnaryOperation)
        ):
            new = _parenthesized(new, at)
        changed = at.replaced(new)
        return _mark(_again(at.statement, changed), marker)


def _parenthesized(new: cst.BaseExpression, at: At) -> cst.BaseExpression:
    """Keep the old expression's parentheses; add some where precedence could bite."""
    old = at.node
    assert isinstance(old, cst.BaseExpression)
    if old.lpar:
        return new.with_changes(lpar=old.lpar, rpar=old.rpar)
    parent = at.path[-1][0]
    if isinstance(parent, (cst.Arg, cst.Assign, cst.AnnAssign, cst.If, cst.While, cst.Return, cst.Element, cst.Expr)):
        return new
    return new.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


@dataclass(frozen=True)
class WrapCondition:
    """Replace the test of the one ``if`` whose test is ``test`` by ``new``, in which ``{}`` stands for the old test."""

    scope: str
    test: str
    new: str

    @property
    def _code(self) -> str:
        return self.new.format(f"({self.test})")

    @property
    def injected(self) -> tuple[ast.AST, ...]:
        return (syntax.expression_pattern(self._code),)

    def written(self, module: cst.Module) -> bool:
        where = _scope_or_none(module, self.scope)
        if where is None:
            return False
        wanted = syntax.expression_pattern(self._code)
        tests = [syntax.tree(at.node.test) for at in IfTest(self.test).candidates(where) if isinstance(at.node, cst.If)]
        return sum(syntax.same(wanted, test) for test in tests) == 1

    def apply(self, module: cst.Module, marker: str) -> cst.Module:
        where = anchors.scope(module, self.scope)
        at = anchors.find(where, IfTest(self.test), self.scope)
        assert isinstance(at.node, cst.If)
        old = at.node.test
        inside = _one_line(old)
        new = cst.parse_expression(self.new.format(inside))
        changed = at.child("test").replaced(new.with_changes(lpar=old.lpar, rpar=old.rpar) if old.lpar else new)
        return _mark(_again(at, changed), marker)


def _one_line(test: cst.BaseExpression) -> str:
    found = syntax.tree(test)
    assert found is not None
    return f"({ast.unparse(found)})"


@dataclass(frozen=True)
class AddElement:
    """Add an element at the end of the one tuple, list or set literal of a scope that has all of ``holds``."""

    scope: str
    holds: tuple[str, ...]
    element: str

    @property
    def injected(self) -> tuple[ast.AST, ...]:
        return (syntax.expression_pattern(self.element),)

    def _literals(self, where: At) -> list[At]:
        found = []
        for at in syntax.expressions(where):
            if not isinstance(at.node, (cst.Tuple, cst.List, cst.Set)):
                continue
            have = [syntax.tree(e.value) for e in at.node.elements]
            if all(any(syntax.same(syntax.expression_pattern(h), x) for x in have) for h in self.holds):
                found.append(at)
        return found

    def _has(self, at: At) -> bool:
        assert isinstance(at.node, (cst.Tuple, cst.List, cst.Set))
        wanted = syntax.expression_pattern(self.element)
        return any(syntax.same(wanted, syntax.tree(e.value)) for e in at.node.elements)

    def written(self, module: cst.Module) -> bool:
        where = _scope_or_none(module, self.scope)
        if where is None:
            return False
        found = self._literals(where)
        return len(found) == 1 and self._has(found[0])

    def apply(self, module: cst.Module, marker: str) -> cst.Module:
        where = anchors.scope(module, self.scope)
        found = self._literals(where)
        shape = f"a literal that holds {', '.join(self.holds)}"
        if len(found) > 1:
            raise AnchorAmbiguous(
                f"{shape} stands {len(found)} times in {self.scope}",
                evidence=[syntax.code(at.node)[:110] for at in found],
            )
        if not found:
            near = [
                syntax.code(at.node)[:110]
                for at in syntax.expressions(where)
                if isinstance(at.node, (cst.Tuple, cst.List, cst.Set))
            ]
            raise AnchorMissing(
                f"{shape} is not in {self.scope or 'the module'}", evidence=[f"nearest: {text}" for text in near[:3]]
            )
        (at,) = found
        assert isinstance(at.node, (cst.Tuple, cst.List, cst.Set))
        elements = list(at.node.elements)
        last = elements[-1]
        trailing = last.comma
        between = elements[-2].comma if len(elements) > 1 else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        elements[-1] = last.with_changes(comma=between)
        elements.append(cst.Element(cst.parse_expression(self.element), comma=trailing))
        changed = at.replaced(at.node.with_changes(elements=elements))
        return _mark(_again(at.statement, changed), marker)


@dataclass(frozen=True)
class AddBranchFirst:
    """Put a branch in front of an ``if`` chain: ``if new: ...`` and the old ``if`` becomes its ``elif``."""

    scope: str
    code: str
    """One ``if`` statement without ``else``."""
    before: IfTest

    @property
    def injected(self) -> tuple[ast.AST, ...]:
        return _trees(self.code)

    def written(self, module: cst.Module) -> bool:
        where = _scope_or_none(module, self.scope)
        if where is None:
            return False
        (wanted,) = _trees(self.code)
        assert isinstance(wanted, ast.If) and not wanted.orelse
        count = 0
        for at in self.before.candidates(where):
            if not _tests(at.node, wanted.test):
                continue
            found = syntax.tree(at.node)
            if isinstance(found, ast.If) and isinstance(at.node, cst.If) and isinstance(at.node.orelse, cst.If):
                count += syntax.same(wanted.body, found.body)
        return count == 1

    def apply(self, module: cst.Module, marker: str) -> cst.Module:
        where = anchors.scope(module, self.scope)
        at = anchors.find(where, self.before, self.scope)
        (new,) = _marked(self.code, marker, module)
        assert isinstance(new, cst.If) and isinstance(at.node, cst.If)
        if at.path[-1][1] == "orelse":
            return at.replaced(new.with_changes(orelse=at.node))
        old = at.node.with_changes(leading_lines=[])
        return at.replaced(new.with_changes(orelse=old, leading_lines=at.node.leading_lines))


@dataclass(frozen=True)
class GuardStatement:
    """Run the one statement of this shape only when ``condition`` holds."""

    scope: str
    statement: Stmt
    condition: str

    @property
    def injected(self) -> tuple[ast.AST, ...]:
        return (syntax.expression_pattern(self.condition),)

    def written(self, module: cst.Module) -> bool:
        where = _scope_or_none(module, self.scope)
        if where is None:
            return False
        test = syntax.expression_pattern(self.condition)
        count = 0
        for at in IfTest(self.condition).candidates(where):
            found = syntax.tree(at.node) if _tests(at.node, test) else None
            if isinstance(found, ast.If) and len(found.body) == 1 and not found.orelse:
                count += syntax.difference(syntax.statement_pattern(self.statement.pattern), found.body[0]) is None
        return count == 1

    def apply(self, module: cst.Module, marker: str) -> cst.Module:
        where = anchors.scope(module, self.scope)
        at = anchors.find(where, self.statement, self.scope)
        if at.path[-1][2] is None or not isinstance(at.path[-1][0], (cst.Module, cst.IndentedBlock)):
            raise AnchorMissing(f"{self.statement} in {self.scope} is not a statement of its own")
        (guard,) = _marked(f"if {self.condition}:\n    pass\n", marker, module)
        assert isinstance(guard, cst.If) and isinstance(at.node, (cst.SimpleStatementLine, cst.BaseCompoundStatement))
        inner = at.node.with_changes(leading_lines=[])
        body = guard.body.with_changes(body=[inner])
        return at.replaced(guard.with_changes(body=body, leading_lines=at.node.leading_lines))
