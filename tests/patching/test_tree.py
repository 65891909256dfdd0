"""Trees on a host: the transaction, and every way in which a tree may be amiss. Real files, real processes."""

from __future__ import annotations

import json
import os
import py_compile
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_deploy.errors import (
    CommandFailed,
    ForeignEdit,
    HostChanged,
    Incompatible,
    PatchError,
    UnsupportedVersion,
    UsageError,
)
from dflash_deploy.host.local import LocalHost
from dflash_deploy.model import Status, WriteFile
from dflash_deploy.patching import tree
from dflash_deploy.patching.patch import PatchSet, State
from dflash_deploy.plan.patch import plan_patch
from tests.patching.demo import CPU, HOOKS, MORE, SOURCES, hashes, install, payload
from tests.scope import EVERYTHING

HOST = LocalHost()
MAX_POINTS = 80


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return install(tmp_path / "env" / "lib" / "python3.11" / "site-packages")


@pytest.fixture
def brought(tmp_path: Path) -> Path:
    return payload(tmp_path / "source")


def apply(site: Path, brought: Path | None = None, *sets: PatchSet, **options: bool) -> list[Status]:
    outcomes = tree.apply(HOST, str(site), sets or (HOOKS,), package="demo", payload=brought, **options)
    return [outcome.status for outcome in outcomes]


def inspect(site: Path, brought: Path | None = None, *sets: PatchSet) -> tree.TreeState:
    return tree.inspect(HOST, str(site), sets or (HOOKS,), package="demo", payload=brought)


def revert(site: Path) -> list[Status]:
    return [outcome.status for outcome in tree.revert(HOST, str(site), package="demo")]


def test_apply_again_and_revert(site: Path, brought: Path) -> None:
    before = hashes(site)
    assert inspect(site, brought).status == "absent"
    assert apply(site, brought) == [Status.CHANGED]
    assert "# dflash-deploy: hook-a" in (site / "demo/a.py").read_text()
    assert (site / "brought/deep/table.txt").read_text() == "data\n"
    state = inspect(site, brought)
    assert (state.status, [v.state for v in state.verdicts]) == ("applied", [State.APPLIED, State.APPLIED])
    after = hashes(site)
    assert apply(site, brought) == [Status.OK]
    assert hashes(site) == after
    result = HOST.run(["python3", "-c", "import demo.a; print(demo.a.f())"], env={"PYTHONPATH": str(site)})
    assert result.out == "0\n", result.err
    assert revert(site) == [Status.CHANGED]
    assert hashes(site) == before
    assert revert(site) == [Status.OK]


@pytest.mark.parametrize("way", ["demo", "", "../../.."])
def test_the_path_may_be_package_site_or_environment(site: Path, brought: Path, way: str) -> None:
    assert apply(site / way, brought) == [Status.CHANGED]
    assert inspect(site, brought).status == "applied"


def test_the_plan_names_every_file_and_its_digest(site: Path, brought: Path) -> None:
    plan = plan_patch(inspect(site, brought))
    writes = [step for step in plan.steps if isinstance(step, WriteFile)]
    assert [Path(step.path).relative_to(site).as_posix() for step in writes] == [
        "brought/__init__.py",
        "brought/deep/__init__.py",
        "brought/deep/table.txt",
        "demo/a.py",
        "demo/b.py",
    ]
    assert writes[0].expect_sha256 == "" and len(writes[-1].expect_sha256 or "") == 64
    apply(site, brought)
    assert plan_patch(inspect(site, brought)).empty


@pytest.fixture
def one(tmp_path: Path) -> tuple[Path, Path, PatchSet]:
    """The smallest transaction of every kind: (site, payload of one file, set that changes one file)."""
    source = tmp_path / "source" / "brought"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text("VALUE = 1\n")
    return install(tmp_path / "site-packages"), source, replace(HOOKS, patches=HOOKS.patches[:1])


def kill_points(action: Callable[[], object]) -> Iterator[int]:
    """Runs ``action`` again and again, its agent ended by SIGKILL later each time, until it gets through. CI takes
    every third point, which meets both ways on alternately."""
    for point in range(1, MAX_POINTS, 1 if EVERYTHING else 3):
        os.environ["DFLASH_DEPLOY_FAULT"] = str(point)
        try:
            action()
            return
        except CommandFailed as error:
            assert "137" in error.message
        finally:
            del os.environ["DFLASH_DEPLOY_FAULT"]
        yield point
    raise AssertionError("more points than expected")


