"""Which drafters a tree of independent depths is for, told from the checkpoint's configuration before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def refuse_dependent_depths(config: Mapping[str, Any]) -> None:
    """``config``: a drafter's config.json. DFlash's depths are drawn independently of each other; later drafters choose a
    token by the one before it (arXiv 2607.05147 and others), and a tree of their marginals would be badly chosen.

    Raises:
        ValueError: such a drafter, with the field that says so.
    """
    dflash = config.get("dflash_config") or {}
    found = ""
    for field in ("selector_rank", "selector_top_k"):
        if dflash.get(field):
            found = f"DFlash2 (dflash_config.{field} is {dflash[field]}), whose selector picks a path token by token"
    projector = dflash.get("projector_type", config.get("projector_type"))
    if projector == "domino":
        found = f"Domino (projector_type is {projector}), which rolls a path out token by token"
    if dflash.get("lilicorr_enabled", any(str(field).startswith("lilicorr_") for field in dflash)):
        found = "DFLASH with a LiLiCorr head (dflash_config.lilicorr_*), which picks a path token by token"
    for name in config.get("architectures") or ():
        if "DSpark" in str(name) or "DFlash2" in str(name):
            found = found or f"a {name}, whose head picks a path token by token"
    if found:
        raise ValueError(
            f"DDTREE needs a drafter whose depths are independent of each other; this one is {found}. "
            "Use --speculative-algorithm DFLASH with it where the release has that, or a DFlash checkpoint"
        )


def drafter_config(server_args: Any) -> Mapping[str, Any]:
    """The drafter's configuration as SGLang reads it; empty when it cannot be read, which the loader says better."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    path = server_args.speculative_draft_model_path
    try:
        config: Mapping[str, Any] = get_config(
            path,
            trust_remote_code=server_args.trust_remote_code,
            revision=server_args.speculative_draft_model_revision,
        ).to_dict()
    except Exception:
        return {}
    return config
