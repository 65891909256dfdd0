"""What the probe could not read is unknown: never fine, never an alarm, never "does not apply". What makes no sense
still gets an answer."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_deploy.audit.compare import compare
from dflash_deploy.audit.report import audit
from dflash_deploy.audit.request import build_case
from dflash_deploy.errors import DflashError
from dflash_deploy.facts import Facts
from dflash_deploy.facts.redact import redact
from dflash_deploy.render import markdown
from tests.audit.cases import CASES, HEALTHY, facts_of

Place = tuple[str | int, ...]
DECIDES = ("path", "asked", "exists", "kind")
"""Keys of an environment or a model folder that say which it is; the probe always writes them."""
JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1 << 70, 3.5, float("nan"), "", "x", "12", "12.8", "\0\u202e", "9" * 5000, "1.2.3.4.5"),
    *([], [[]], [None], {}, {"a": 1}, ["x", "y"], [1, 2, 3]),
)


def severities(raw: dict[str, Any]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for finding in audit(build_case(Facts.from_json(raw))).findings:
        found.setdefault(finding.rule, set()).add(str(finding.severity))
    return found


def sections(raw: dict[str, Any]) -> Iterator[Place]:
    """Everything that the probe reads with a step of its own, and so may fail to read."""
    tops = [name for name in raw if name not in ("schema", "probe", "request", "name")]
    yield from ((name,) for name in tops)
    yield from ((name, key) for name in tops if isinstance(raw[name], dict) for key in raw[name])
    yield from (("gpu", "smi", key) for key in raw["gpu"]["smi"])
    for top in (("venvs", "environments"), ("models",)):
        items = raw[top[0]][top[1]] if len(top) > 1 else raw[top[0]]
        yield from ((*top, index, key) for index, item in enumerate(items) for key in item if key not in DECIDES)


def without(raw: dict[str, Any], place: Place) -> dict[str, Any]:
    """The facts with one part not read; a whole section has an error of the probe."""
    found = copy.deepcopy(raw)
    value: Any = found
    for step in place[:-1]:
        value = value[step]
    del value[place[-1]]
    if len(place) == 1:
        found["probe"]["errors"] = {place[0]: "no answer within 25 s"}
    return found


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
def test_what_was_not_read_is_unknown(path: Path) -> None:
    raw = json.loads(path.read_text())
    whole = severities(raw)
    wrong = []
    for place in sections(raw):
        for rule, states in severities(without(raw, place)).items():
            if states != whole[rule] and "unknown" not in states:
                wrong.append((".".join(map(str, place)), rule, whole[rule], states))
    assert not wrong


@pytest.mark.parametrize("section", ["venvs", "gpu", "python", "host"])
def test_a_section_that_failed_is_counted_and_named(section: str) -> None:
    raw = without(json.loads(HEALTHY[0].read_text()), (section,))
    report = audit(build_case(Facts.from_json(raw)))
    assert report.coverage["unknown"] >= 5 or section == "host"
    assert report.coverage["unknown"] >= 2
    assert any(f"{section} was not seen: no answer within 25 s" in finding.message for finding in report.findings)


def test_the_title_promises_no_more_than_was_seen() -> None:
    raw = json.loads(HEALTHY[0].read_text())
    assert audit(build_case(Facts.from_json(raw))).title == "can run what is installed"
    blind = audit(build_case(Facts.from_json(without(raw, ("venvs",)))))
    assert blind.title == "can run sglang-0.5.16-cu130, as far as it could be seen"
    raw["venvs"]["environments"] = []
    assert audit(build_case(Facts.from_json(raw))).title == "can run sglang-0.5.16-cu130, which is not installed"


def test_nvidia_smi_that_hangs_leaves_gpu_rules_unknown() -> None:
    raw = json.loads(HEALTHY[0].read_text())
    raw["gpu"]["smi"] = {"status": "timeout", "error": "", "gpus": [], "processes": [], "topology": "", "p2p": ""}
    states = severities(raw)
    for rule in ("gpu-visible", "gpu-architecture-covered", "gpu-memory-free", "gpu-driver-answers"):
        assert states[rule] == {"unknown"}, rule
    assert states["driver-supports-cuda"] == {"ok"}


def test_an_environment_that_is_not_there_is_said() -> None:
    raw = json.loads(HEALTHY[0].read_text())
    raw["venvs"]["environments"] = [{"path": "/srv/none", "asked": True, "exists": False}]
    assert severities(raw)["venv-present"] == {"warn"}
    raw["request"]["stack"] = "sglang-0.5.16-cu130"
    assert severities(raw)["venv-present"] == {"not-applicable"}


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        yield (*at, key)
        yield from places(item, (*at, key))


@pytest.mark.parametrize("seed", range(5))
def test_facts_that_make_no_sense_get_an_answer(seed: int) -> None:
    documents = [json.loads(path.read_text()) for path in HEALTHY]
    documents += [facts_of(json.loads(path.read_text())) for path in CASES[seed::5]]
    sound = Facts.from_json(documents[0])
    rng = random.Random(seed)
    for _ in range(60):
        raw = copy.deepcopy(rng.choice(documents))
        known = list(places(raw))
        for place in rng.choices(known, k=rng.choice((1, 1, 2, 5, 20))):
            value: Any = raw
            try:
                for step in place[:-1]:
                    value = value[step]
                value[place[-1]] = copy.deepcopy(rng.choice(JUNK))
            except (KeyError, IndexError, TypeError):
                continue  # an earlier change took the place away
        try:
            facts = Facts.from_json(raw)
            report = audit(build_case(facts))
        except DflashError as error:
            assert error.message
            continue
        json.dumps(report.as_dict())
        assert markdown(report) and compare(facts, sound) and compare(sound, facts) is not None
        redact(raw)