def test_killed_at_every_point_of_an_apply(one: tuple[Path, Path, PatchSet]) -> None:
    site, brought, hooks = one
    before = hashes(site)
    apply(site, brought, hooks)
    after = hashes(site)
    revert(site)
    seen = set()
    for point in kill_points(lambda: apply(site, brought, hooks)):
        state = inspect(site, brought, hooks)
        seen.add(state.facts.interrupted)
        if point % 2:
            outcomes = tree.apply(HOST, str(site), [hooks], package="demo", payload=brought)
            assert hashes(site) == after, f"point {point}"
        else:
            outcomes = []
        outcomes += tree.revert(HOST, str(site), package="demo")
        assert (outcomes[0].name == "recover") == bool(state.facts.interrupted), point
        if state.facts.interrupted:
            whole = state.facts.interrupted == "apply"
            assert ("completed the interrupted apply" if whole else "rolled back") in outcomes[0].detail
        assert hashes(site) == before, f"point {point}"
    assert seen >= {"preparation", "apply"}


def test_killed_at_every_point_of_a_revert(one: tuple[Path, Path, PatchSet]) -> None:
    site, brought, hooks = one
    before = hashes(site)
    apply(site, brought, hooks)
    for point in kill_points(lambda: revert(site)):
        revert(site)
        assert hashes(site) == before, f"point {point}"
        apply(site, brought, hooks)
    assert hashes(site) == before


def test_a_foreign_edit_stops_everything(site: Path, brought: Path) -> None:
    apply(site, brought)
    path = site / "demo/a.py"
    path.write_text(path.read_text() + "\nmine = 1\n")
    now = hashes(site)
    assert inspect(site, brought).status == "foreign"
    for action in (lambda: apply(site, brought), lambda: revert(site)):
        with pytest.raises(ForeignEdit) as caught:
            action()
        assert caught.value.exit_code == 7 and "demo/a.py" in caught.value.message
        assert "  +mine = 1" in caught.value.evidence
        assert not any("hook-a" in line for line in caught.value.evidence if line.startswith("  +"))
        assert hashes(site) == now


def test_an_edit_before_us_is_foreign_too(site: Path, brought: Path) -> None:
    (site / "demo/a.py").write_text(SOURCES["demo/a.py"] + "mine = 1\n")
    now = hashes(site)
    with pytest.raises(ForeignEdit, match=r"demo/a\.py"):
        apply(site, brought)
    assert hashes(site) == now


def test_reinstallation_is_noticed_and_mended(site: Path, brought: Path) -> None:
    apply(site, brought)
    install(site)
    state = inspect(site, brought)
    assert (state.status, state.overwritten) == ("overwritten", ("demo/a.py", "demo/b.py"))
    assert apply(site, brought) == [Status.CHANGED]
    assert inspect(site, brought).status == "applied"
    assert revert(site) == [Status.CHANGED]
    assert (site / "demo/a.py").read_text() == SOURCES["demo/a.py"]


def test_revert_after_reinstallation_leaves_nothing(site: Path, brought: Path) -> None:
    before = hashes(site)
    apply(site, brought)
    install(site)
    revert(site)
    assert hashes(site) == before


def test_other_sets_start_from_the_pristine_bytes(site: Path, brought: Path) -> None:
    before = hashes(site)
    apply(site, brought)
    assert apply(site, brought, MORE) == [Status.CHANGED]
    assert (site / "demo/a.py").read_text() == SOURCES["demo/a.py"]
    assert "hook-c" in (site / "demo/c.py").read_text() and not (site / "brought").exists()
    assert apply(site, brought, HOOKS, MORE) == [Status.CHANGED]
    assert inspect(site, brought, HOOKS, MORE).status == "applied"
    revert(site)
    assert hashes(site) == before


def test_a_changed_payload_is_noticed_and_stale_files_go(site: Path, brought: Path, tmp_path: Path) -> None:
    before = hashes(site)
    apply(site, brought)
    (brought / "__init__.py").write_text("VALUE = 2\n")
    (brought / "deep/table.txt").unlink()
    state = inspect(site, brought)
    assert (state.status, state.payload_changed) == ("outdated", True)
    apply(site, brought)
    assert (site / "brought/__init__.py").read_text() == "VALUE = 2\n"
    assert not (site / "brought/deep/table.txt").exists()
    py_compile.compile(str(site / "brought/__init__.py"))
    revert(site)
    assert hashes(site) == before


def test_somebody_elses_package_of_the_payloads_name_is_left_alone(site: Path, brought: Path) -> None:
    payload(site, "VALUE = 0\n")
    now = hashes(site)
    with pytest.raises(ForeignEdit, match="brought/"):
        apply(site, brought)
    assert hashes(site) == now


def test_hard_links_keep_the_old_bytes(site: Path, brought: Path, tmp_path: Path) -> None:
    os.link(site / "demo/a.py", tmp_path / "cached.py")
    apply(site, brought)
    assert (tmp_path / "cached.py").read_text() == SOURCES["demo/a.py"]
    assert (site / "demo/a.py").stat().st_nlink == 1
    revert(site)
    assert (tmp_path / "cached.py").read_text() == SOURCES["demo/a.py"]


