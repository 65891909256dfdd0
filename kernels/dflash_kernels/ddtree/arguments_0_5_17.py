"""What ``--speculative-algorithm DDTREE`` does to the server arguments of SGLang 0.5.17 and 0.5.18."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import arguments

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def handle_server_args(server_args: ServerArgs) -> None:
    """As that of 0.5.16; the drafter shares the target's numbers.

    Raises:
        ValueError: an argument that DDTREE cannot serve, named.
    """
    arguments.handle_server_args(server_args, tensor_parallel=False, hybrids=False)
    arguments.refuse_small_tree(server_args)
