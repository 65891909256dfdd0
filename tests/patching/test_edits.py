"""Edits: where they land, what they refuse, and that they leave every other byte alone."""

from __future__ import annotations

import ast

import pytest

from dflash_deploy.errors import AnchorAmbiguous, AnchorMissing, ContractBroken, InvalidResult, PatchError
from dflash_deploy.patching import engine
from dflash_deploy.patching.anchors import After, Assign, Before, Calls, Def, First, IfTest, Last, Stmt
from dflash_deploy.patching.edits import (
    AddBranchFirst,
    AddClassField,
    AddElement,
    AddImport,
    AddMethod,
    AppendToModule,
    Edit,
    GuardStatement,
    InsertStatements,
    ReplaceExpression,
    WrapCondition,
)
from dflash_deploy.patching.patch import Patch

SOURCE = '''\
"""Docstring."""
from __future__ import annotations

import os
from enum import Enum, auto


class Kind(Enum):
    A = auto()
    B = auto()

    def is_b(self):
        """Doc."""
        return self == Kind.B

    def make(self, args):
        assert args
        if self.is_b():  # b
            return one(
                args,  # kept
            )
        elif args.x in ("A", "B"):
            y = 1
        else:
            y = 2
        stream.record(y)
        return y


def late(): return 1
'''


def patch(edit: Edit) -> Patch:
    return Patch("p", "m.py", "why", edit)


def added(source: str, edit: Edit) -> list[str]:
    """Lines that the edit added, after the checks that hold for every edit."""
    data = source.encode()
    new = engine.apply_edit(data, patch(edit))
    assert new != data
    assert engine.apply_edit(new, patch(edit)) == new, "applying again must change nothing"
    compile(new, "m.py", "exec")
    old, lines = source.splitlines(), new.decode().splitlines()
    rest = list(old)
    return [line for line in lines if not (line in rest and rest.remove(line) is None)]


CASES: list[tuple[Edit, list[str]]] = [
    (AddClassField("Kind", "C = auto()", after="B"), ["    C = auto()  # dflash-deploy: p"]),
    (AddImport("import sys"), ["import sys  # dflash-deploy: p"]),
    (AppendToModule("late.x = 1"), ["late.x = 1  # dflash-deploy: p"]),
    (InsertStatements("Kind.is_b", "print(self)", at=First()), ["        print(self)  # dflash-deploy: p"]),
    (InsertStatements("Kind.make", "print(y)", at=Before(Stmt("return y"))), ["        print(y)  # dflash-deploy: p"]),
    (
        InsertStatements("Kind.make", "print(y)", at=After(Calls("stream.record"))),
        ["        print(y)  # dflash-deploy: p"],
    ),
    (InsertStatements("Kind.make", "y += 1", at=After(Stmt("y = 2"))), ["            y += 1  # dflash-deploy: p"]),
    (InsertStatements("", "z = os", at=Before(Def("Kind"))), ["z = os  # dflash-deploy: p"]),
    (InsertStatements("late", "x = 1", at=First()), ["def late():", "    x = 1  # dflash-deploy: p", "    return 1"]),
    (
        AddMethod("Kind", "def is_c(self):\n    return False"),
        ["    def is_c(self):  # dflash-deploy: p", "        return False"],
    ),
    (
        AddElement("Kind.make", ("'A'", "'B'"), "'C'"),
        ['        elif args.x in ("A", "B", \'C\'):  # dflash-deploy: p'],
    ),
    (
        WrapCondition("Kind.make", "self.is_b()", "{} and args"),
        ["        if (self.is_b()) and args:  # b  # dflash-deploy: p"],
    ),
    (
        ReplaceExpression("Kind.is_b", "self == Kind.B", "self in (Kind.B,)"),
        ["        return self in (Kind.B,)  # dflash-deploy: p"],
    ),
    (
        AddBranchFirst("Kind.make", "if args is None:\n    y = 3", before=IfTest("self.is_b()")),
        ["        if args is None:  # dflash-deploy: p", "            y = 3", "        elif self.is_b():  # b"],
    ),
    (
        GuardStatement("Kind.make", Stmt("stream.record(...)"), "y > 1"),
        ["        if y > 1:  # dflash-deploy: p", "            stream.record(y)"],
    ),
]


@pytest.mark.parametrize(("edit", "lines"), CASES, ids=lambda value: type(value).__name__)
def test_edit_adds_exactly_these_lines(edit: Edit, lines: list[str]) -> None:
    source = SOURCE + "\nstream = None\n\n\ndef one(x): return x\n"
    assert added(source, edit) == lines


