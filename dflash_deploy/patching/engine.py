"""Bytes to bytes: judge each patch of a set, then apply what is absent. All or nothing.

Judging applies each patch in memory in the set's order, so later patches may hold on to what earlier ones wrote;
contracts and names are checked on the result.
"""

from __future__ import annotations

import ast
import gc
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import libcst as cst

from dflash_deploy.errors import AnchorAmbiguous, AnchorMissing, ContractBroken, InvalidResult, PatchError
from dflash_deploy.patching import syntax
from dflash_deploy.patching.anchors import Assign, Def, First, Last
from dflash_deploy.patching.contracts import check_contract, check_landing
from dflash_deploy.patching.edits import AddImport, Edit, InsertStatements
from dflash_deploy.patching.hollow import Hollow, hollow, words
from dflash_deploy.patching.patch import Contract, Patch, PatchSet, Present, State, Verdict, worst

MAX_LINES_CHANGED = 64
"""Lines of a file that the edits of one set may touch; hooks touch a handful."""


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
                evidence += [
                    f"{verdict.patch} ({verdict.file}): {verdict.state}: {verdict.detail}",
                    *(f"    {e}" for e in verdict.evidence),
                ]
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
    data = rendered(_edited(module, patch).bytes, source, patch.file)
    check_landing(compiled(data, patch.file), patch.file, patch.edit.scope, patch.edit.injected)
    return data


def _edited(module: cst.Module, patch: Patch) -> cst.Module:
    changed = patch.edit.apply(module, patch.marker)
    if not patch.edit.written(changed):
        raise InvalidResult(f"{patch.name}: the edit does not recognise its own result in {patch.file}")
    return changed


def rendered(data: bytes, source: bytes, file: str) -> bytes:
    """The bytes of an edited module, checked.

    Raises:
        InvalidResult: more than edits of a few lines differ from ``source``, so the parser did not keep the rest.
    """
    lost = Counter(source.splitlines()) - Counter(data.splitlines())
    if lost.total() > MAX_LINES_CHANGED:
        raise InvalidResult(f"{file} does not survive the parser: {lost.total()} lines would change")
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


def parsed(data: bytes, file: str) -> ast.Module:
    """The syntax tree of a file.

    Raises:
        InvalidResult: not Python.
    """
    try:
        return ast.parse(data, file)
    except (SyntaxError, ValueError) as error:
        raise InvalidResult(f"{file} cannot be parsed as Python", evidence=str(error).splitlines()[:4]) from error


def _present(files: Mapping[str, bytes], trees: _Trees, present: Present) -> bool:
    data = files.get(present.file)
    if data is None or present.name.rpartition(".")[2].encode() not in data:
        return False
    tree = trees(present.file)
    try:
        check_contract(tree, Contract(present.file, present.name))
    except ContractBroken:
        return False
    return True


def superseded(files: Mapping[str, bytes | None], each: PatchSet) -> bool:
    """Whether upstream has what the whole set is for. ``files`` are as upstream has them."""
    if each.superseded is None:
        return False
    here = {path: data for path, data in files.items() if data is not None}
    return _present(here, _Trees(here), each.superseded)


def run(files: Mapping[str, bytes | None], patches: Sequence[Patch], *, explain: bool = True) -> Outcome:
    """Judge and apply ``patches`` to ``files``: path in the package → bytes, None when there is no such file.

    Args:
        explain: look through whole files for the nearest candidates of an anchor that is not there.
    """
    collecting = gc.isenabled()
    gc.disable()  # millions of live nodes and no cycles to free: the collector takes a third of the time
    try:
        return _run(files, patches, explain)
    finally:
        if collecting:
            gc.enable()


def _run(files: Mapping[str, bytes | None], patches: Sequence[Patch], explain: bool) -> Outcome:
    here = {path: data for path, data in files.items() if data is not None}
    before = _Trees(here)
    works: dict[str, _Work] = {}
    together = {p.file: [q for q in patches if q.file == p.file] for p in patches}
    verdicts = [_edit(here, works, together[patch.file], patch, before, explain) for patch in patches]
    edited = {v.file for v in verdicts if v.state is State.ABSENT}
    new = {path: works[path].rendered() for path in sorted(edited)}
    after = before.updated(new, {path: works[path].tree for path in edited})
    whole = before.updated(new)  # parsed as a whole only to say what is wrong: its lines are the file's
    for index, patch in enumerate(patches):
        if verdicts[index].state not in (State.ABSENT, State.APPLIED):
            continue
        error = _broken(patch, after)
        if error is not None and explain:
            error = _broken(patch, whole)
        if error is not None:
            verdicts[index] = _verdict(patch, State.CONFLICT, error)
    return Outcome(tuple(verdicts), new)


