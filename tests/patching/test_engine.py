"""Verdicts, contracts, and sets as a whole."""

from __future__ import annotations

import pytest

from dflash_deploy.errors import AnchorMissing, ContractBroken
from dflash_deploy.patching import engine
from dflash_deploy.patching.anchors import After, Assign, Before, First, Stmt
from dflash_deploy.patching.edits import AddClassField, InsertStatements
from dflash_deploy.patching.patch import Contract, Patch, PatchSet, Present, State

FIRST = Patch(
    "first", "a.py", "why", InsertStatements("f", "x = g(1, k=2)", at=First()), (Contract("b.py", "g", ("a", "k"), 1),)
)
FILES: dict[str, bytes | None] = {
    "a.py": b"from b import g\n\n\ndef f():\n    return 0\n",
    "b.py": b"def g(a, *, k):\n    return a\n",
}


def states(files: dict[str, bytes | None], *patches: Patch) -> list[State]:
    return [verdict.state for verdict in engine.run(files, patches).verdicts]


def test_absent_then_applied() -> None:
    outcome = engine.run(FILES, [FIRST])
    assert outcome.ok and [v.state for v in outcome.verdicts] == [State.ABSENT]
    assert list(outcome.files) == ["a.py"]
    again = engine.run({**FILES, **outcome.files}, [FIRST])
    assert [v.state for v in again.verdicts] == [State.APPLIED] and not again.files


@pytest.mark.parametrize(
    ("called", "holds"),
    [
        ("def g(a, *, k): pass", True),
        ("def g(a, k=0, m=1): pass", True),
        ("def g(a, **options): pass", True),
        ("def g(*args, k): pass", True),
        ("class g:\n    def __init__(self, a, k): pass", True),
        ("class g:\n    a: int\n    k: int = 0", True),
        ("class base:\n    a: int\nclass g(base):\n    k: int = 0", True),
        ("def g(a, *, m): pass", False),
        ("def g(a, *, k, m): pass", False),
        ("def g(k, a): pass", False),
        ("class g:\n    a: int\n    b: int\n    k: int = 0", False),
        ("def h(a, k): pass", False),
        ("", False),
    ],
)
def test_contract_of_a_called_function(called: str, holds: bool) -> None:
    files = {**FILES, "b.py": called.encode() + b"\n"}
    outcome = engine.run(files, [FIRST])
    assert outcome.ok == holds
    if not holds:
        with pytest.raises(ContractBroken):
            outcome.check()


def test_contract_on_methods_and_attributes() -> None:
    source = b"class A:\n    y: int\n    def m(self, a): self.x = a\n    @staticmethod\n    def s(a): pass\n"
    source += b"class B(A): pass\n"
    for contract, holds in (
        (Contract("b.py", "A.m", ("a",)), True),
        (Contract("b.py", "A.s", ("a",), 1), True),
        (Contract("b.py", "A.m", ()), False),
        (Contract("b.py", "B", attributes=("x", "y")), True),
        (Contract("b.py", "B", attributes=("z",)), False),
        (Contract("b.py", "A.x"), True),
        (Contract("b.py", "A.z"), False),
        (Contract("c.py", "A"), False),
    ):
        patch = Patch("p", "a.py", "why", InsertStatements("f", "print()", at=First()), (contract,))
        assert engine.run({**FILES, "b.py": source, "c.py": None}, [patch]).ok == holds, contract


def test_superseded_drifted_ambiguous_conflict_and_missing_file() -> None:
    member = Patch("member", "a.py", "why", AddClassField("K", "C = 3", after="B"), superseded=Present("a.py", "K.C"))
    body = b"class K:\n    A = 1\n    B = 2\n"
    assert states({"a.py": body}, member) == [State.ABSENT]
    assert states({"a.py": body + b"    C = 7\n"}, member) == [State.SUPERSEDED]
    assert states({"a.py": body + b"    C = 4  # dflash-deploy: member\n"}, member) == [State.DRIFTED]
    assert states({"a.py": body + b"    D = 4  # dflash-deploy: member-two\n"}, member) == [State.ABSENT]
    assert states({"a.py": body + b"    B = 5\n"}, member) == [State.AMBIGUOUS]
    assert states({"a.py": b"class K:\n    A = 1\n"}, member) == [State.CONFLICT]
    assert states({"a.py": None}, member) == [State.CONFLICT]
    assert states({"a.py": b"class K(:\n"}, member) == [State.CONFLICT]


def test_later_patches_may_hold_on_to_earlier_ones_and_to_each_other() -> None:
    one = Patch("one", "a.py", "why", InsertStatements("f", "y = 1", at=First()))
    two = Patch("two", "a.py", "why", InsertStatements("f", "y += 1", at=After(Assign("y"))))
    files: dict[str, bytes | None] = {"a.py": b"def f():\n    return 0\n"}
    outcome = engine.run(files, [one, two])
    assert outcome.files["a.py"].decode().splitlines()[1:3] == [
        "    y = 1  # dflash-deploy: one",
        "    y += 1  # dflash-deploy: two",
    ]
    assert not engine.run(files, [two]).ok


def test_all_obstacles_come_together_and_nothing_is_half_done() -> None:
    bad = Patch("bad", "a.py", "why", InsertStatements("nope", "pass", at=First()))
    worse = Patch("worse", "a.py", "why", InsertStatements("f", "pass", at=Before(Stmt("return 1"))))
    with pytest.raises(AnchorMissing) as caught:
        engine.run(FILES, [FIRST, bad, worse]).check()
    text = "\n".join(caught.value.evidence)
    assert "bad (a.py)" in text and "worse (a.py)" in text and "first (" not in text


def test_a_set_supports_its_range() -> None:
    some = PatchSet("s", "demo", ">=1.2,<1.4", ())
    assert [some.supports(v) for v in ("1.1", "1.2", "1.3.post1", "1.4")] == [False, True, True, False]
