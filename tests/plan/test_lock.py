"""Locks: hashes for every package of a stack, and what becomes of an installation with them."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources

import pytest
from packaging.requirements import Requirement

from dflash_deploy.audit.stacks import STACKS, get_stack
from dflash_deploy.facts import Facts
from dflash_deploy.model import Run, WriteFile
from dflash_deploy.plan.constraints import constraints
from dflash_deploy.plan.lock import lock_of, lock_text
from dflash_deploy.plan.provision import VenvState, plan_provision
from dflash_deploy.settings import effective

CPU = get_stack("sglang-0.5.16-cpu")


def test_every_lock_belongs_to_a_stack_and_meets_its_pins() -> None:
    found = 0
    for path in resources.files("dflash_deploy.plan").joinpath("locks").iterdir():
        name, _, python = path.name.removesuffix(".txt").rpartition("-cp")
        stack = get_stack(name)
        text = lock_of(stack, (int(python[0]), int(python[1:])), "x86_64")
        assert text, f"{path.name} is of other pins than {name}: make it again"
        held = {line.partition("==")[0].lower().replace("_", "-"): line for line in text.splitlines()[1:]}
        for pin in (*stack.requirements, *stack.no_deps):
            line = held[Requirement(pin).name.lower().replace("_", "-")]
            assert line.partition(" ")[0].lower().replace("_", "-") == pin.lower().replace("_", "-")
        assert all(len(line.partition("sha256:")[2]) == 64 for line in held.values())
        found += 1
    assert found


def test_with_a_lock_nothing_is_resolved(facts: Facts) -> None:
    settings = effective("h", facts, options={"stack": "cpu"})
    steps = plan_provision(settings, facts, VenvState()).steps
    installs = [step for step in steps if isinstance(step, Run) and "install" in step.title]
    assert len(installs) == 1 and "--require-hashes --no-deps -r" in installs[0].describe()
    assert any(isinstance(step, WriteFile) and step.data.startswith(b"# pins: ") for step in steps)
    for other in (replace(settings, lock=False), replace(settings, stack=replace(CPU, requirements=("torch==1.0",)))):
        text = "\n".join(step.describe() for step in plan_provision(other, facts, VenvState()).steps)
        assert "--require-hashes" not in text and "torch==" in text
    assert not lock_of(CPU, (3, 11), "aarch64") and not lock_of(CPU, (3, 13), "x86_64")


def test_without_a_lock_dependencies_are_held(facts: Facts) -> None:
    stack = next(each for each in STACKS if each.name == "sglang-0.5.16-cu130")
    settings = replace(effective("h", facts, options={"stack": "cpu"}), stack=stack)
    steps = plan_provision(settings, facts, VenvState()).steps
    written = next(step for step in steps if isinstance(step, WriteFile) and "constraints" in step.path)
    assert written.data.decode().splitlines() == constraints(stack)
    assert any("-c " + written.path in step.describe() for step in steps)


def test_a_report_becomes_a_lock() -> None:
    item = {
        "metadata": {"name": "a", "version": "1"},
        "download_info": {"archive_info": {"hash": "sha256=" + "0" * 64}},
    }
    assert lock_text(CPU, {"install": [item]}).splitlines() == [f"# pins: {CPU.pins}", "a==1 --hash=sha256:" + "0" * 64]


@pytest.mark.parametrize("stack", [s for s in STACKS if s.flashinfer], ids=lambda s: s.name)
def test_one_flashinfer_and_one_cuda(stack: object) -> None:
    lines = constraints(stack)  # type: ignore[arg-type]
    assert len({line.partition("==")[2] for line in lines if line.startswith("flashinfer")}) == 1
    assert {line.removesuffix("<0")[-2:] for line in lines if line.endswith("<0")} in ({"12"}, {"13"})
