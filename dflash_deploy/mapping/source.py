"""The Python files of a package: from a folder, or straight from a wheel."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dflash_deploy.errors import UnreadableFact, UsageError

SKIPPED = ("test", "tests", "testing", "benchmark", "benchmarks", "third_party", "examples")
"""Folders below the package that serve nothing."""


@dataclass(frozen=True)
class Tree:
    """A package's files, tests and benchmarks left out."""

    path: str
    version: str | None
    files: Mapping[str, bytes] = field(repr=False)
    """By POSIX path relative to the package."""

    def having(self, words: Sequence[bytes]) -> list[str]:
        """Names of the files with one of these words in them."""
        return [name for name, data in self.files.items() if any(word in data for word in words)]


def load(path: Path, package: str) -> Tree:
    """Every ``.py`` file of the package that serves.

    Args:
        path: the package's folder, the folder that holds it, a virtual environment, or a wheel.

    Raises:
        UsageError: the package is not there.
        UnreadableFact: not a wheel.
    """
    if path.is_file():
        return _wheel(path, package)
    root = folder(path, package)
    found = {}
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).as_posix()
        if _served(name):
            found[name] = file.read_bytes()
    version = None
    infos = sorted(root.parent.glob(f"{package}-*.dist-info/METADATA"))
    if len(infos) == 1:
        version = _version(infos[0].read_bytes())
    return Tree(str(root), version, found)


def folder(path: Path, package: str) -> Path:
    """The package's own folder.

    Raises:
        UsageError
    """
    path = path.expanduser().absolute()
    tried = [path, path / package, path / "python" / package, *sorted(path.glob(f"lib*/python3*/*-packages/{package}"))]
    for place in tried:
        if place.name == package and (place / "__init__.py").is_file():
            return place
    raise UsageError(
        f"there is no package {package} in {path}",
        evidence=[f"looked in: {place}" for place in tried],
        hint="name its folder, the folder that holds it, a virtual environment, or a wheel",
    )


def _wheel(path: Path, package: str) -> Tree:
    try:
        with zipfile.ZipFile(path) as archive:
            found, version = {}, None
            for name in sorted(archive.namelist()):
                if re.fullmatch(rf"{package}-[^/]+\.dist-info/METADATA", name):
                    version = _version(archive.read(name))
                inner = name.removeprefix(f"{package}/")
                if inner == name or not name.endswith(".py") or not _served(inner):
                    continue
                found[inner] = archive.read(name)
    except (zipfile.BadZipFile, OSError) as error:
        raise UnreadableFact(f"{path} cannot be read as a wheel", evidence=str(error)) from None
    if not found:
        raise UsageError(f"the wheel {path.name} holds no package {package}")
    return Tree(str(path), version, found)


def _served(name: str) -> bool:
    folders = name.split("/")[:-1]
    return not any(part in SKIPPED for part in folders)


def _version(metadata: bytes) -> str | None:
    found = re.search(rb"^Version: *(\S+)", metadata, re.M)
    return found.group(1).decode() if found else None
