"""Profiles below the tables of hosts.toml, and where each setting of a host came from."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from dflash_deploy.audit.stacks import get_stack
from dflash_deploy.errors import UsageError
from dflash_deploy.inventory import load_inventory, resolve
from dflash_deploy.profiles import shipped
from tests.cli.test_deploy_cli import cli

OWN = """
[defaults]
port = 30009
budget = 4
[profiles.mine]
profile = "h200"
server_args = ["--log-requests"]
env = { A = "1", B = "1" }
[gpu]
address = "10.0.0.1"
profile = "mine"
server_args = ["--tp-size", "2"]
env = { B = "2" }
[other]
address = "10.0.0.2"
"""


@pytest.mark.parametrize("name", sorted(shipped()))
def test_a_shipped_profile_is_a_host_table_with_its_reasons(name: str, tmp_path: Path) -> None:
    text = shipped()[name]
    found = tomllib.loads(text)
    assert get_stack(found["stack"]).patch_sets and text.startswith("# ")
    path = tmp_path / "hosts.toml"
    path.write_text(f'[box]\naddress = "10.0.0.1"\nprofile = "{name}"\n')
    options = resolve("box", inventory=path).options
    assert {key: options[key] for key in found} == found
    # Its examples are tables that hold, too.
    examples = text.partition("# Examples")[2].splitlines()
    path.write_text("\n".join(line.removeprefix("#   ") for line in examples if line.startswith("#   ")))
    assert all(entry["profile"] == name for entry in load_inventory(path).hosts.values())


def test_a_table_adds_to_its_profile(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(OWN)
    inventory = load_inventory(path)
    gpu, h200 = inventory.hosts["gpu"], tomllib.loads(shipped()["h200"])
    assert gpu["server_args"] == [*h200["server_args"], "--log-requests", "--tp-size", "2"]
    assert gpu["env"] == {"A": "1", "B": "2"} and gpu["port"] == 30009
    # A profile that a host names is its own word, before the defaults.
    assert gpu["budget"] == h200["budget"] and inventory.hosts["other"]["budget"] == 4
    assert gpu["profile_of"]["stack"] == "h200" and "port" not in gpu["profile_of"]
    for text, what in (
        ('[a]\nprofile = "h2000"\n', "no profile"),
        ('[profiles.a]\nprofile = "b"\n[profiles.b]\nprofile = "a"\n[x]\nprofile = "a"\n', "in a circle"),
        ("[profiles.a]\nnonsense = 1\n", "unknown key"),
        ("[profiles]\na = 1\n", "a table per profile"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=what):
            load_inventory(path)


def test_config_says_where_each_setting_comes_from(tmp_path: Path) -> None:
    words = ("--budget", "9", "--server-arg=--log-requests", "--json")
    done = cli("config", "show", "local", *words, home=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["settings"]["budget"] == {"value": 9, "from": "command line"}
    assert found["settings"]["port"] == {"value": 30000, "from": "default"}
    assert found["command"][-1] == "--log-requests"
    assert "command line" in cli("config", "show", "local", *words[:-1], home=tmp_path).stdout
    assert list(json.loads(cli("config", "profiles", "--json", home=tmp_path).stdout)["profiles"]) == sorted(shipped())
    assert cli("config", "profile", "h200", home=tmp_path).stdout == shipped()["h200"]
    assert cli("config", "profile", "none", home=tmp_path).returncode == 2
