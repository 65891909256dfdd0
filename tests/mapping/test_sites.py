"""Every kind of site on small sources: what a text search misses is found, what it wrongly finds is left out."""

from __future__ import annotations

import textwrap
import zipfile
from pathlib import Path

import pytest

from dflash_deploy.errors import UnreadableFact, UsageError
from dflash_deploy.mapping.build import build
from dflash_deploy.mapping.model import Kind, Site
from tests.mapping.small import package


def sites(tmp_path: Path, text: str, **files: str) -> list[Site]:
    """Sites of a module ``here``."""
    package(tmp_path, here=textwrap.dedent(text), **{n: textwrap.dedent(t) for n, t in files.items()})
    return [site for site in build(tmp_path).sites if site.file == "here.py"]


def brief(found: list[Site]) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(str(site.kind), site.role, site.names) for site in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(batch):\n    return batch.spec_algorithm.is_dflash()", ("predicate", "ask", ("is_dflash",))),
        (  # a local alias, and a flag made from the answer
            "def f(batch):\n    a = batch.spec_algorithm\n    tree = a.is_eagle() and 1\n    if tree:\n        pass",
            ("predicate", "flag", ("is_eagle",)),
        ),
        (  # a flag on self, tested in another method
            """
            class A:
                def __init__(self, spec_algorithm):
                    self.quick = not spec_algorithm.is_dflash()
                def f(self):
                    return 1 if self.quick else 2
            """,
            ("predicate", "flag", ("is_dflash",)),
        ),
        ("def f(x):\n    return getattr(x, 'is_dflash', None)", ("predicate", "duck", ("is_dflash",))),
        (  # an import under another name
            "from sglang.spec_info import SpeculativeAlgorithm as S\ndef f(x):\n    return x == S.EAGLE",
            ("predicate", "compare", ("EAGLE",)),
        ),
        ("def f(x: 'SpeculativeAlgorithm'):\n    return x.is_none()", ("predicate", "ask", ("is_none",))),
        ("def f(a):\n    return a.speculative_algorithm in ('EAGLE', None)", ("name", "compare", ("EAGLE",))),
        (  # a name under another name, in a collection under another name
            "KNOWN = frozenset({'DFLASH'})\ndef f(a):\n    n = a.speculative_algorithm.upper()\n    return n in KNOWN",
            ("name", "compare", ("DFLASH",)),
        ),
        ("from sglang.known import TABLE as T\ndef f(speculative_algorithm):\n    return T[speculative_algorithm]",
         ("name", "lookup", ("EAGLE",))),
        (
            "def f(a):\n    match a.speculative_algorithm:\n        case 'EAGLE' | 'DFLASH':\n            pass",
            ("name", "compare", ("EAGLE", "DFLASH")),
        ),
        (
            "from sglang.spec_info import SpeculativeAlgorithm as S\ndef f(n):\n    return S.from_string('dflash')",
            ("name", "parse", ("DFLASH",)),
        ),
        ("def f(x, DFlashVerifyInput):\n    return isinstance(x, DFlashVerifyInput)",
         ("type", "test", ("DFlashVerifyInput",))),
        ("from sglang.spec_info import DFlashVerifyInput as V\nX = V(1)", ("type", "make", ("DFlashVerifyInput",))),
        ("def f(m):\n    verify = m.forward_mode.is_target_verify()\n    if verify:\n        pass",
         ("branch", "flag", ("is_target_verify",))),
        ("def f(runner):\n    if getattr(runner, 'is_draft_worker', False):\n        pass", ("branch", "duck", ())),
        ("def f(x, m):\n    return x(custom_mask=m)", ("mask", "produce", ())),
        ("def f(x):\n    return x(custom_mask=None)", ("mask", "none", ())),
        (  # what is handed over as a mask is one
            "class A:\n    def f(self, x):\n        x(custom_mask=self.buf)\n    def g(self):\n        return self.buf",
            ("mask", "consume", ()),
        ),
        ("from sglang.modes import CaptureHiddenMode as C\ndef f(x):\n    x.capture_hidden_mode = C.FULL",
         ("hidden", "set", ())),
        ("class A:\n    def f(self, a):\n        self.w = a.speculative_num_draft_tokens\n    def g(self):\n"
         "        return self.w == 4", ("tokens", "gate", ())),
        ("class A:\n    def f(self, a):\n        self.topk = a.speculative_eagle_topk or 0\n    def g(self):\n"
         "        return self.topk > 1", ("topk", "gate", ())),
    ],
)  # fmt: skip
def test_found(tmp_path: Path, text: str, expected: tuple[str, str, tuple[str, ...]]) -> None:
    found = sites(tmp_path, text, known="TABLE = {'EAGLE': 1, 'OTHER': 2}\n")
    assert expected in brief(found), brief(found)


