"""An environment from one host to another: two sshds, the stand-in stack with a compiled package and scripts."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_deploy.errors import Incompatible
from dflash_deploy.transplant import Environment, batches, refuse
from tests.hosts.loopback import Sshd
from tests.wheelhouse.conftest import Cli, built, cli

__all__ = ["built", "cli"]


def environment() -> Environment:
    return Environment((3, 11, 2), "cpython-311-x86_64-linux-gnu", "x86_64", "/v/s", "/v", (("a", 1),), (), (), False)


def test_every_reason_against_comes_out_at_once() -> None:
    refuse(environment(), replace(environment(), python=(3, 11, 9)), ())
    other = replace(environment(), python=(3, 12, 1), soabi="cpython-312-x86_64-linux-gnu", machine="aarch64")
    with pytest.raises(Incompatible) as caught:
        refuse(replace(environment(), bound=("x.pth",), patched=True), other, ("glibc there is 2.31",))
    assert len(caught.value.evidence) == 5


def test_batches_are_bounded_and_keep_everything() -> None:
    entries = [(str(i), (i % 7) * (12 << 20)) for i in range(50)] + [("huge", 900 << 20)]
    found = list(batches(entries))
    assert [entry for batch in found for entry in batch] == entries
    assert all(len(batch) == 1 or sum(size for _, size in batch) <= 64 << 20 for batch in found)


@pytest.fixture
def inventory(new_sshd: Callable[..., Sshd], built: Path, tmp_path: Path) -> Iterator[Path]:
    text = '[defaults]\nstack = "standin"\nmode = "supervisor"\nalgorithm = "NONE"\n'
    for name in ("a", "b"):
        server = new_sshd()
        text += (
            f'[{name}]\naddress = "{server.user}@127.0.0.1:{server.port}"\nidentity_file = "{server.key}"\n'
            f'known_hosts = "{server.known_hosts}"\nroot = "{tmp_path / name}"\n'
        )
    (tmp_path / "hosts.toml").write_text(text)
    yield tmp_path / "hosts.toml"


@pytest.mark.wheels
def test_a_copy_is_whole_names_its_own_paths_and_is_audited(
    cli: Cli, inventory: Path, built: Path, tmp_path: Path
) -> None:
    more = ("--inventory", str(inventory))
    error = cli.json("provision", "b", "--from", "a", *more, exit_code=2)["error"]
    assert "has no finished standin" in error["message"] and not list((tmp_path / "b").rglob("pyvenv.cfg"))
    cli.json("provision", "a", "--wheelhouse", str(built), *more)
    source = next((tmp_path / "a").rglob("pyvenv.cfg")).parent
    # A script that names its interpreter, as pip writes them.
    script = source / "bin" / "hello"
    script.write_text(f"#!{source}/bin/python\nimport jinja2, sys\nprint(sys.prefix)\n")
    script.chmod(0o755)

    # What was spoiled on the first host is found, by name.
    spoiled = next(source.rglob("jinja2/loaders.py"))
    before = spoiled.read_bytes()
    spoiled.write_bytes(before.replace(b"class", b"klass", 1))
    error = cli.json("provision", "b", "--from", "a", *more, exit_code=4)["error"]
    assert error["evidence"] == ["jinja2/loaders.py"]
    spoiled.write_bytes(before)

    answer = cli.json("provision", "b", "--from", "a", *more)
    copy = next(step for step in answer["steps"] if step["name"] == "copy")
    assert copy["status"] == "changed" and "1 scripts rewritten" in copy["detail"]
    target = next((tmp_path / "b").rglob("pyvenv.cfg")).parent
    # The first host goes away: nothing of the copy leads there.
    source.rename(source.with_name("gone"))
    said = subprocess.run([target / "bin" / "hello"], capture_output=True, text=True, check=True).stdout.strip()
    assert Path(said) == target
    left = subprocess.run(
        ["grep", "-rlI", "--exclude-dir=__pycache__", str(source), str(target)], capture_output=True, text=True
    ).stdout
    assert left == ""
    assert not cli.json("provision", "b", *more)["changed"]
