"""What ``--speculative-algorithm DDTREE`` does to server arguments since SGLang 0.5.19: they are declared, not assigned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .arguments import refuse_small_tree, tree_arguments

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


class _Declared:
    """Server arguments with what has been decided so far; setting one declares it."""

    def __init__(self, server_args: ServerArgs) -> None:
        object.__setattr__(self, "_record", server_args)

    def __getattr__(self, name: str) -> Any:
        from sglang.srt.arg_groups.overrides import resolving_view

        return getattr(resolving_view(self._record), name)

    def __setattr__(self, name: str, value: Any) -> None:
        from sglang.srt.arg_groups.overrides import declare_resolution

        declare_resolution(self._record, "ddtree", **{name: value})


def handle_server_args(server_args: ServerArgs) -> None:
    """As :func:`.arguments.tree_arguments`.

    Raises:
        ValueError: an argument that DDTREE cannot serve, named.
    """
    from sglang.srt.arg_groups.overrides import attention_backends_of
    from sglang.srt.arg_groups.speculative_hook import _handle_dflash

    declared = _Declared(server_args)
    tree_arguments(declared, lambda: _handle_dflash(server_args), lambda: attention_backends_of(declared))
    refuse_small_tree(declared)
