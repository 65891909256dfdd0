"""What a DFlash checkpoint's config.json says, and which checkpoints this implementation serves.

The format is that of the published DFlash drafters: the decoder's usual fields, and
``dflash_config`` with the fields of its own. Later drafters keep the file format but compute something else; they are
refused, because serving them as plain DFlash costs acceptance without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARCHITECTURE = "DFlashDraftModel"
DEFAULT_BLOCK = 16
MAX_BLOCK = 16

LATER = {
    "conv_kernel_size": "DFlash2 (grouped dynamic convolutions)",
    "conv_group_size": "DFlash2 (grouped dynamic convolutions)",
    "selector_rank": "DFlash2 (candidate selector)",
    "selector_top_k": "DFlash2 (candidate selector)",
    "markov_rank": "DSpark (Markov head)",
    "markov_head": "DSpark (Markov head)",
    "confidence_head": "DSpark (confidence head)",
}
"""Fields that only later drafters have, and whose they are."""


@dataclass(frozen=True)
class DFlashConfig:
    """A drafter. F is ``block``: tokens of one draft pass, the bonus token included; F - 1 of them are predictions."""

    block: int
    mask_token: int
    target_layers: tuple[int, ...]
    """Target layers after which the residual stream is read, ascending."""
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    softcap: float = 0.0
    """tanh soft cap of the logits; 0: none."""

    @property
    def depths(self) -> int:
        return self.block - 1


def default_target_layers(draft_layers: int, target_layers: int) -> tuple[int, ...]:
    """The published rule for ``draft_layers`` features, spread evenly from layer 1 to the third last.

    Rounds halves to even, as Python does.
    """
    if draft_layers == 1:
        return (target_layers // 2,)
    first, last = 1, target_layers - 3
    return tuple(round(first + i * (last - first) / (draft_layers - 1)) for i in range(draft_layers))


def read_config(config: Mapping[str, Any], target: Mapping[str, Any]) -> DFlashConfig:
    """The drafter of ``config`` (its config.json) for a target of ``target`` (the target's text configuration).

    Raises:
        ValueError: a later drafter, a field that is not served, or a drafter of another target; all problems at once.
    """
    own: Mapping[str, Any] = config.get("dflash_config") or {}
    problems = [*_variant(config, own), *_pair(config, target)]
    block = own.get("block_size", config.get("block_size", DEFAULT_BLOCK))
    if not isinstance(block, int) or not 2 <= block <= MAX_BLOCK:
        problems.append(f"block_size is {block}; 2 to {MAX_BLOCK} is served")
    layers = own.get("target_layer_ids", config.get("target_layer_ids"))
    total = int(target["num_hidden_layers"])
    ids = default_target_layers(int(config["num_hidden_layers"]), total) if layers is None else tuple(layers)
    # The last layer's output is not in the residual stream that the target hands out between its layers.
    if not ids or list(ids) != sorted(set(ids)) or not all(0 <= i < total - 1 for i in ids):
        problems.append(f"target_layer_ids {list(ids)} are not ascending layers 0 to {total - 2} of the target")
    mask = own.get("mask_token_id", config.get("mask_token_id"))
    if not isinstance(mask, int) or not 0 <= mask < int(target["vocab_size"]):
        problems.append(f"mask_token_id is {mask}; the target's vocabulary has {target['vocab_size']} tokens")
    if problems:
        raise ValueError("this drafter is not served: " + "; ".join(problems))
    return DFlashConfig(
        block=block,
        mask_token=mask,
        target_layers=ids,
        embedding_scale=float(own.get("input_embedding_scale") or 1.0),
        output_multiplier=float(own.get("output_multiplier") or 1.0),
        softcap=float(own.get("final_logit_softcapping") or 0.0),
    )


def _variant(config: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    problems = []
    architectures = list(config.get("architectures") or [])
    if architectures != [ARCHITECTURE]:
        problems.append(f"its architectures are {architectures}, not [{ARCHITECTURE!r}]")
    problems += [f"{key} makes it {LATER[key]}" for key in LATER if own.get(key) or config.get(key)]
    if own.get("projector_type", config.get("projector_type")) == "domino":
        problems.append("projector_type makes it Domino (a path rolled out token by token)")
    if any(str(key).startswith("lilicorr") for key in own):
        problems.append("lilicorr fields make it DFlash with a LiLiCorr head")
    if own.get("is_causal", config.get("is_causal")):
        problems.append("is_causal is set: the block of a DFlash drafter sees itself in both directions")
    kinds = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if kinds:
        problems.append(f"layer_types has {', '.join(kinds)}; only full_attention is served")
    return problems


def _pair(config: Mapping[str, Any], target: Mapping[str, Any]) -> list[str]:
    problems = []
    made_for = config.get("num_target_layers")
    if made_for is not None and int(made_for) != int(target["num_hidden_layers"]):
        problems.append(f"it was made for a target of {made_for} layers, this one has {target['num_hidden_layers']}")
    # Draft tokens are embedded by the target, so the widths must agree.
    if int(config["hidden_size"]) != int(target["hidden_size"]):
        problems.append(f"its hidden_size is {config['hidden_size']}, the target's {target['hidden_size']}")
    return problems
