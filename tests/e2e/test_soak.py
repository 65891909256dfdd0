"""Half an hour of mixed load on one served tree: no wrong token, no leak, no crash."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.server import PAIR, Server, ddtree, hang_up, serve
from tests.scope import costly
from tests.tiny_pair.model import chat

torch = pytest.importorskip("torch")
from tests.tiny_pair import replay  # noqa: E402
from tests.tiny_pair.model import load_target  # noqa: E402

SECONDS = 1800.0
LIMIT = 32
pytestmark = [pytest.mark.e2e, costly, pytest.mark.timeout(SECONDS + 900)]


def resident_kib(folder: Path) -> int:
    """Memory of all processes that work in ``folder``: the server's."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").resolve() == folder.resolve():
                lines = (process / "status").read_text().splitlines()
                total += next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    return total


def test_mixed_load(cpu_venv: Path, tmp_path: Path) -> None:
    """1 to 32 requests at once: greedy ones held against the replay, long prompts, samples, connections cut."""
    torch.set_num_threads(1)
    target = load_target(PAIR / "target")
    rows = [list(prompt) for prompt in replay.read_prompts(PAIR / "prompts.jsonl")[:24]]
    rows += [[*rows[at], *chat("Tell me a story about an owl."), *rows[at + 1] * 4][-700:] for at in range(0, 12, 2)]
    stop = replay.stop_tokens(target)
    wanted = [replay.greedy(target, prompt, LIMIT, stop).tokens for prompt in rows]
    draw, lock, tally, faults = random.Random(5), threading.Lock(), Counter[str](), list[str]()

    def one(server: Server, kind: str, number: int, after_s: float) -> None:
        wrong = ""
        try:
            if kind == "cut":
                asked = {"input_ids": rows[number], "sampling_params": {"temperature": 0, "max_new_tokens": 256}}
                hang_up(server.port, asked, after_s)
            elif kind == "sampled":
                wrong = "" if server.generate(rows[number], LIMIT, temperature=1.0, top_p=0.9).tokens else "no tokens"
            else:
                got = server.generate(rows[number], LIMIT).tokens
                wrong = "" if got == wanted[number] else f"prompt {number}: {got} is not {wanted[number]}"
        except Exception as error:
            wrong = f"{kind}: {error}"
        with lock:
            tally[kind] += 1
            faults.extend([wrong] if wrong else [])

    words = [*ddtree(16), "--chunked-prefill-size", "256"]
    with serve(cpu_venv, tmp_path / "server.log", words) as server:
        memory: list[int] = []
        began = time.monotonic()
        while time.monotonic() - began < SECONDS and not faults:
            at_once = draw.choice((1, 2, 8, 16, 32))
            with ThreadPoolExecutor(at_once) as pool:
                for _ in range(2 * at_once):
                    kind = draw.choices(("greedy", "sampled", "cut"), (6, 3, 1))[0]
                    pool.submit(one, server, kind, draw.randrange(len(rows)), draw.uniform(0.05, 1.5))
            memory.append(resident_kib(tmp_path))
            print(f"{time.monotonic() - began:.0f} s: {dict(tally)}, {memory[-1] >> 10} MiB", flush=True)
        time.sleep(3)  # an idle scheduler counts its slots, and ends the server when some are missing
        assert server.generate(rows[0], LIMIT).tokens == wanted[0]
        log = server.log.read_text(errors="replace")
    assert not faults, "\n".join(faults[:3])
    assert "leak" not in log and "Traceback" not in log, log[-3000:]
    assert tally["greedy"] > 100 and tally["sampled"] > 50 and tally["cut"] > 10, tally
    # The first fifth fills caches and allocators; what leaks grows on.
    settled = memory[len(memory) // 5 :]
    assert settled[-1] < 1.1 * settled[0], [kib >> 10 for kib in memory]
