"""What a torch profiler trace says of DDTREE's decode steps: where a step's time goes, and what it copies to the host.

    python -m tests.bench.traces TRACE.json.gz [...]

Traces as SGLang's ``/start_profile`` writes them, on CPU and GPU, with stacks (``tests.bench.pair_gpu --profile``).
"""

from __future__ import annotations

import bisect
import gzip
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STEP = ": _decode_step"
"""The Python frame of a DDTREE step."""
GRAPHS = ("load drafter", "drafter", "load target", "target", "drafter's KV")
"""What a step replays, in this order, where loading is captured."""
KERNELS = {
    "_chunk_topk": "top-k",
    "_merge": "top-k",
    "_build_tree": "build, positions, mask",
    "_positions": "build, positions, mask",
    "_mask": "build, positions, mask",
    "_verify_greedy": "walk",
    "_move_kv": "KV move",
}
"""Our kernels by name; what passes between ranks is told by :data:`EXCHANGES`."""
EXCHANGES = {
    ("allgather", "all_gather"): {"drafter": "top-k gather", "target": "arg-max gather"},
    ("nccl", "cross_device_reduce", "all_reduce", "allreduce"): {
        "drafter": "drafter's sums",
        "target": "target's sums",
    },
}
"""Words in the name of a collective's kernel, NCCL's or SGLang's own, to its part by the graph that replays it. The
layers sum, over all ranks; only we gather. A kernel waits for the slowest rank, and that is in its time."""
GAP = "gap, drafter to target"


@dataclass(frozen=True)
class Copies:
    """steps: decode steps in the trace. inside: copies to the host that were asked for within one (a replayed graph's
    too). outside: all others, the scheduler's results among them.
    """

    steps: int
    inside: int
    outside: int


class Trace:
    """A gzipped Chrome trace.

    Raises:
        ValueError: it has no frame of a decode step, so it can say nothing of one.
    """

    def __init__(self, path: Path) -> None:
        with gzip.open(path, "rt") as file:
            events = json.load(file)["traceEvents"]
        self.steps = sorted(
            (event["tid"], event["ts"], event["ts"] + event["dur"])
            for event in events
            if event.get("cat") == "python_function" and STEP in event["name"]
        )
        if not self.steps:
            raise ValueError(f"{path}: no frame {STEP!r}: was it recorded with stacks?")
        self.device = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        self._asked = {
            event["args"]["correlation"]: event
            for event in events
            if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
        }

    def asked(self, event: dict[str, Any]) -> tuple[int | None, str]:
        """The step within which the host asked for a device event, and the call."""
        call = self._asked.get(event["args"].get("correlation"))
        if call is None:
            return None, ""
        at = bisect.bisect_right(self.steps, (call["tid"], call["ts"], float("inf"))) - 1
        within = at >= 0 and self.steps[at][0] == call["tid"] and call["ts"] <= self.steps[at][2]
        return (at if within else None), str(call["name"])

    def copies_to_host(self) -> Copies:
        copies = [event for event in self.device if event["cat"] == "gpu_memcpy" and "DtoH" in event["name"]]
        inside = sum(self.asked(event)[0] is not None for event in copies)
        return Copies(len(self.steps), inside, len(copies) - inside)

    def parts(self) -> dict[str, float]:
        """Microseconds a step by part; "step" is the time from one to the next, "idle" what the device did nothing in,
        :data:`GAP` the part of that between the end of the drafter's graph and the start of the target's.

        Raises:
            ValueError: fewer than two steps, or a step that does not replay the five graphs.
        """
        if len(self.steps) < 2:
            raise ValueError("a step's time needs two of them")
        spent: Counter[str] = Counter()
        graphs: dict[int, dict[int, None]] = {at: {} for at in range(len(self.steps))}
        busy: dict[tuple[int, str], list[tuple[float, float]]] = {}
        mine: list[tuple[int, str, dict[str, Any]]] = []
        for event in sorted(self.device, key=lambda event: event["ts"]):
            step, call = self.asked(event)
            if step is not None:
                mine.append((step, call, event))
                if "GraphLaunch" in call:
                    graphs[step][event["args"]["correlation"]] = None
        for step, call, event in mine:
            order = list(graphs[step])
            if len(order) != len(GRAPHS):
                raise ValueError(f"step {step} replays {len(order)} graphs, not {len(GRAPHS)}: is loading captured?")
            name = event["name"]
            graph = GRAPHS[order.index(event["args"]["correlation"])] if "GraphLaunch" in call else "eager"
            ours = next((part for kernel, part in KERNELS.items() if name.startswith(kernel)), None)
            passed = next((by for words, by in EXCHANGES.items() if any(word in name.lower() for word in words)), None)
            if passed is not None:
                part = passed.get(graph, f"exchange, {graph}")
            else:
                part = ours or graph
            spent[part] += event["dur"]
            busy.setdefault((step, graph), []).append((event["ts"], event["ts"] + event["dur"]))
        count = len(self.steps)
        for step in range(count):
            drafted, verified = (busy[step, graph] for graph in ("drafter", "target"))
            start, end = max(until for _, until in drafted), min(at for at, _ in verified)
            between = sum(
                until - at for (s, _), spans in busy.items() if s == step for at, until in spans if start <= at < end
            )
            spent[GAP] += max(0.0, end - start - between)
        out = {part: round(us / count, 1) for part, us in spent.most_common()}
        out["step"] = round((self.steps[-1][1] - self.steps[0][1]) / (count - 1), 1)
        out["idle"] = round(out["step"] - (sum(spent.values()) - spent[GAP]) / count, 1)
        return out


def main() -> int:
    for name in sys.argv[1:]:
        try:
            trace = Trace(Path(name))
            print(json.dumps({"trace": Path(name).name, **asdict(trace.copies_to_host()), "us": trace.parts()}))
        except ValueError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
    return 0 if len(sys.argv) > 1 else 2


if __name__ == "__main__":
    sys.exit(main())
