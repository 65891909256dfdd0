"""SGLang's own serving bench, run on the host from the deployment's environment: random token ids of given lengths.

It measures the engine without regard to content: acceptance on random ids says nothing about a drafter.
"""

from __future__ import annotations

import json
import posixpath
from typing import Any

from dflash_deploy.errors import CommandFailed
from dflash_deploy.host.base import Host
from dflash_deploy.settings import Settings

KEYS = (
    "completed", "duration", "request_throughput", "input_throughput", "output_throughput", "mean_ttft_ms",
    "median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms", "mean_itl_ms", "median_itl_ms",
    "p95_itl_ms", "p99_itl_ms", "mean_e2e_latency_ms", "median_e2e_latency_ms", "accept_length", "concurrency",
)  # fmt: skip


def sglang_bench(
    host: Host, settings: Settings, *, concurrency: int, requests: int, input_tokens: int, output_tokens: int
) -> dict[str, Any]:
    """What it reports, by its own names.

    Raises:
        CommandFailed: it did not run to its end; its last lines are the evidence.
    """
    out = posixpath.join(settings.service_dir, "sglang-bench.jsonl")
    command = [
        settings.python, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", settings.url,
        "--dataset-name", "random-ids", "--model", settings.model, "--tokenizer", settings.model,
        "--random-input-len", str(input_tokens), "--random-output-len", str(output_tokens),
        "--random-range-ratio", "1.0", "--num-prompts", str(requests), "--max-concurrency", str(concurrency),
        "--output-file", out, "--disable-tqdm", "--seed", "1",
    ]  # fmt: skip
    host.run(["rm", "-f", out], timeout_s=30)
    stack = dict(settings.stack.env)
    # Not where a folder of the name sglang may lie.
    inside = ["/bin/sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", settings.service_dir, *command]
    result = host.run(inside, env={**stack, "HF_HUB_OFFLINE": "1"}, timeout_s=3600)
    rows = (host.read(out) or b"").splitlines()
    host.run(["rm", "-f", out], timeout_s=30)
    if not result.ok or not rows:
        raise CommandFailed(
            f"SGLang's own bench failed on {host.name} (exit {result.exit_code})",
            evidence=(result.err or result.out).strip().splitlines()[-6:],
            hint="bench without --sglang-bench measures by itself",
        )
    row = json.loads(rows[-1])
    return {key: row[key] for key in KEYS if key in row}
