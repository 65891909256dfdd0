"""What an expression stands for: followed through locals, ``self`` attributes, module constants and imports.

Flow-insensitive and within one file, save for collections of names that other modules export: enough to see through
aliases, and nothing is guessed from a name that merely looks alike.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from dflash_deploy.mapping import vocabulary
from dflash_deploy.mapping.vocabulary import Vocabulary

Function = ast.FunctionDef | ast.AsyncFunctionDef
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Tag(Enum):
    """Kinds of thing."""

    ALGORITHM = auto()
    NAME = auto()
    """An algorithm's name."""
    NAMES = auto()
    """A collection of algorithm names."""
    PREDICATE = auto()
    """A bound predicate, or what one answered."""
    INPUT = auto()
    """A SpecInput."""
    INPUT_TYPE = auto()
    MODE = auto()
    PHASE = auto()
    """What a forward mode answered about verify or draft."""
    DRAFT_WORKER = auto()
    MASK = auto()
    HIDDEN = auto()
    TOKENS = auto()
    TOPK = auto()


@dataclass(frozen=True)
class Meaning:
    """What something stands for."""

    tag: Tag
    names: tuple[str, ...] = ()
    via: str = ""
    """The alias that carries it; ``""``: the word itself."""


WORDS = {
    "spec_algorithm": Tag.ALGORITHM,
    "speculative_algorithm": Tag.NAME,
    "spec_info": Tag.INPUT,
    "spec_input_type": Tag.INPUT_TYPE,
    "forward_mode": Tag.MODE,
    "is_draft_worker": Tag.DRAFT_WORKER,
    "custom_mask": Tag.MASK,
    "capture_hidden_mode": Tag.HIDDEN,
    "speculative_eagle_topk": Tag.TOPK,
    **dict.fromkeys(vocabulary.TOKENS, Tag.TOKENS),
}
"""Names of parameters and attributes that carry a meaning wherever they stand."""


