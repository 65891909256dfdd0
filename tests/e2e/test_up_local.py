"""``up local``: a machine without a GPU ends with a healthy DDTREE service, also after kill -9 in the middle."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import MAIN, dflash_deploy

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


@pytest.fixture
def words(tmp_path: Path, cpu_venv: Path) -> Iterator[list[str]]:
    """Options of a deployment that is always ended; its environment is kept."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = ["local", "--root", str(tmp_path / "root"), "--venv", str(cpu_venv), "--mode", "supervisor"]
    try:
        yield [*base, "--stack", "cpu", "--port", str(port)]
    finally:
        subprocess.run([*MAIN, "down", *base, "--break-lock"], capture_output=True, timeout=300)


def test_up_killed_up_again_and_once_more(words: list[str]) -> None:
    # Killed in the middle of steps, then the same command again.
    for step in ("patch", "launch", "health"):
        victim = subprocess.Popen([*MAIN, "up", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert victim.stderr is not None
        for line in victim.stderr:
            if line.startswith(f"{step} ..."):
                time.sleep(0.5)
                break
        victim.send_signal(signal.SIGKILL)
        victim.stderr.close()
        victim.wait()
    first = dflash_deploy("up", *words)
    assert first["ok"]
    data = first["health"]["data"]
    assert data["acceptance_length"] > 1.5 and data["completion"] and sum(data["acceptance_histogram"]) > 0
    assert first["streamed"].strip()

    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{first['url']}/v1", api_key="none", timeout=120)
    probe = json.loads((Path(__file__).parents[2] / "templates" / "tiny-pair" / "probe.json").read_text())[0]
    chat = client.chat.completions.create(
        model=client.models.list().data[0].id, messages=probe["messages"], temperature=0, max_tokens=48
    )
    assert chat.choices[0].message.content == first["streamed"] == probe["expect"]

    began = time.monotonic()
    again = dflash_deploy("up", *words)
    assert not again["changed"] and {step["status"] for step in again["steps"]} == {"ok"}
    print(f"a second up took {time.monotonic() - began:.0f} s")
    assert dflash_deploy("plan", *words)["changes"] is False
