"""The commands as users call them, offline and on this machine; the JSON against its schema."""

from __future__ import annotations

import importlib.resources
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_deploy.audit.compare import compare
from dflash_deploy.audit.report import audit
from dflash_deploy.audit.request import build_case
from dflash_deploy.audit.stacks import STACKS, choose_stacks, stack_for
from dflash_deploy.errors import Incompatible
from dflash_deploy.facts import Facts
from dflash_deploy.facts.redact import redact
from dflash_deploy.render import markdown
from tests.audit.cases import CASES, DATA, HEALTHY, facts_of


def call(*argv: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", "from dflash_deploy.cli import main; main()", *argv]
    return subprocess.run(program, capture_output=True, text=True, timeout=120)


def follows(schema: dict[str, Any], value: Any, at: str = "$") -> None:
    """The part of JSON Schema that our schema uses."""
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "integer": int,
        "number": (int, float),
        "null": type(None),
    }
    if "const" in schema:
        assert value == schema["const"], at
    if "enum" in schema:
        assert value in schema["enum"], at
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        assert any(isinstance(value, kinds[name]) for name in names), (at, value)  # type: ignore[arg-type]
    if isinstance(value, dict):
        assert set(schema.get("required", [])) <= set(value), at
        for key, item in value.items():
            rest = schema.get("additionalProperties", {})
            assert key in schema.get("properties", {}) or rest is not False, f"{at}.{key}"
            follows(schema.get("properties", {}).get(key, rest or {}), item, f"{at}.{key}")
    if isinstance(value, list):
        for index, item in enumerate(value):
            follows(schema.get("items", {}), item, f"{at}[{index}]")


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(
        importlib.resources.files("dflash_deploy.audit").joinpath("report.schema.json").read_text()
    )
    return loaded


def test_clean_host_exits_0_and_follows_the_schema(schema: dict[str, Any]) -> None:
    done = call("audit", "--offline", str(HEALTHY[0]), "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    follows(schema, data)
    assert data["compatible"] and data["primary"] is None


def test_incompatible_host_exits_6(tmp_path: Path, schema: dict[str, Any]) -> None:
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(facts_of(json.loads((DATA / "cases/abi-002.json").read_text()))))
    done = call("audit", "--offline", str(path), "--json", "--markdown", str(tmp_path / "report.md"))
    assert done.returncode == 6
    data = json.loads(done.stdout)
    follows(schema, data)
    assert data["primary"] == "extension-symbols-resolve"
    text = (tmp_path / "report.md").read_text()
    assert "**PRIMARY**" in text and "c10\\_cuda\\_check\\_implementation" in text
    people = call("audit", "--offline", str(path))
    assert people.returncode == 6
    assert "PRIMARY" in people.stdout and "not applicable" in people.stdout


def test_every_case_prints(schema: dict[str, Any]) -> None:
    for path in CASES:
        report = audit(build_case(Facts.from_json(facts_of(json.loads(path.read_text())))))
        follows(schema, json.loads(json.dumps(report.as_dict())))
        assert markdown(report)


@pytest.mark.parametrize(
    "argv",
    [
        ("audit",),
        ("audit", "local", "--offline", "x"),
        ("audit", "--offline", "/nonexistent"),
        ("explain", "no-such-rule"),
    ],
)
def test_bad_usage_is_one_message(argv: tuple[str, ...]) -> None:
    done = call(*argv)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ")


def test_unreachable_host_exits_3() -> None:
    done = call("audit", "nobody@127.0.0.1:1", "--connect-timeout", "1", "--json")
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr


