"""KV slots of a step, reserved ahead of what is committed and handed back by the scheduler when a request ends."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.common import alloc_paged_token_slots_extend, alloc_token_slots, get_last_loc
from sglang.srt.speculative.spec_utils import assign_req_to_token_pool_func


def reserve(batch: Any, width: int) -> None:
    """Give every request of the ScheduleBatch ``width`` slots behind its committed KV, in ``req_to_token``.

    A request keeps what a step did not commit for the next one, so that a step allocates about what the last one
    committed and frees nothing. The scheduler knows of the surplus through ``Req.kv_allocated_len``.
    """
    have = [req.kv_allocated_len for req in batch.reqs]
    want = [max(req.kv_allocated_len, req.kv_committed_len + width) for req in batch.reqs]
    missing = sum(want) - sum(have)
    if not missing:
        return
    start_cpu, end_cpu = torch.tensor(have, dtype=torch.int64), torch.tensor(want, dtype=torch.int64)
    start, end = (lens.to(batch.device, non_blocking=True) for lens in (start_cpu, end_cpu))
    if batch.token_to_kv_pool_allocator.page_size == 1:
        slots = alloc_token_slots(batch.tree_cache, missing)
    else:
        last = get_last_loc(batch.req_to_token_pool.req_to_token, batch.req_pool_indices, start)
        slots = alloc_paged_token_slots_extend(batch.tree_cache, start, start_cpu, end, end_cpu, last, missing)
    assign_req_to_token_pool_func(
        batch.req_pool_indices, batch.req_to_token_pool.req_to_token, start, end, slots, len(batch.reqs)
    )
    for req, length in zip(batch.reqs, want, strict=True):
        req.kv_allocated_len = length
