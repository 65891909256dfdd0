"""What a wheelhouse is, what it lacks, what is wrong with it. No network but for the one build."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_deploy.audit.stacks import STACKS, get_stack
from dflash_deploy.errors import UsageError
from dflash_deploy.facts import Facts, PythonInterpreter
from dflash_deploy.plan.constraints import FLASHINFER, constraints
from dflash_deploy.wheelhouse import House, Wheel, WheelTarget
from dflash_deploy.wheelhouse.build import target_for
from dflash_deploy.wheelhouse.closure import lacking
from dflash_deploy.wheelhouse.house import read_house
from tests.wheelhouse.conftest import Cli

TARGET = WheelTarget((3, 11), "x86_64", (2, 31))


@pytest.mark.parametrize(
    ("file", "fits"),
    [
        ("a-1-py3-none-any.whl", True),
        ("a-1-cp311-cp311-manylinux_2_28_x86_64.whl", True),
        ("a-1-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", True),
        ("a-1-cp39-abi3-manylinux_2_31_x86_64.whl", True),
        ("a-1-cp311-cp311-manylinux_2_34_x86_64.whl", False),
        ("a-1-cp312-cp312-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp311-cp311-manylinux_2_28_aarch64.whl", False),
        ("a-1-cp311-cp311-win_amd64.whl", False),
    ],
)
def test_which_wheels_a_target_takes(file: str, fits: bool) -> None:
    assert Wheel(file, "").fits(TARGET) is fits


def test_markers_count_for_the_target_not_for_this_python() -> None:
    wheels = [Wheel("a-1-py3-none-any.whl", ""), Wheel("b-2.0-py3-none-any.whl", "")]
    needs = {
        "a-1-py3-none-any.whl": [
            "b>=1; python_version < '3.12'",
            "old; python_version < '3.11'",
            "win; sys_platform == 'win32'",
            "more; extra == 'x'",
        ]
    }

    def short(target: WheelTarget, *wanted: str, bare: tuple[str, ...] = ()) -> list[str]:
        return lacking(wheels, needs, target, wanted=wanted, bare=bare)

    assert short(TARGET, "a==1") == []
    assert short(WheelTarget((3, 10)), "a==1") == ["old, which a asks for"]
    assert short(TARGET, "a[x]==1") == ["more, which a asks for"]
    assert short(TARGET, "b>=3") == ["b>=3 (here: 2.0), which the stack asks for"]
    # What is installed without its dependencies asks for nothing.
    assert short(WheelTarget((3, 10)), bare=("a==1",)) == []


def test_a_host_names_the_target() -> None:
    stack = get_stack("sglang-0.5.16-cpu")
    pythons = (PythonInterpreter("/usr/bin/python3.13", (3, 13, 0), False), PythonInterpreter("/p", (3, 12, 1), True))
    facts = Facts("h", "x86_64", "Linux", "/root", "root", 0, glibc=(2, 36), pythons=pythons)
    assert target_for(stack, facts) == WheelTarget((3, 12), "x86_64", (2, 36))
    assert target_for(stack, facts, "3.11").python == (3, 11)
    with pytest.raises(UsageError):
        target_for(stack, facts, "3.9")


def test_a_manifest_survives_its_file_and_bad_ones_are_refused(tmp_path: Path) -> None:
    house = House(str(tmp_path), "s", "p", TARGET, (Wheel("a-1-py3-none-any.whl", "00", 3),))
    path = tmp_path / "wheelhouse.json"
    path.write_text(json.dumps(house.to_json()))
    assert read_house(tmp_path) == house
    for text in ("{", "{}", "[]", json.dumps({**house.to_json(), "schema": 2}),
                 json.dumps(house.to_json()).replace("a-1-py3", "../a-1-py3")):  # fmt: skip
        path.write_text(text)
        with pytest.raises(UsageError):
            read_house(tmp_path)
    path.unlink()
    with pytest.raises(UsageError, match="no finished wheelhouse"):
        read_house(tmp_path)


def test_constraints_keep_one_cuda_major_and_one_flashinfer() -> None:
    for stack in STACKS:
        lines = constraints(stack)
        if stack.device != "cuda":
            assert not any("cu12" in line or "cu13" in line for line in lines)
            continue
        other, own = ("cu12", "cu13") if stack.cuda.startswith("13") else ("cu13", "cu12")
        assert f"nvidia-cublas-{other}<0" in lines and not any(line.endswith(f"-{own}<0") for line in lines)
        assert {f"{name}=={stack.flashinfer}" for name in FLASHINFER} <= set(lines)
        assert f"torch=={stack.torch}" in lines and stack.kernel in lines


@pytest.mark.wheels
def test_damage_is_named_by_check_and_mended_by_build(cli: Cli, house: Callable[[], Path]) -> None:
    folder = house()
    jinja, torch = (next(folder.glob(f"{name}-*.whl")) for name in ("jinja2", "torch"))
    idna = next(folder.glob("idna-*.whl"))
    jinja.write_bytes(jinja.read_bytes()[:-7])
    data = bytearray(torch.read_bytes())
    data[len(data) // 2] ^= 1
    torch.write_bytes(data)
    idna.unlink()
    found = cli.json("wheelhouse", "check", str(folder), exit_code=2)["problems"]
    assert len(found) == 3
    assert any(line.startswith(f"{jinja.name}: truncated") for line in found)
    assert any(line.startswith(f"{torch.name}: wrong hash") for line in found)
    assert any(line.startswith(f"{idna.name}: No such file") for line in found)
    done = cli.run("wheelhouse", "build", "--stack", "standin", "--out", str(folder))
    assert done.returncode == 0, done.stderr
    # Resolved once, and only what was damaged came again.
    assert "resolving" not in done.stderr and "4 of 7 wheels are there" in done.stderr
    assert cli.json("wheelhouse", "check", str(folder))["problems"] == []


@pytest.mark.wheels
def test_a_set_that_is_not_whole_is_refused(cli: Cli, house: Callable[[], Path]) -> None:
    folder = house()
    manifest = folder / "wheelhouse.json"
    raw = json.loads(manifest.read_text())
    raw["wheels"] = [wheel for wheel in raw["wheels"] if not wheel["file"].startswith("markupsafe")]
    manifest.write_text(json.dumps(raw))
    found = cli.json("wheelhouse", "check", str(folder), exit_code=2)["problems"]
    assert len(found) == 1 and "lacks MarkupSafe>=2.0" in found[0] and "jinja2" in found[0]


def test_a_folder_of_something_else_is_not_touched(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    done = cli.run("wheelhouse", "build", "--stack", "standin", "--out", str(tmp_path))
    assert done.returncode == 2 and "holds something else" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
