"""Does the tree still hold what injected code relies on?

The names that it uses, the functions that it calls, and that it is reached at all.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import functools
from collections.abc import Iterable

from dflash_deploy.errors import ContractBroken
from dflash_deploy.patching.patch import Contract
from dflash_deploy.patching.syntax import same

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@functools.lru_cache(maxsize=512)
def own(node: ast.AST) -> tuple[ast.AST, ...]:
    """Nodes of a scope in textual order, without what is inside nested definitions."""
    found: list[ast.AST] = []
    stack = [node]
    while stack:
        current = stack.pop()
        if current is not node:
            found.append(current)
            if isinstance(current, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
                continue
        below: list[ast.AST] = []
        for field in current._fields:
            value = getattr(current, field, None)
            if isinstance(value, list):
                below += [item for item in value if isinstance(item, ast.AST)]
            elif isinstance(value, ast.AST):
                below.append(value)
        stack += reversed(below)
    return tuple(found)


@functools.lru_cache(maxsize=256)
def bound(node: ast.AST, before: int | None = None) -> frozenset[str]:
    """Names that a scope binds: parameters, assignments, imports, definitions.

    ``before``: only above that line (parameters always).
    """
    names: set[str] = set()
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        arguments = node.args
        names |= {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        names |= {a.arg for a in (arguments.vararg, arguments.kwarg) if a is not None}
    for child in own(node):
        if before is not None and getattr(child, "lineno", 0) >= before:
            continue
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            names.add(child.id)
        elif isinstance(child, (ast.Import, ast.ImportFrom)):
            names |= {(a.asname or a.name).split(".")[0] for a in child.names}
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler)):
            names.add(child.name or "")
    return frozenset(names)


def _free(nodes: Iterable[ast.AST]) -> list[str]:
    loads: dict[str, None] = {}
    stores: set[str] = set()
    for root in nodes:
        if isinstance(root, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            stores.add(root.name)
        stores |= bound(root)
        for node in ast.walk(root):
            if isinstance(node, (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef)):
                stores |= bound(node)
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                stores |= {(a.asname or a.name).split(".")[0] for a in node.names}
            if isinstance(node, ast.Name):
                if isinstance(node.ctx, ast.Load):
                    loads[node.id] = None
                else:
                    stores.add(node.id)
    return [name for name in loads if name not in stores and not hasattr(builtins, name)]


def definitions(tree: ast.Module, name: str) -> list[tuple[ast.AST, list[ast.AST]]]:
    """(node, enclosing scopes from the module down) of every definition with this qualified name."""
    found: list[tuple[ast.AST, list[ast.AST]]] = [(tree, [])]
    for part in name.split(".") if name else ():
        found = [
            (child, [*scopes, node])
            for node, scopes in found
            for child in own(node)
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and child.name == part
        ]
    return found


def check_landing(tree: ast.Module, file: str, scope: str, injected: tuple[ast.AST, ...]) -> None:
    """Names that injected code uses are bound where it landed, and nothing before it always leaves its blocks.

    Raises:
        ContractBroken
    """
    places = definitions(tree, scope)
    if len(places) != 1:
        return
    node, outer = places[0]
    kinds = tuple({type(i) for i in injected if isinstance(i, (ast.stmt, ast.expr))})
    landed = [n for n in own(node) if isinstance(n, kinds) and any(_is(i, n) for i in injected)]
    line = landed[0].lineno if landed else None
    function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    names = set(bound(node, line if function else None))
    for around in outer:
        if not isinstance(around, ast.ClassDef):
            names |= bound(around)
    star = any(isinstance(n, ast.ImportFrom) and any(a.name == "*" for a in n.names) for n in own(tree))
    missing = [] if star else [n for n in _free(injected) if n not in names]
    if missing:
        near = difflib.get_close_matches(missing[0], sorted(names), n=3, cutoff=0.5)
        raise ContractBroken(
            f"injected code in {scope or 'the module'} uses {', '.join(missing)}, which is not bound there in {file}",
            evidence=[f"nearest: {n}" for n in near],
        )
    if line is not None and function:
        end = _leaves_before(node, line)
        if end is not None:
            raise ContractBroken(
                f"injected code in {scope} of {file} would never run: line {end.lineno} always leaves before it",
                evidence=[ast.unparse(end).splitlines()[0][:110]],
            )


def _is(wanted: ast.AST, node: ast.AST) -> bool:
    """Equal code; of an ``if`` only the first branch counts: the old chain may follow as its ``elif``."""
    if isinstance(wanted, ast.If) and isinstance(node, ast.If):
        return same(wanted.test, node.test) and same(wanted.body, node.body)
    return same(wanted, node)


def _leaves_before(scope: ast.AST, line: int) -> ast.stmt | None:
    """The statement that always leaves a block of the function before the statement at ``line`` is reached."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for index, part in enumerate(block := getattr(scope, field, None) or ()):
            first = part.body[0].lineno if isinstance(part, ast.match_case) else part.lineno
            last = part.body[-1].end_lineno if isinstance(part, ast.match_case) else part.end_lineno
            if first <= line <= (last or first):
                earlier = [s for s in block[:index] if isinstance(s, _ENDS)]
                return earlier[0] if earlier else _leaves_before(part, line)
    return None


