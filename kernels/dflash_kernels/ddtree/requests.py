"""What a request may not ask of a tree: refused by name, never silently left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def validate_ddtree_request(req: Req, enable_overlap: bool) -> str | None:
    """Why DDTREE cannot serve the request, or None; the server answers with it and status 400.

    Penalties and minimum lengths depend on the tokens written so far, which differ from node to node, and the scheduler
    does not count them under speculation; a grammar's mask differs likewise.
    """
    sampling = req.sampling_params
    asked = {
        "logprobs (return_logprob)": req.return_logprob,
        "hidden states (return_hidden_states) with the overlap scheduler": enable_overlap and req.return_hidden_states,
        "sampling masks (return_sampling_mask)": getattr(req, "return_sampling_mask", False),
        "grammar-constrained output (json_schema, regex, ebnf, structural_tag)": any(
            getattr(sampling, name, None) is not None for name in ("json_schema", "regex", "ebnf", "structural_tag")
        ),
        "frequency_penalty": sampling.frequency_penalty != 0.0,
        "presence_penalty": sampling.presence_penalty != 0.0,
        "repetition_penalty": sampling.repetition_penalty != 1.0,
        "min_new_tokens": sampling.min_new_tokens > 0,
        "custom_logit_processor": bool(req.custom_logit_processor),
        "LoRA adapters (lora_path)": req.lora_id is not None,
    }
    refused = [name for name, wanted in asked.items() if wanted]
    if not refused:
        return None
    return (
        f"DDTREE speculative decoding does not support {', '.join(refused)}. Ask without, or serve without speculation."
    )
