"""The sites of one file."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dflash_deploy.mapping import vocabulary
from dflash_deploy.mapping.meaning import WORDS, Function, Reader, Scope, Tag, own
from dflash_deploy.mapping.model import Kind, Site
from dflash_deploy.mapping.vocabulary import Vocabulary

_USED = {
    Tag.MASK: (Kind.MASK, "consume"),
    Tag.HIDDEN: (Kind.HIDDEN, "use"),
    Tag.TOKENS: (Kind.TOKENS, "use"),
    Tag.TOPK: (Kind.TOPK, "use"),
}
_STORED = {Tag.MASK: "produce", Tag.HIDDEN: "set", Tag.TOKENS: "set", Tag.TOPK: "set"}
_COMPARED = {
    Tag.NAMES: Kind.NAME,
    Tag.NAME: Kind.NAME,
    Tag.ALGORITHM: Kind.PREDICATE,
    Tag.INPUT_TYPE: Kind.TYPE,
    Tag.MODE: Kind.BRANCH,
    Tag.HIDDEN: Kind.HIDDEN,
    Tag.TOPK: Kind.TOPK,
    Tag.TOKENS: Kind.TOKENS,
    Tag.MASK: Kind.MASK,
}
"""Whose comparison decides, when both sides mean something."""


def scan(file: str, source: bytes, tree: ast.Module, words: Vocabulary) -> list[Site]:
    """Every site of a parsed file, once per line, kind, role and what it names."""
    scanner = _Scanner(file, Reader(file, source, tree, words))
    scanner.definition(tree, scanner.reader.top)
    unique = {(s.line, s.kind, s.role, s.names, s.scope): s for s in reversed(scanner.sites)}
    return sorted(unique.values())


class _Scanner:
    def __init__(self, file: str, reader: Reader) -> None:
        self.file, self.reader, self.words = file, reader, reader.words
        self.sites: list[Site] = []

    def definition(self, node: ast.Module | Function | ast.ClassDef, scope: Scope) -> None:
        """Sites of one definition, then of those inside it."""
        self._declared(node, scope)
        seen: set[int] = set()
        """Nodes whose site an outer node has given already."""
        inner: list[Function | ast.ClassDef] = []
        for child in own(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner.append(child)
            elif id(child) not in seen:
                self._node(child, scope, seen)
        for each in inner:
            if self.reader.concerns(each, scope):
                self.definition(each, self.reader.inner(each, scope))

    def _add(
        self, kind: Kind, role: str, node: ast.AST, scope: Scope, names: tuple[str, ...] = (), via: str = ""
    ) -> None:
        code = " ".join(ast.unparse(node).split()) if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) else via
        via = "" if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else via
        line = int(getattr(node, "lineno", 0))
        self.sites.append(Site(self.file, line, kind, role, scope.name, code[:160], names, via))

    def _declared(self, node: ast.AST, scope: Scope) -> None:
        last = scope.name.rpartition(".")[2]
        holder = scope.name.rpartition(".")[0].rpartition(".")[2]
        if isinstance(node, ast.ClassDef) and node.name in self.words.inputs:
            bases = ", ".join(ast.unparse(b) for b in node.bases)
            self._add(Kind.TYPE, "declare", node, scope, (node.name,), f"class {node.name}({bases})")
        elif (
            isinstance(node, ast.FunctionDef)
            and holder in (vocabulary.ALGORITHM, vocabulary.REGISTERED)
            and last in self.words.predicates
        ):
            names = tuple(dict.fromkeys((*self.words.calls.get(last, ()), *self.reader.mentioned(node))))
            self._add(Kind.PREDICATE, "declare", node, scope, (last, *names), f"def {last}(self)")

    def _node(self, node: ast.AST, scope: Scope, seen: set[int]) -> None:
        if isinstance(node, ast.Compare):
            self._compare(node, scope, seen)
        elif isinstance(node, ast.Call):
            self._call(node, scope, seen)
        elif isinstance(node, ast.Subscript):
            self._lookup(node, node.slice, scope)
        elif isinstance(node, ast.Match):
            self._match(node, scope, seen)
        elif isinstance(node, (ast.Attribute, ast.Name)):
            self._word(node, scope)
        elif isinstance(node, ast.Constant):
            self._literal(node, scope)
        elif isinstance(node, ast.Expr) and isinstance(node.value, (ast.Constant, ast.JoinedStr)):
            seen.update(id(n) for n in ast.walk(node))  # a docstring
        elif isinstance(node, (ast.JoinedStr, ast.Raise)):
            seen.update(id(n) for n in ast.walk(node) if isinstance(n, ast.Constant))  # messages
        elif isinstance(node, (ast.AnnAssign, ast.arg)) and node.annotation is not None:
            seen.update(id(n) for n in ast.walk(node.annotation))
        for test in _tests(node):
            self._flag(test, scope, isinstance(node, ast.BoolOp))

    def _compare(self, node: ast.Compare, scope: Scope, seen: set[int]) -> None:
        sides = (node.left, *node.comparators)
        found = [m for m in (self.reader.meaning(side, scope) for side in sides) if m is not None]
        names = self.reader.mentioned(node)
        tags = {m.tag for m in found}
        if not tags & {Tag.NAME, Tag.ALGORITHM} and Tag.NAMES in tags and not self._plausible(sides, scope):
            return
        for tag, kind in _COMPARED.items():
            mine = [m for m in found if m.tag is tag]
            if not mine:
                continue
            if tag is Tag.NAMES and not tags & {Tag.NAME, Tag.ALGORITHM}:
                continue
            all_names = tuple(dict.fromkeys((*names, *(n for m in found for n in m.names))))
            if kind is Kind.NAME:
                all_names = tuple(dict.fromkeys((*_strings(sides), *all_names)))
            if kind is Kind.BRANCH and not all_names:
                return  # another pass than verify or draft
            role = "gate" if kind in (Kind.TOPK, Kind.TOKENS, Kind.MASK) else "compare"
            self._add(kind, role, node, scope, all_names, next((m.via for m in found if m.via), ""))
            seen.update(id(n) for side in sides for n in ast.walk(side) if not isinstance(n, ast.Call))
            return

    def _plausible(self, sides: tuple[ast.expr, ...], scope: Scope) -> bool:
        found = (self.reader.meaning(side, scope) for side in sides)
        return any(m is not None and m.tag in (Tag.NAME, Tag.ALGORITHM) for m in found)

    def _call(self, node: ast.Call, scope: Scope, seen: set[int]) -> None:
        function, reader = node.func, self.reader
        name = reader.origin(function)
        if isinstance(function, ast.Name) and function.id in ("getattr", "hasattr") and len(node.args) >= 2:
            self._duck(node, scope, seen)
            return
        found = reader.meaning(function, scope)
        if found is not None and found.tag is Tag.PREDICATE:
            self._add(Kind.PREDICATE, "ask", node, scope, found.names, found.via)
        elif found is not None and found.tag is Tag.PHASE:
            self._add(Kind.BRANCH, "ask", node, scope, found.names, found.via)
        elif isinstance(function, ast.Attribute) and function.attr in self.words.input_predicates:
            self._add(Kind.TYPE, "ask", node, scope, (function.attr,))
        elif isinstance(function, ast.Attribute) and function.attr in self.words.methods:
            receiver = reader.meaning(function.value, scope)
            if receiver is not None and receiver.tag is Tag.ALGORITHM:
                self._add(Kind.PREDICATE, "ask", node, scope, (function.attr,), receiver.via)
        elif name == "isinstance" and len(node.args) == 2:
            self._isinstance(node, scope)
        elif name in self.words.inputs:
            self._add(Kind.TYPE, "make", node.func, scope, (name,))
        self._registry(node, name, scope, seen)
        for keyword in node.keywords:
            self._keyword(keyword, node, scope, seen)

    def _duck(self, node: ast.Call, scope: Scope, seen: set[int]) -> None:
        """``getattr(x, "word")``: the word is a string, and no search for the attribute finds it."""
        found = self.reader.meaning(node, scope)
        word = node.args[1]
        if found is None or not isinstance(word, ast.Constant):
            return
        seen.update(id(n) for n in ast.walk(node))
        via = f"{ast.unparse(node.func)}(..., {word.value!r})"
        kinds = {
            Tag.PREDICATE: (Kind.PREDICATE, "duck"),
            Tag.PHASE: (Kind.BRANCH, "duck"),
            Tag.DRAFT_WORKER: (Kind.BRANCH, "duck"),
            Tag.NAME: (Kind.NAME, "duck"),
            **_USED,
        }
        if found.tag in kinds:
            kind, role = kinds[found.tag]
            self._add(kind, role, node, scope, found.names, via)

    def _isinstance(self, node: ast.Call, scope: Scope) -> None:
        kinds = node.args[1].elts if isinstance(node.args[1], ast.Tuple) else [node.args[1]]
        names = tuple(n for k in kinds if (n := self.reader.origin(k)) in self.words.inputs)
        if names:
            self._add(Kind.TYPE, "test", node, scope, names)
        elif any(self.reader.origin(k) in (vocabulary.ALGORITHM, vocabulary.REGISTERED) for k in kinds):
            self._add(Kind.PREDICATE, "test", node, scope, tuple(self.reader.origin(k) for k in kinds))

    def _registry(self, node: ast.Call, name: str, scope: Scope, seen: set[int]) -> None:
        receiver = node.func.value if isinstance(node.func, ast.Attribute) else None
        holder = self.reader.origin(receiver) if isinstance(receiver, (ast.Name, ast.Attribute)) else ""
        names = tuple(
            a.value.upper()
            for a in node.args
            if isinstance(a, ast.Constant) and isinstance(a.value, str) and a.value.upper() in self.words.algorithms
        )
        own_class = scope.name.split(".")[0] == vocabulary.ALGORITHM and holder == "cls"
        if name in ("from_string", "register") and (holder == vocabulary.ALGORITHM or own_class):
            self._add(Kind.NAME, "parse" if name == "from_string" else "register", node, scope, names)
        elif name == "register_algorithm":
            self._add(Kind.NAME, "register", node, scope, names)
        elif name == "get_spec" and receiver is None:
            self._add(Kind.NAME, "lookup", node, scope, names)
        elif name in ("get", "pop", "setdefault") and receiver is not None and node.args:
            self._lookup(node, node.args[0], scope)
        elif name in ("startswith", "endswith") and receiver is not None:
            found = self.reader.meaning(receiver, scope)
            if found is not None and found.tag is Tag.NAME:
                self._add(Kind.NAME, "compare", node, scope, names, found.via)
        else:
            return
        seen.update(id(a) for a in node.args if isinstance(a, ast.Constant))

    def _lookup(self, node: ast.expr, key: ast.expr, scope: Scope) -> None:
        table = node.value if isinstance(node, ast.Subscript) else node
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            table = node.func.value
        enum = self.reader.origin(table) if isinstance(table, (ast.Name, ast.Attribute)) else ""
        own_class = enum == "cls" and vocabulary.ALGORITHM in scope.name.split(".")
        found = self.reader.meaning(key, scope)
        if (found is not None and found.tag in (Tag.NAME, Tag.ALGORITHM)) or enum == vocabulary.ALGORITHM or own_class:
            held = self.reader.meaning(table, scope)
            names = held.names if held is not None and held.tag is Tag.NAMES else ()
            self._add(Kind.NAME, "lookup", node, scope, names, found.via if found is not None else "")

    def _match(self, node: ast.Match, scope: Scope, seen: set[int]) -> None:
        found = self.reader.meaning(node.subject, scope)
        if found is None or found.tag not in (Tag.NAME, Tag.ALGORITHM, Tag.INPUT_TYPE):
            return
        kind = Kind.TYPE if found.tag is Tag.INPUT_TYPE else Kind.NAME
        for case in node.cases:
            names = self.reader.mentioned(case.pattern)
            self._add(kind, "compare", case.pattern if hasattr(case.pattern, "lineno") else node.subject, scope, names)
            seen.update(id(n) for n in ast.walk(case.pattern))

    def _keyword(self, keyword: ast.keyword, node: ast.Call, scope: Scope, seen: set[int]) -> None:
        tag = WORDS.get(keyword.arg or "")
        called = ast.unparse(node.func)
        code = ast.parse(f"{called}({keyword.arg}={ast.unparse(keyword.value)})", mode="eval").body if tag else node
        ast.copy_location(code, keyword.value)
        if tag in _STORED:
            kind = _USED[tag][0]
            nothing = isinstance(keyword.value, ast.Constant) and keyword.value.value is None
            role = "none" if nothing and tag is Tag.MASK else _STORED[tag]
            found = self.reader.meaning(keyword.value, scope)
            names = found.names if found is not None and found.tag is tag else ()
            self._add(kind, role, code, scope, names)
            if isinstance(keyword.value, (ast.Name, ast.Attribute)):
                seen.update(id(n) for n in ast.walk(keyword.value))
        elif tag is Tag.NAME:
            self._add(Kind.NAME, "set", code, scope, self.reader.mentioned(keyword.value))
            seen.update(id(n) for n in ast.walk(keyword.value))

    def _word(self, node: ast.Attribute | ast.Name, scope: Scope) -> None:
        found = self.reader.meaning(node, scope)
        if found is None:
            return
        stored = isinstance(node.ctx, ast.Store)
        if found.tag in _USED:
            kind, role = _USED[found.tag]
            if isinstance(node, ast.Name) and stored:
                return  # the value's own words are the site
            self._add(kind, _STORED[found.tag] if stored else role, node, scope, found.names, found.via)
        elif found.tag is Tag.INPUT_TYPE and found.names:
            self._add(Kind.TYPE, "use", node, scope, found.names)
        elif found.tag is Tag.ALGORITHM and found.names and isinstance(node, ast.Attribute) and not found.via:
            self._add(Kind.PREDICATE, "use", node, scope, found.names)
        elif found.tag is Tag.NAMES and isinstance(node, ast.Name) and not stored:
            self._add(Kind.NAME, "use", node, scope, found.names, found.via)

    def _literal(self, node: ast.Constant, scope: Scope) -> None:
        if isinstance(node.value, str) and node.value in self.words.algorithms and node.value != "NONE":
            self._add(Kind.NAME, "value", node, scope, (node.value,))

    def _flag(self, test: ast.expr, scope: Scope, default: bool) -> None:
        """A name or attribute that decides a branch, with an answer in it."""
        if not isinstance(test, (ast.Name, ast.Attribute)):
            return
        found = self.reader.meaning(test, scope)
        kinds = {
            Tag.PREDICATE: Kind.PREDICATE,
            Tag.PHASE: Kind.BRANCH,
            Tag.DRAFT_WORKER: Kind.BRANCH,
            Tag.TOPK: Kind.TOPK,
            Tag.MASK: Kind.MASK,
        }
        if found is not None and found.tag in kinds:
            role = "gate" if found.tag in (Tag.TOPK, Tag.MASK) else "flag"
            if role == "gate" and default:
                return  # ``x or 0`` takes a default, and decides nothing
            self._add(kinds[found.tag], role, test, scope, found.names, found.via)


def _tests(node: ast.AST) -> Iterator[ast.expr]:
    """Expressions whose truth decides, directly below a node."""
    if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
        yield node.test
    elif isinstance(node, ast.BoolOp):
        yield from node.values
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.comprehension):
        yield from node.ifs


def _strings(nodes: tuple[ast.expr, ...]) -> tuple[str, ...]:
    """String literals among these nodes and in literal collections among them."""
    items = [i for n in nodes for i in (n.elts if isinstance(n, (ast.Tuple, ast.List, ast.Set)) else [n])]
    return tuple(i.value for i in items if isinstance(i, ast.Constant) and isinstance(i.value, str))
