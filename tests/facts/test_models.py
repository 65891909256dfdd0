"""Model folders damaged in every way that downloads are: an answer, and no rule that trips over it."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from dflash_deploy.assets import templates_dir
from dflash_deploy.audit.report import audit
from dflash_deploy.audit.request import build_case
from dflash_deploy.facts import Facts
from dflash_deploy.facts.remote.models import model_facts

ODD = (
    *(None, [], {}, 5, {"architectures": 5}, {"dflash_config": {"target_layer_ids": "x"}}, {"layer_types": 3}),
    *({"text_config": []}, {"weight_map": {"a": "../../x", "b": 3}}, {"model": {"vocab": []}}, {"hidden_size": "8"}),
)


def damage(data: bytes, rng: random.Random) -> bytes:
    found = bytearray(data[:40000])
    kind = rng.randrange(5)
    if kind == 0:
        del found[rng.randrange(len(found)) :]
    elif kind == 1:
        for _ in range(rng.randrange(1, 30)):
            found[rng.randrange(len(found))] = rng.randrange(256)
    elif kind == 2:
        found[:8] = rng.randbytes(8)
    elif kind == 3:
        return b"[" * 100000
    else:
        return json.dumps(rng.choice(ODD)).encode()
    return bytes(found)


@pytest.mark.parametrize("seed", range(3))
def test_damaged_folders_get_an_answer(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    pair = templates_dir() / "tiny-pair"
    for _ in range(20):
        paths = []
        for part in ("target", "drafter"):
            folder = tmp_path / part
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for file in (pair / part).iterdir():
                data = file.read_bytes()[:40000]
                (folder / file.name).write_bytes(damage(data, rng) if rng.random() < 0.6 else data)
            if rng.random() < 0.3:
                index = {"weight_map": {"a": f"model-{rng.randrange(99999):05d}-of-99999.safetensors"}}
                (folder / "model.safetensors.index.json").write_text(json.dumps(index))
            paths.append(str(folder))
        models = json.loads(json.dumps([model_facts(path) for path in paths]))
        facts = Facts.from_json({"schema": 1, "models": models})
        report = audit(build_case(facts, model=paths[0], draft=paths[1]))
        assert not [finding for finding in report.findings if "unexpected shape" in finding.message]
        assert not report.compatible  # every folder's weights were cut short
