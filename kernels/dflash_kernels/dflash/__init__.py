"""DFLASH and DDTREE for SGLang 0.5.10.post1, which has neither: configuration, draft model, worker, requests.

``config`` and ``request`` import no sglang; the other modules do and run in the server's scheduler.
"""

from __future__ import annotations

from typing import Any


def worker_class(algorithm: str) -> type[Any]:
    """The worker of ``DFLASH`` or ``DDTREE``."""
    if algorithm == "DDTREE":
        from .tree_worker import DDTreeWorker

        return DDTreeWorker
    from .worker import DFlashWorker

    return DFlashWorker
