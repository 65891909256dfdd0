"""Files without what no edit touches: nothing is lost, nothing that an edit sees is missing."""

from __future__ import annotations

import ast
import textwrap

import pytest

from dflash_deploy.patching import engine, hollow
from dflash_deploy.patching.anchors import After, Assign, Before, First, IfTest, Stmt
from dflash_deploy.patching.edits import (
    AddBranchFirst,
    AddClassField,
    AddElement,
    AddImport,
    AddMethod,
    AppendToModule,
    InsertStatements,
    ReplaceExpression,
)
from dflash_deploy.patching.patch import Patch, State

SOURCE = textwrap.dedent('''
    """Docstring."""
    from __future__ import annotations
    import os
    A = 1
    TABLE = {
        "x": 1,
    }
    NAMES = ("a", "b")


    @decorated(
        lambda: 0
    )
    class Other(Base):
        """A docstring."""
        def long(self):
            # a comment first
            x = 1
            return x
            # deeper at the end
        y = 2


    class Kept:
        first: int = 0
        second: A[
            int, "two"
        ] = 1
        third: int = 2; fourth = 3
        fifth = """
    text that starts in the first column
    """

        def touched(self, n):
            def inner():
                one = 1
                two = 2
                return one, two
            if n:
                return inner()
            return n

        def untouched(self): return 1

        async def other(self):
            @wrapped
            def nested():
                pass
            return nested
        last = 9


    if A:
        def late(x):
            y = x
            y += 1
            return y
    else:
        late = None
''').lstrip("\n")

EDITS = (
    AddClassField("Kept", "sixth: int = 6", after="second"),
    AddMethod("Kept", "def more(self):\n    return 1\n"),
    InsertStatements("Kept.touched", "n = int(n)", at=First()),
    AddBranchFirst("Kept.touched", "if n is None:\n    return 0\n", before=IfTest("n")),
    ReplaceExpression("Kept.touched", "inner()", "(inner(), n)"),
    AddImport("import sys"),
    AppendToModule("Z = 1"),
    InsertStatements("", "B = 2", at=After(Assign("A"))),
    InsertStatements("late", "y = 3", at=Before(Stmt("return y"))),
    AddElement("", ('"a"', '"b"'), '"c"'),
)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("edit", EDITS, ids=lambda e: f"{type(e).__name__} {e.scope}")
def test_an_edit_gives_the_same_bytes(edit: object, newline: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SOURCE.replace("\n", newline).encode()
    patch = Patch("p", "f.py", "why", edit)  # type: ignore[arg-type]
    small = hollow.hollow(source, ast.parse(source), hollow.words([edit]))
    assert len(small.source) < len(source) and small.filled(small.source) == source
    quick = engine.run({"f.py": source}, [patch])
    assert quick.ok and quick.files["f.py"] == engine.apply_edit(source, patch)
    again = engine.run({"f.py": quick.files["f.py"]}, [patch])
    assert [v.state for v in again.verdicts] == [State.APPLIED]


def test_what_is_taken_out() -> None:
    names = hollow.words([AddClassField("Kept", "sixth: int = 6", after="second")])
    small = hollow.hollow(SOURCE.encode(), ast.parse(SOURCE), names).source.decode()
    assert "class Kept" in small and "second: A[" in small and "def late(x):" in small
    for gone in ("a comment first", "inner", "nested", "text that starts", "y += 1", "TABLE", "touched", "Other"):
        assert gone not in small, gone
    whole = hollow.hollow(SOURCE.encode(), ast.parse(SOURCE), names, frozenset({"Kept", ""})).source.decode()
    assert "text that starts" in whole and "TABLE" in whole and "inner" not in whole
    deep = hollow.hollow(
        SOURCE.encode(), ast.parse(SOURCE), frozenset({"Kept", "touched"}), looked=frozenset({"Kept.touched"})
    )
    left = deep.source.decode()
    assert "return inner()" in left and "first: int" in left and deep.filled(deep.source) == SOURCE.encode()
    for gone in ("import os", "second", "fifth", "last", "late", "untouched", "nested"):
        assert gone not in left, gone


@pytest.mark.parametrize("keep", ["", "Kept", "Kept touched", "long", "late", "A second"])
@pytest.mark.parametrize("looked", [None, "Kept", "Kept.touched", ""])
def test_the_tree_is_that_of_the_filled_source(keep: str, looked: str | None) -> None:
    names = frozenset(keep.split())
    small = hollow.hollow(
        SOURCE.encode(), ast.parse(SOURCE), names, looked=None if looked is None else frozenset({looked})
    )
    assert small.bodies and small.filled(small.source) == SOURCE.encode()
    assert ast.dump(small.filled_tree(ast.parse(small.source))) == ast.dump(ast.parse(SOURCE))


def test_a_hole_that_went_deeper_is_noticed() -> None:
    source = b"import a\ndef f():\n    x = 1\n    y = 2\n"
    small = hollow.hollow(source, ast.parse(source), frozenset())
    assert small.filled(small.source) == source and b"def" not in small.source
    moved = small.source.replace(b'"dflash', b'if a:\n    "dflash')
    assert small.filled(moved) is None


@pytest.mark.parametrize(
    "source",
    [
        b"\xef\xbb\xbfdef f():\n    a = 1\n    b = 2\n    c = 3\n",
        b"# coding: latin-1\ndef f():\n    a = '\xe9'\n    b = 2\n    c = 3\n",
        b"def f():\n    a = 1\n    b = 2\n    c = 3",
        b"def f():\r    a = 1\n    b = 2\n    c = 3\n",
        b"\fdef f():\n    a = 1\n    b = 2\n    c = 3\n",
        b'def f():\n    a = "dflash-deploy-hole"\n    b = 2\n    c = 3\n',
    ],
)
def test_sources_that_stay_whole(source: bytes) -> None:
    assert hollow.hollow(source, ast.parse(source), frozenset()) == hollow.Hollow(source)


def test_a_lost_hole_is_noticed() -> None:
    source = b"def f():\n    a = 1\n    b = 2\n    c = 3\n" * 2
    small = hollow.hollow(source, ast.parse(source), frozenset())
    assert len(small.bodies) == 2 and small.filled(small.source) == source
    first, second = (b'"dflash-deploy-hole %d"' % n for n in (0, 1))
    assert small.filled(small.source.replace(first, b"pass")) is None
    assert small.filled(small.source.replace(second, first)) is None


def test_an_anchor_that_is_not_there_is_explained_from_the_whole_file() -> None:
    patch = Patch("p", "f.py", "why", InsertStatements("Other.longer", "pass", at=First()))
    (verdict,) = engine.run({"f.py": SOURCE.encode()}, [patch]).verdicts
    assert verdict.state is State.CONFLICT and "nearest: Other.long" in verdict.evidence
