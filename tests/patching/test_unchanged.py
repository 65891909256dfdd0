"""A run that finds all as the last one left it says so from hashes alone; whatever differs is judged in full."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from dflash_deploy.host.local import LocalHost
from dflash_deploy.patching import tree
from dflash_deploy.patching.unchanged import look, rules_digest, unchanged
from tests.patching.demo import HOOKS, hashes, install, payload

HOST = LocalHost()
RULES = "r" * 64


@dataclass(frozen=True)
class Applied:
    site: Path
    payload: Path

    def same(self, *sets: str, rules: str = RULES) -> bool:
        names = sets or ("hooks",)
        found = unchanged(
            look(HOST, str(self.site), "demo"), lambda gpu: names, package="demo", rules=rules, payload=self.payload
        )
        return found is not None

    def apply(self, rules: str = RULES) -> None:
        tree.apply(HOST, str(self.site), (HOOKS,), package="demo", payload=self.payload, rules=rules)


@pytest.fixture
def applied(tmp_path: Path) -> Applied:
    site = install(tmp_path / "env" / "lib" / "python3.11" / "site-packages")
    made = Applied(site, payload(tmp_path / "source"))
    made.apply()
    return made


def test_nothing_differs(applied: Applied) -> None:
    before = hashes(applied.site)
    assert applied.same() and hashes(applied.site) == before
    manifest = json.loads((applied.site / ".dflash-deploy" / "manifest.json").read_text())
    assert set(manifest["seen"]) == {"demo/c.py"} and manifest["rules"] == RULES


@pytest.mark.parametrize("name", ["demo/a.py", "demo/c.py", "brought/deep/table.txt"])
@pytest.mark.parametrize("how", ["edited", "removed"])
def test_a_file_differs(applied: Applied, name: str, how: str) -> None:
    path = applied.site / name
    if how == "edited":
        path.write_bytes(path.read_bytes() + b"# mine\n")
    else:
        path.unlink()
    assert not applied.same()


def test_the_release_was_installed_again(applied: Applied) -> None:
    install(applied.site)
    assert not applied.same()


def test_another_release_sets_rules_or_payload(applied: Applied) -> None:
    assert not applied.same("hooks", "more") and not applied.same("more") and not applied.same(rules="x" * 64)
    assert not applied.same(rules="")
    (applied.payload / "new.py").write_text("")
    assert not applied.same()
    (applied.payload / "new.py").unlink()
    assert applied.same()
    (applied.site / "demo-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: demo\nVersion: 1.1\n")
    assert not applied.same()


def test_an_interrupted_run(applied: Applied) -> None:
    (applied.site / ".dflash-deploy" / ".left").write_text("")
    assert not applied.same()


def test_a_work_tree(applied: Applied) -> None:
    clone = install(applied.payload.parent / "clone")
    (clone / ".git").mkdir()
    tree.apply(HOST, str(clone), (HOOKS,), package="demo", payload=applied.payload, rules=RULES, allow_dirty=True)
    assert not Applied(clone, applied.payload).same()


def test_other_rules_are_written_down_when_they_change_nothing(applied: Applied) -> None:
    files = {name: text for name, text in hashes(applied.site).items() if not name.startswith(".dflash-deploy/m")}
    applied.apply(rules="n" * 64)
    assert applied.same(rules="n" * 64) and not applied.same()
    assert {n: t for n, t in hashes(applied.site).items() if not n.startswith(".dflash-deploy/m")} == files


def test_the_digest_is_over_names_and_text(tmp_path: Path) -> None:
    folder = tmp_path / "rules"
    folder.mkdir()
    digests = {rules_digest([folder])}
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", ""), ("c.txt", "no code")):
        (folder / name).write_text(text)
        digests.add(rules_digest([folder]))
    assert len(digests) == 4


def test_neither_the_parser_nor_the_sets_are_loaded(applied: Applied) -> None:
    script = (
        "import sys; from dflash_deploy.cli import patch; from dflash_deploy.host.local import LocalHost; "
        "patch.rules(); patch.nothing_to_do(patch.look(LocalHost(), sys.argv[1])); "
        "bad = {'libcst', 'dflash_patches', 'paramiko'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    site = applied.site
    (site / "sglang").mkdir()
    (site / "sglang" / "__init__.py").write_text("")
    done = subprocess.run([sys.executable, "-c", script, str(site)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
