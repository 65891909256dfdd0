"""Run every rule on a case, find the primary cause, fold its consequences, count honestly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dflash_deploy.audit.rules import RULES, Case
from dflash_deploy.audit.stacks import Choice, choose_stacks
from dflash_deploy.errors import Incompatible
from dflash_deploy.facts.parse import section
from dflash_deploy.model import Finding, Severity

SCHEMA = 1


@dataclass(frozen=True)
class Report:
    """The verdict on one host."""

    host: str
    findings: tuple[Finding, ...]
    """Failures first, the primary cause at the head, its consequences after it."""
    stacks: tuple[Choice, ...]
    stack: str
    """Name of the stack that was judged; "": what is installed."""
    probe: Mapping[str, Any]

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity is Severity.FAIL)

    @property
    def primary(self) -> Finding | None:
        return next((finding for finding in self.findings if finding.primary), None)

    @property
    def compatible(self) -> bool:
        return not self.failures

    @property
    def exit_code(self) -> int:
        """0: compatible, 6: not."""
        return 0 if self.compatible else Incompatible.exit_code

    @property
    def verdict(self) -> str:
        """One line: can or cannot run what, and the primary cause."""
        return f"{self.title}: {self.primary.message}" if self.primary else self.title

    @property
    def title(self) -> str:
        """Can or cannot run what. What was not seen is not promised."""
        if not self.compatible:
            return f"cannot run {self.stack or 'what is installed'}"
        seen = "" if not self.coverage["unknown"] else ", as far as it could be seen"
        environment = next((f.severity for f in self.findings if f.rule == "venv-python-resolves"), Severity.UNKNOWN)
        if self.stack or environment is Severity.OK:
            return f"can run {self.stack or 'what is installed'}{seen}"
        best = next((choice.stack.name for choice in self.stacks if choice.fits), "")
        absent = "" if environment is Severity.UNKNOWN else ", which is not installed"
        return f"can run {best}{absent}{seen}" if best else "no stack fits"

    @property
    def coverage(self) -> dict[str, int]:
        """Rules that ran, did not apply, could not look; a rule counts once."""
        states: dict[str, set[Severity]] = {}
        for finding in self.findings:
            states.setdefault(finding.rule, set()).add(finding.severity)
        unseen = sum(1 for state in states.values() if Severity.UNKNOWN in state)
        idle = sum(1 for state in states.values() if state == {Severity.NOT_APPLICABLE})
        return {"rules": len(states), "ran": len(states) - unseen - idle, "not_applicable": idle, "unknown": unseen}

    @property
    def coverage_line(self) -> str:
        count = self.coverage
        idle = f"{count['not_applicable']} not applicable, {count['unknown']} unknown"
        return f"{count['ran']} of {count['rules']} rules ran, {idle}"

    def as_dict(self) -> dict[str, Any]:
        """As ``audit --json`` prints it; ``report.schema.json`` describes it."""
        return {
            "schema": SCHEMA,
            "host": self.host,
            "compatible": self.compatible,
            "stack": self.stack or None,
            "primary": self.primary.rule if self.primary else None,
            "coverage": self.coverage,
            "findings": [
                {
                    "rule": f.rule,
                    "severity": str(f.severity),
                    "where": str(f.where),
                    "message": f.message,
                    "evidence": list(f.evidence),
                    "remedy": f.remedy,
                    "primary": f.primary,
                    "because_of": f.because_of,
                }
                for f in self.findings
            ],
            "stacks": [
                {"name": c.stack.name, "fits": c.fits, "reasons": list(c.reasons), "changes": list(c.changes)}
                for c in self.stacks
            ],
            "probe": {
                "via": str(self.probe.get("via", "")),
                "seconds": self.probe.get("seconds"),
                "errors": {str(key): str(value) for key, value in section(self.probe, "errors").items()},
            },
        }


ORDER = {Severity.FAIL: 0, Severity.WARN: 1, Severity.UNKNOWN: 2, Severity.OK: 3, Severity.NOT_APPLICABLE: 4}


def fold(findings: list[Finding]) -> list[Finding]:
    """Mark the primary cause and name it in the findings that follow from it."""
    failed = {finding.rule for finding in findings if finding.severity is Severity.FAIL}
    because: dict[str, str] = {}
    for name in sorted(failed, key=lambda rule: (RULES[rule].weight, rule)):
        for consequence in RULES[name].explains:
            if consequence in failed and consequence != name:
                because.setdefault(consequence, name)
    roots = sorted((name for name in failed if name not in because), key=lambda rule: (RULES[rule].weight, rule))
    primary = roots[0] if roots else ""
    marked = False
    result = []
    for finding in findings:
        if finding.severity is Severity.FAIL:
            first = finding.rule == primary and not marked
            marked = marked or first
            finding = replace(finding, primary=first, because_of=because.get(finding.rule, ""))
        result.append(finding)

    def position(finding: Finding) -> tuple[int, int, int, str]:
        root = finding.because_of or finding.rule
        return (ORDER[finding.severity], RULES[root].weight, 1 if finding.because_of else 0, finding.rule)

    return sorted(result, key=lambda finding: (not finding.primary, *position(finding)))


def audit(case: Case) -> Report:
    """Judge the case with every rule."""
    findings = [finding for rule in RULES.values() for finding in rule.run(case)]
    return Report(
        host=case.facts.host,
        findings=tuple(fold(findings)),
        stacks=tuple(choose_stacks(case.facts)),
        stack=case.stack.name if case.stack else "",
        probe=section(case.raw, "probe"),
    )
