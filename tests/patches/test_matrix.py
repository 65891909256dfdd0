"""The table of releases: what it says is so, the README shows it, and releases that are not in it are handled."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from dflash_patches import registry
from packaging.version import Version

from dflash_deploy.errors import ContractBroken, PatchError, UnsupportedVersion
from dflash_deploy.host.local import LocalHost
from dflash_deploy.model import Status
from dflash_deploy.patching import tree
from dflash_deploy.patching.patch import State
from tests.patches import matrix
from tests.patches.wheels import wheel

VERSIONS = [each["version"] for each in matrix.stored()]
STATES = ("state", "generation", "holds", "of")


def again(version: str, generations: dict[str, str] | None) -> dict[str, Any]:
    """The row of a release as its wheel gives it now."""
    return matrix.row(version, generations)[0]


@pytest.fixture(scope="module")
def now() -> dict[str, dict[str, Any]]:
    """Every row anew: the generations that the table names, on two processes."""
    tried = [{name: cell["generation"] for name, cell in each["sets"].items()} for each in matrix.stored()]
    for version in VERSIONS:
        wheel("sglang", version)
    with ProcessPoolExecutor(2, mp_context=get_context("forkserver")) as pool:
        return dict(zip(VERSIONS, pool.map(again, VERSIONS, tried), strict=True))


def test_the_readme_shows_the_table() -> None:
    assert matrix.shown() == matrix.table(matrix.stored()), "run: python -m tests.patches.matrix --write"


def test_every_release_of_the_registry_has_a_row() -> None:
    assert set(registry.RELEASES) <= set(VERSIONS)
    assert [Version(v) for v in VERSIONS] == sorted(Version(v) for v in VERSIONS)


@pytest.mark.parametrize("each", registry.all_sets(), ids=lambda s: f"{s.name} {s.versions}")
def test_the_table_and_the_sets_agree(each: registry.PatchSet) -> None:
    rows = {row["version"]: row["sets"][each.name] for row in matrix.stored()}
    applies = [v for v, cell in rows.items() if each.supports(v)]
    assert applies and all(rows[v]["state"] == "applies" and rows[v]["holds"] == len(each.patches) for v in applies)
    assert set(each.tested) <= set(applies)


def test_anchors_were_seen_where_the_sets_apply() -> None:
    for each in registry.all_sets():
        for patch in each.patches:
            assert set(each.tested) <= set(each.seen[patch.name]), "run: python -m tests.patches.matrix --write"


@pytest.mark.wheels
@pytest.mark.parametrize("version", VERSIONS)
def test_a_row_is_what_the_wheel_gives(now: dict[str, dict[str, Any]], version: str) -> None:
    (stored,) = [each for each in matrix.stored() if each["version"] == version]
    assert {k: v for k, v in stored.items() if k != "full"} == now[version]


@pytest.mark.wheels
def test_releases_later_than_the_table_are_untested() -> None:
    later = [v for v in matrix.published() if v not in VERSIONS]
    assert all(Version(v) > Version(VERSIONS[-1]) for v in later), "a release below the newest has no row"
    for version in later[-1:]:
        with pytest.raises(UnsupportedVersion):
            registry.find(version, "ddtree")
        row, _ = matrix.row(version)
        print(f"untested: {version}: {row['sets']}")
        assert all(cell["state"] in ("untested", "refused", "superseded") for cell in row["sets"].values())


HOST = LocalHost()
NEWEST = VERSIONS[-1]


@pytest.fixture
def later(tmp_path: Path) -> Path:
    """The files of the newest release that the sets read, as if they were of a later one."""
    site = tmp_path / "site-packages"
    release = matrix.Release(NEWEST)
    for path in {p for each in registry.all_sets() if each.supports(NEWEST) for p in (*each.files, "__init__.py")}:
        data = release.file(path)
        if data is not None:
            (site / "sglang" / path).parent.mkdir(parents=True, exist_ok=True)
            (site / "sglang" / path).write_bytes(data)
    info = site / "sglang-0.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.9.9\n")
    return site


def changed(site: Path, path: str, edit: Callable[[str], str]) -> None:
    text = (site / "sglang" / path).read_text()
    new = edit(text)
    assert new != text
    (site / "sglang" / path).write_text(new)


@functools.cache
def cpu() -> registry.PatchSet:
    return registry.find("0.9.9", "cpu", allow_untested=True)


@pytest.mark.wheels
def test_an_untested_release_is_patched_only_when_told(later: Path) -> None:
    with pytest.raises(UnsupportedVersion) as refused:
        registry.find("0.9.9", "cpu")
    assert "--allow-untested" in refused.value.hint and refused.value.exit_code == 7
    with pytest.raises(UnsupportedVersion):
        tree.apply(HOST, str(later), [cpu()], device="cpu")
    done = tree.apply(HOST, str(later), [cpu()], device="cpu", allow_untested=True)
    assert [o.status for o in done] == [Status.CHANGED]


@pytest.mark.wheels
def test_an_untested_release_whose_anchor_moved_is_refused_with_where_it_was(later: Path) -> None:
    patch = next(p for p in cpu().patches if p.edit.scope)
    last = patch.edit.scope.rpartition(".")[2]
    changed(later, patch.file, lambda text: text.replace(f"def {last}(", f"def {last}_anew("))
    with pytest.raises(PatchError) as caught:
        tree.apply(HOST, str(later), [cpu()], device="cpu", allow_untested=True)
    evidence = "\n".join(caught.value.evidence)
    assert f"nearest: {patch.edit.scope}_anew" in evidence and "first difference: name" in evidence
    assert "this anchor was last seen in: " in evidence and f"to {NEWEST}" in evidence
    assert not (later / ".dflash-deploy").exists()


@pytest.mark.wheels
def test_an_untested_release_whose_contract_broke_is_refused(later: Path) -> None:
    contract = next(c for p in cpu().patches for c in p.contract if c.params == ())
    name = contract.name.rpartition(".")[2]
    changed(later, contract.file, lambda text: text.replace(f"def {name}(", f"def {name}_anew("))
    with pytest.raises(ContractBroken, match="does not fit"):
        tree.apply(HOST, str(later), [cpu()], device="cpu", allow_untested=True)


@pytest.mark.wheels
def test_upstream_with_ddtree_supersedes_the_set(later: Path, tmp_path: Path) -> None:
    each = registry.find("0.9.9", "ddtree", allow_untested=True)
    changed(
        later,
        matrix.SPEC_INFO,
        lambda text: text.replace("    DFLASH = auto()\n", "    DFLASH = auto()\n    DDTREE = auto()\n"),
    )
    before = {p: p.read_bytes() for p in later.rglob("*") if p.is_file()}
    payload = tmp_path / "dflash_kernels"
    payload.mkdir()
    (payload / "__init__.py").write_text("")
    state = tree.inspect(HOST, str(later), [each], payload=payload, allow_untested=True)
    assert {v.state for v in state.verdicts} == {State.SUPERSEDED} and not state.changes and not state.obstacles
    (done,) = tree.apply(HOST, str(later), [each], payload=payload, allow_untested=True)
    assert done.status is Status.OK and "upstream has SpeculativeAlgorithm.DDTREE" in done.detail
    assert {p: p.read_bytes() for p in later.rglob("*") if p.is_file()} == before
    both = tree.apply(HOST, str(later), [each, cpu()], payload=payload, device="cpu", allow_untested=True)
    assert [o.status for o in both] == [Status.CHANGED] and not (later / "dflash_kernels").exists()
    shutil.rmtree(later / ".dflash-deploy")
