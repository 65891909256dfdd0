"""A tree's files → its map."""

from __future__ import annotations

import ast
import gc
from pathlib import Path

from dflash_deploy.errors import UsageError
from dflash_deploy.mapping import source, vocabulary
from dflash_deploy.mapping.model import Map
from dflash_deploy.mapping.scan import scan


def build(path: Path, package: str = "sglang") -> Map:
    """The map of a package in a folder, an environment or a wheel.

    Raises:
        UsageError, UnreadableFact
    """
    collecting = gc.isenabled()
    gc.disable()  # millions of live nodes and no cycles among them
    try:
        return _build(source.load(path, package), package)
    finally:
        if collecting:
            gc.enable()


def _build(tree: source.Tree, package: str) -> Map:
    parsed: dict[str, ast.Module] = {}
    unreadable: list[str] = []
    words = _read(tree, tree.having(vocabulary.WORDS), parsed, unreadable)
    if not words.algorithms:
        raise UsageError(
            f"{tree.path} has no class {vocabulary.ALGORITHM}: no release of {package} with speculative decoding",
            evidence=f"{len(tree.files)} files looked through",
        )
    words = _read(tree, tree.having(vocabulary.marks(words)), parsed, unreadable)
    sites = [site for file, module in parsed.items() for site in scan(file, tree.files[file], module, words)]
    return Map(
        source=tree.path,
        version=tree.version,
        sites=tuple(sorted(sites)),
        algorithms=tuple(sorted(words.algorithms)),
        predicates=tuple(sorted(words.predicates)),
        calls=words.calls,
        unreadable=tuple(unreadable),
        files=len(tree.files),
    )


def _read(
    tree: source.Tree, names: list[str], parsed: dict[str, ast.Module], unreadable: list[str]
) -> vocabulary.Vocabulary:
    """Parse these files too; the words of all that are parsed."""
    for file in names:
        if file in parsed or file in unreadable:
            continue
        try:
            parsed[file] = ast.parse(tree.files[file], file)
        except (SyntaxError, ValueError):
            unreadable.append(file)
    return vocabulary.read(parsed)
