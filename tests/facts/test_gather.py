"""The probe against real shells and Pythons, and against hosts that misbehave."""

from __future__ import annotations

import ast
import importlib.resources
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from dflash_deploy.errors import UnreadableFact
from dflash_deploy.facts import Facts, gather
from dflash_deploy.facts.program import MODULES, PACKAGE
from dflash_deploy.facts.remote.models import model_facts
from dflash_deploy.facts.remote.ports import without_secrets
from dflash_deploy.model import Result


class Shell:
    """This machine, with a chosen environment and noise around every answer."""

    name = "shell"

    def __init__(self, env: Mapping[str, str] | None = None, before: bytes = b"", after: bytes = b"") -> None:
        self.env, self.before, self.after = env, before, after
        self.calls = 0

    def run(self, argv: Sequence[str], *, input: bytes | None = None, timeout_s: float = 60.0) -> Result:
        self.calls += 1
        done = subprocess.run(argv, input=input, capture_output=True, timeout=timeout_s, env=self.env)
        return Result(tuple(argv), done.returncode, self.before + done.stdout + self.after, done.stderr)


def path_with(folder: Path, tools: Sequence[str]) -> dict[str, str]:
    """An environment whose PATH holds only these tools."""
    folder.mkdir(exist_ok=True)
    for tool in tools:
        found = shutil.which(tool)
        if found and not (folder / tool).exists():
            (folder / tool).symlink_to(found)
    return {"PATH": str(folder), "HOME": str(folder)}


BASICS = ("sh", "uname", "id", "sed", "grep", "cat", "getconf", "df", "ls")


def test_one_round_trip(tmp_path: Path) -> None:
    host = Shell()
    facts = gather(host, paths=[str(tmp_path / "not/yet")], ports=[1])
    assert host.calls == 1
    assert facts.system == os.uname().sysname and facts.arch == os.uname().machine
    assert facts.uid == os.getuid()
    assert facts.memory_mib and facts.cpu_count
    assert str(tmp_path / "not/yet") in facts.disk_free_mib
    assert any(python.version >= (3, 11, 0) for python in facts.pythons)
    assert not facts.raw["probe"]["errors"]
    assert Facts.from_json(facts.to_json()).to_json() == facts.to_json()


def test_noisy_login_shell() -> None:
    noise = b'Welcome!\n\xff\xfe{"schema": 1}\n' * 50
    facts = gather(Shell(before=noise, after=b"\nlogout\n"), discover=False)
    assert facts.uid == os.getuid()


def without_system_python(command: tuple[str, ...]) -> tuple[str, ...]:
    """The fixed paths that the search tries, made absent."""
    return tuple(
        word.replace("/usr/bin/python3", "/nonexistent/p")
        .replace("/usr/local/bin/python3", "/nonexistent/p")
        .replace("/opt/*/bin/python3", "")
        for word in command
    )


class Bare(Shell):
    """A host on which no Python can be found."""

    def run(self, argv: Sequence[str], *, input: bytes | None = None, timeout_s: float = 60.0) -> Result:
        return super().run(without_system_python(tuple(argv)), input=input, timeout_s=timeout_s)


def test_without_python_the_basics_are_there(tmp_path: Path) -> None:
    facts = gather(Bare(path_with(tmp_path / "bin", BASICS)), paths=["/"])
    assert facts.raw["probe"]["via"] == "sh"
    assert facts.arch == os.uname().machine and facts.uid == os.getuid()
    assert facts.memory_mib and facts.disk_free_mib["/"] > 0
    assert "no Python" in facts.raw["probe"]["errors"]["python"]


def test_broken_python_falls_back(tmp_path: Path) -> None:
    env = path_with(tmp_path / "bin", BASICS)
    broken = tmp_path / "bin/python3"
    broken.write_text(
        '#!/bin/sh\ncase "$*" in *version_info*) exit 0;; esac\necho "ModuleNotFoundError: json" >&2\nexit 1\n'
    )
    broken.chmod(0o755)
    facts = gather(Bare(env))
    assert facts.raw["probe"]["via"] == "sh"
    assert "ModuleNotFoundError" in facts.raw["probe"]["errors"]["python"]


def test_silent_host_is_an_error() -> None:
    class Silent(Shell):
        def run(self, argv: Sequence[str], *, input: bytes | None = None, timeout_s: float = 60.0) -> Result:
            return Result(tuple(argv), 1, b"", b"This account is not available.\n")

    with pytest.raises(UnreadableFact) as caught:
        gather(Silent())
    assert "not available" in " ".join(caught.value.evidence)


def test_secrets_of_a_ports_owner_stay_on_the_host() -> None:
    words = [
        "python",
        "-m",
        "sglang.launch_server",
        "--api-key",
        "sk-1",
        "--admin-api-key=sk-2",
        "--tokenizer-path",
        "/m",
    ]
    shown = without_secrets([*words, "http://u:p@proxy"])
    assert "sk-" not in shown and "u:p" not in shown
    assert shown.startswith("python -m sglang.launch_server --api-key *** --admin-api-key=***")


