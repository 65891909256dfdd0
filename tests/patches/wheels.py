"""Releases as wheels from the configured package index, cached outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from dflash_patches.registry import RELEASES, Tested

from tests.scope import EVERYTHING

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash-deploy" / "wheels"


SERVED = {version for version, support in RELEASES.items() if support.tested is Tested.SERVED}


def chosen(version: str) -> bool:
    """Whether tests of single releases take this one: those that are served, and all with ``DFLASH_TESTS=all``
    (each is another download, and minutes)."""
    return version in SERVED or EVERYTHING


def wheel(package: str, version: str) -> Path:
    """The wheel of a release, downloaded when it is not in the cache."""
    CACHE.mkdir(parents=True, exist_ok=True)
    pattern = f"{package}-{version}-*.whl"
    found = sorted(CACHE.glob(pattern))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        fresh = CACHE / f".{package}-{version}.{os.getpid()}"
        try:
            subprocess.run([*command, "--dest", str(fresh), f"{package}=={version}"], check=True, timeout=300)
            for path in fresh.glob(pattern):
                path.replace(CACHE / path.name)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        found = sorted(CACHE.glob(pattern))
    return found[0]


def unpack(package: str, version: str, site: Path) -> Path:
    """Unpack a release into a site folder, as an installer does."""
    with zipfile.ZipFile(wheel(package, version)) as archive:
        archive.extractall(site)
    return site
