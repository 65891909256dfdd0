"""Models to a host: from a hub on loopback with the hub's own client, and from a folder here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_deploy.audit.stacks import get_stack
from dflash_deploy.cli.deployment import blobs_of
from dflash_deploy.errors import CommandFailed
from dflash_deploy.execute import Journal, execute
from dflash_deploy.host import connect
from dflash_deploy.host.local import LocalHost
from dflash_deploy.model import Plan
from dflash_deploy.plan.models import NOTE, ModelState, fetch_steps, fetched_path, hub_parts, upload_steps
from dflash_deploy.settings import Mode, Settings
from dflash_deploy.wheelhouse.cache import cached
from tests.hosts.loopback import Sshd
from tests.models.hub import SHA, Hub, serve

TOKEN = "hf_verysecrettoken"


def test_names_of_the_hub_and_paths() -> None:
    assert hub_parts("Qwen/Qwen3-8B") == ("Qwen/Qwen3-8B", "")
    assert hub_parts("Qwen/Qwen3-8B@refs/pr/3") == ("Qwen/Qwen3-8B", "refs/pr/3")
    for path in ("/models/a", "~/a", "./a/b", "a", "a/b/c", "../a", ""):
        assert hub_parts(path) is None
    assert fetched_path("/r", "o/m", "v1/x") == "/r/models/o--m@v1-x"


@pytest.fixture(scope="module")
def client_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the hub's client, as transformers brings it."""
    venv = tmp_path_factory.mktemp("client") / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    command = [venv / "bin" / "python", "-m", "pip", "install", "-q", "--no-compile", "huggingface_hub==1.33.0"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"the hub's client cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return venv


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {"config.json": b"{}", "tokenizer.json": b'{"a": 1}'}
    files["model-00001-of-00001.safetensors"] = os.urandom(3 << 20)
    found = Hub("org/tiny", files)
    server = serve(found)
    yield found
    server.shutdown()


def settings_for(root: Path, venv: Path, env: dict[str, str]) -> Settings:
    return Settings(
        host="local", stack=get_stack("sglang-0.5.16-cpu"), root=str(root), venv=str(venv), service="s",
        bind="127.0.0.1", port=1, model="", draft_model="", algorithm="NONE", budget=16, server_args=(), env=env,
        mode=Mode.SUPERVISOR, tiny_pair=False,
    )  # fmt: skip


@pytest.mark.wheels
@pytest.mark.waits
def test_fetched_whole_or_refused_by_name(client_venv: Path, hub: Hub, tmp_path: Path) -> None:
    settings = settings_for(tmp_path, client_venv, {"HF_TOKEN": TOKEN, "HF_ENDPOINT": hub.url, "OTHER": "x"})
    path = fetched_path(str(tmp_path), hub.repo, "")
    plan = Plan("models", tuple(fetch_steps(settings, path, ModelState(repo=hub.repo))))
    host = LocalHost()
    journal = Journal(host, str(tmp_path / "journal.jsonl"))
    weights = "model-00001-of-00001.safetensors"
    hub.spoiled.add(weights)
    with pytest.raises(CommandFailed) as caught:
        execute(plan, host, journal=journal)
    assert any(weights in line and "config.json" not in line for line in caught.value.evidence), caught.value.evidence
    assert not Path(path).exists() and not (Path(path + ".part") / weights).exists()
    hub.spoiled.clear()
    said: list[str] = []
    execute(plan, host, journal=journal, on_progress=lambda news: said.append(news.line))
    assert {p.name: p.read_bytes() for p in Path(path).iterdir() if p.is_file() and p.name != NOTE} == hub.files
    note = json.loads((Path(path) / NOTE).read_text())
    assert note["revision"] == SHA and set(note["files"]) == set(hub.files)
    assert f"Bearer {TOKEN}" in hub.tokens
    # It travels as a variable: it is in no output, no journal, no command line.
    shown = [*said, (tmp_path / "journal.jsonl").read_text(), *caught.value.evidence]
    assert TOKEN not in "\n".join([*shown, *(step.describe() for step in plan.steps)])


@pytest.mark.wheels
@pytest.mark.waits
def test_a_hub_that_does_not_answer_is_said(client_venv: Path, tmp_path: Path) -> None:
    settings = settings_for(tmp_path, client_venv, {"HF_ENDPOINT": "http://127.0.0.1:9"})
    path = fetched_path(str(tmp_path), "org/tiny", "")
    with pytest.raises(CommandFailed) as caught:
        execute(Plan("models", tuple(fetch_steps(settings, path, ModelState(repo="org/tiny")))), LocalHost())
    assert any("Connect" in line for line in caught.value.evidence), caught.value.evidence
    assert not Path(path).exists()


def test_a_folder_of_here_goes_file_by_file(sshd: Sshd, tmp_path: Path) -> None:
    source = tmp_path / "here" / "pair"
    (source / "sub").mkdir(parents=True)
    for name in ("config.json", "a.safetensors", "copy.safetensors", "sub/b.txt"):
        (source / name).write_bytes(b"same" if "safetensors" in name else name.encode())
    (source / ".git").mkdir()
    (source / ".git" / "x").write_text("no")
    blobs = blobs_of(source)
    assert [blob.name for blob in blobs] == ["a.safetensors", "config.json", "copy.safetensors", "sub/b.txt"]
    host = connect(sshd.target)
    target = str(tmp_path / "there" / "models" / "pair")

    def plan() -> Plan:
        return Plan("models", tuple(upload_steps(target, blobs, cached(host, f"{target}.blobs"), str(source))))

    first = plan()
    execute(Plan("models", first.steps[:1]), host)
    # The disk spoils what was brought: named, and the next run brings it again.
    spoiled = Path(f"{target}.blobs") / blobs[0].sha256
    spoiled.write_bytes(b"sane")
    with pytest.raises(CommandFailed) as caught:
        execute(plan(), host)
    assert any("a.safetensors" in line and "wrong hash" in line for line in caught.value.evidence)
    assert not Path(target).exists()
    again = plan()
    assert "upload 1 of 4" in again.steps[0].title
    execute(again, host)
    found = {p.relative_to(target).as_posix() for p in Path(target).rglob("*") if p.is_file()}
    assert found == {*(blob.name for blob in blobs), NOTE} and (Path(target) / "a.safetensors").read_bytes() == b"same"
    assert sorted(p.name for p in Path(target).parent.iterdir()) == ["pair"]
    host.close()
