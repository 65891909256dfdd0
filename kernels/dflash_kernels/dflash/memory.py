"""KV memory of a drafter, which shares its slots with the target."""

from __future__ import annotations

from typing import Any


def draft_cell_size(model_runner: Any) -> int:
    """Bytes of the drafter's KV for one slot, on this rank. ``model_runner``: the target's.

    The drafter's pool has as many slots as the target's; left out of the budget, it would not fit beside a full one.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.dp_attention import get_attention_tp_size

    args = model_runner.server_args
    draft = ModelConfig.from_server_args(
        args,
        model_path=args.speculative_draft_model_path,
        model_revision=args.speculative_draft_model_revision,
        is_draft_model=True,
    )
    heads = draft.get_num_kv_heads(get_attention_tp_size())
    # The drafter's pool keeps the drafter's own dtype, whatever --kv-cache-dtype says of the target's.
    return int(2 * draft.num_hidden_layers * heads * draft.head_dim * draft.dtype.itemsize)
