"""The log parser on hostile and on long input."""

from __future__ import annotations

import random
import resource
import sys
import time
from pathlib import Path

import pytest

from dflash_deploy.diagnose import Phase, Watcher

START = b"""[2026-01-05 10:00:00] server_args=ServerArgs(model_path='m', tp_size=2)
[2026-01-05 10:00:01 TP0] Init torch distributed begin.
[2026-01-05 10:00:01 TP1] Init torch distributed begin.
[2026-01-05 10:00:02 TP0] Init torch distributed ends. elapsed=0.06 s, mem usage=0.00 GB
[2026-01-05 10:00:02 TP0] Load weight begin. avail mem=21.45 GB
\rLoading safetensors checkpoint shards:   0% Completed | 0/2 [00:00<?, ?it/s]
\rLoading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01, 1.0it/s]
\rLoading safetensors checkpoint shards: 100% Completed | 2/2 [00:02<00:00, 1.0it/s]
[2026-01-05 10:00:04 TP0] Load weight end. elapsed=2.00 s, type=Qwen3ForCausalLM
[2026-01-05 10:00:04 TP0] KV Cache is allocated. dtype: torch.float32, #tokens: 16384
[2026-01-05 10:00:05 TP0] Load weight begin. avail mem=20.00 GB
[2026-01-05 10:00:06 TP0] Load weight end. elapsed=0.10 s, type=DFlashDraftModel
[2026-01-05 10:00:07 TP0] Capture target CUDA graph begin. This can take up to several minutes. avail mem=19 GB
\x1b[32mCapturing batches (bs=2 avail_mem=19.00 GB):  50%|#####     | 1/2 [00:00<00:00]\x1b[0m\r
[2026-01-05 10:00:09 TP0] max_total_num_tokens=16384, chunked_prefill_size=2048, max_running_requests=8
[2026-01-05 10:00:10] Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)
[2026-01-05 10:00:12] The server is fired up and ready to roll!
"""


@pytest.mark.parametrize("size", [1, 7, 100, 100_000])
def test_phases_and_progress_in_pieces_of_any_size(size: int) -> None:
    watcher = Watcher()
    events = [e for i in range(0, len(START), size) for e in watcher.feed(START[i : i + size])]
    phases = [e.phase for e in events if e.kind == "phase" and e.rank in ("", "TP0")]
    assert phases == [
        Phase.DIST_INIT, Phase.WEIGHTS, Phase.KV_CACHE, Phase.DRAFT_INIT, Phase.GRAPHS,
        Phase.WARM_UP, Phase.WARM_UP, Phase.READY,
    ]  # fmt: skip
    assert [(e.done, e.total) for e in events if e.kind == "progress"] == [(0, 2), (1, 2), (2, 2), (1, 2)]
    assert watcher.state.phase is Phase.READY and not watcher.state.fatal and not watcher.state.first_errors


def test_first_exception_wins_over_the_last_line() -> None:
    watcher = Watcher()
    watcher.feed(
        b"[2026-01-05 10:00:01 TP1] Scheduler hit an exception: Traceback (most recent call last):\n"
        b"  File \"x.py\", line 1, in f\n    g()\nKeyError: 'deep'\n\n"
        b"During handling of the above exception, another exception occurred:\n\n"
        b'Traceback (most recent call last):\n  File "x.py", line 2, in h\n    i()\nRuntimeError: shallow\n'
        b"[2026-01-05 10:00:01] Received sigquit from a child process. It usually means the child failed.\n"
    )
    assert watcher.state.first_errors["TP1"].exception == "KeyError: 'deep'"
    assert watcher.state.fatal == "KeyError: 'deep'"


def test_a_new_start_forgets_the_old_one() -> None:
    watcher = Watcher()
    watcher.feed(
        b"[2026-01-05 10:00:01] Scheduler hit an exception: Traceback (most recent call last):\n  f\nOSError: x\n"
    )
    assert watcher.state.fatal
    watcher.feed(START)
    assert not watcher.state.fatal and watcher.state.starts == 2 and watcher.state.phase is Phase.READY


def test_binary_noise_and_giant_lines_do_no_harm() -> None:
    noise = random.Random(1)
    watcher = Watcher()
    for _ in range(50):
        watcher.feed(noise.randbytes(20_000))
    for _ in range(200):
        watcher.feed(b"error " * 20_000)  # 24 MB without a line end
    watcher.feed(b"\n" + START)
    assert watcher.state.phase is Phase.READY


def test_keeps_up_in_constant_memory() -> None:
    """Over 200 MB: serving lines, with an error line in each chunk; memory is that of the process before and after."""
    line = b"[2026-01-05 10:00:47 TP0] Decode batch, #running-req: 12, #token: 12345, accept len: 3.10, #queue-req: 0\n"
    bad = b"[2026-01-05 10:00:47 TP0] ERROR request %d failed: timeout while reading\n"
    watcher = Watcher()
    chunk = line * 600
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, lines, sent = time.process_time(), 0, 0
    for i in range(3500):
        data = chunk + bad % i
        watcher.feed(data)
        lines += 601
        sent += len(data)
    took = time.process_time() - began
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{lines / took:,.0f} lines/s, {sent / 1e6:,.0f} MB, memory +{grown:.1f} MiB", file=sys.stderr)
    assert sent > 200e6 and watcher.state.lines == lines
    assert grown < 16
    assert lines / took > 50_000


def test_a_real_start_on_a_cpu() -> None:
    """SGLang 0.5.16 with the tiny pair and DFLASH: every phase in order, nothing taken for a failure."""
    log = (Path(__file__).parents[1] / "data" / "diagnose" / "cpu-0.5.16-ready.log").read_bytes()
    for thorough in (False, True):
        watcher = Watcher(thorough=thorough)
        phases = [e.phase for e in watcher.feed(log) if e.kind == "phase"]
        assert phases == [Phase.DIST_INIT, Phase.WEIGHTS, Phase.DRAFT_INIT, Phase.WARM_UP, Phase.READY]
        assert not watcher.state.fatal and not watcher.state.first_errors and not watcher.state.matches
