"""What a trace says, on one that was written by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.traces import GRAPHS, Trace


def written(path: Path, *, graphs: int = len(GRAPHS), copy_inside: bool = False, frame: str = "_decode_step") -> Trace:
    """Two steps of 100 microseconds, 300 apart; each graph is 20 of a kernel, our mask 5, a copy for the scheduler 7."""
    events: list[dict[str, Any]] = []
    number = 0

    def asked(call: str, at: float, category: str, name: str, duration: float, tid: int = 1) -> None:
        nonlocal number
        number += 1
        at_once = {"correlation": number}
        events.append({"cat": "cuda_runtime", "name": call, "ts": at, "dur": 1, "tid": tid, "args": at_once})
        events.append({"cat": category, "name": name, "ts": at + 400, "dur": duration, "tid": 9, "args": at_once})

    for begin in (1000, 1300):
        events.append({"cat": "python_function", "name": f"worker.py(1): {frame}", "ts": begin, "dur": 100, "tid": 1})
        asked("cuLaunchKernelEx", begin + 1, "kernel", "_mask", 5)
        for graph in range(graphs):
            asked("cudaGraphLaunch", begin + 10 + graph, "kernel", "gemm", 20)
        asked(
            "cudaMemcpyAsync", begin + (50 if copy_inside else 150), "gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 7
        )
        asked("cudaMemcpyAsync", begin + 60, "gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 7, tid=2)
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


def test_a_trace_that_cannot_tell_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is loading captured"):
        written(tmp_path / "a.gz", graphs=4).parts()
    with pytest.raises(ValueError, match="recorded with stacks"):
        written(tmp_path / "b.gz", frame="forward")