@pytest.mark.parametrize(
    "text",
    [
        "# if spec_algorithm.is_dflash(): custom_mask\nX = 1",
        '"""spec_algorithm == "DFLASH" decides."""\nX = 1',
        "def f(log, draft):\n    log.info('DFLASH draft')\n    raise ValueError(f'DFLASH {draft}')",
        "from sglang.others import Backend\ndef f(draft, backend):\n    return backend.is_none()",
        "def f(topk, draft):\n    return topk == 1",
        "class Router:\n    def f(self, k, draft):\n        self.topk = k\n        return self.topk > 1",
        "def f(quant_algo, draft):\n    return quant_algo == 'EAGLE3'",
        "def f(batch):\n    return batch.forward_mode.is_extend()",
        "class DraftEagleModel:\n    pass",
        "def f(x: 'SpecInput') -> 'SpecInput':\n    return x",
    ],
)
def test_left_out(tmp_path: Path, text: str) -> None:
    assert sites(tmp_path, text) == []


def test_where_a_site_is(tmp_path: Path) -> None:
    text = """
    class A:
        def f(self, b):
            def g():
                return b.spec_algorithm.is_eagle()
            return g
    """
    (site,) = sites(tmp_path, text)
    assert (site.scope, site.line, site.qualified) == ("A.f.g", 5, "here.A.f.g")
    assert site.code == "b.spec_algorithm.is_eagle()" and site.via == ""


def test_words_come_from_the_tree(tmp_path: Path) -> None:
    found = build(package(tmp_path).parent)
    assert found.algorithms == ("DFLASH", "EAGLE", "NONE") and found.version == "1.0"
    assert found.predicates == ("is_dflash", "is_dflash_family", "is_eagle", "is_none")
    assert found.calls["is_dflash_family"] == ("is_dflash",)


def test_tests_and_benchmarks_are_not_served(tmp_path: Path) -> None:
    ask = "def f(batch):\n    return batch.spec_algorithm.is_dflash()\n"
    package(tmp_path, test__a=ask, benchmark__b=ask, deep__c=ask)
    files = {site.file for site in build(tmp_path).sites}
    assert "deep/c.py" in files and not {"test/a.py", "benchmark/b.py"} & files


def test_a_wheel_gives_the_same_map(tmp_path: Path) -> None:
    root = package(tmp_path / "site")
    with zipfile.ZipFile(tmp_path / "sglang-1.0-py3-none-any.whl", "w") as archive:
        for path in sorted(root.parent.rglob("*")):
            archive.write(path, path.relative_to(root.parent))
    wheel, folder = build(tmp_path / "sglang-1.0-py3-none-any.whl"), build(root)
    assert wheel.sites == folder.sites and wheel.version == folder.version == "1.0"


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no package sglang"):
        build(tmp_path)
    (tmp_path / "x.whl").write_text("no archive")
    with pytest.raises(UnreadableFact):
        build(tmp_path / "x.whl")
    root = package(tmp_path, broken="def f(draft:\n")
    assert build(tmp_path).unreadable == ("broken.py",)
    (root / "spec_info.py").write_text("")
    with pytest.raises(UsageError, match="no class SpeculativeAlgorithm"):
        build(tmp_path)


def test_kinds_are_all_used(tmp_path: Path) -> None:
    text = """
        def f(b, args):
            b.spec_algorithm.is_eagle()
            args.speculative_algorithm == "EAGLE"
            b.spec_info.is_verify_input()
            b.forward_mode.is_target_verify()
            return b.custom_mask, b.capture_hidden_mode, b.draft_token_num, args.speculative_eagle_topk
    """
    assert {site.kind for site in sites(tmp_path, text)} == set(Kind)
