"""What patch sets and a payload do at the sites, and what moved between two trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_deploy.mapping.build import build
from dflash_deploy.mapping.cover import concerned, cover, gaps
from dflash_deploy.mapping.model import Cover
from dflash_deploy.mapping.moved import How, compare
from dflash_deploy.patching.anchors import First
from dflash_deploy.patching.edits import AddClassField, InsertStatements
from dflash_deploy.patching.patch import Contract, Patch, PatchSet
from tests.mapping.small import package

SETS = [
    PatchSet(
        "tree",
        "sglang",
        "==1.0",
        (
            Patch("member", "spec_info.py", "why", AddClassField("SpeculativeAlgorithm", "TREE = 3", after="DFLASH")),
            Patch("answer", "spec_info.py", "why", InsertStatements("SpeculativeAlgorithm.is_dflash", "1", at=First())),
            Patch(
                "edit",
                "here.py",
                "why",
                InsertStatements("edited", "1", at=First()),
                contract=(Contract("here.py", "relied", params=("b",)),),
            ),
        ),
    )
]
HERE = """
from sglang.spec_info import SpeculativeAlgorithm as S
def edited(b):
    return b.spec_algorithm.is_eagle()
def relied(b):
    return b.custom_mask
def asks(b):
    return b.spec_algorithm.is_dflash_family()
def asks_others(b):
    return b.spec_algorithm.is_eagle()
def parses(n):
    return S.from_string(n)
def compares(a):
    return a.speculative_algorithm == 'DFLASH'
class Worker:
    def run(self, b):
        return b.draft_token_num
    def helped(self, b):
        return b.draft_token_num
"""
PAYLOAD = """
from sglang.here import Worker
class TreeWorker(Worker):
    def run(self, b):
        return 2
    def helped(self, b):
        return super().helped(b)
"""


def test_every_way_to_cover_a_site(tmp_path: Path) -> None:
    package(tmp_path, here=HERE)
    found = build(tmp_path)
    covered = {
        c.site.scope: c for c in cover(found, SETS, {"kit/worker.py": PAYLOAD.encode()}) if c.site.file == "here.py"
    }
    assert {scope: c.cover for scope, c in covered.items()} == {
        "edited": Cover.EDITED,
        "relied": Cover.RELIED,
        "asks": Cover.ANSWERED,
        "asks_others": Cover.NONE,
        "parses": Cover.ANSWERED,
        "compares": Cover.NONE,
        "Worker.run": Cover.REPLACED,
        "Worker.helped": Cover.NONE,
    }
    assert covered["asks"].by == ("tree:answer",) and covered["edited"].by == ("tree:edit",)
    assert covered["Worker.run"].by == ("kit.worker.TreeWorker.run",)


def test_gaps_are_what_the_sets_extend_and_leave_open(tmp_path: Path) -> None:
    package(tmp_path, here=HERE)
    found = build(tmp_path)
    names = concerned(found, SETS)
    assert names == {"is_dflash", "is_dflash_family", "DFLASH"}
    assert [c.site.scope for c in gaps(cover(found, SETS), names)] == ["compares"]
    assert concerned(found, []) == frozenset()


AFTER = """
def edited(b):
    # a comment, and other lines above
    return b.spec_algorithm.is_eagle()
def relied(b):
    return b.custom_mask.view(1) and b.custom_mask
class Moved:
    def asks(self, b):
        return b.spec_algorithm.is_dflash_family()
def compares(a):
    return a.speculative_algorithm in ('DFLASH', 'EAGLE')
"""


@pytest.mark.parametrize("reverse", [False, True])
def test_what_moved(tmp_path: Path, reverse: bool) -> None:
    package(tmp_path / "a", here=HERE)
    package(tmp_path / "b", version="1.1", here=AFTER, other="def asks_others(b):\n    b.spec_algorithm.is_eagle()\n")
    one, two = build(tmp_path / "a"), build(tmp_path / "b")
    differences = compare(two, one) if reverse else compare(one, two)
    assert len([d for d in differences if d.before]) == len((two if reverse else one).sites)
    assert len([d for d in differences if d.after]) == len((one if reverse else two).sites)
    hows = {(d.before or d.after).scope: d.how for d in differences if d.how is not How.SAME}  # type: ignore[union-attr]
    gone, moved = (How.NEW, "Moved.asks") if reverse else (How.GONE, "asks")
    assert hows == {
        moved: How.MOVED,
        "asks_others": How.MOVED,
        "compares": How.CHANGED,
        "parses": gone,
        "Worker.run": gone,
        "Worker.helped": gone,
    }
    assert all(d.how is How.SAME for d in compare(one, one))
