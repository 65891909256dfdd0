"""Requests that DFLASH and DDTREE cannot answer exactly, and what they are told."""

from __future__ import annotations

from typing import Any


def refusal(req: Any, algorithm: str) -> str | None:
    """Why the server refuses a request (HTTP 400), or None. ``req``: the scheduler's Req, before it is queued.

    What depends on the tokens decoded so far would have to be known for every path of a draft; until it is, a clear
    answer is better than a wrong one.
    """
    sampling = req.sampling_params
    asked = {
        "logprobs": req.return_logprob,
        "hidden states": req.return_hidden_states,
        "frequency_penalty": sampling.frequency_penalty != 0.0,
        "presence_penalty": sampling.presence_penalty != 0.0,
        "repetition_penalty": sampling.repetition_penalty != 1.0,
        "min_new_tokens": sampling.min_new_tokens > 0,
        "a custom logit processor": req.custom_logit_processor is not None,
        "a grammar (json_schema, regex, ebnf or structural_tag)": any(
            getattr(sampling, name, None) is not None for name in ("json_schema", "regex", "ebnf", "structural_tag")
        ),
        "input embeddings": req.input_embeds is not None,
        "a LoRA adapter": req.lora_id is not None,
    }
    wrong = [name for name, yes in asked.items() if yes]
    if not wrong:
        return None
    return (
        f"Invalid request: {algorithm} does not serve {', '.join(wrong)}. "
        "Leave it out, or use a server without speculation."
    )
