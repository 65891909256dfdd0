"""Models and environments that are wrong on purpose."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

PAIR = Path(__file__).resolve().parents[2] / "templates" / "tiny-pair"
WEIGHTS = "model.safetensors"


def _copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def rewritten(source: Path, target: Path, change: Callable[[str, np.ndarray], np.ndarray]) -> Path:
    """A model folder whose tensors went through ``change(name, tensor)``."""
    folder = _copy(source, target)
    tensors = load_file(folder / WEIGHTS)
    changed = {name: np.ascontiguousarray(change(name, tensor)) for name, tensor in tensors.items()}
    save_file(changed, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def garbage(source: Path, target: Path) -> Path:
    """Weights of the right shapes that compute nonsense: loaded without a complaint."""
    noise = np.random.default_rng(7)

    def change(name: str, tensor: np.ndarray) -> np.ndarray:
        if tensor.ndim < 2:
            return tensor
        return noise.normal(0, float(tensor.std()) or 0.02, tensor.shape).astype(tensor.dtype)

    return rewritten(source, target, change)


def for_another_target(source: Path, target: Path, width: int = 192) -> Path:
    """A drafter that was made for a target of another hidden size."""
    config = json.loads((source / "config.json").read_text())
    before = config["hidden_size"]

    def change(name: str, tensor: np.ndarray) -> np.ndarray:
        shape = [size // before * width if size in (before, 3 * before) else size for size in tensor.shape]
        return np.zeros(shape, tensor.dtype)

    folder = rewritten(source, target, change)
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": width}))
    return folder


def without_a_shard(source: Path, target: Path) -> Path:
    """Two shards and an index, and the second shard never arrived."""
    folder = sharded(source, target)
    (folder / "model-00002-of-00002.safetensors").unlink()
    return folder


def sharded(source: Path, target: Path) -> Path:
    """The same weights in two shards with an index."""
    folder = _copy(source, target)
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    parts = [names[: len(names) // 2], names[len(names) // 2 :]]
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for file, part in zip(files, parts, strict=True):
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    where = {name: files[at] for at, part in enumerate(parts) for name in part}
    total = sum(tensor.nbytes for tensor in tensors.values())
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    (folder / WEIGHTS).unlink()
    return folder


def own_sglang(venv: Path, target: Path) -> Path:
    """A small venv with its own copy of SGLang, payload and manifest; everything else comes from ``venv``."""
    # By the environment's own interpreter: its standard library and its binary belong together.
    real = os.path.realpath(venv / "bin" / "python")
    subprocess.run([real, "-m", "venv", "--without-pip", str(target)], check=True)
    there = next((venv / "lib").glob("python*/site-packages"))
    here = next((target / "lib").glob("python*/site-packages"))
    for entry in there.iterdir():
        if entry.name.startswith(("sglang", "dflash_kernels", ".dflash-deploy")):
            subprocess.run(["cp", "-a", "--reflink=auto", str(entry), str(here)], check=True)
    (here / "shared.pth").write_text(f"{there}\n")
    return target


def reinstalled(venv: Path, pristine: Path) -> list[str]:
    """SGLang's files as a reinstallation leaves them: the wheel's own, beside a manifest that says they are patched.

    Args:
        pristine: the wheel of the same release.
    """
    site = next((venv / "lib").glob("python*/site-packages"))
    manifest = json.loads((site / ".dflash-deploy" / "manifest.json").read_text())
    import zipfile

    back = []
    with zipfile.ZipFile(pristine) as archive:
        names = set(archive.namelist())
        for name in manifest["files"]:
            if name in names:
                (site / name).write_bytes(archive.read(name))
                back.append(name)
    for cache in (site / "sglang").rglob("__pycache__"):
        shutil.rmtree(cache)
    return back
