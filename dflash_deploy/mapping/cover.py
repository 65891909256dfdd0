"""Sites × patch sets × payload → what is done at each site, and where nothing is."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from dflash_deploy.mapping.model import Cover, Covered, Kind, Map, Site
from dflash_deploy.mapping.vocabulary import ALGORITHM, REGISTERED, module
from dflash_deploy.patching.patch import PatchSet

_ASKED = ("ask", "flag", "duck", "declare")


def cover(found: Map, sets: Sequence[PatchSet], payload: Mapping[str, bytes] | None = None) -> tuple[Covered, ...]:
    """Every site of the map with what the sets do there.

    Args:
        payload: Python files of the payload package by any path; classes in it override methods of the tree's classes.
    """
    edits: dict[tuple[str, str], list[str]] = {}
    contracts: dict[tuple[str, str], list[str]] = {}
    for each in sets:
        for patch in each.patches:
            edits.setdefault((patch.file, patch.edit.scope), []).append(f"{each.name}:{patch.name}")
            for contract in patch.contract:
                contracts.setdefault((contract.file, contract.name), []).append(f"{each.name}:{patch.name}")
    answers = _answers(found, edits)
    members = tuple(name for (_, scope), names in edits.items() if scope == ALGORITHM for name in names)
    replaced = overrides(payload or {})

    def one(site: Site) -> Covered:
        place = (site.file, site.scope)
        if place in edits:
            return Covered(site, Cover.EDITED, tuple(edits[place]))
        for name in (site.scope, site.scope.rpartition(".")[0]):  # a nested function goes with its method
            if (module(site.file), name) in replaced:
                return Covered(site, Cover.REPLACED, replaced[module(site.file), name])
        if site.kind in (Kind.PREDICATE, Kind.BRANCH) and site.role in _ASKED and not site.scope.startswith(REGISTERED):
            by = tuple(dict.fromkeys(b for name in site.names for b in answers.get(name, ())))
            if by:
                return Covered(site, Cover.ANSWERED, by)
        if site.kind is Kind.NAME and site.role == "parse" and members:
            return Covered(site, Cover.ANSWERED, members)
        if place in contracts:
            return Covered(site, Cover.RELIED, tuple(dict.fromkeys(contracts[place])))
        return Covered(site)

    return tuple(one(site) for site in found.sites)


def _answers(found: Map, edits: Mapping[tuple[str, str], list[str]]) -> dict[str, tuple[str, ...]]:
    """Predicate → patches that change what it answers: of itself, or of a predicate that it asks."""
    changed = {
        scope.rpartition(".")[2]: tuple(names)
        for (_, scope), names in edits.items()
        if scope.rpartition(".")[0] == ALGORITHM
    }
    answers = dict(changed)
    for _ in found.calls:
        for method, asked in found.calls.items():
            by = tuple(dict.fromkeys((*answers.get(method, ()), *(b for name in asked for b in answers.get(name, ())))))
            if by:
                answers[method] = by
    return answers


def concerned(found: Map, sets: Sequence[PatchSet]) -> frozenset[str]:
    """Predicates and algorithms whose sites matter to the sets: what they extend, and what asks it."""
    edits = {(p.file, p.edit.scope): [p.name] for each in sets for p in each.patches}
    asked = set(_answers(found, edits)) & set(found.predicates)
    direct = {scope.rpartition(".")[2] for _, scope in edits if scope.rpartition(".")[0] == ALGORITHM}
    names = set(asked)
    for site in found.sites:
        if site.kind is Kind.PREDICATE and site.role == "declare" and site.names[0] in direct & set(found.predicates):
            names.update(n for n in site.names if n in found.algorithms)
    return frozenset(names)


def gaps(covered: Sequence[Covered], names: frozenset[str]) -> tuple[Covered, ...]:
    """Sites that name what the sets extend, and that no patch covers."""
    return tuple(c for c in covered if c.cover is Cover.NONE and names.intersection(c.site.names))


def overrides(payload: Mapping[str, bytes]) -> dict[tuple[str, str], tuple[str, ...]]:
    """(module, ``Class.method``) of the tree → the payload's methods that stand in for it without calling it."""
    found: dict[tuple[str, str], list[str]] = {}
    for path, data in payload.items():
        if not path.endswith(".py"):
            continue
        tree = ast.parse(data, path)
        imports = {
            (a.asname or a.name): ((n.module or "").partition(".")[2], a.name)
            for n in ast.walk(tree)
            if isinstance(n, ast.ImportFrom) and not n.level
            for a in n.names
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            for base in node.bases:
                if isinstance(base, ast.Name) and base.id in imports:
                    origin, name = imports[base.id]
                    for method in node.body:
                        if isinstance(method, ast.FunctionDef) and not _calls_super(method):
                            key = (origin, f"{name}.{method.name}")
                            found.setdefault(key, []).append(f"{module(path)}.{node.name}.{method.name}")
    return {key: tuple(names) for key, names in found.items()}


def _calls_super(method: ast.FunctionDef) -> bool:
    return any(
        isinstance(n, ast.Attribute) and n.attr == method.name and ast.unparse(n.value).startswith("super(")
        for n in ast.walk(method)
    )
