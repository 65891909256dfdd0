"""What a health check found: one rung after another, each with what it proves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How far up the ladder to go. Each level includes those before it."""

    LIVE = "live"
    READY = "ready"
    GENERATE = "generate"
    SPEC = "spec"
    LOSSLESS = "lossless"
    SOAK = "soak"


class RungStatus(StrEnum):
    """Verdict of one rung."""

    OK = "ok"
    FAILED = "failed"
    STARTING = "starting"
    """Not ready yet, and that is no fault."""
    SKIPPED = "skipped"
    """It does not apply to this deployment."""
    NOT_RUN = "not-run"
    """An earlier rung failed."""


EXIT_CODES = {
    "process": 90,
    "host": 91,
    "health": 92,
    "arguments": 93,
    "patches": 94,
    "completion": 95,
    "concurrent": 96,
    "requests": 97,
    "speculation": 98,
    "lossless": 99,
    "soak": 100,
}
"""Exit code of ``health`` by the rung that does not hold: 90, and how high the ladder could be climbed."""


@dataclass(frozen=True)
class Rung:
    """One question with its answer."""

    name: str
    level: Level
    status: RungStatus
    proves: str
    evidence: tuple[str, ...] = ()
    diagnosis: str = ""
    """Id of the signature that the evidence shows, if any."""
    hint: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """It holds, or does not apply."""
        return self.status in (RungStatus.OK, RungStatus.SKIPPED)


@dataclass(frozen=True)
class HealthReport:
    """All rungs of one check."""

    host: str
    level: Level
    rungs: tuple[Rung, ...]
    data: Mapping[str, Any] = field(default_factory=dict)
    """url, model, completion, acceptance_length, acceptance_histogram, acceptance_by_position, tokens_per_s, …, where
    known.
    """

    @property
    def failed(self) -> Rung | None:
        """The first rung that is not as it should be."""
        return next((r for r in self.rungs if r.status in (RungStatus.FAILED, RungStatus.STARTING)), None)

    @property
    def exit_code(self) -> int:
        """0, or that of the rung that does not hold."""
        return EXIT_CODES[self.failed.name] if self.failed else 0

    @property
    def ok(self) -> bool:
        """Every rung of the level was run and none failed."""
        return bool(self.rungs) and all(r.good for r in self.rungs)

    def as_dict(self) -> dict[str, Any]:
        """JSON data; the keys are stable: host, level, ok, failed, exit_code, rungs, data."""
        return {
            "host": self.host,
            "level": self.level.value,
            "ok": self.ok,
            "failed": self.failed.name if self.failed else None,
            "exit_code": self.exit_code,
            "rungs": [
                {
                    "name": r.name,
                    "level": r.level.value,
                    "status": r.status.value,
                    "proves": r.proves,
                    "evidence": list(r.evidence),
                    "diagnosis": r.diagnosis or None,
                    "hint": r.hint,
                    "seconds": round(r.seconds, 3),
                }
                for r in self.rungs
            ],
            "data": dict(self.data),
        }


def prometheus(reports: tuple[HealthReport, ...], unreachable: tuple[str, ...] = ()) -> str:
    """The reports as text for node-exporter's textfile collector.

    Args:
        unreachable: hosts that gave no report at all; they count as not healthy.
    """
    lines: list[str] = []

    def family(name: str, text: str, rows: Sequence[tuple[str, float]]) -> None:
        if rows:
            lines.extend((f"# HELP {name} {text}", f"# TYPE {name} gauge"))
            lines.extend(f"{name}{{{labels}}} {value:g}" for labels, value in rows)

    def host(report: HealthReport) -> str:
        return f'host="{_label(report.host)}"'

    family(
        "dflash_healthy",
        "1 when every rung up to the level holds.",
        [(f'{host(r)},level="{r.level}"', int(r.ok)) for r in reports]
        + [(f'host="{_label(name)}",level=""', 0) for name in unreachable],
    )
    family(
        "dflash_host_reachable",
        "1 when the host answered at all.",
        [(host(r), 1) for r in reports] + [(f'host="{_label(name)}"', 0) for name in unreachable],
    )
    asked = [(r, g) for r in reports for g in r.rungs if g.status is not RungStatus.SKIPPED]
    family(
        "dflash_health_rung",
        "1 ok, 0 failed, starting or not run; skipped rungs are left out.",
        [(f'{host(r)},rung="{g.name}"', int(g.status is RungStatus.OK)) for r, g in asked],
    )
    family(
        "dflash_health_rung_seconds",
        "How long the rung took.",
        [(f'{host(r)},rung="{g.name}"', g.seconds) for r, g in asked if g.status is not RungStatus.NOT_RUN],
    )
    for name, key, text in (
        ("dflash_acceptance_length", "acceptance_length", "Tokens a verify step yields on average, bonus included."),
        ("dflash_tokens_per_second", "tokens_per_s", "Output tokens per second during the probe."),
        ("dflash_service_restarts", "restarts", "Restarts since the service was launched."),
    ):
        family(name, text, [(host(r), float(r.data[key])) for r in reports if r.data.get(key) is not None])
    family(
        "dflash_accepted_at_position",
        "Share of verify steps that accepted the draft up to this position.",
        [
            (f'{host(r)},position="{at}"', share)
            for r in reports
            for at, share in enumerate(r.data.get("acceptance_by_position") or (), 1)
        ],
    )
    for name, key, scale, text in (
        ("dflash_gpu_memory_used_bytes", "used_mib", 2**20, "GPU memory in use, of all processes."),
        ("dflash_gpu_utilisation_percent", "percent", 1, "Share of time with a kernel running."),
    ):
        family(
            name,
            text,
            [
                (f'{host(r)},gpu="{gpu["index"]}"', float(gpu[key]) * scale)
                for r in reports
                for gpu in r.data.get("gpus") or ()
                if gpu.get(key) is not None
            ],
        )
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
