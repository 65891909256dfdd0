"""Model folders: configuration, shards, tokenizer. (Filled below.)"""

from __future__ import annotations

from typing import Any


def model_facts(path: str) -> dict[str, Any]:
    return {"path": path}
