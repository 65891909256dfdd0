"""Facts and a stack → steps of provisioning."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from dflash_deploy.audit.stacks import get_stack
from dflash_deploy.errors import Incompatible, UsageError
from dflash_deploy.facts import Facts, Gpu, PythonInterpreter
from dflash_deploy.model import Blob, CopyTree, Remove, Run, Upload, WriteFile
from dflash_deploy.plan.models import ModelState
from dflash_deploy.plan.provision import VenvState, plan_models, plan_provision, unmet
from dflash_deploy.settings import Settings, effective

CPU = get_stack("sglang-0.5.16-cpu")


def complete() -> VenvState:
    packages: dict[str, str] = {}
    for pin in (*CPU.requirements, *CPU.no_deps):
        name, _, version = pin.partition("==")
        packages[canonicalize_name(name)] = version or "1.0"
    return VenvState(True, (3, 11, 2), packages, CPU.pins)


@pytest.fixture
def settings(facts: Facts) -> Settings:
    return effective("h", facts)


def commands(plan_steps: object) -> str:
    return "\n".join(step.describe() for step in plan_steps)  # type: ignore[attr-defined]


def test_a_bare_host_gets_everything(facts: Facts, settings: Settings) -> None:
    plan = plan_provision(replace(settings, lock=False), facts, VenvState())
    text = commands(plan.steps)
    assert f"/usr/bin/python3 -m venv /home/me/.local/share/dflash-deploy/venvs/{CPU.pins[:12]}" in text
    assert "torch==2.14.1+cpu" in text and "--no-deps " in text and "sglang==0.5.16" in text
    assert isinstance(plan.steps[-1], WriteFile) and plan.steps[-1].path == settings.stamp
    assert json.loads(plan.steps[-1].data)["pins"] == CPU.pins
    assert isinstance(plan.steps[-2], Run) and "import" in plan.steps[-2].title


def test_a_complete_venv_needs_nothing(facts: Facts, settings: Settings) -> None:
    assert plan_provision(settings, facts, complete()).empty
    # The variant's local version meets the pin.
    variant = replace(complete(), packages={**complete().packages, "torch": "2.14.1+cpu"})
    assert plan_provision(settings, facts, variant).empty


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"stamp": ""}, "not finished"),
        ({"stamp": "0" * 64}, "pins have changed"),
        ({"packages": {**complete().packages, "transformers": "4.57.1"}}, "transformers==5.12.1 (found 4.57.1)"),
        ({"packages": {k: v for k, v in complete().packages.items() if k != "uvloop"}}, "uvloop==0.23.0 (absent)"),
    ],
)
def test_what_is_left_of_an_installation_goes_on_in_place(
    facts: Facts, settings: Settings, change: dict[str, object], reason: str
) -> None:
    plan = plan_provision(settings, facts, replace(complete(), **change))  # type: ignore[arg-type]
    assert reason in plan.reason and not plan.empty
    assert not any(isinstance(step, Remove) for step in plan.steps)
    assert "-m venv" not in commands(plan.steps)


def test_a_broken_venv_of_ours_is_made_anew_a_foreign_folder_is_not(facts: Facts, settings: Settings) -> None:
    plan = plan_provision(settings, facts, VenvState(exists=True))
    assert isinstance(plan.steps[0], Remove)
    elsewhere = effective("h", facts, options={"venv": "/opt/things"})
    with pytest.raises(UsageError, match="/opt/things"):
        plan_provision(elsewhere, facts, VenvState(exists=True))


def test_uv_is_used_where_it_is(facts: Facts, settings: Settings) -> None:
    text = commands(
        plan_provision(replace(settings, lock=False), replace(facts, uv="/usr/bin/uv", pythons=()), VenvState()).steps
    )
    assert "/usr/bin/uv venv --python 3.13" in text and "--torch-backend=cpu" in text and "-m pip" not in text


def test_a_python_that_there_is_a_lock_for_comes_first(facts: Facts, settings: Settings) -> None:
    """On a newer one, some package of a GPU stack has no wheel and would have to be compiled."""
    stack = get_stack("sglang-0.5.16-cu130")
    settings = replace(settings, stack=stack)
    pythons = (
        PythonInterpreter("/usr/bin/python3.13", (3, 13, 1), True),
        PythonInterpreter("/opt/python/bin/python3.12", (3, 12, 4), True),
    )
    for uv, python in ((None, "/opt/python/bin/python3.12 -m venv"), ("/usr/bin/uv", "--python /opt/python")):
        text = commands(plan_provision(settings, replace(facts, uv=uv, pythons=pythons), VenvState()).steps)
        assert python in text and "--require-hashes" in text
    text = commands(plan_provision(settings, replace(facts, uv="/usr/bin/uv", pythons=()), VenvState()).steps)
    assert "--python 3.12" in text and "--require-hashes" in text
    # Without any, the newest.
    text = commands(plan_provision(settings, replace(facts, pythons=pythons[:1]), VenvState()).steps)
    assert "/usr/bin/python3.13 -m venv" in text and "--require-hashes" not in text


def test_all_obstacles_come_out_together(facts: Facts, settings: Settings) -> None:
    old = (
        PythonInterpreter("/usr/bin/python3", (3, 9, 2), True),
        PythonInterpreter("/usr/bin/python3.11", (3, 11, 0), False),
    )
    with pytest.raises(Incompatible) as caught:
        plan_provision(settings, replace(facts, pythons=old, disk_free_mib={"/": 900}), VenvState())
    assert len(caught.value.evidence) == 2
    assert "Python 3.11 to 3.13" in caught.value.evidence[0] and "900 MiB are free" in caught.value.evidence[1]


def test_disk_space_is_asked_for_what_is_still_to_come(facts: Facts, settings: Settings) -> None:
    tight = replace(facts, disk_free_mib={"/home/me": 3_000})
    nearly = replace(complete(), stamp="", packages={**complete().packages, "einops": "0"})
    del nearly.packages["einops"]  # type: ignore[attr-defined]
    assert not plan_provision(settings, tight, nearly).empty
    with pytest.raises(Incompatible):
        plan_provision(settings, tight, VenvState())


def test_unmet_names_both_sides() -> None:
    assert unmet(CPU, {}) and all(entry.endswith("(absent)") for entry in unmet(CPU, {}))
    assert unmet(CPU, complete().packages) == []


def test_models(facts: Facts, settings: Settings) -> None:
    copy = plan_models(settings, {}, "/pair", pair_differs=True).steps
    assert copy == (CopyTree("/pair", f"{settings.root}/models/tiny-pair", title="copy the tiny pair"),)
    assert plan_models(settings, {}, "/pair", pair_differs=False).empty
    own = effective("h", facts, options={"model": "/m", "draft_model": "/d"})
    assert plan_models(own, {"/m": ModelState(True), "/d": ModelState(True)}, "", pair_differs=True).empty
    blobs = (Blob("here/d/a", "a", "11", 5), Blob("here/d/sub/b", "sub/b", "22", 7))
    state = ModelState(local="here/d", blobs=blobs, present={"11": 5, "22": 3})
    steps = plan_models(own, {"/m": ModelState(True), "/d": state}, "", pair_differs=True).steps
    # What an earlier attempt brought whole does not travel again.
    assert isinstance(steps[0], Upload) and steps[0].blobs == blobs[1:] and steps[0].folder == "/d.blobs"
    assert [s.path for s in steps if isinstance(s, WriteFile)] == [
        "/d.part/.dflash-deploy-model.json",
        "/d.part/.SHA256SUMS",
    ]
    hub = ModelState(repo="org/m", revision="main")
    (fetch,) = plan_models(own, {"/m": hub, "/d": ModelState(True)}, "", pair_differs=True).steps
    assert (
        isinstance(fetch, Run) and fetch.argv[-4:-1] == ("org/m", "main", "/m") and fetch.env["HF_HUB_OFFLINE"] == "0"
    )
    with pytest.raises(UsageError) as caught:
        plan_models(own, {}, "", pair_differs=True)
    assert len(caught.value.evidence) == 2


def test_settings_say_where_each_value_comes_from(facts: Facts) -> None:
    entry = {"root": "/srv/d", "port": 1234, "server_args": ["--a", "b"]}
    settings = effective("h", facts, options={"port": 4321}, entry=entry)
    assert (settings.root, settings.port, settings.venv) == (
        "/srv/d",
        4321,
        f"/srv/d/venvs/{CPU.pins[:12]}",
    )
    assert settings.origin["port"] == "command line" and settings.origin["root"] == "hosts.toml"
    assert settings.origin["bind"] == "default" and settings.bind == "127.0.0.1"
    assert settings.server_argv()[-2:] == ("--a", "b")


def test_bad_settings_come_out_together(facts: Facts) -> None:
    options = {"port": 70000, "budget": 0, "algorithm": "magic", "service": "a b", "root": "/", "env": {"1x": "y"}}
    with pytest.raises(UsageError) as caught:
        effective("h", facts, options=options)
    assert len(caught.value.evidence) == 6


def test_a_gpu_host_needs_a_model_and_a_drafter(facts: Facts) -> None:
    gpu = replace(facts, gpus=(Gpu(0, "H200", (9, 0), 143_000),), driver=(580, 1))
    with pytest.raises(UsageError, match="do not hold"):
        effective("h", gpu)
    with pytest.raises(UsageError):
        effective("h", gpu, options={"model": "/m"})
    settings = effective("h", gpu, options={"model": "/m", "algorithm": "none"})
    assert settings.stack.device == "cuda" and "--speculative-algorithm" not in settings.server_argv()
    assert not effective("h", gpu, serving=False).tiny_pair


def test_secrets_of_the_environment_are_not_shown(facts: Facts) -> None:
    settings = effective("h", facts, options={"env": {"HF_TOKEN": "hf_secret"}})
    assert "hf_secret" not in repr(settings) + json.dumps(settings.as_dict()) + " ".join(settings.server_argv())
    assert settings.environment()["HF_TOKEN"] == "hf_secret"
    assert Path(settings.env_file).parent == Path(settings.service_dir)