@dataclass
class Scope:
    """Names that one definition binds, and where it looks further."""

    name: str = ""
    outer: Scope | None = None
    names: dict[str, Meaning | None] = field(default_factory=dict)
    attributes: dict[str, Meaning] = field(default_factory=dict)
    """Of ``self``; shared by the methods of a class."""

    def chain(self) -> Iterator[Scope]:
        """This scope and those around it."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.outer

    def find(self, name: str) -> Meaning | None:
        return next((scope.names[name] for scope in self.chain() if name in scope.names), None)


class Reader:
    """Meanings in one file."""

    def __init__(self, file: str, source: bytes, tree: ast.Module, words: Vocabulary) -> None:
        self.words = words
        self.top = Scope()
        self._file, self._package = file, vocabulary.module(file).split(".")
        self._lines = source.split(b"\n")
        self._imported: dict[str, str] = {}
        """Local name → name at its origin."""
        self._known = words.every | WORDS.keys()
        self._words_of: dict[ast.AST, frozenset[str]] = {}
        self._import(tree)
        self.learn(tree, self.top)

    def _import(self, node: ast.AST) -> None:
        for below in own(node):
            if not isinstance(below, ast.ImportFrom):
                continue
            exported = self.words.collections.get(_origin(below, self._package, self._file), {})
            for alias in below.names:
                local = alias.asname or alias.name
                self._imported[local] = alias.name
                if alias.name in self._known and local != alias.name:
                    self._known = self._known | {local}
                if alias.name in exported:
                    via = local if local == alias.name else f"{local} (imported {alias.name})"
                    self.top.names[local] = Meaning(Tag.NAMES, exported[alias.name], via)

    def concerns(self, node: Function | ast.ClassDef, scope: Scope) -> bool:
        """Whether a definition holds any word or alias that means something. Most hold none, and are skipped."""
        if node not in self._words_of:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
            text = b"\n".join(self._lines[first : node.end_lineno]).decode("utf-8", "replace")
            self._words_of[node] = frozenset(re.findall(r"\w+", text))
        found = self._words_of[node]
        return not (
            found.isdisjoint(self._known)
            and found.isdisjoint(scope.attributes)
            and all(found.isdisjoint(n for n, m in each.names.items() if m is not None) for each in scope.chain())
        )

    def origin(self, node: ast.expr) -> str:
        """Last name of a class or function as its module spells it."""
        if isinstance(node, ast.Name):
            return self._imported.get(node.id, node.id)
        return node.attr if isinstance(node, ast.Attribute) else ""

    def inner(self, node: Function | ast.ClassDef, outer: Scope) -> Scope:
        """The scope of a definition, with what its parameters and assignments mean."""
        name = f"{outer.name}.{node.name}" if outer.name else node.name
        scope = Scope(name, outer, attributes=outer.attributes)
        if isinstance(node, ast.ClassDef):
            scope = Scope(name, outer)
            for method in node.body:
                if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)) and self.concerns(method, scope):
                    self.inner(method, scope)  # for what it assigns to self
            scope.names.clear()
            self.learn(node, scope)
            return replace(scope, names={})  # a class body is no scope for its methods
        arguments = node.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            scope.names[argument.arg] = self._parameter(argument, outer)
        self._import(node)
        self.learn(node, scope)
        return scope

    def _parameter(self, argument: ast.arg, outer: Scope) -> Meaning | None:
        for node in ast.walk(argument.annotation) if argument.annotation is not None else ():
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            name = self.origin(node) if isinstance(node, (ast.Name, ast.Attribute)) else text.rpartition(".")[2]
            if name == vocabulary.ALGORITHM:
                return Meaning(Tag.ALGORITHM, via="" if argument.arg == "spec_algorithm" else argument.arg)
            if name in self.words.inputs:
                return Meaning(Tag.INPUT, (name,), "" if argument.arg == "spec_info" else argument.arg)
        if argument.arg in ("self", "cls") and outer.name.rpartition(".")[2] in (
            vocabulary.ALGORITHM,
            vocabulary.REGISTERED,
        ):
            return Meaning(Tag.ALGORITHM)
        tag = WORDS.get(argument.arg)
        return Meaning(tag) if tag is not None else None

    def learn(self, node: ast.AST, scope: Scope) -> None:
        """What the assignments of a scope (not of those inside) mean; twice, for chains of aliases."""
        for _ in range(2):
            for below in _binding(node):
                for target, value in _assignments(below):
                    self._bind(target, value, scope)
                if isinstance(below, ast.Call):
                    for keyword in below.keywords:
                        if keyword.arg == "custom_mask":
                            self._backwards(keyword.value, scope)

    def _bind(self, target: ast.expr, value: ast.expr, scope: Scope) -> None:
        if isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List)):
            if len(target.elts) == len(value.elts):
                for one, other in zip(target.elts, value.elts, strict=True):
                    self._bind(one, other, scope)
            return
        found = self.meaning(value, scope)
        if isinstance(target, ast.Name):
            own_word = WORDS.get(target.id)
            if own_word is not None:
                scope.names[target.id] = Meaning(own_word)
            elif found is not None:
                scope.names[target.id] = replace(found, via=target.id)
            else:
                scope.names.setdefault(target.id, None)
        elif isinstance(target, ast.Attribute) and _is_self(target) and found is not None and target.attr not in WORDS:
            scope.attributes.setdefault(target.attr, replace(found, via=f"self.{target.attr}"))

    def _backwards(self, value: ast.expr, scope: Scope) -> None:
        """What is handed over as a custom mask is one."""
        if isinstance(value, ast.Name) and value.id not in WORDS and scope.find(value.id) is None:
            scope.names[value.id] = Meaning(Tag.MASK, via=value.id)
        elif _is_self(value) and isinstance(value, ast.Attribute) and value.attr not in WORDS:
            scope.attributes.setdefault(value.attr, Meaning(Tag.MASK, via=f"self.{value.attr}"))

    def meaning(self, node: ast.expr | None, scope: Scope) -> Meaning | None:
        """What an expression stands for, or None."""
        if isinstance(node, ast.Name):
            return scope.find(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(node.value, node.attr, scope)
        if isinstance(node, ast.Call):
            return self._call(node, scope)
        if isinstance(node, ast.NamedExpr):
            return self.meaning(node.value, scope)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self._answer(self.meaning(node.operand, scope))
        if isinstance(node, (ast.BoolOp, ast.IfExp, ast.Compare)):
            return self._combined(node, scope)
        if isinstance(node, (ast.Tuple, ast.List, ast.Set, ast.Dict)):
            names = vocabulary.named(node, self.words.algorithms)
            return Meaning(Tag.NAMES, names) if names else None
        return None

    def _answer(self, found: Meaning | None) -> Meaning | None:
        return found if found is not None and found.tag in (Tag.PREDICATE, Tag.PHASE, Tag.DRAFT_WORKER) else None

    def _combined(self, node: ast.BoolOp | ast.IfExp | ast.Compare, scope: Scope) -> Meaning | None:
        if isinstance(node, ast.IfExp):
            return self.meaning(node.body, scope) or self.meaning(node.orelse, scope)
        if isinstance(node, ast.Compare):
            sides = [self.meaning(side, scope) for side in (node.left, *node.comparators)]
            tags = {side.tag for side in sides if side is not None}
            if tags & {Tag.ALGORITHM, Tag.NAME} and not _only_none(node):
                return Meaning(Tag.PREDICATE, self.mentioned(node))
            return None
        found = [m for m in (self.meaning(value, scope) for value in node.values) if m is not None]
        answers = [m for m in found if self._answer(m)]
        if answers:
            names = tuple(dict.fromkeys(n for m in answers for n in m.names))
            return replace(answers[0], names=names)
        return found[0] if found else None

    def _attribute(self, value: ast.expr, attr: str, scope: Scope) -> Meaning | None:
        base = self.origin(value) if isinstance(value, (ast.Name, ast.Attribute)) else ""
        if base == vocabulary.ALGORITHM and attr in self.words.algorithms:
            return Meaning(Tag.ALGORITHM, (attr,))
        if base == vocabulary.INPUT_TYPE and attr in self.words.input_types:
            return Meaning(Tag.INPUT_TYPE, (attr,))
        if base == vocabulary.MODE and attr in self.words.modes:
            return Meaning(Tag.MODE, (attr,))
        if base == vocabulary.HIDDEN_MODE and attr in self.words.hidden_modes:
            return Meaning(Tag.HIDDEN, (attr,))
        if attr in WORDS:
            return Meaning(WORDS[attr])
        found = self.meaning(value, scope)
        if attr in self.words.predicates and (
            attr not in self.words.shared or (found is not None and found.tag is Tag.ALGORITHM)
        ):
            return Meaning(Tag.PREDICATE, (attr,), found.via if found is not None else "")
        if attr in self.words.mode_predicates:
            return Meaning(Tag.PHASE, (attr,), found.via if found is not None else "")
        if found is not None and found.tag is Tag.ALGORITHM and attr == "name":
            return Meaning(Tag.NAME, found.names, found.via)
        if found is not None and found.tag is Tag.INPUT and attr == "topk":
            return Meaning(Tag.TOPK, via=found.via)
        if isinstance(value, ast.Name) and value.id == "self":
            return scope.attributes.get(attr)
        return None

    def _call(self, node: ast.Call, scope: Scope) -> Meaning | None:
        function = node.func
        if isinstance(function, ast.Name) and function.id in ("getattr", "hasattr") and len(node.args) >= 2:
            word = node.args[1]
            if isinstance(word, ast.Constant) and isinstance(word.value, str):
                return self._attribute(node.args[0], word.value, scope)
            return None
        if isinstance(function, ast.Name) and function.id in ("str", "bool", "int", "cast") and node.args:
            return self.meaning(node.args[-1], scope)
        if isinstance(function, ast.Attribute):
            receiver = self.origin(function.value) if isinstance(function.value, (ast.Name, ast.Attribute)) else ""
            if function.attr == "from_string" and receiver in (vocabulary.ALGORITHM, "cls"):
                return Meaning(Tag.ALGORITHM)
            if function.attr in ("upper", "lower", "strip", "casefold"):
                found = self.meaning(function.value, scope)
                return found if found is not None and found.tag is Tag.NAME else None
        if self.origin(function) in self.words.inputs:
            return Meaning(Tag.INPUT, (self.origin(function),))
        names = vocabulary.named(node, self.words.algorithms)
        if names:
            return Meaning(Tag.NAMES, names)
        return self._answer(self.meaning(function, scope))

    def mentioned(self, node: ast.AST) -> tuple[str, ...]:
        """Algorithm names in strings, and members of the family's enums, in an expression."""
        enums = {
            vocabulary.ALGORITHM: self.words.algorithms,
            vocabulary.INPUT_TYPE: self.words.input_types,
            vocabulary.MODE: self.words.modes,
            vocabulary.HIDDEN_MODE: self.words.hidden_modes,
        }
        found: dict[str, None] = {}
        for below in ast.walk(node):
            if isinstance(below, ast.Constant) and isinstance(below.value, str):
                if below.value.upper() in self.words.algorithms:
                    found[below.value.upper()] = None
            elif isinstance(below, ast.Attribute) and below.attr in enums.get(self.origin(below.value), ()):
                found[below.attr] = None
        return tuple(found)


