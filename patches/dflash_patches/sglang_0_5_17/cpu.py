"""The ``cpu`` sets: SGLang 0.5.17 and 0.5.18 on a CPU, their Triton kernels run by Triton's interpreter (``TRITON_INTERPRET=1``).

As that of 0.5.16; the relay between scheduler and worker minds CPU tensors by itself here.
"""

from __future__ import annotations

from dflash_patches.shared.cpu import cpu_set

CPU = cpu_set("server_args", "npu", "0.5.17", "0.5.18")
