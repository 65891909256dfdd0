"""The tools that hold the style, the types and the import arrows; their settings are in pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


@pytest.mark.parametrize("command", ["ruff check .", "lint-imports", "mypy"])
def test_tool(command: str) -> None:
    name, *words = command.split()
    if not (BIN / name).exists():
        pytest.skip(f"{name} is not installed: pip install -e '.[test]'")
    done = subprocess.run([BIN / name, *words], cwd=TOP, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
