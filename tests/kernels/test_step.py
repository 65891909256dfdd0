"""What lies around a step: its layout before the draft, and its result behind the verify."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from dflash_kernels.accepted import Accepted  # noqa: E402
from dflash_kernels.ddtree.commit import Committed, commit_step  # noqa: E402
from dflash_kernels.ddtree.prepare import StepBuffers, prepare_step  # noqa: E402


@pytest.mark.parametrize("width", [4, 6, 9])
def test_layout_of_a_step(device: str, width: int) -> None:
    """Rows of a captured batch beyond the real requests are padding: the dummy slot, length 0."""
    block, mask_token = 4, 99
    req_to_token = torch.arange(3 * 32, device=device).view(3, 32) + 1
    step = StepBuffers.empty(4, block, width, device)
    for name in ("slots", "draft_slots", "prefix", "block_positions"):
        getattr(step, name).fill_(77)
    bonus, prefix, pool = (torch.tensor(row, device=device) for row in ([11, 12], [5, 20], [2, 0]))
    prepare_step(bonus, prefix, pool, req_to_token, mask_token, step)
    for row, (start, request) in enumerate(((5, 2), (20, 0))):
        wanted = req_to_token[request, start : start + width].tolist()
        assert step.slots[row].tolist() == wanted
        assert step.draft_slots[row].tolist() == wanted[:block]
        assert step.block_positions[row].tolist() == list(range(start, start + block))
        assert step.block_ids[row].tolist() == [11 + row, 99, 99, 99]
    assert step.req_pool.tolist() == [2, 0, 0, 0]
    assert step.prefix.tolist() == [5, 20, 0, 0] and step.roots.tolist() == [11, 12, 0, 0]
    assert not step.slots[2:].any() and not step.draft_slots[2:].any()
    assert step.rows(2).slots.data_ptr() == step.slots.data_ptr() and step.rows(2).cap == 2


def test_commit_into_a_wider_block(device: str) -> None:
    index = torch.tensor([[0, 2, 5, -1], [0, -1, -1, -1]], dtype=torch.int32, device=device)
    tokens = torch.tensor([[31, 32, 33, 0], [41, 0, 0, 0]], dtype=torch.int32, device=device)
    accepted = Accepted(index, torch.tensor([2, 0], dtype=torch.int32, device=device), tokens)
    prefix = torch.tensor([7, 9], device=device)
    block = Committed.empty(5, 4, device)
    for committed in (commit_step(accepted, prefix, 8), commit_step(accepted, prefix, 8, out=block)):
        assert committed.lens.tolist() == [3, 1] and committed.lens.dtype == torch.int32
        assert committed.seq_lens.tolist() == [10, 10]
        assert committed.bonus.tolist() == [33, 41]
        assert committed.tokens.tolist() == [[31, 32, 33, 0], [41, 0, 0, 0]]
        assert committed.rows[:8].tolist() == [0, 2, 5, 0, 8, 8, 8, 8]
    kept = block.first(2).lasting()
    commit_step(Accepted(index, accepted.length * 0, tokens), prefix, 8, out=block)
    assert kept.seq_lens.tolist() == [10, 10] and block.first(2).seq_lens.tolist() == [8, 10]