def test_this_machine_is_saved_and_judged_again(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    live = call("audit", "local", "--stack", "sglang-0.5.16-cpu", "--save", str(path), "--json")
    assert live.returncode in (0, 6), live.stderr
    again = call("audit", "--offline", str(path), "--json")
    assert json.loads(again.stdout)["findings"] == json.loads(live.stdout)["findings"]
    assert path.stat().st_mode & 0o077 == 0


def test_explain_and_stacks() -> None:
    assert "sgl-project/sglang#30562" in call("explain", "extension-symbols-resolve").stdout
    assert len(json.loads(call("stacks", "--json").stdout)) == len(STACKS)


def host(name: str, **changes: Any) -> Facts:
    raw = json.loads((DATA / "healthy" / f"{name}.json").read_text())
    for key, value in changes.items():
        raw["host"][key] = value
    return Facts.from_json(raw)


def test_driver_decides_the_stack() -> None:
    old, new = host("healthy-h200-cu128"), host("healthy-h200-cu130")
    first = stack_for(old)
    assert first is not None and first.name == "sglang-0.5.10.post1-cu128"
    fits = [choice.stack.name for choice in choose_stacks(new) if choice.fits]
    assert fits[:2] == ["sglang-0.5.16-cu130", "sglang-0.5.23-cu130"]
    refused = next(choice for choice in choose_stacks(old) if choice.stack.name == "sglang-0.5.16-cu130")
    assert not refused.fits and "driver >= 580" in " ".join(refused.reasons) and refused.changes


def test_no_stack_fits_is_a_verdict() -> None:
    raw = json.loads((DATA / "healthy/healthy-h200-cu130.json").read_text())
    raw["host"]["libc"] = {"name": "musl", "version": "1.2.5"}
    with pytest.raises(Incompatible) as caught:
        build_case(Facts.from_json(raw), stack="auto")
    assert "musl" in " ".join(caught.value.evidence) and "glibc" in caught.value.hint


def test_a_stack_is_not_judged_by_an_environment_of_another_release() -> None:
    facts = host("healthy-h200-cu130")
    other = audit(build_case(facts, stack="sglang-0.5.23-cu130"))
    assert other.compatible and not [f for f in other.findings if f.where == "venv" and f.severity in ("fail", "warn")]
    present = next(f for f in other.findings if f.rule == "venv-present")
    assert present.severity == "not-applicable" and "another release" in present.message
    same = audit(build_case(facts, stack="sglang-0.5.16-cu130"))
    assert same.coverage["ran"] > other.coverage["ran"] + 10


def test_copied_venv_story() -> None:
    old, new = host("healthy-h200-cu128"), host("healthy-h200-cu130")
    back = {item.what: item for item in compare(new, old)}
    assert back["/home/serve/venv: the folder itself"].verdict == "rebuild"
    assert "driver" in " ".join(back["/home/serve/venv: its list of pins"].why)
    assert {item.what: item.verdict for item in compare(old, new)}["/home/serve/venv: its list of pins"] == "travels"
    assert back["NVIDIA driver"].verdict == "stays"


def test_redaction_removes_names() -> None:
    raw = json.loads(HEALTHY[0].read_text())
    raw["env"]["http_proxy"] = "http://alice:pw@proxy.corp.example:3128"
    raw["gpu"]["smi"]["gpus"][0]["uuid"] = "GPU-01234567-89ab-cdef-0123-456789abcdef"
    raw["ports"]["note"] = "10.1.2.3 fe80:1:2:3:4:5:6:7"
    raw["env"]["no_proxy"] = "localhost,127.0.0.1,intranet.corp.example,.lan"
    raw["gpu"]["smi"]["processes"] = [{"pid": 7, "name": "/home/bob/venv/bin/python"}]
    found = redact(raw)
    text = json.dumps(found)
    for secret in ("gpu-host", "serve/", "alice", "corp", "01234567", "10.1.2.3", "fe80", "bob", ".lan"):
        assert secret not in text
    pin = "nvidia-cudnn-cu13==9.15.1.9; platform_system == 'Linux'"
    assert redact({"requires": [pin, "10.1.2.3"]})["requires"] == [pin, "0.0.0.0"]
    assert found["env"]["no_proxy"] == "localhost,127.0.0.1,host,host"
    assert Facts.from_json(redact(raw)).driver == Facts.from_json(raw).driver
