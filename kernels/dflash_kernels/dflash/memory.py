"""KV memory of a drafter, which shares its slots with the target."""

from __future__ import annotations

from typing import Any

from .capture import draft_model_config


def draft_cell_size(model_runner: Any) -> int:
    """Bytes of the drafter's KV for one slot, on this rank. ``model_runner``: the target's.

    The drafter's pool has as many slots as the target's; left out of the budget, it would not fit beside a full one.
    """
    from sglang.srt.layers.dp_attention import get_attention_tp_size

    draft = draft_model_config(model_runner.server_args)
    heads = draft.get_num_kv_heads(get_attention_tp_size())
    # The drafter's pool keeps the drafter's own dtype, whatever --kv-cache-dtype says of the target's.
    return int(2 * draft.num_hidden_layers * heads * draft.head_dim * draft.dtype.itemsize)
