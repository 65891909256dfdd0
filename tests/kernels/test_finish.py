"""A stop before the limit of tokens, in a step that brings both: on a request that ends as SGLang 0.5.16's does."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
from dflash_kernels.ddtree.finish import stopped_before_limit

STOP = 9


@dataclass
class Request:
    """``update_finish_state`` with the patch's hook; ``hooked`` False: as the release has it."""

    limit: int
    hooked: bool = True
    grammar: Any = None
    output_ids: Any = field(default_factory=lambda: array("q"))
    reason: str = ""
    length: int | None = None

    @property
    def sampling_params(self) -> SimpleNamespace:
        return SimpleNamespace(max_new_tokens=self.limit)

    def finished(self) -> bool:
        return bool(self.reason)

    def update_finish_state(self, new_accepted_len: int = 1) -> None:
        if self.finished():
            return
        several = self.hooked and new_accepted_len > 1 and len(self.output_ids) >= self.limit
        if several and stopped_before_limit(self, new_accepted_len):  # type: ignore[arg-type]
            return
        if len(self.output_ids) >= self.limit:
            self.reason, self.length = "length", self.limit
            return
        for at in range(len(self.output_ids) - new_accepted_len, len(self.output_ids)):
            if self.output_ids[at] == STOP:
                self.reason, self.length = "stop", at + 1
                return

    def served(self, *steps: list[int]) -> tuple[str, list[int]]:
        for step in steps:
            if not self.finished():
                self.output_ids.extend(step)
                self.update_finish_state(len(step))
        return self.reason, list(self.output_ids[: self.length])


TOKENS = [1, 2, 3, STOP, 5, 6, 7, 8]


@pytest.mark.parametrize("limit", range(1, 9))
@pytest.mark.parametrize("cut", range(1, 8))
def test_as_one_token_at_a_time(limit: int, cut: int) -> None:
    alone = Request(limit, hooked=False).served(*([token] for token in TOKENS))
    assert Request(limit).served(TOKENS[:1], TOKENS[1:cut], TOKENS[cut:]) == alone
    assert Request(limit).served(TOKENS[:1], TOKENS[1:]) == alone


def test_the_release_alone_answers_with_what_follows_the_stop() -> None:
    """What the hook is for; where this fails, it is not needed any more."""
    assert Request(6, hooked=False).served(TOKENS[:1], TOKENS[1:]) == ("length", TOKENS[:6])
    assert Request(6).served(TOKENS[:1], TOKENS[1:]) == ("stop", TOKENS[:4])


def test_what_is_beyond_stays_with_the_request() -> None:
    """KV is freed by the tokens that the request holds."""
    request = Request(6)
    request.served(TOKENS[:1], TOKENS[1:])
    assert list(request.output_ids) == TOKENS


def test_a_grammar_ends_by_its_own_rule() -> None:
    assert Request(6, grammar=object()).served(TOKENS[:1], TOKENS[1:]) == ("length", TOKENS[:6])
