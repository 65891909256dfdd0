"""A bench as JSON data and as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from dflash_deploy.bench import plots
from dflash_deploy.bench.load import Sweep, percentile

PERCENTS = (50, 90, 99)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}": round(percentile(values, percent), 4) for percent in PERCENTS}


def sweep_dict(sweep: Sweep) -> dict[str, Any]:
    """One sweep; times in seconds."""
    good, accepted = sweep.good, sweep.acceptance
    width, rates = sweep.timeline()
    errors = [sample.error for sample in sweep.samples if sample.error]
    return {
        "method": sweep.method,
        "concurrency": sweep.concurrency,
        "requests": len(sweep.samples),
        "failed": len(errors),
        "errors": list(dict.fromkeys(errors))[:5],
        "seconds": round(sweep.seconds, 3),
        "output_tokens": sum(sample.tokens for sample in good),
        "tokens_per_s": round(sweep.tokens_per_s, 3),
        "first_token_s": _spread([sample.first for sample in good]),
        "per_token_s": _spread([sample.per_token for sample in good if sample.per_token]),
        "gap_s": _spread([gap for sample in good for gap in sample.gaps]),
        "whole_s": _spread([sample.whole for sample in good]),
        "acceptance_length": round(accepted.length, 4) if accepted.steps else None,
        "acceptance_by_position": [round(share, 4) for share in accepted.by_position],
        "acceptance_histogram": list(accepted.histogram),
        "timeline": {"bucket_s": round(width, 4), "tokens_per_s": [round(rate, 2) for rate in rates]},
    }


def as_dict(about: Mapping[str, Any], sweeps: Sequence[Sweep], **more: Any) -> dict[str, Any]:
    """The whole bench. Keys are stable: about, sweeps, and what ``more`` names (starts, sglang_bench)."""
    return {"about": dict(about), "sweeps": [sweep_dict(sweep) for sweep in sweeps], **more}


def html(data: Mapping[str, Any], templates: Path) -> str:
    """The report.

    Args:
        data: of :func:`as_dict`, also after a trip through JSON.
        templates: folder with ``bench.html.j2``.
    """
    sweeps: list[dict[str, Any]] = list(data["sweeps"])
    methods = list(dict.fromkeys(str(sweep["method"]) for sweep in sweeps))
    widths = sorted({int(sweep["concurrency"]) for sweep in sweeps})

    def of(method: str) -> list[dict[str, Any]]:
        return [sweep for sweep in sweeps if sweep["method"] == method]

    drawn = []
    drawn.append(
        (
            "Tokens a second by batch",
            "All output tokens of all requests, over the time of the sweep.",
            plots.lines(
                "Tokens a second by batch", "requests at once", "tokens/s",
                {m: [(s["concurrency"], s["tokens_per_s"]) for s in of(m)] for m in methods}, marks=True,
            ),
        )
    )  # fmt: skip
    drawn.append(
        (
            "Tokens a second by width",
            "The same figures by method: a wider tree is worth it as long as its bar is the highest.",
            plots.bars(
                "Tokens a second by width", "method", "tokens/s", methods,
                {f"{w} at once": [next((s["tokens_per_s"] for s in of(m) if s["concurrency"] == w), 0.0)
                                  for m in methods] for w in widths},
            ),
        )
    )  # fmt: skip
    positions: dict[str, list[float]] = {}
    for method in methods:
        for sweep in of(method):
            if sweep["acceptance_by_position"]:
                positions.setdefault(method, sweep["acceptance_by_position"])
    if positions:
        longest = max(len(shares) for shares in positions.values())
        drawn.append(
            (
                "Acceptance per position",
                "Share of verify steps that accepted the draft up to a position, at the lowest concurrency.",
                plots.bars(
                    "Acceptance per position", "position in the draft", "share of steps",
                    [str(at) for at in range(1, longest + 1)], positions,
                ),
            )
        )  # fmt: skip
    for key, title, text in (
        (
            "first_token_s",
            "Time to the first token",
            "Half of the requests are below p50, all but one in a hundred below p99 (dashed).",
        ),
        (
            "gap_s",
            "Wait between pieces of the stream",
            "One piece is one step: a speculative server sends several tokens at once.",
        ),
    ):
        drawn.append(
            (
                title,
                text,
                plots.lines(
                    title, "requests at once", "seconds",
                    {f"{m} {p}": [(s["concurrency"], s[key][p]) for s in of(m)]
                     for m in methods for p in ("p50", "p99")},
                    marks=True, pairs=True,
                ),
            )
        )  # fmt: skip
    drawn.append(
        (
            "Timeline",
            "Tokens a second while the widest sweep of each method ran.",
            plots.lines("Timeline", "seconds", "tokens/s", {m: _timeline(of(m)[-1]) for m in methods}, marks=False),
        )
    )
    starts = [row for row in data.get("starts") or () if row.get("phases")]
    if starts:
        rows = [
            (str(row.get("label") or row.get("time", ""))[:16], [(p, float(s)) for p, s in row["phases"].items()])
            for row in starts
        ]
        drawn.append(("Starts", "How long each phase of a start took.", plots.spans("Starts", rows)))
    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates), undefined=jinja2.StrictUndefined, autoescape=True, trim_blocks=True
    )
    return jinja.get_template("bench.html.j2").render(data=data, drawn=drawn, percents=[f"p{p}" for p in PERCENTS])


def _timeline(sweep: Mapping[str, Any]) -> list[tuple[float, float]]:
    line = sweep["timeline"]
    return [((at + 0.5) * line["bucket_s"], rate) for at, rate in enumerate(line["tokens_per_s"])]
