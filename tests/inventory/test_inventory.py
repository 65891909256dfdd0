"""Names to targets."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_deploy.errors import UsageError
from dflash_deploy.inventory import load_inventory, resolve, resolve_all

HOSTS = """
[defaults]
user = "deploy"
known_hosts = "known"
stack = "cpu"

[ct200]
address = "tester@127.0.0.1:2200"
identity_file = ["keys/a", "/abs/b"]
port = 30001
server_args = ["--log-level", "info"]

[inner]
address = "gpu-7"
proxy_jump = "ct200, edge"
"""
CONFIG = """
Host edge
  HostName edge.example.org
  Port 2222
  User jumper
  IdentityFile ~/.ssh/edge

Host gpu-*
  User cuda
  ProxyJump edge
  HostName %h.example.org

Host *
  IdentitiesOnly yes
"""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "hosts.toml").write_text(HOSTS)
    (tmp_path / "more").write_text(CONFIG)
    (tmp_path / "config").write_text(f"Include {tmp_path}/more\n")
    return {"inventory": tmp_path / "hosts.toml", "ssh_config": tmp_path / "config"}


def test_local() -> None:
    assert resolve("local").kind == "local"


def test_several_names_each_once_in_order(files: dict[str, Path]) -> None:
    found = resolve_all(["inner", "local", "ct200", "inner"], **files)
    assert [target.name for target in found] == ["inner", "local", "ct200"]
    assert found[2] == resolve("ct200", **files)
    with pytest.raises(UsageError, match="ct20x"):
        resolve_all(["ct200", "ct20x"], **files)


def test_a_host_of_the_inventory(files: dict[str, Path], tmp_path: Path) -> None:
    target = resolve("ct200", **files)
    assert (target.name, target.address, target.port, target.user) == ("ct200", "127.0.0.1", 2200, "deploy")
    assert target.identity_files == (str(tmp_path / "keys/a"), "/abs/b")
    assert target.known_hosts == (str(tmp_path / "known"),)
    assert target.options == {"stack": "cpu", "port": 30001, "server_args": ["--log-level", "info"]}


def test_a_host_of_the_ssh_config(files: dict[str, Path]) -> None:
    target = resolve("edge", **files)
    assert (target.address, target.port, target.user, target.identities_only) == (
        "edge.example.org",
        2222,
        "jumper",
        True,
    )
    assert target.identity_files == (str(Path("~/.ssh/edge").expanduser()),)
    gpu = resolve("gpu-3", **files)
    assert (gpu.address, gpu.user) == ("gpu-3.example.org", "cuda")
    assert [hop.address for hop in gpu.proxy_jump] == ["edge.example.org"]


def test_the_inventory_wins_and_the_config_fills_in(files: dict[str, Path]) -> None:
    target = resolve("inner", **files)
    assert (target.address, target.user) == ("gpu-7.example.org", "deploy")
    assert [hop.name for hop in target.proxy_jump] == ["ct200", "edge"]


def test_addresses(files: dict[str, Path]) -> None:
    target = resolve("me@10.1.2.3:2022", **files)
    assert (target.address, target.port, target.user, dict(target.options)) == ("10.1.2.3", 2022, "me", {})
    assert resolve("me@[::1]:22", **files).address == "::1"
    assert resolve("example.org", **files).port == 22


def test_a_wrong_name_names_the_nearest(files: dict[str, Path]) -> None:
    with pytest.raises(UsageError) as caught:
        resolve("ct20", **files)
    assert "ct200" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a]\nadress = 'x'", "address"),
        ("[a]\nport = 'x'", "a number"),
        ("[a]\nport = true", "a number"),
        ("[a]\nserver_args = [1]", "list of texts"),
        ("stack = 'cpu'", "outside any host"),
        ("[local]\nstack = 'cpu'", "this machine"),
        ("[groups]\nall = 'a'", "groups"),
        ("[a", "cannot be read"),
    ],
)
def test_faults_of_the_file(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_inventory(path)
    assert said in f"{caught.value.message} {caught.value.hint}"


def test_a_named_inventory_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        resolve("x", inventory=tmp_path / "none.toml")


def test_jumps_in_a_circle(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text("[a]\naddress='1.1.1.1'\nproxy_jump='b'\n[b]\naddress='2.2.2.2'\nproxy_jump='a'\n")
    config = tmp_path / "config"
    config.write_text("")
    with pytest.raises(UsageError, match="circle"):
        resolve("a", inventory=path, ssh_config=config)


def test_groups_stand_for_hosts_and_groups(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text('[a]\n[b]\n[c]\n[groups]\nfront = ["b", "a"]\nall = ["front", "c", "a"]\n')

    def names(*asked: str) -> list[str]:
        return [target.name for target in resolve_all(asked, inventory=path)]

    assert names("front") == ["b", "a"] and names("all") == ["b", "a", "c"] and names("c", "front") == ["c", "b", "a"]
    with pytest.raises(UsageError, match="is a group"):
        resolve("front", inventory=path)
    with pytest.raises(UsageError) as caught:
        resolve("fron", inventory=path)
    assert "front" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('[a]\n[groups]\na = ["b"]\n', "both a group and a host"),
        ('[groups]\nx = ["y"]\ny = ["x"]\n', "circle"),
        ("[groups]\nx = []\n", "list of names"),
        ("groups = 3\n", "list of names"),
        ('[groups]\nlocal = ["a"]\n', "both"),
    ],
)
def test_groups_that_cannot_be(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "hosts.toml").write_text(text)
    with pytest.raises(UsageError, match=what):
        load_inventory(tmp_path / "hosts.toml")


CLUSTER = """
[defaults]
server_args = ["--a"]
[x]
address = "u@10.0.0.7:2222"
port = 1
[y]
address = "10.0.0.8"
[clusters.big]
hosts = ["x", "y"]
port = 30005
server_args = ["--tp-size", "2"]
"""


def test_a_cluster_ranks_its_hosts_and_shares_its_options(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(CLUSTER)
    first, second = resolve_all(["big"], inventory=path)
    assert (first.name, second.name) == ("x", "y")
    assert first.options["node_rank"] == 0 and second.options["node_rank"] == 1 and second.options["nnodes"] == 2
    assert first.options["dist_init_addr"] == second.options["dist_init_addr"] == "10.0.0.7:20000"
    # A host's own word is the last one.
    assert (first.options["port"], second.options["port"]) == (1, 30005)
    assert first.options["server_args"] == ["--tp-size", "2"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('[a]\n[clusters.c]\nhosts = ["a"]\n', "two or more"),
        ('[a]\n[b]\n[clusters.c]\nhosts = ["a", "z"]\n', "no host of this file"),
        ('[a]\n[b]\n[clusters.a]\nhosts = ["a", "b"]\n', "something else"),
        ('[a]\n[b]\n[clusters.c]\nhosts = ["a", "b"]\nnonsense = 1\n', "unknown key"),
        ('[a]\n[b]\n[d]\n[clusters.c]\nhosts = ["a", "b"]\n[clusters.e]\nhosts = ["b", "d"]\n', "in two clusters"),
    ],
)
def test_clusters_that_cannot_be(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "hosts.toml").write_text(text)
    with pytest.raises(UsageError, match=what):
        load_inventory(tmp_path / "hosts.toml")


def test_hosts_of_a_cluster_start_together_or_not_at_all(tmp_path: Path) -> None:
    from dflash_deploy.cli.several import together

    path = tmp_path / "hosts.toml"
    path.write_text(CLUSTER)
    both = resolve_all(["big"], inventory=path)
    together(both, 2)
    for targets, parallel in ((both, 1), (both[:1], 4)):
        with pytest.raises(UsageError):
            together(targets, parallel)
