"""Bytes to bytes: judge each patch of a set, then apply what is absent. All or nothing.

Judging applies each patch in memory in the set's order, so later patches may hold on to what earlier ones wrote; contracts and names are checked on
the result.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dflash_deploy.errors import AnchorAmbiguous, AnchorMissing, ContractBroken, InvalidResult, PatchError
from dflash_deploy.patching import syntax
from dflash_deploy.patching.contracts import check_contract, check_landing, definitions
from dflash_deploy.patching.patch import Contract, Patch, PatchSet, Present, State, Verdict, worst


@dataclass(frozen=True)
class Outcome:
    """What a list of patches does to a tree."""

    verdicts: tuple[Verdict, ...]
    files: Mapping[str, bytes] = field(repr=False)
    """New bytes of every file that changes, by path relative to the package. Meaningful only when ``ok``."""

    @property
    def ok(self) -> bool:
        return worst(self.verdicts) is None

    def check(self) -> None:
        """Raise the first obstacle as the error of its kind, with every obstacle as evidence."""
        first = worst(self.verdicts)
        if first is None:
            return
        evidence = []
        for verdict in self.verdicts:
            if not verdict.state.ok:
                evidence += [f"{verdict.patch} ({verdict.file}): {verdict.state}: {verdict.detail}", *(f"    {e}" for e in verdict.evidence)]
        kind = {State.AMBIGUOUS: AnchorAmbiguous, State.DRIFTED: InvalidResult}.get(first.state, AnchorMissing)
        if first.state is State.CONFLICT and first.detail.startswith("contract: "):
            kind = ContractBroken
        raise kind(
            f"{first.patch} does not fit this tree ({first.state}); nothing was changed",
            evidence=evidence,
            hint="reinstall the pristine release, or use a release that the sets were written for",
        )


def apply_edit(source: bytes, patch: Patch) -> bytes:
    """Apply one patch's edit to one file, with the checks that need no other file. Already written: the same bytes.

    Raises:
        AnchorMissing, AnchorAmbiguous, ContractBroken, InvalidResult
    """
    module = syntax.parse(source, patch.file)
    if patch.edit.written(module):
        return source
    changed = patch.edit.apply(module, patch.marker)
    if not patch.edit.written(changed):
        raise InvalidResult(f"{patch.name}: the edit does not recognise its own result in {patch.file}")
    data = changed.bytes
    check_landing(compiled(data, patch.file), patch.file, patch.edit.scope, patch.edit.injected)
    return data


def compiled(data: bytes, file: str) -> ast.Module:
    """The syntax tree of a file that must compile.

    Raises:
        InvalidResult
    """
    try:
        compile(data, file, "exec", dont_inherit=True)
        return ast.parse(data, file)
    except (SyntaxError, ValueError) as error:
        raise InvalidResult(f"{file} would not compile", evidence=str(error)) from error


def _present(trees: Callable[[str], ast.Module | None], present: Present) -> bool:
    tree = trees(present.file)
    if tree is None:
        return False
    try:
        check_contract(tree, _existence(present))
    except ContractBroken:
        return bool(definitions(tree, present.name))
    return True


def _existence(present: Present) -> Contract:
    return Contract(present.file, present.name)


def run(files: Mapping[str, bytes | None], patches: Sequence[Patch]) -> Outcome:
    """Judge and apply ``patches`` to ``files`` (path relative to the package → bytes, None when there is no such file)."""
    now: dict[str, bytes | None] = dict(files)
    cache: dict[tuple[str, int], ast.Module | None] = {}

    def trees(path: str) -> ast.Module | None:
        data = now.get(path)
        key = (path, id(data))
        if key not in cache:
            cache[key] = None if data is None else compiled(data, path)
        return cache[key]

    verdicts: list[Verdict] = []
    for patch in patches:
        verdicts.append(_one(now, patch, trees))
    for index, patch in enumerate(patches):
        if verdicts[index].state in (State.ABSENT, State.APPLIED):
            for contract in patch.contract:
                try:
                    check_contract(trees(contract.file), contract)
                except (ContractBroken, InvalidResult) as error:
                    verdicts[index] = _verdict(patch, State.CONFLICT, error)
                    break
    changed = {path: data for path, data in now.items() if data is not None and data != files.get(path)}
    return Outcome(tuple(verdicts), changed)


def _one(now: dict[str, bytes | None], patch: Patch, trees: Callable[[str], ast.Module | None]) -> Verdict:
    source = now.get(patch.file)
    if source is None:
        return Verdict(patch.name, patch.file, State.CONFLICT, f"{patch.file} is not in the tree")
    try:
        module = syntax.parse(source, patch.file)
        if patch.edit.written(module):
            return Verdict(patch.name, patch.file, State.APPLIED)
        if any(line.rstrip().endswith(patch.marker) for line in source.decode("utf-8", "replace").splitlines()):
            return Verdict(patch.name, patch.file, State.DRIFTED, "lines that carry its marker are not what this version writes")
        if patch.superseded is not None and _present(trees, patch.superseded):
            return Verdict(patch.name, patch.file, State.SUPERSEDED, f"upstream has {patch.superseded.name}")
        now[patch.file] = apply_edit(source, patch)
    except AnchorAmbiguous as error:
        return _verdict(patch, State.AMBIGUOUS, error)
    except PatchError as error:
        return _verdict(patch, State.CONFLICT, error)
    return Verdict(patch.name, patch.file, State.ABSENT)


def _verdict(patch: Patch, state: State, error: PatchError) -> Verdict:
    prefix = "contract: " if isinstance(error, ContractBroken) else ""
    return Verdict(patch.name, patch.file, state, prefix + error.message, error.evidence)


def patches_of(sets: Sequence[PatchSet]) -> tuple[Patch, ...]:
    """All patches of the sets in order."""
    return tuple(patch for each in sets for patch in each.patches)
