"""What a trace says, on one that was written by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.traces import GAP, GRAPHS, Trace

DTOH = ("Memcpy DtoH (Device -> Pinned)", 7)
NCCL = "ncclDevKernel_{}(ncclDevKernelArgsStorage<4096ul>)"


def written(
    path: Path,
    *,
    graphs: int = len(GRAPHS),
    copy_inside: bool = False,
    frame: str = "_decode_step",
    ranks: bool = False,
) -> Trace:
    """Two steps of 140 microseconds, 300 apart; each graph is 20 of a kernel, our mask 5, a copy for the scheduler 7.

    The device is 400 behind the host, and 60 later than that from the target on. ``ranks``: every graph sums (3) and
    gathers (2).
    """
    events: list[dict[str, Any]] = []
    number = 0

    def asked(call: str, at: float, category: str, *kernels: tuple[str, float], tid: int = 1, late: float = 0) -> None:
        nonlocal number
        number += 1
        at_once = {"correlation": number}
        events.append({"cat": "cuda_runtime", "name": call, "ts": at, "dur": 1, "tid": tid, "args": at_once})
        start = at + 400 + late
        for name, duration in kernels:
            events.append({"cat": category, "name": name, "ts": start, "dur": duration, "tid": 9, "args": at_once})
            start += duration

    for begin in (1000, 1300):
        events.append({"cat": "python_function", "name": f"worker.py(1): {frame}", "ts": begin, "dur": 140, "tid": 1})
        asked("cuLaunchKernelEx", begin + 1, "kernel", ("_mask", 5))
        passed = (
            [(NCCL.format("AllReduce_Sum_bf16_RING_LL"), 3), (NCCL.format("AllGather_RING_LL"), 2)] if ranks else []
        )
        for graph in range(graphs):
            asked("cudaGraphLaunch", begin + 10 + graph * 25, "kernel", ("gemm", 20), *passed, late=60 * (graph > 2))
        asked("cudaMemcpyAsync", begin + (50 if copy_inside else 150), "gpu_memcpy", DTOH)
        asked("cudaMemcpyAsync", begin + 60, "gpu_memcpy", DTOH, tid=2)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return Trace(path)


def test_copies_are_told_by_who_asked(tmp_path: Path) -> None:
    clean = written(tmp_path / "a.gz").copies_to_host()
    assert (clean.steps, clean.inside, clean.outside) == (2, 0, 4)
    assert written(tmp_path / "b.gz", copy_inside=True).copies_to_host().inside == 2


def test_parts_of_a_step(tmp_path: Path) -> None:
    parts = written(tmp_path / "a.gz").parts()
    assert {name: parts[name] for name in GRAPHS} == dict.fromkeys(GRAPHS, 20.0)
    assert parts["build, positions, mask"] == 5.0
    assert parts["step"] == 300.0 and parts["idle"] == 300.0 - 5 * 20 - 5
    # The drafter ends at 455, the target begins at 545, loading the target takes 20 in between.
    assert parts[GAP] == 545 - 455 - 20


def test_what_passes_between_ranks(tmp_path: Path) -> None:
    parts = written(tmp_path / "a.gz", ranks=True).parts()
    assert {name: parts[name] for name in ("drafter's sums", "target's sums")} == dict.fromkeys(
        ("drafter's sums", "target's sums"), 3.0
    )
    assert parts["top-k gather"] == parts["arg-max gather"] == 2.0
    assert parts["target"] == 20.0 and parts["exchange, load target"] == 5.0


def test_a_trace_that_cannot_tell_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is loading captured"):
        written(tmp_path / "a.gz", graphs=4).parts()
    with pytest.raises(ValueError, match="recorded with stacks"):
        written(tmp_path / "b.gz", frame="forward")