def check_contract(tree: ast.Module | None, contract: Contract) -> None:
    """Check one contract against the file's tree (None: there is no such file).

    Raises:
        ContractBroken
    """
    where = f"{contract.name} in {contract.file}"
    if tree is None:
        raise ContractBroken(f"{contract.file} is not in the tree, but injected code relies on {contract.name}")
    found = definitions(tree, contract.name)
    if not found:
        parent, _, last = contract.name.rpartition(".")
        holders = definitions(tree, parent)
        if (
            contract.params is None
            and not contract.attributes
            and any(last in _attributes(tree, h) for h, _ in holders)
        ):
            return
        names = sorted({n for h, _ in holders for n in _attributes(tree, h)} or bound(tree))
        near = difflib.get_close_matches(last, names, n=3, cutoff=0.5)
        raise ContractBroken(f"{where} is missing", evidence=[f"nearest: {n}" for n in near])
    node = found[-1][0]
    if contract.attributes:
        have = bound(node)
        lacking = [a for a in contract.attributes if a not in have]
        if lacking:
            have = _attributes(tree, node)
            lacking = [a for a in lacking if a not in have]
        if lacking:
            near = difflib.get_close_matches(lacking[0], sorted(have), n=3, cutoff=0.5)
            raise ContractBroken(
                f"{where} has no attribute {', '.join(lacking)}", evidence=[f"nearest: {n}" for n in near]
            )
    if contract.params is not None:
        _check_call(tree, node, contract, where)


def _bases(tree: ast.Module, node: ast.ClassDef) -> list[ast.ClassDef]:
    """The class and its bases as far as this file defines them, nearest first."""
    order = [node]
    for current in order:
        for base in current.bases:
            name = base.id if isinstance(base, ast.Name) else ""
            order += (
                [n for n, _ in definitions(tree, name) if isinstance(n, ast.ClassDef) and n not in order]
                if name
                else []
            )
    return order


@functools.lru_cache(maxsize=256)
def _attributes(tree: ast.Module, node: ast.AST) -> frozenset[str]:
    if not isinstance(node, ast.ClassDef):
        return bound(node)
    names: set[str] = set()
    for cls in _bases(tree, node):
        names |= bound(cls)
        for inner in ast.walk(cls):
            if not isinstance(inner, ast.Attribute) or not isinstance(inner.ctx, ast.Store):
                continue
            if isinstance(inner.value, ast.Name) and inner.value.id == "self":
                names.add(inner.attr)
    return frozenset(names)


def _check_call(tree: ast.Module, node: ast.AST, contract: Contract, where: str) -> None:
    passed = list(contract.params or ())
    if isinstance(node, ast.ClassDef):
        classes = _bases(tree, node)
        init = next(
            (n for c in classes for n in c.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None
        )
        if init is None:
            _check_fields(classes, passed, contract, where)
            return
        node, method = init, True
    else:
        assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        decorators = {ast.unparse(d) for d in node.decorator_list}
        method = "." in contract.name and "staticmethod" not in decorators
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    required = {a.arg for a in plain[: len(plain) - len(arguments.defaults)]}
    required |= {a.arg for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is None}
    order = [a.arg for a in plain][1 if method and plain and plain[0].arg in ("self", "cls", "mcs") else 0 :]
    if method and plain:
        required.discard(plain[0].arg)
    accepted = {*order, *(a.arg for a in arguments.kwonlyargs)} - {a.arg for a in arguments.posonlyargs}
    by_position, by_name = passed[: contract.positional], passed[contract.positional :]
    unknown = [p for p in by_name if p not in accepted and arguments.kwarg is None]
    _report(where, unknown, sorted(required - set(passed)), accepted)
    if by_position != order[: contract.positional] and arguments.vararg is None:
        raise ContractBroken(
            f"{where} takes its first parameters in another order",
            evidence=[f"expected ({', '.join(by_position)})", f"found ({', '.join(order[: contract.positional])})"],
        )


def _check_fields(classes: list[ast.ClassDef], passed: list[str], contract: Contract, where: str) -> None:
    accepted, required = set(), set()
    for cls in classes:
        for item in cls.body:
            if (
                isinstance(item, ast.AnnAssign)
                and isinstance(item.target, ast.Name)
                and "ClassVar" not in ast.unparse(item.annotation)
            ):
                accepted.add(item.target.id)
                if item.value is None:
                    required.add(item.target.id)
    _report(where, [p for p in passed if p not in accepted], sorted(required - set(passed)), accepted)


def _report(where: str, unknown: list[str], lacking: list[str], accepted: set[str]) -> None:
    if unknown:
        near = difflib.get_close_matches(unknown[0], sorted(accepted), n=3, cutoff=0.5)
        raise ContractBroken(
            f"{where} takes no parameter {', '.join(unknown)}", evidence=[f"nearest: {n}" for n in near]
        )
    if lacking:
        raise ContractBroken(f"{where} now requires {', '.join(lacking)}, which injected code does not pass")
