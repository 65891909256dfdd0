"""The ``cpu`` sets: SGLang 0.5.19 to 0.5.21 on a CPU, their Triton kernels run by Triton's interpreter (``TRITON_INTERPRET=1``).

As that of 0.5.16; the relay between scheduler and worker minds CPU tensors by itself here.
"""

from __future__ import annotations

from dflash_patches.shared.cpu import cpu_set

CPU_19 = cpu_set("cfg", "npu", "0.5.19")
CPU_20 = cpu_set("cfg", "xpu", "0.5.20", "0.5.21")
