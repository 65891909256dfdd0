"""No silent misapplication: seeded edits of each patch's file, harmless ones taken, harmful ones refused.

50 of each with ``DFLASH_TESTS=all``, the first 20 otherwise.
"""

from __future__ import annotations

import ast
import zipfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import TypeVar

import pytest
from _pytest.mark.structures import ParameterSet
from dflash_patches import registry

from dflash_deploy.errors import ContractBroken, PatchError
from dflash_deploy.patching import contracts, engine
from dflash_deploy.patching.contracts import check_contract
from dflash_deploy.patching.patch import Contract, Patch, PatchSet
from tests.patches.mutations import Mutation, change, mutations, reduced
from tests.patches.wheels import chosen, wheel
from tests.scope import EVERYTHING

pytestmark = pytest.mark.wheels

COUNT = 50 if EVERYTHING else 20
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


@pytest.mark.parametrize(("version", "patch"), CASES)
def test_mutations(version: str, patch: Patch) -> None:
    release = read(version, patch.file)
    # Patches of one set may hold on to what earlier ones wrote.
    for each in next(s for s in SETS if s.supports(version) and patch in s.patches).patches:
        if each is patch:
            break
        if each.file == patch.file:
            release = applied(release, each)
    source = reduced(release, patch)
    wanted = change(source, applied(source, patch), patch.edit.scope)
    assert wanted == change(release, applied(release, patch), patch.edit.scope)
    seen: Counter[tuple[str, bool]] = Counter()
    wrong: list[str] = []
    known: dict[str, list[str]] = {}  # some kinds can be had in one way only
    for mutation in mutations(source, patch, COUNT, SEED):
        if mutation.source not in known:
            known[mutation.source] = judged(mutation, patch, wanted)
        seen[mutation.kind, mutation.harmful] += 1
        wrong += [f"{mutation.kind}: {text}" for text in known[mutation.source]]
    assert not wrong
    assert seen.total() == COUNT
    assert {harmful for _, harmful in seen} == {True, False} and len(seen) >= 5, seen


def applied(source: str, patch: Patch) -> str:
    """The file as a run of the engine writes it, of which only what lies in this file is asked.

    Raises:
        PatchError
    """
    alone = replace(patch, contract=(), superseded=None)
    outcome = engine.run({patch.file: source.encode()}, [alone], explain=False)
    outcome.check()
    return outcome.files[patch.file].decode()


def judged(mutation: Mutation, patch: Patch, wanted: tuple[Counter[str], Counter[str]]) -> list[str]:
    try:
        new = applied(mutation.source, patch)
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
    named: dict[str, list[tuple[ast.AST, str]]] = {word: [] for word in words}
    for node in ast.walk(tree):
        for field in ("name", "id", "attr", "arg"):
            if (word := getattr(node, field, None)) in named:
                named[word].append((node, field))
    for word, places in named.items():
        rename(places, f"{word}_v2")
        with pytest.raises(ContractBroken):
            check_contract(tree, contract)
        rename(places, word)
    check_contract(tree, contract)


def rename(places: Iterable[tuple[ast.AST, str]], word: str) -> None:
    """Give all that has one name another one."""
    for node, field in places:
        setattr(node, field, word)
    for cached in (contracts.own, contracts.bound, contracts._attributes):
        cached.cache_clear()