def _broken(patch: Patch, after: _Trees) -> PatchError | None:
    """What of a patch does not hold in the edited files."""
    try:
        tree = after(patch.file)
        if tree is not None:
            check_landing(tree, patch.file, patch.edit.scope, patch.edit.injected)
        for contract in patch.contract:
            check_contract(after(contract.file), contract)
    except (ContractBroken, InvalidResult) as error:
        return error
    return None


class _Trees:
    """Syntax trees of files, parsed when first asked for; files that we changed are compiled as well."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files
        self._trees: dict[str, ast.Module] = {}
        self._changed: Mapping[str, Callable[[], ast.Module] | None] = {}

    def updated(
        self, files: Mapping[str, bytes], readers: Mapping[str, Callable[[], ast.Module]] | None = None
    ) -> _Trees:
        trees = _Trees({**self._files, **files})
        trees._trees = {path: tree for path, tree in self._trees.items() if path not in files}
        trees._changed = {path: (readers or {}).get(path) for path in files}
        return trees

    def __call__(self, path: str) -> ast.Module | None:
        if path not in self._files:
            return None
        if path not in self._trees:
            read = self._changed.get(path)
            if read is not None:
                self._trees[path] = read()
            else:
                self._trees[path] = (compiled if path in self._changed else parsed)(self._files[path], path)
        return self._trees[path]


class _Work:
    """One file under the edits of one run: without what they cannot touch until one of them asks for more."""

    def __init__(self, source: bytes, file: str, patches: Sequence[Patch], tree: ast.Module) -> None:
        self.source, self.file = source, file
        edits = [p.edit for p in patches]
        whole = frozenset(e.scope for e in edits if not _names_its_place(e))
        self._hollow = hollow(source, tree, words(edits), whole, frozenset(e.scope for e in edits))
        self.module = syntax.parse(self._hollow.source, file)
        self._written: tuple[cst.Module, bytes] | None = None

    def whole(self) -> bool:
        """Put the bodies back, for an edit that failed without them; False: they are there already."""
        if not self._hollow.bodies:
            return False
        self.module = syntax.parse(self._filled(), self.file)
        self._hollow = Hollow(self.source)
        return True

    def _bytes(self) -> bytes:
        if self._written is None or self._written[0] is not self.module:
            self._written = self.module, self.module.bytes
        return self._written[1]

    def _filled(self) -> bytes:
        data = self._hollow.filled(self._bytes())
        if data is None:
            raise InvalidResult(f"{self.file} does not survive the parser: a definition is lost")
        return data

    def rendered(self) -> bytes:
        return rendered(self._filled(), self.source, self.file)

    def tree(self) -> ast.Module:
        """The tree of what is rendered, of which only what an edit could touch is compiled and parsed again."""
        return self._hollow.filled_tree(compiled(self._bytes(), self.file))


def _names_its_place(edit: Edit) -> bool:
    """Whether the edit looks at no assignment of its scope but those whose target it names."""
    if isinstance(edit, AddImport):
        return True
    if not isinstance(edit, InsertStatements):
        return False
    return isinstance(edit.at, (First, Last)) or isinstance(edit.at.shape, (Assign, Def))


def _edit(
    files: Mapping[str, bytes],
    works: dict[str, _Work],
    together: Sequence[Patch],
    patch: Patch,
    before: _Trees,
    explain: bool,
) -> Verdict:
    source = files.get(patch.file)
    if source is None:
        return Verdict(patch.name, patch.file, State.CONFLICT, f"{patch.file} is not in the tree")
    try:
        if patch.file not in works:
            tree = before(patch.file)
            assert tree is not None
            works[patch.file] = _Work(source, patch.file, together, tree)
        work = works[patch.file]
        if patch.edit.written(work.module):
            return Verdict(patch.name, patch.file, State.APPLIED)
        if _carries(source, patch.marker):
            return Verdict(
                patch.name, patch.file, State.DRIFTED, "lines that carry its marker are not what this version writes"
            )
        if patch.superseded is not None and _present(files, before, patch.superseded):
            return Verdict(patch.name, patch.file, State.SUPERSEDED, f"upstream has {patch.superseded.name}")
        try:
            work.module = _edited(work.module, patch)
        except PatchError:
            if not explain or not work.whole():
                raise
            work.module = _edited(work.module, patch)
    except AnchorAmbiguous as error:
        return _verdict(patch, State.AMBIGUOUS, error)
    except PatchError as error:
        return _verdict(patch, State.CONFLICT, error)
    return Verdict(patch.name, patch.file, State.ABSENT)


def _carries(source: bytes, marker: str) -> bool:
    found = re.search(re.escape(marker.encode()) + rb"(?![\\w-])", source)
    return found is not None


def _verdict(patch: Patch, state: State, error: PatchError) -> Verdict:
    prefix = "contract: " if isinstance(error, ContractBroken) else ""
    return Verdict(patch.name, patch.file, state, prefix + error.message, error.evidence)


def patches_of(sets: Sequence[PatchSet]) -> tuple[Patch, ...]:
    """All patches of the sets in order."""
    return tuple(patch for each in sets for patch in each.patches)
