"""How much the tests try: what CI has time for or, with ``DFLASH_TESTS=all``, everything.

Everything: each release that a patch set applies to and not only those that are served, every seeded mutation of every
patch, each kernel package as published (2 GB), the costly failures, the long waves of requests. Hours on two cores.
How many of something is asked for by its own number: ``DFLASH_FLEET_HOSTS``, ``DFLASH_DEPLOY_FAULTS``.
"""

from __future__ import annotations

import os

import pytest

_SCOPE = os.environ.get("DFLASH_TESTS", "")
if _SCOPE not in ("", "all"):
    raise pytest.UsageError(f"DFLASH_TESTS is {_SCOPE!r}; it may be 'all', or not set")

EVERYTHING = _SCOPE == "all"
costly = pytest.mark.skipif(not EVERYTHING, reason="costly: DFLASH_TESTS=all makes this one too")
