"""Where the templates and the payload lie: beside the package in a wheel, at the top of a checkout otherwise."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from dflash_deploy.errors import UsageError


def templates_dir() -> Path:
    """Folder of the jinja2 templates."""
    here = Path(__file__).resolve().parent
    for folder in (here / "templates", here.parent / "templates"):
        if folder.is_dir():
            return folder
    raise UsageError("the templates are missing from this installation", hint="reinstall dflash-deploy")


def payload_dir() -> Path:
    """Folder of the ``dflash_kernels`` package: copied to the target, never imported here.

    Raises:
        UsageError: the package is not installed beside this one.
    """
    spec = importlib.util.find_spec("dflash_kernels")
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    checkout = Path(__file__).resolve().parent.parent / "kernels" / "dflash_kernels"
    if checkout.is_dir():
        return checkout
    raise UsageError(
        "the payload package dflash_kernels is missing from this installation", hint="reinstall dflash-deploy"
    )