def test_mode_stays_and_stale_bytecode_goes(site: Path, brought: Path) -> None:
    (site / "demo/a.py").chmod(0o640)
    stale = Path(py_compile.compile(str(site / "demo/a.py"), doraise=True) or "")
    other = Path(py_compile.compile(str(site / "demo/c.py"), doraise=True) or "")
    apply(site, brought)
    assert (site / "demo/a.py").stat().st_mode & 0o777 == 0o640
    assert not stale.exists() and other.exists()


@pytest.fixture
def immutable(site: Path) -> Iterator[Path]:
    """A file that even root cannot replace."""
    path = site / "demo/b.py"
    if shutil.which("chattr") is None or subprocess.run(["chattr", "+i", path], capture_output=True).returncode:
        pytest.skip("this file system knows no immutable files (chattr +i)")
    yield path
    subprocess.run(["chattr", "-i", path], check=True)


def test_a_file_that_cannot_be_replaced_rolls_all_back(site: Path, brought: Path, immutable: Path) -> None:
    now = hashes(site)
    with pytest.raises(CommandFailed, match="nothing was changed"):
        apply(site, brought)
    assert hashes(site) == now


def test_a_read_only_tree(site: Path, brought: Path) -> None:
    now = hashes(site)
    if os.geteuid() == 0:
        mounted = subprocess.run(["mount", "--bind", site, site], capture_output=True).returncode == 0
        if not mounted:
            pytest.skip("root ignores modes, and a bind mount is not allowed here")
        try:
            subprocess.run(["mount", "-o", "remount,ro,bind", site], check=True)
            with pytest.raises(CommandFailed, match="nothing was changed"):
                apply(site, brought)
        finally:
            subprocess.run(["umount", site], check=True)
    else:
        site.chmod(0o555)
        with pytest.raises(CommandFailed, match="nothing was changed"):
            apply(site, brought)
        site.chmod(0o755)
    assert hashes(site) == now


def test_a_work_tree_is_refused(tmp_path: Path, brought: Path) -> None:
    site = install(tmp_path / "clone", record=False)
    subprocess.run(["git", "init", "-q", site], check=True)
    now = hashes(site)
    with pytest.raises(ForeignEdit, match="git work tree") as caught:
        apply(site, brought)
    assert "--allow-dirty" in caught.value.hint and hashes(site) == now
    assert apply(site, brought, allow_dirty=True) == [Status.CHANGED]
    revert(site)
    assert hashes(site) == now


def test_an_environment_inside_a_work_tree_is_fine(tmp_path: Path, brought: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    site = install(tmp_path / ".venv" / "lib" / "python3.11" / "site-packages")
    assert apply(site, brought) == [Status.CHANGED]


def test_another_release(tmp_path: Path, brought: Path) -> None:
    site = install(tmp_path / "site-packages", version="1.1")
    with pytest.raises(UnsupportedVersion) as caught:
        apply(site, brought)
    assert "demo ==1.0" in caught.value.evidence[0]
    assert apply(site, brought, allow_untested=True) == [Status.CHANGED]
    revert(site)
    (site / "demo/c.py").write_text("def h(required): pass\n")
    (site / "demo-1.1.dist-info/RECORD").unlink()
    now = hashes(site)
    with pytest.raises(PatchError, match="hook-b"):
        apply(site, brought, allow_untested=True)
    assert hashes(site) == now


def test_sets_for_another_device_and_wrong_combinations(site: Path) -> None:
    with pytest.raises(Incompatible, match="without a GPU"):
        tree.inspect(HOST, str(site), [CPU], package="demo", device="cuda")
    assert tree.inspect(HOST, str(site), [CPU], package="demo", device="cpu").status == "absent"
    needs = PatchSet("needs", "demo", "==1.0", (), requires=("hooks",), conflicts=("more",))
    with pytest.raises(UsageError, match="needs hooks"):
        inspect(site, None, needs)
    with pytest.raises(UsageError, match="exclude"):
        inspect(site, None, needs, HOOKS, MORE)


def test_no_package_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no package demo"):
        apply(tmp_path)


def test_a_file_that_changes_between_reading_and_writing(site: Path, brought: Path) -> None:
    state = inspect(site, brought)
    (site / "demo/b.py").write_text("x = 1\n")
    now = hashes(site)
    assert state.manifest is not None
    with pytest.raises(HostChanged, match=r"demo/b\.py"):
        tree._commit(HOST, state.facts, "apply", state.changes, state.manifest)
    assert hashes(site) == now


def test_a_later_manifest_is_not_touched(site: Path, brought: Path) -> None:
    apply(site, brought)
    path = site / ".dflash-deploy/manifest.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "schema": 99}))
    now = hashes(site)
    with pytest.raises(PatchError, match="later dflash-deploy"):
        revert(site)
    assert hashes(site) == now
