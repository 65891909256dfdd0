"""Which drafters DDTREE refuses, by their configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dflash_kernels.ddtree.drafter import refuse_dependent_depths

PAIR = Path(__file__).resolve().parents[2] / "templates" / "tiny-pair"


def test_the_tiny_drafter_is_served() -> None:
    refuse_dependent_depths(json.loads((PAIR / "drafter" / "config.json").read_text()))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"dflash_config": None},
        {"architectures": ["DFlashDraftModel"], "dflash_config": {"selector_rank": 0, "selector_top_k": 0}},
        {"dflash_config": {"lilicorr_enabled": False, "lilicorr_rank": 8, "conv_kernel_size": 4}},
    ],
)
def test_served(config: dict[str, Any]) -> None:
    refuse_dependent_depths(config)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"dflash_config": {"selector_rank": 256, "selector_top_k": 16}}, "DFlash2"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({"architectures": ["Qwen3DSparkModel"]}, "Qwen3DSparkModel"),
        ({"dflash_config": {"projector_type": "domino"}}, "Domino"),
        ({"projector_type": "domino"}, "Domino"),
        ({"dflash_config": {"lilicorr_rank": 8}}, "LiLiCorr"),
    ],
)
def test_refused(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        refuse_dependent_depths(config)
    assert "Use --speculative-algorithm DFLASH" in str(caught.value)
