"""Every case under tests/data/audit is named by its rule, and healthy hosts raise no alarm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_deploy.audit.report import Report, audit
from dflash_deploy.audit.request import build_case
from dflash_deploy.facts import Facts
from dflash_deploy.model import Severity
from tests.audit.cases import CASES, HEALTHY, facts_of


def judged(raw: dict[str, object]) -> Report:
    return audit(build_case(Facts.from_json(json.loads(json.dumps(raw)))))


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
def test_healthy_host_is_clean(path: Path) -> None:
    report = judged(json.loads(path.read_text()))
    alarms = [finding for finding in report.findings if finding.severity in (Severity.FAIL, Severity.WARN)]
    assert not alarms
    assert report.coverage["unknown"] == 0
    assert report.coverage["ran"] > 25


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case_is_named_by_its_rule(path: Path) -> None:
    case = json.loads(path.read_text())
    report = judged(facts_of(case))
    alarms = {
        finding.rule: finding for finding in report.findings if finding.severity in (Severity.FAIL, Severity.WARN)
    }
    if case["expect"] is None:
        assert not alarms
        return
    assert case["expect"] in alarms
    found = alarms[case["expect"]]
    assert found.severity == case["severity"]
    assert found.remedy
    assert case.get("says", "") in " ".join((found.message, *found.evidence, found.remedy))
    if case["severity"] == "fail":
        assert report.primary is not None
        assert report.primary.rule == case["expect"], [finding.rule for finding in report.failures]
        roots = {finding.rule for finding in report.failures if not finding.because_of}
        assert roots == {case["expect"]}
    else:
        assert report.compatible
