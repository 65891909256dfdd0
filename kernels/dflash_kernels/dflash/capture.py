"""Hands the target's hidden states out: the residual stream after the layers that the drafter was trained on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .config import DFlashConfig, read_config


def draft_model_config(server_args: Any) -> Any:
    """SGLang's ModelConfig of the drafter. Arguments that quantise the target do not quantise its drafter."""
    from sglang.srt.configs.model_config import ModelConfig

    args = copy.copy(server_args)
    args.speculative_draft_model_quantization = None
    return ModelConfig.from_server_args(
        args,
        model_path=args.speculative_draft_model_path,
        model_revision=args.speculative_draft_model_revision,
        is_draft_model=True,
    )


def drafter_of(server_args: Any, target_config: Any) -> DFlashConfig:
    """The drafter that the server was started with. ``target_config``: SGLang's ModelConfig of the target.

    Raises:
        ValueError: see :func:`~dflash_kernels.dflash.config.read_config`.
    """
    draft = draft_model_config(server_args)
    return read_config(draft.hf_config.to_dict(), target_config.hf_text_config.to_dict())


def capture_hidden_states(model_runner: Any) -> None:
    """Called on the target's runner once its model is loaded, before its graphs are captured.

    Raises:
        ValueError: the drafter is not served, or is another target's.
        RuntimeError: the target's decoder layers cannot be found.
    """
    layers = drafter_of(model_runner.server_args, model_runner.model_config).target_layers
    model = model_runner.model
    if hasattr(model, "set_eagle3_layers_to_capture"):
        # SGLang's own hook reads the stream before a layer; it takes ids of the layers whose output is meant.
        model.set_eagle3_layers_to_capture(list(layers))
        return
    LayerOutputs(model, layers)


class LayerOutputs:
    """For targets without that hook: reads what decoder layers return and gives it to the logits processor.

    Only Python glue around modules: it runs while a graph is captured and costs nothing at replay.
    """

    def __init__(self, model: nn.Module, layers: tuple[int, ...]) -> None:
        decoder = _decoder_layers(model)
        processor = getattr(model, "logits_processor", None)
        if decoder is None or processor is None or len(decoder) <= max(layers):
            raise RuntimeError(
                f"DFLASH reads hidden states of the target after its layers {list(layers)}; "
                f"{type(model).__name__} has no such decoder layers, or no logits_processor"
            )
        self._outputs: list[Tensor | None] = [None] * len(layers)
        for at, layer in enumerate(layers):
            decoder[layer].register_forward_hook(self._keep(at))
        processor.register_forward_pre_hook(self._give, with_kwargs=True)

    def _keep(self, at: int) -> Callable[..., None]:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._outputs[at] = residual_stream(output)

        return keep

    def _give(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kept = list(self._outputs)
        self._outputs = [None] * len(kept)
        # Positional: input_ids, hidden_states, lm_head, metadata, then the states that are captured.
        return args[:4], {**kwargs, "aux_hidden_states": kept}


def residual_stream(output: Any) -> Tensor:
    """What a decoder layer adds up to: its output, plus the residual that many layers return beside it."""
    parts = [part for part in (output if isinstance(output, tuple) else (output,)) if isinstance(part, Tensor)][:2]
    return parts[0] if len(parts) == 1 else torch.add(*parts)


def _decoder_layers(model: nn.Module) -> nn.ModuleList | None:
    for path in ("model.layers", "language_model.model.layers", "transformer.h", "model.decoder.layers"):
        found: Any = model
        for name in path.split("."):
            found = getattr(found, name, None)
        if isinstance(found, nn.ModuleList):
            return found
    return None
