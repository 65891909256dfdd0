"""Releases on a host: each is proved before it counts, a failed one changes nothing, and one can go back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.releases.conftest import Deployed

pytestmark = [pytest.mark.waits, pytest.mark.timeout(1500)]


def root_of(deployed: Deployed) -> Path:
    return Path(deployed.place[1])


def current(deployed: Deployed) -> str:
    return (root_of(deployed) / "current").readlink().name


def test_a_second_up_changes_nothing(deployed: Deployed) -> None:
    again = deployed.up()
    assert not again["changed"] and {step["status"] for step in again["steps"]} == {"ok"}
    plan = deployed.plan()
    assert plan["changes"] is False
    assert deployed.json("status")["release"] == current(deployed)


def test_a_release_holds_what_it_needs(deployed: Deployed) -> None:
    folder = root_of(deployed) / "releases" / current(deployed)
    assert {each.name for each in folder.iterdir()} >= {"venv", "patched.json", "manifest.json", "config", "log"}
    venv = (folder / "venv").resolve()
    base = venv.with_name(venv.name.partition("-")[0])
    site, other = (next(path.glob("lib/python3*/site-packages")) for path in (venv, base))
    # Big files share their blocks, what is patched does not, and the one as installed stays as it was installed.
    assert (site / "big/data.bin").samefile(other / "big/data.bin")
    assert not (site / "sglang/hook.py").samefile(other / "sglang/hook.py")
    assert "one" in (site / "sglang/hook.py").read_text() and "one" not in (other / "sglang/hook.py").read_text()
    assert str(base) + "/" not in (venv / "bin/pip").read_text() and str(venv) in (venv / "bin/pip").read_text()


def test_change_fail_roll_back(deployed: Deployed) -> None:
    first = current(deployed)
    # Other patches and another setting: another release, its environment made from the same base.
    plan = deployed.plan("--budget", "8", code=10, STANDIN_PATCH="two")
    diffs = "".join(step["diff"] for each in plan["plans"] for step in each["steps"])
    assert "+    return 'two'" in diffs and '+ "budget": 8' in diffs
    up = deployed.up("--budget", "8", STANDIN_PATCH="two")
    second = current(deployed)
    assert plan["release"] == up["release"] == second != first
    assert (deployed.serving()["hook"], deployed.serving()["speculative_ddtree_budget"]) == ("two", "8")
    # One that cannot start: the service goes on, the error says why and how to go on.
    failed = deployed.up("--budget", "9", "--server-arg=--stand-in-die", code=9, STANDIN_PATCH="two")["error"]
    assert "RuntimeError: as asked" in "\n".join(failed["evidence"])
    assert f"release {second} serves again" in failed["evidence"] and "run the same command again" in failed["hint"]
    assert current(deployed) == second and deployed.serving()["speculative_ddtree_budget"] == "8"
    # One that starts and answers wrongly, with other pins.
    failed = deployed.up("--server-arg=--stand-in-garbage", code=9, STANDIN_BIG="2.0")["error"]
    assert "checked completion differs" in failed["evidence"][0]
    assert (deployed.serving()["hook"], deployed.serving()["big"]) == ("two", "1.0")
    rows = {each["id"]: each for each in deployed.json("releases")["releases"]}
    assert [bool(rows[name]["failed"]) for name in sorted(rows)] == [False, False, True, True]
    third = next(name for name in rows if name.startswith("0003"))
    assert "as asked" in "\n".join(deployed.json("logs", "--release", third)["lines"])
    # Back, and forth again by name: environment, patches and configuration together.
    deployed.json("rollback")
    assert current(deployed) == first
    assert (deployed.serving()["hook"], deployed.serving()["speculative_ddtree_budget"]) == ("one", "16")
    deployed.json("rollback", "--to", second)
    assert current(deployed) == second and deployed.serving()["hook"] == "two"
    assert deployed.json("health")["ok"]
    # A release whose environment was changed is not gone back to.
    hook = next(
        (root_of(deployed) / "releases" / first / "venv").resolve().glob("lib/python3*/site-packages/sglang/hook.py")
    )
    kept = hook.read_text()
    hook.write_text(kept + "# edited\n")
    error = deployed.json("rollback", "--to", first, code=8)["error"]
    assert "patched files were changed" in error["evidence"][0] and current(deployed) == second
    hook.write_text(kept)
    assert deployed.json("rollback", "--to", "0099-none", code=2)["error"]["evidence"]
    # What nobody uses goes.
    deployed.json("prune", "--keep", "1")
    assert current(deployed) == second and first not in {r["id"] for r in deployed.json("releases")["releases"]}
    assert not hook.exists() and deployed.serving()["hook"] == "two"
