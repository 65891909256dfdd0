"""The public reports of failed starts and failing servers, as fixtures."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data" / "diagnose"


def reports() -> list[dict[str, Any]]:
    """One for each: ref, want, and a log or a state."""
    found: list[dict[str, Any]] = tomllib.loads((DATA / "reports.toml").read_text("utf-8"))["report"]
    return found
