"""Verify steps that a served tree takes, against an offline replay of the exact tree over the same target and drafter.

    python -m tests.bench.offline_steps --venv DIR --target DIR --draft DIR --template T --offline REPLAY.json
        --prompts A.jsonl B.jsonl --nodes 16 64 --out RESULT.json

Runs on a CPU in float32, where served tokens are the target's greedy ones. ``--offline``: a list ``prompts`` in the order
of the prompt files, of objects with ``id``, ``new_tokens`` and ``steps`` by tree size without the root, in which the last
step is missing when the answer ends inside it. Takes the shortest ``--count`` answers. Exits 1 when a step count differs
by more than that one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.e2e import server as served


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--venv", "--target", "--draft", "--template", "--offline", "--out"):
        parser.add_argument(name, required=True)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--nodes", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--count", type=int, default=12)
    args = parser.parse_args()
    replayed = json.loads(Path(args.offline).read_text())["prompts"]
    texts = {
        row["id"]: row["prompt"]
        for name in args.prompts
        for row in map(json.loads, Path(name).read_text().splitlines())
    }
    chosen = sorted(replayed, key=lambda row: row["new_tokens"])[: args.count]
    at = served.ARGUMENTS.index("--model-path")
    served.ARGUMENTS[at + 1] = args.target
    rows: list[dict[str, Any]] = []
    for nodes in args.nodes:
        words = [*served.ddtree(nodes), "--speculative-ddtree-topk", "16"]
        words[words.index("--speculative-draft-model-path") + 1] = args.draft
        with (
            tempfile.TemporaryDirectory() as folder,
            served.serve(Path(args.venv), Path(folder) / "server.log", words) as server,
        ):
            for row in chosen:
                body = {"temperature": 0, "max_new_tokens": 256}
                text = args.template.format(texts[row["id"]])
                status, answer = server.post("/generate", {"text": text, "sampling_params": body})
                if status != 200:
                    print(f"{row['id']}: {status} {answer}", file=sys.stderr)
                    return 1
                meta = answer["meta_info"]
                steps, offline = meta["spec_verify_ct"], row["steps"][str(nodes - 1)]
                equal = meta["completion_tokens"] == row["new_tokens"] and steps - offline in (0, 1)
                rows.append({"nodes": nodes, "prompt": row["id"], "tokens": meta["completion_tokens"],
                             "steps": steps, "offline": offline, "equal": equal})  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
    Path(args.out).write_text(json.dumps(rows, indent=1))
    return 0 if all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
