"""What the words mean in one release, read from its own classes and enums rather than listed here.

Only the classes that give the family its shape are named: ``SpeculativeAlgorithm``, ``CustomSpecAlgo``, ``SpecInput``,
``SpecInputType``, ``ForwardMode``, ``CaptureHiddenMode``. Members, predicates and subclasses are what the tree says.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

ALGORITHM, REGISTERED, INPUT, INPUT_TYPE = "SpeculativeAlgorithm", "CustomSpecAlgo", "SpecInput", "SpecInputType"
MODE, HIDDEN_MODE = "ForwardMode", "CaptureHiddenMode"

WORDS = (
    *(b"spec_alg", b"SpeculativeAlgorithm", b"speculative_", b"spec_info", b"SpecInput", b"draft", b"custom_mask"),
    *(b"capture_hidden", b"CaptureHidden", b"target_verify", b"TARGET_VERIFY", b"num_tokens_per_"),
)
"""A file with one of these may hold a site, or declare a word."""

_PHASE = re.compile(r"verify|draft")
TOKENS = frozenset(
    {"speculative_num_draft_tokens", "num_draft_tokens", "draft_token_num", "num_tokens_per_req", "num_tokens_per_bs"}
)


@dataclass(frozen=True)
class Vocabulary:
    """The words of one tree."""

    algorithms: frozenset[str] = frozenset()
    predicates: frozenset[str] = frozenset()
    """Methods without arguments of the algorithm that answer yes or no."""
    methods: frozenset[str] = frozenset()
    """Every other public method of the algorithm."""
    shared: frozenset[str] = frozenset()
    """Predicates that other classes define too, or whose names say no algorithm: only of a known algorithm."""
    calls: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    inputs: frozenset[str] = frozenset()
    """SpecInput and every class below it."""
    input_types: frozenset[str] = frozenset()
    input_predicates: frozenset[str] = frozenset()
    mode_predicates: frozenset[str] = frozenset()
    """Methods of the forward mode that tell verify or draft passes from others."""
    modes: frozenset[str] = frozenset()
    hidden_modes: frozenset[str] = frozenset()
    collections: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    """Module → name of a collection of algorithm names at its top → those names."""

    @functools.cached_property
    def every(self) -> frozenset[str]:
        """Every word of it."""
        classes = {ALGORITHM, REGISTERED, INPUT_TYPE, MODE, HIDDEN_MODE, "register_algorithm", "get_spec"}
        exported = {name for names in self.collections.values() for name in names}
        asked = self.predicates | self.mode_predicates | self.input_predicates | self.methods
        return frozenset(classes | exported | asked | self.inputs | (self.algorithms - {"NONE"}))


def marks(words: Vocabulary) -> tuple[bytes, ...]:
    """What a file without any of :data:`WORDS` has when it holds a site all the same."""
    asked = (words.predicates - words.shared) | words.mode_predicates | words.input_predicates | words.inputs
    quoted = [quote + name + quote for name in words.algorithms - {"NONE"} for quote in ("'", '"')]
    return tuple(sorted(word.encode() for word in (*asked, *quoted)))


def read(trees: Mapping[str, ast.Module]) -> Vocabulary:
    """The vocabulary of parsed files."""
    classes: dict[str, list[ast.ClassDef]] = {}
    for tree in trees.values():
        for node in _classes(tree):
            classes.setdefault(node.name, []).append(node)
    algorithms = frozenset(_members(classes.get(ALGORITHM, ())))
    asked: set[str] = set()
    methods: set[str] = set()
    for name in (ALGORITHM, REGISTERED):
        for method in _methods(classes.get(name, ())):
            if method.name.startswith("_") or _decorated(method, "classmethod") or _decorated(method, "staticmethod"):
                continue
            (asked if _is_predicate(method) else methods).add(method.name)
    owners = {n for n in classes if n in (ALGORITHM, REGISTERED) or _below(n, REGISTERED, classes)}
    shared = {m.name for n, nodes in classes.items() if n not in owners for m in _methods(nodes)} & asked
    shared |= {name for name in asked if not any(a.lower() in name for a in algorithms if a != "NONE")}
    modes = {m.name for m in _methods(classes.get(MODE, ())) if _PHASE.search(m.name) and m.name.startswith("is_")}
    return Vocabulary(
        algorithms=algorithms,
        predicates=frozenset(asked),
        methods=frozenset(methods),
        shared=frozenset(shared),
        calls=_calls(classes.get(ALGORITHM, ()), asked | methods),
        inputs=frozenset(n for n in classes if n == INPUT or _below(n, INPUT, classes)),
        input_types=frozenset(_members(classes.get(INPUT_TYPE, ()))),
        input_predicates=frozenset(m.name for m in _methods(classes.get(INPUT, ())) if m.name.startswith("is_")),
        mode_predicates=frozenset(modes),
        modes=frozenset(m for m in _members(classes.get(MODE, ())) if _PHASE.search(m.lower())),
        hidden_modes=frozenset(_members(classes.get(HIDDEN_MODE, ()))),
        collections={module(file): found for file, tree in trees.items() if (found := _collections(tree, algorithms))},
    )


def module(file: str) -> str:
    """Dotted name of a file, relative to the package."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def named(node: ast.AST, algorithms: frozenset[str]) -> tuple[str, ...]:
    """Algorithm names in a literal collection of strings (also ``frozenset({...})``); empty: it is none."""
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        if isinstance(node.func, ast.Name) and node.func.id in ("frozenset", "set", "tuple", "list"):
            return named(node.args[0], algorithms)
        return ()
    items: list[ast.expr | None]
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        items = list(node.elts)
    elif isinstance(node, ast.Dict):
        items = list(node.keys)
    else:
        return ()
    words = tuple(i.value for i in items if isinstance(i, ast.Constant) and isinstance(i.value, str))
    return tuple(w for w in words if w in algorithms) if any(w in algorithms and w != "NONE" for w in words) else ()