@functools.lru_cache(maxsize=4096)
def own(node: ast.AST) -> tuple[ast.AST, ...]:
    """Nodes of a scope in textual order, without what is inside nested definitions (their decorators are seen)."""
    found: list[ast.AST] = []
    stack: list[ast.AST] = [node]
    while stack:
        current = stack.pop()
        if current is not node:
            found.append(current)
            if isinstance(current, _DEFINITIONS):
                stack += current.decorator_list[::-1]
                continue
        below: list[ast.AST] = []
        for name in current._fields:
            value = getattr(current, name, None)
            if isinstance(value, list):
                below += [item for item in value if isinstance(item, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                below.append(value)
        stack += reversed(below)
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _binding(node: ast.AST) -> tuple[ast.AST, ...]:
    """What of a scope can give a name its meaning."""
    kinds = (ast.Assign, ast.AnnAssign, ast.NamedExpr)
    return tuple(
        n
        for n in own(node)
        if isinstance(n, kinds) or (isinstance(n, ast.Call) and any(k.arg == "custom_mask" for k in n.keywords))
    )


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield target, node.value
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        yield node.target, node.value


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _only_none(node: ast.Compare) -> bool:
    return all(isinstance(side, ast.Constant) and side.value is None for side in node.comparators)


def _origin(node: ast.ImportFrom, package: list[str], file: str) -> str:
    """Dotted module of a from-import, relative to the package that is mapped."""
    if node.level:
        up = node.level - (1 if file.endswith("/__init__.py") else 0)
        base = package[: len(package) - up] if up else package
        return ".".join([*base, *((node.module or "").split(".") if node.module else [])])
    return (node.module or "").partition(".")[2]