REFUSED: list[tuple[Edit, type[PatchError], str]] = [
    (AddClassField("Knd", "C = 1", after="B"), AnchorMissing, "nearest: Kind"),
    (AddClassField("Kind", "C = 1", after="Z"), AnchorMissing, "nearest: A = auto()"),
    (InsertStatements("Kind.mak", "print()", at=First()), AnchorMissing, "nearest: Kind.make"),
    (InsertStatements("make", "print()", at=First()), AnchorMissing, "nearest: Kind.make"),
    (InsertStatements("Kind.make", "print()", at=Before(Stmt("return z"))), AnchorMissing, "expected 'y'"),
    (InsertStatements("Kind.make", "print(1)", at=After(Assign("y"))), AnchorAmbiguous, "match: y = 1"),
    (InsertStatements("Kind.make", "print(1)", at=Before(IfTest("args.x in ..."))), AnchorMissing, ""),
    (InsertStatements("Kind.make", "print(nope)", at=First()), ContractBroken, ""),
    (InsertStatements("Kind.make", "print(y)", at=First()), ContractBroken, ""),
    (InsertStatements("Kind.make", "print(1)", at=Last()), ContractBroken, "return y"),
    (AddElement("Kind.make", ("'A'", "'C'"), "'D'"), AnchorMissing, "nearest: ("),
    (GuardStatement("Kind.make", Stmt("stream.wait(...)"), "args"), AnchorMissing, "stream.record"),
    (ReplaceExpression("Kind.is_b", "self == Kind.C", "self"), AnchorMissing, "expected 'C', found 'B'"),
]


@pytest.mark.parametrize(("edit", "error", "evidence"), REFUSED, ids=lambda value: str(value)[:60])
def test_edit_refuses_and_says_what_is_near(edit: Edit, error: type[PatchError], evidence: str) -> None:
    with pytest.raises(error) as caught:
        engine.apply_edit(SOURCE.encode(), patch(edit))
    text = "\n".join(caught.value.evidence)
    if evidence.startswith("expected 'y'"):
        assert "first difference" in text
    else:
        assert evidence in text


def test_layout_comments_and_quotes_do_not_count() -> None:
    source = "def f(a):\n    if  not  (a . startswith(\n            'x' ) ) : # c\n        return 1\n"
    new = engine.apply_edit(source.encode(), patch(WrapCondition("f", 'not a.startswith("x")', "{} and a")))
    assert ast.unparse(ast.parse(new)) == "def f(a):\n    if not a.startswith('x') and a:\n        return 1"


@pytest.mark.parametrize(
    "data",
    [
        SOURCE.replace("\n", "\r\n").encode(),
        b"\xef\xbb\xbf" + SOURCE.encode(),
        ("# -*- coding: latin-1 -*-\n" + SOURCE.replace("Docstring", "D\xe9j\xe0")).encode("latin-1"),
        SOURCE.replace("    ", "\t").encode(),
        SOURCE.replace("A = auto()", "A  =auto( )   ;").encode() + b"\x0c\n# end without newline",
    ],
    ids=["crlf", "bom", "latin-1", "tabs", "odd spacing"],
)
def test_every_other_byte_survives(data: bytes) -> None:
    new = engine.apply_edit(data, patch(AddClassField("Kind", "C = auto()", after="B")))
    start = new.index(b"C = auto()")
    start = new.rindex(b"\n", 0, start) + 1
    end = new.index(b"\n", start) + 1
    assert new[:start] + new[end:] == data
    line = new[start:end]
    assert line.endswith(b"\r\n") == (b"\r\n" in data)
    assert line.startswith(b"\t") == (b"\tA" in data)


def test_what_is_not_python_is_refused() -> None:
    with pytest.raises(InvalidResult):
        engine.apply_edit(b"def f(:\n", patch(AppendToModule("x = 1")))


def test_a_function_moved_within_its_class_still_takes_the_patch() -> None:
    head, make = SOURCE.split("    def make", 1)
    make, tail = make.split("\n\n\ndef late", 1)
    head, is_b = head.split("    def is_b", 1)
    moved = f"{head}    def make{make}\n\n    def is_b{is_b.rstrip()}\n\n\ndef late{tail}"
    lines = added(moved, InsertStatements("Kind.make", "print(y)", at=Before(Stmt("return y"))))
    assert lines == ["        print(y)  # dflash-deploy: p"]


def test_a_branch_that_is_never_reached_is_refused() -> None:
    source = "def f(a):\n    return 0\n    if a:\n        return 1\n"
    with pytest.raises(ContractBroken, match="never run"):
        engine.apply_edit(source.encode(), patch(AddBranchFirst("f", "if not a:\n    return 2", before=IfTest("a"))))
