"""Virtual environments. (Filled below.)"""

from __future__ import annotations

from typing import Any


def venv_facts(home: str, asked: list[str], discover: bool, markers: list[str]) -> list[dict[str, Any]]:
    return []
