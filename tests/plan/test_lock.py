"""Locks: hashes for every package of a stack, and what becomes of an installation with them."""

from __future__ import annotations

import re
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
        bound = [line for line in constraints(stack) if "==" in line and Requirement(line).name in held]
        for pin in (*stack.requirements, *stack.no_deps, *bound):
            line = held[Requirement(pin).name.lower().replace("_", "-")]
            assert line.partition(" ")[0].lower().replace("_", "-") == pin.lower().replace("_", "-")
        hashes = [word for line in held.values() for word in line.split()[1:]]
        assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", word) for word in hashes) and len(hashes) >= len(held)
        # What constraints keep out of a resolution is not in what came of one.
        kept_out = {line.removesuffix("<0") for line in constraints(stack) if line.endswith("<0")}
        assert not kept_out & set(held)
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
    assert not lock_of(CPU, (3, 11), "aarch64") and not lock_of(CPU, (3, 10), "x86_64")


def test_without_a_lock_dependencies_are_held(facts: Facts) -> None:
    stack = next(each for each in STACKS if each.name == "sglang-0.5.16-cu130")
    settings = replace(effective("h", facts, options={"stack": "cpu"}), stack=stack, lock=False)
    steps = plan_provision(settings, facts, VenvState()).steps
    written = next(step for step in steps if isinstance(step, WriteFile) and "constraints" in step.path)
    assert written.data.decode().splitlines() == constraints(stack)
    assert any("-c " + written.path in step.describe() for step in steps)


def test_what_uv_resolved_becomes_a_lock() -> None:
    def package(name: str, *files: str) -> dict[str, object]:
        wheels = [{"url": f"https://index/{file}", "hashes": {"sha256": f"{n}" * 64}} for n, file in enumerate(files)]
        return {"name": name, "version": "1", "wheels": wheels}

    plain = package("b", "b-1-cp311-cp311-win_amd64.whl", "b-1-cp311-cp311-manylinux_2_28_x86_64.whl")
    text = lock_text(CPU, (3, 11), [{"packages": [plain]}, {"packages": [package("a", "a-1-py3-none-any.whl")]}])
    assert text.splitlines() == [
        f"# pins: {CPU.pins}", "a==1 --hash=sha256:" + "0" * 64, "b==1 --hash=sha256:" + "1" * 64
    ]  # fmt: skip
    with pytest.raises(ValueError, match="b 1: no wheel"):
        lock_text(CPU, (3, 12), [{"packages": [plain]}])


@pytest.mark.parametrize("stack", [s for s in STACKS if s.flashinfer], ids=lambda s: s.name)
def test_one_flashinfer_and_one_cuda(stack: object) -> None:
    lines = constraints(stack)  # type: ignore[arg-type]
    assert len({line.partition("==")[2] for line in lines if line.startswith("flashinfer")}) == 1
    assert {line.removesuffix("<0")[-2:] for line in lines if line.endswith("<0")} in ({"12"}, {"13"})