def test_hanging_nvidia_smi(tmp_path: Path) -> None:
    hang = tmp_path / "nvidia-smi"
    hang.write_text("#!/bin/sh\ntrap '' TERM\nsleep 30\n")
    hang.chmod(0o755)
    begun = time.monotonic()
    facts = gather(Shell({**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}), discover=False)
    assert time.monotonic() - begun < 20
    assert facts.raw["gpu"]["smi"]["status"] == "timeout"
    assert facts.gpus == ()


def test_nvidia_smi_lines_are_all_read(tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        '#!/bin/sh\ncase "$*" in *compute_cap*) echo "0, 9.0"; echo "1, 9.0";;\n'
        '*query-gpu*) for i in 0 1; do echo "$i, NVIDIA H200, 143771, 143000, Enabled, 0000$i, GPU-$i, '
        '580.159.04, Enabled, 0, 75.1"; done;;\n'
        "*compute-apps*) echo '42, GPU-0, 1000, python';; esac\n"
    )
    smi.chmod(0o755)
    facts = gather(Shell({**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}), discover=False)
    assert [(gpu.index, gpu.compute_capability, gpu.memory_free_mib) for gpu in facts.gpus] == [
        (0, (9, 0), 143000),
        (1, (9, 0), 143000),
    ]
    assert facts.raw["gpu"]["smi"]["processes"][0]["pid"] == 42


def test_modules_are_python_3_8() -> None:
    for name in MODULES:
        source = importlib.resources.files(PACKAGE).joinpath(f"{name}.py").read_text()
        ast.parse(source, feature_version=(3, 8))
        assert "from __future__ import annotations" in source


def old_pythons() -> list[str]:
    names = [shutil.which(f"python3.{minor}") for minor in (8, 9, 10)]
    home = Path.home() / ".pyenv/versions"
    names += [str(path) for minor in (8, 9) for path in home.glob(f"3.{minor}.*/bin/python3")]
    return [name for name in names if name]


@pytest.mark.skipif(not old_pythons(), reason="no older Python on this machine")
def test_runs_on_an_older_python(tmp_path: Path) -> None:
    working = [name for name in old_pythons() if subprocess.run([name, "-c", ""], capture_output=True).returncode == 0]
    if not working:
        pytest.skip("no older Python that starts")
    env = path_with(tmp_path / "bin", BASICS)
    (tmp_path / "bin/python3").symlink_to(working[-1])
    facts = gather(Bare(env))
    assert facts.raw["probe"]["via"] == "python"
    assert facts.raw["probe"]["python"].startswith(("3.8.", "3.9.", "3.10."))
    assert not facts.raw["probe"]["errors"]


def test_hostile_names(tmp_path: Path) -> None:
    site = tmp_path / "venv/lib/python3.12/site-packages/torch"
    site.mkdir(parents=True)
    (tmp_path / "venv/pyvenv.cfg").write_text("home = /nonexistent/bin\nversion = 3.12.1\n")
    (site / "evil\x1b[31m\n.so").write_bytes(b"\x7fELF" + b"\0" * 100)
    os.mkfifo(site / "pipe.so")
    (site / "loop.so").symlink_to("loop.so")
    begun = time.monotonic()
    facts = gather(Shell(), venvs=[str(tmp_path / "venv")], discover=False)
    assert time.monotonic() - begun < 20
    (environment,) = facts.raw["venvs"]["environments"]
    assert environment["elf"]["bad_count"] == 1
    assert "\x1b" not in environment["elf"]["bad"][0]["path"]
    assert environment["python_exists"] is False


def safetensors(size: int) -> bytes:
    head = b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size, size)
    return len(head).to_bytes(8, "little") + head + bytes(size)


def test_model_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["X"], "hidden_size": 8}')
    (tmp_path / "model-00001-of-00003.safetensors").write_bytes(safetensors(100))
    (tmp_path / "model-00002-of-00003.safetensors").write_bytes(safetensors(100)[:-1])
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-00001-of-00003.safetensors", "b": "model-00002-of-00003.safetensors", '
        '"c": "model-00003-of-00003.safetensors", "d": "../x"}}'
    )
    (tmp_path / "tokenizer.json").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    facts = model_facts(str(tmp_path))
    problems = {item["name"]: item["problem"] for item in facts["weights"]["files"]}
    assert problems["model-00001-of-00003.safetensors"] is None
    assert "header says" in problems["model-00002-of-00003.safetensors"]
    assert problems["model-00003-of-00003.safetensors"] == "missing"
    assert "../x" not in problems
    assert facts["tokenizer"]["files"]["tokenizer.json"] == "lfs pointer"
    assert model_facts(str(tmp_path / "none")) == {"path": str(tmp_path / "none"), "exists": False}
