"""Every patch set: its patches' own examples and refusals, and the registry."""

from __future__ import annotations

import pytest
from dflash_patches import registry
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from dflash_deploy.errors import PatchError, UnsupportedVersion, UsageError
from dflash_deploy.patching import engine
from dflash_deploy.patching.patch import Example, Patch, Refusal

SETS = registry.all_sets()
PATCHES = [pytest.param(p, id=f"{s.name}:{p.name}") for s in SETS for p in s.patches]
EXAMPLES = [pytest.param(p, e, id=f"{s.name}:{p.name}") for s in SETS for p in s.patches for e in p.examples]
REFUSALS = [pytest.param(p, r, id=f"{s.name}:{p.name}:{r.error}") for s in SETS for p in s.patches for r in p.refuses]
RELEASES = [
    f"0.5.{minor}{post}" for minor in range(6, 26) for post in ("", ".post1", ".post2")
]  # every name that a release could have


@pytest.mark.parametrize("patch", PATCHES)
def test_patch_explains_and_proves_itself(patch: Patch) -> None:
    assert patch.why and patch.examples and patch.refuses
    assert not patch.file.startswith(("/", ".")) and patch.file.endswith(".py")


@pytest.mark.parametrize(("patch", "example"), EXAMPLES)
def test_example(patch: Patch, example: Example) -> None:
    new = engine.apply_edit(example.before.encode(), patch)
    assert new.decode() == example.after
    assert engine.apply_edit(new, patch) == new
    assert patch.marker in new.decode()
    outcome = engine.run({patch.file: example.before.encode()}, [patch])
    assert not outcome.files or outcome.files[patch.file] == new


@pytest.mark.parametrize(("patch", "refusal"), REFUSALS)
def test_refusal(patch: Patch, refusal: Refusal) -> None:
    with pytest.raises(PatchError) as caught:
        engine.apply_edit(refusal.before.encode(), patch)
    assert type(caught.value).__name__ == refusal.error


@pytest.mark.parametrize("each", SETS, ids=lambda s: f"{s.name} {s.versions}")
def test_set(each: registry.PatchSet) -> None:
    names = [p.name for p in each.patches]
    assert len(set(names)) == len(names)
    SpecifierSet(each.versions)
    assert each.tested and all(each.supports(v) for v in each.tested)
    assert set(each.requires) | set(each.conflicts) <= set(registry.names())
    for version in each.tested:
        assert registry.find(version, each.name) is each


def test_ranges_of_one_name_are_disjoint() -> None:
    for name in registry.names():
        for version in RELEASES:
            found = [s for s in SETS if s.name == name and s.supports(version)]
            assert len(found) <= 1, f"{name} {version}"
    assert all(Version(v) for v in RELEASES)


def test_unknown_release_and_unknown_set() -> None:
    with pytest.raises(UnsupportedVersion) as caught:
        registry.find("0.4.0", "cpu")
    assert any("0.5.16" in line for line in caught.value.evidence)
    for version, nearest in (("0.5.99", "0.5.23"), ("0.5.14", "0.5.10.post1"), ("0.4.0", "0.5.10.post1")):
        each = registry.find(version, "cpu", allow_untested=True)
        assert each.supports(nearest) and not each.supports(version)
    with pytest.raises(UsageError, match="no patch set called nope"):
        registry.find("0.5.16", "nope")


def test_table_of_releases_agrees_with_the_sets() -> None:
    assert list(registry.RELEASES) == sorted(registry.RELEASES, key=Version)
    for version, support in registry.RELEASES.items():
        fits = {s.name for s in SETS if s.supports(version)}
        assert set(support.sets) == fits, version
        assert (support.generation is None) == (not fits) == (support.tested is registry.Tested.NONE), version
        assert support.generation is not None or support.reason, version
    assert {v for s in SETS for v in s.tested} <= set(registry.RELEASES)


def test_an_unsupported_release_says_why() -> None:
    with pytest.raises(UnsupportedVersion) as caught:
        registry.find("0.5.9", "ddtree")
    assert registry.RELEASES["0.5.9"].reason in caught.value.evidence[0]


def test_the_cpu_set_is_never_for_a_gpu() -> None:
    assert all(s.device == "cpu" for s in SETS if s.name == "cpu")
