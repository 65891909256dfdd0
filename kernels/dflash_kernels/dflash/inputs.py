"""The state that a batch carries between steps, and what the verify pass is told."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from torch import Tensor


class DFlashDraftInput(SpecInput):
    """The last committed token of each request, whose KV is not written yet. int64 [bs]."""

    def __init__(self, bonus: Tensor) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT)
        self.bonus = bonus

    def is_draft_input(self) -> bool:
        # Padding and planning code takes every draft input for EAGLE's, whose tensors this one has not.
        return False

    def get_spec_adjust_token_coefficient(self) -> tuple[int, int]:
        return 1, 1

    def filter_batch(self, new_indices: Tensor, has_been_filtered: bool = True) -> None:
        # The worker filters nothing itself, whatever the caller assumes.
        self.bonus = self.bonus[new_indices]

    def merge_batch(self, spec_info: DFlashDraftInput) -> None:
        self.bonus = torch.cat([self.bonus, spec_info.bonus])


class DFlashVerifyInput(SpecInput):
    """A pass over ``draft_token_num`` tokens a request: the drafter's block, or the target's chain or tree."""

    def __init__(
        self,
        draft_token_num: int,
        positions: Tensor | None = None,
        custom_mask: Tensor | None = None,
        capture: bool = False,
    ) -> None:
        """positions: int64 [bs * draft_token_num].

        custom_mask: flat, request by request [N, prefix + N], 1 where a token may see; None: the layers' own rule.
        capture: the pass also returns the target's hidden states.
        """
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.draft_token_num = draft_token_num
        self.num_tokens_per_req = draft_token_num
        self.positions = positions
        self.custom_mask = custom_mask
        self.capture_hidden_mode = CaptureHiddenMode.FULL if capture else CaptureHiddenMode.NULL

    def is_verify_input(self) -> bool:
        return True

    def get_spec_adjust_token_coefficient(self) -> tuple[int, int]:
        return self.draft_token_num, self.draft_token_num


def capture_input(model_runner: Any, mask: Tensor, width: int) -> DFlashVerifyInput:
    """What a CUDA graph is captured with.

    Nothing is copied from this mask: it is empty. The graph reads the attention backend's own mask buffer, which the
    worker fills before each replay; a graph captured without a mask would ignore a tree and stay plausible.
    """
    return DFlashVerifyInput(width, custom_mask=mask[:0], capture=not model_runner.is_draft_worker)