def _collections(tree: ast.Module, algorithms: frozenset[str]) -> dict[str, tuple[str, ...]]:
    found = {}
    for node in tree.body:
        target: ast.expr | None = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and value is not None and (names := named(value, algorithms)):
            found[target.id] = names
    return found


def _classes(node: ast.AST) -> Iterator[ast.ClassDef]:
    """Classes at module level and in other classes, also under ``if`` and ``try``."""
    for part in ("body", "orelse", "handlers", "finalbody"):
        for child in getattr(node, part, ()):
            if isinstance(child, ast.ClassDef):
                yield child
            if isinstance(child, (ast.ClassDef, ast.If, ast.Try, ast.ExceptHandler)):
                yield from _classes(child)


def _members(classes: Iterable[ast.ClassDef]) -> list[str]:
    return [
        target.id
        for node in classes
        for item in node.body
        if isinstance(item, ast.Assign)
        for target in item.targets
        if isinstance(target, ast.Name) and not target.id.startswith("_")
    ]


def _methods(classes: Iterable[ast.ClassDef]) -> list[ast.FunctionDef]:
    return [item for node in classes for item in node.body if isinstance(item, ast.FunctionDef)]


def _decorated(method: ast.FunctionDef, name: str) -> bool:
    return any(isinstance(d, ast.Name) and d.id == name for d in method.decorator_list)


def _is_predicate(method: ast.FunctionDef) -> bool:
    returns = isinstance(method.returns, ast.Name) and method.returns.id == "bool"
    return returns and len(method.args.args) == 1 and not method.args.kwonlyargs


def _below(name: str, top: str, classes: Mapping[str, list[ast.ClassDef]], seen: frozenset[str] = frozenset()) -> bool:
    bases = {
        base.attr if isinstance(base, ast.Attribute) else base.id
        for node in classes.get(name, ())
        for base in node.bases
        if isinstance(base, (ast.Name, ast.Attribute))
    }
    return top in bases or any(_below(b, top, classes, seen | {name}) for b in bases - seen - {name} if b in classes)


def _calls(classes: Iterable[ast.ClassDef], methods: set[str]) -> dict[str, tuple[str, ...]]:
    """Which methods of the algorithm each of its methods calls on itself."""
    found = {}
    for method in _methods(classes):
        used = {
            node.attr
            for node in ast.walk(method)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        }
        found[method.name] = tuple(sorted(used & methods))
    return found
