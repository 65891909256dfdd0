"""The sets on the real release: apply, compile, apply again, revert to identical bytes over the whole tree."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dflash_patches import registry
from packaging.version import Version

from dflash_deploy.assets import payload_dir
from dflash_deploy.errors import ForeignEdit, PatchError
from dflash_deploy.host.local import LocalHost
from dflash_deploy.model import Status
from dflash_deploy.patching import tree
from dflash_deploy.patching.patch import State
from tests.patches.wheels import chosen, unpack

pytestmark = pytest.mark.wheels

HOST = LocalHost()
RELEASES = [v for v in sorted({v for s in registry.all_sets() for v in s.tested}, key=Version) if chosen(v)]


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    version = str(request.param)
    return version, unpack("sglang", version, tmp_path_factory.mktemp(version) / "site-packages")


@pytest.fixture
def site(release: tuple[str, Path], tmp_path: Path) -> Iterator[Path]:
    """A copy of hard links, as package caches make them; the release itself must come out of every test unharmed."""
    _, pristine = release
    site = tmp_path / "site-packages"
    shutil.copytree(pristine, site, copy_function=os.link)
    before = hashes(pristine)
    yield site
    assert hashes(pristine) == before


@pytest.fixture(scope="module")
def payload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the payload, which may be under work."""
    return Path(shutil.copytree(payload_dir(), tmp_path_factory.mktemp("payload") / "dflash_kernels"))


def hashes(site: Path) -> dict[str, str]:
    return {
        str(path.relative_to(site)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in site.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def sets_for(version: str) -> list[registry.PatchSet]:
    return [s for s in registry.all_sets() if s.supports(version)]


def test_apply_compile_again_revert(release: tuple[str, Path], site: Path, payload: Path) -> None:
    version, _ = release
    sets = sets_for(version)
    before = hashes(site)
    began = time.monotonic()
    state = tree.inspect(HOST, str(site), sets, payload=payload, device="cpu")
    took = time.monotonic() - began
    assert {v.state for v in state.verdicts} <= {State.ABSENT, State.SUPERSEDED}, state.as_dict()
    assert state.facts.version == version and not state.obstacles
    outcomes = tree.apply(HOST, str(site), sets, payload=payload, device="cpu")
    assert [o.status for o in outcomes] == [Status.CHANGED]
    print(f"{version}: check {took:.1f} s, apply {outcomes[0].seconds:.1f} s")
    # Alone on a core each takes about a second; a busy machine of CI gets ten times that.
    assert took < 10 and outcomes[0].seconds < 12
    for change in state.changes:
        text = (site / change.path).read_bytes()
        if change.path.endswith(".py"):
            compile(text, change.path, "exec")
        assert text == change.after
    again = tree.apply(HOST, str(site), sets, payload=payload, device="cpu")
    assert [o.status for o in again] == [Status.OK]
    assert tree.inspect(HOST, str(site), sets, payload=payload, device="cpu").status == "applied"
    changed = {path for path, value in hashes(site).items() if before.get(path) != value}
    ours = {c.path for c in state.changes}
    assert {c for c in changed if not c.startswith(".dflash-deploy/")} == ours
    assert [o.status for o in tree.revert(HOST, str(site))] == [Status.CHANGED]
    assert hashes(site) == before
    assert not (site / ".dflash-deploy").exists()


@pytest.mark.parametrize("name", registry.names())
def test_each_set_alone(release: tuple[str, Path], site: Path, payload: Path, name: str) -> None:
    sets = [s for s in sets_for(release[0]) if s.name == name]
    if not sets:
        pytest.skip(f"no set {name} for {release[0]}")
    sets += [s for s in sets_for(release[0]) if s.name in sets[0].requires]
    state = tree.inspect(HOST, str(site), sets, payload=payload, device="cpu" if sets[0].device == "cpu" else None)
    assert all(v.state.ok for v in state.verdicts), state.as_dict()
    assert not state.obstacles


def test_a_hand_edited_release_is_refused(release: tuple[str, Path], site: Path, payload: Path) -> None:
    sets = sets_for(release[0])
    path = site / "sglang" / sets[0].patches[0].file
    text = path.read_text() + "\nlocal_change = 1\n"
    path.unlink()
    path.write_text(text)
    now = hashes(site)
    with pytest.raises(ForeignEdit) as caught:
        tree.apply(HOST, str(site), sets, payload=payload, device="cpu")
    assert sets[0].patches[0].file in caught.value.message and caught.value.exit_code == 7
    assert hashes(site) == now


def test_a_renamed_anchor_is_refused_with_what_is_near(release: tuple[str, Path], site: Path) -> None:
    each = next(s for s in sets_for(release[0]) if s.name == "cpu")
    patch = next(p for p in each.patches if p.edit.scope)
    path = site / "sglang" / patch.file
    name = patch.edit.scope.rpartition(".")[2]
    text = path.read_text().replace(f"def {name}(", f"def {name}_moved(")
    path.unlink()
    path.write_text(text)
    (next(site.glob("sglang-*.dist-info")) / "RECORD").unlink()
    with pytest.raises(PatchError) as caught:
        tree.apply(HOST, str(site), [each], device="cpu")
    assert any(f"nearest: {patch.edit.scope}_moved" in line for line in caught.value.evidence)
