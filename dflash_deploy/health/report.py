"""What a health check found: one rung after another, each with what it proves."""

from __future__ import annotations

from collections.abc import Mapping
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
    def ok(self) -> bool:
        """Every rung of the level was run and none failed."""
        return bool(self.rungs) and all(r.status in (RungStatus.OK, RungStatus.SKIPPED) for r in self.rungs)

    def as_dict(self) -> dict[str, Any]:
        """JSON data; the keys are stable: host, level, ok, failed, rungs, data."""
        return {
            "host": self.host,
            "level": self.level.value,
            "ok": self.ok,
            "failed": self.failed.name if self.failed else None,
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


def prometheus(reports: tuple[HealthReport, ...]) -> str:
    """The reports as text for node-exporter's textfile collector."""
    lines = ["# HELP dflash_healthy 1 when every rung up to the level holds.", "# TYPE dflash_healthy gauge"]
    lines += [f'dflash_healthy{{host="{_label(r.host)}",level="{r.level}"}} {int(r.ok)}' for r in reports]
    lines += ["# HELP dflash_health_rung 1 ok, 0 failed, starting or not run; skipped rungs are left out."]
    lines += ["# TYPE dflash_health_rung gauge"]
    for report in reports:
        for rung in report.rungs:
            if rung.status is not RungStatus.SKIPPED:
                value = int(rung.status is RungStatus.OK)
                lines.append(f'dflash_health_rung{{host="{_label(report.host)}",rung="{rung.name}"}} {value}')
    for name, key, help_text in (
        (
            "dflash_acceptance_length",
            "acceptance_length",
            "Tokens a verify step yields on average, bonus token included.",
        ),
        ("dflash_tokens_per_second", "tokens_per_s", "Output tokens per second during the probe."),
    ):
        values = [(r.host, r.data[key]) for r in reports if r.data.get(key) is not None]
        if values:
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} gauge"]
            lines += [f'{name}{{host="{_label(host)}"}} {value:g}' for host, value in values]
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
