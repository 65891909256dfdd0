"""What a torch profiler trace says of a decode step: its copies from the device to the host, and who asked for them."""

from __future__ import annotations

import bisect
import gzip
import json
from dataclasses import dataclass
from pathlib import Path

STEP = ": _decode_step"
"""The Python frame of a DDTREE step, as a trace recorded with stacks names it."""


@dataclass(frozen=True)
class Copies:
    """steps: decode steps in the trace. inside: copies to the host that were asked for within one (a replayed graph's
    too). outside: all others, the scheduler's results among them.
    """

    steps: int
    inside: int
    outside: int


def copies_to_host(trace: Path, frame: str = STEP) -> Copies:
    """Count the copies of a gzipped Chrome trace, recorded on CPU and GPU with stacks.

    Raises:
        ValueError: the trace has no such frame, so it can say nothing of it.
    """
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    steps = sorted(
        (event["tid"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "python_function" and frame in event["name"]
    )
    if not steps:
        raise ValueError(f"{trace}: no frame {frame!r}: was it recorded with stacks?")
    asked = {
        event["args"]["correlation"]: (event["tid"], event["ts"])
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }

    def within(tid: int, at: float) -> bool:
        found = bisect.bisect_right(steps, (tid, at, float("inf"))) - 1
        return found >= 0 and steps[found][0] == tid and at <= steps[found][2]

    inside = outside = 0
    for event in events:
        if event.get("cat") == "gpu_memcpy" and "DtoH" in event["name"]:
            asker = asked.get(event["args"].get("correlation"))
            if asker is not None and within(*asker):
                inside += 1
            else:
                outside += 1
    return Copies(len(steps), inside, outside)
