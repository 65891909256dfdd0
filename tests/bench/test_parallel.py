"""How the bench of several ranks groups and times its servers."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tests.bench import parallel_gpu  # noqa: E402


def test_each_lot_has_the_first_arm() -> None:
    arms = ["none", "dflash", "ddtree:32", "ddtree:64", "ddtree:auto"]
    assert list(parallel_gpu.lots(arms, 3)) == [["none", "dflash", "ddtree:32"], ["none", "ddtree:64", "ddtree:auto"]]
    assert list(parallel_gpu.lots(arms, 9)) == [arms]
    assert list(parallel_gpu.lots(["none"], 1)) == [["none"]]
    with pytest.raises(ValueError, match="at least 2"):
        list(parallel_gpu.lots(arms, 1))


@pytest.mark.parametrize("speculates", [False, True])
def test_a_step_is_timed_without_the_prefill(monkeypatch: pytest.MonkeyPatch, speculates: bool) -> None:
    """A prefill of 3 s and steps of 20 ms, for 4 requests of 41 tokens: 40 steps, or 20 where two come at once."""

    def measure(_: Any, prompts: list[str], tokens: int, concurrency: int) -> dict[str, float]:
        steps = (tokens - 1) // (2 if speculates else 1)
        return {
            "seconds": 3.0 + 0.02 * steps,
            "tokens": tokens * len(prompts),
            "steps": steps * len(prompts) if speculates else 0,
        }

    monkeypatch.setattr(parallel_gpu, "measure", measure)
    assert parallel_gpu.step_ms(None, ["a"] * 4, 41) == pytest.approx(20.0)  # type: ignore[arg-type]
