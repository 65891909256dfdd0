"""No silent misapplication: 50 seeded edits of each patch's file, harmless ones taken, harmful ones refused."""

from __future__ import annotations

import ast
import zipfile
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import TypeVar

import pytest
from _pytest.mark.structures import ParameterSet
from dflash_patches import registry

from dflash_deploy.errors import ContractBroken, PatchError
from dflash_deploy.patching import engine
from dflash_deploy.patching.contracts import check_contract
from dflash_deploy.patching.patch import Contract, Patch, PatchSet
from tests.patches.mutations import Mutation, mutations, reduced, scope_lines
from tests.patches.wheels import chosen, wheel
from tests.scope import EVERYTHING

pytestmark = pytest.mark.wheels

COUNT = 50
SEED = 20260
SETS = registry.all_sets()


@cache
def read(version: str, file: str) -> str:
    with zipfile.ZipFile(wheel("sglang", version)) as archive:
        return archive.read(f"sglang/{file}").decode()


# One release a set: one that is chosen, where it has one. Newest first: a patch or contract that several sets share is
# tried on the newest of their releases alone, and on each with DFLASH_TESTS=all.
RELEASE = {id(s): v for s in SETS for v in s.tested if chosen(v)}
TRIED = [s for s in reversed(SETS) if id(s) in RELEASE]
T = TypeVar("T", Patch, Contract)


def distinct(found: Iterable[tuple[PatchSet, Patch, T]]) -> list[ParameterSet]:
    seen: list[T] = []
    cases = []
    for each, patch, what in found:
        if what in seen and not EVERYTHING:
            continue
        seen.append(what)
        name = f"{RELEASE[id(each)]}:{each.name}:{patch.name}"
        cases.append(pytest.param(RELEASE[id(each)], what, id=name if what is patch else f"{name}:{what.name}"))
    return cases


CASES = distinct((s, p, p) for s in TRIED for p in s.patches)


def change(before: str, after: str, scope: str) -> tuple[Counter[str], Counter[str]]:
    """(lines gone, lines new) of a scope."""
    old, new = Counter(scope_lines(before, scope)), Counter(scope_lines(after, scope))
    return old - new, new - old


@pytest.mark.parametrize(("version", "patch"), CASES)
def test_mutations(version: str, patch: Patch) -> None:
    release = read(version, patch.file)
    # Patches of one set may hold on to what earlier ones wrote.
    for each in next(s for s in SETS if s.supports(version) and patch in s.patches).patches:
        if each is patch:
            break
        if each.file == patch.file:
            release = engine.apply_edit(release.encode(), each).decode()
    source = reduced(release, patch)
    wanted = change(source, engine.apply_edit(source.encode(), patch).decode(), patch.edit.scope)
    assert wanted == change(release, engine.apply_edit(release.encode(), patch).decode(), patch.edit.scope)
    seen: Counter[tuple[str, bool]] = Counter()
    wrong: list[str] = []
    for mutation in mutations(source, patch, COUNT, SEED):
        ast.parse(mutation.source)
        seen[mutation.kind, mutation.harmful] += 1
        wrong += [f"{mutation.kind}: {text}" for text in judged(mutation, patch, wanted)]
    assert not wrong
    assert seen.total() == COUNT
    assert {harmful for _, harmful in seen} == {True, False} and len(seen) >= 5, seen


def judged(mutation: Mutation, patch: Patch, wanted: tuple[Counter[str], Counter[str]]) -> list[str]:
    try:
        new = engine.apply_edit(mutation.source.encode(), patch).decode()
    except PatchError as error:
        return [] if mutation.harmful else [f"refused: {error.message} {error.evidence}"]
    if mutation.harmful:
        return ["applied to a tree that it must refuse"]
    got = change(mutation.source, new, patch.edit.scope)
    return [] if got == wanted else [f"applied differently: {got}"]


@cache
def patched(version: str, name: str) -> dict[str, bytes]:
    each = registry.find(version, name)
    files = {f: read(version, f).encode() for f in each.files}
    return {**files, **engine.run(files, each.patches).files}


CONTRACTS = distinct((s, p, c) for s in TRIED for p in s.patches for c in p.contract)


@pytest.mark.parametrize(("version", "contract"), CONTRACTS)
def test_a_broken_contract_is_refused(version: str, contract: Contract) -> None:
    each = next(s for s in SETS if s.supports(version) and any(contract in p.contract for p in s.patches))
    tree = engine.compiled(patched(version, each.name)[contract.file], contract.file)
    check_contract(tree, contract)
    last = contract.name.rsplit(".", 1)[-1]
    words = {last, *contract.attributes, *(contract.params or ())}
    for word in sorted(words):
        broken = ast.parse(ast.unparse(tree))
        _Rename(word).visit(broken)
        with pytest.raises(ContractBroken):
            check_contract(broken, contract)


class _Rename(ast.NodeTransformer):
    """Gives everything of one name another one."""

    def __init__(self, word: str) -> None:
        self.word = word

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for field in ("name", "id", "attr", "arg"):
            if getattr(node, field, None) == self.word:
                setattr(node, field, f"{self.word}_v2")
        return super().generic_visit(node)
