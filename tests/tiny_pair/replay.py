"""What greedy decoding must give, worked out without SGLang and without this project's kernels.

``python -m tests.tiny_pair.replay --prompts templates/tiny-pair/prompts.jsonl --budgets 8 16 32`` decodes each prompt
one token at a time, with the DFlash chain, and with a DDTree of N nodes. Everything is recomputed from the first
token at every step, in float32, so that no cache can be wrong. The tree is an exact best-first search with the
canonical order: score descending, then depth, parent and rank ascending; a score is the integer sum of
``round(max(log p, -130) * 2**20)`` along the path.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tests.tiny_pair.model import Drafter, Target, chat, encode, load_drafter, load_target

Step = Callable[[list[int]], list[int]]


@dataclass(frozen=True)
class Decoded:
    """An answer and how it came about.

    ``tokens``: the answer, cut after the first stop token or at the limit. ``commits``: tokens that each verify step
    committed (accepted drafts and the bonus), the last one uncut; the first token of the answer comes from the prompt's
    own pass and counts in no step. ``gap``: the smallest distance between the two best target logits along the answer
    (greedy decoding only).
    """

    tokens: tuple[int, ...]
    commits: tuple[int, ...] = ()
    gap: float = float("inf")

    @property
    def kept(self) -> tuple[int, ...]:
        """``commits`` with the last one cut to the tokens that remain in the answer."""
        left, out = len(self.tokens) - 1, []
        for commit in self.commits:
            out.append(min(commit, left))
            left -= out[-1]
        return tuple(out)


@dataclass(frozen=True)
class Tree:
    """Nodes in the order in which the search takes them; node 0 is the bonus. ``parents[0]`` is -1."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])

    def mask(self) -> Tensor:
        """[N, N] bool: a node sees itself and its ancestors."""
        see = torch.eye(len(self.tokens), dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], 1):
            see[node] |= see[parent]
        return see

    def walk(self, best: Sequence[int]) -> list[int]:
        """What a greedy target commits: the accepted path below the root and the bonus. ``best[i]``: its choice."""
        node, out = 0, []
        while True:
            out.append(int(best[node]))
            below = [n for n, parent in enumerate(self.parents) if parent == node and self.tokens[n] == best[node]]
            if not below:
                return out
            (node,) = below


def best_first(bonus: int, log_probs: Tensor, nodes: int, width: int) -> Tree:
    """The bonus and the ``nodes - 1`` most likely paths of the drafter's marginals ``log_probs`` [depths, vocab]."""
    ranked = []
    for row in log_probs.tolist():
        order = sorted(range(len(row)), key=lambda token: (-row[token], token))[:width]
        ranked.append([(token, round(max(row[token], -130.0) * 2**20)) for token in order])
    tree = Tree([bonus])
    heap = [(-ranked[0][0][1], 1, 0, 0)]
    base = [0]
    while heap and len(tree.tokens) < nodes:
        negative, depth, parent, rank = heapq.heappop(heap)
        node = len(tree.tokens)
        tree.tokens.append(ranked[depth - 1][rank][0])
        tree.parents.append(parent)
        tree.depths.append(depth)
        base.append(-negative)
        if rank + 1 < len(ranked[depth - 1]):
            heapq.heappush(heap, (-(base[parent] + ranked[depth - 1][rank + 1][1]), depth, parent, rank + 1))
        if depth < len(ranked):
            heapq.heappush(heap, (-(base[node] + ranked[depth][0][1]), depth + 1, node, 0))
    return tree


def draft(target: Target, drafter: Drafter, sequence: list[int]) -> Tensor:
    """Log-probabilities [block - 1, vocab] (float64) of the tokens after ``sequence``, which ends with the bonus."""
    block, past = drafter.block_size, len(sequence) - 1
    _, features = target(torch.tensor([sequence[:-1]]), drafter.feature_layers)
    slots = torch.tensor([[sequence[-1]] + [drafter.mask_token] * (block - 1)])
    positions = torch.arange(past, past + block)[None]
    see = torch.ones(1, 1, block, past + block, dtype=torch.bool)
    hidden = drafter(features, target.embed_tokens(slots), positions, see)
    return target.head(hidden)[0, 1:].double().log_softmax(-1)


def verify(target: Target, sequence: list[int], tree: Tree) -> list[int]:
    """The tokens that the target commits after ``sequence``: one pass over the past and the tree, under its mask."""
    past, nodes = len(sequence) - 1, len(tree.tokens)
    see = torch.ones(past + nodes, past + nodes, dtype=torch.bool).tril()
    see[past:, past:] = tree.mask()
    positions = torch.cat([torch.arange(past), past + torch.tensor(tree.depths)])[None]
    logits, _ = target(torch.tensor([sequence[:-1] + tree.tokens]), positions=positions, mask=see[None, None])
    return tree.walk(logits[0, past:].argmax(-1).tolist())


def chain_step(target: Target, drafter: Drafter) -> Step:
    def step(sequence: list[int]) -> list[int]:
        guesses = draft(target, drafter, sequence).argmax(-1).tolist()
        tree = Tree([sequence[-1], *guesses], list(range(-1, len(guesses))), list(range(len(guesses) + 1)))
        return verify(target, sequence, tree)

    return step


def tree_step(target: Target, drafter: Drafter, nodes: int, width: int) -> Step:
    return lambda sequence: verify(
        target, sequence, best_first(sequence[-1], draft(target, drafter, sequence), nodes, width)
    )


@torch.no_grad()
def greedy(target: Target, prompt: list[int], limit: int, stop: frozenset[int]) -> Decoded:
    tokens: list[int] = []
    gap = float("inf")
    while len(tokens) < limit and not (tokens and tokens[-1] in stop):
        logits, _ = target(torch.tensor([prompt + tokens]))
        top = logits[0, -1].topk(2)
        gap = min(gap, float(top.values[0] - top.values[1]))
        tokens.append(int(top.indices[0]))
    return Decoded(tuple(tokens), gap=gap)


@torch.no_grad()
def speculate(target: Target, step: Step, prompt: list[int], limit: int, stop: frozenset[int]) -> Decoded:
    tokens = [int(target(torch.tensor([prompt]))[0][0, -1].argmax())]
    commits: list[int] = []
    while len(tokens) < limit and not stop & set(tokens):
        new = step(prompt + tokens)
        commits.append(len(new))
        tokens += new
    end = min([limit, *(at + 1 for at, token in enumerate(tokens) if token in stop)])
    return Decoded(tuple(tokens[:end]), tuple(commits))


def stop_tokens(target: Target) -> frozenset[int]:
    stop = target.config.get("eos_token_id")
    return frozenset(stop if isinstance(stop, list) else [] if stop is None else [stop])


def read_prompts(file: Path) -> list[list[int]]:
    """Token lists of a prompts.jsonl: ``messages`` (one user message), ``prompt`` (text), or ``tokens``."""
    out = []
    for line in file.read_text().splitlines():
        row = json.loads(line)
        if "tokens" in row:
            out.append(list(row["tokens"]))
        else:
            out.append(chat(row["messages"][0]["content"]) if "messages" in row else encode(row["prompt"]))
    return out


def tokens_per_step(answers: Sequence[Decoded]) -> float:
    """Committed tokens a verify step, the bonus included, pooled over all answers."""
    commits = [commit for answer in answers for commit in answer.commits]
    return sum(commits) / len(commits)


def main() -> None:
    here = Path(__file__).resolve().parents[2] / "templates" / "tiny-pair"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=here / "target")
    parser.add_argument("--drafter", type=Path, default=here / "drafter")
    parser.add_argument("--prompts", type=Path, default=here / "prompts.jsonl")
    parser.add_argument("--first", type=int, default=None, help="only this many prompts")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument(
        "--budgets", type=int, nargs="*", default=[8, 16, 32], help="nodes of the tree, the root included"
    )
    parser.add_argument("--width", type=int, default=8, help="tokens considered at each depth (K)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one line of JSON a prompt: tokens and commits of each way")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target, drafter = load_target(args.target), load_drafter(args.drafter)
    stop = stop_tokens(target)
    ways = {"chain": chain_step(target, drafter)}
    ways |= {f"tree {n}": tree_step(target, drafter, n, args.width) for n in args.budgets}
    answers: dict[str, list[Decoded]] = {"greedy": [], **{way: [] for way in ways}}
    for prompt in read_prompts(args.prompts)[: args.first]:
        answers["greedy"].append(greedy(target, prompt, args.max_new_tokens, stop))
        for way, step in ways.items():
            answers[way].append(speculate(target, step, prompt, args.max_new_tokens, stop))
        if args.json:
            row = {
                way: {"tokens": done[-1].tokens, "commits": done[-1].commits, "kept": done[-1].kept}
                for way, done in answers.items()
            }
            print(json.dumps({"prompt": prompt, "gap": answers["greedy"][-1].gap, **row}), flush=True)
    if not args.json:
        for way, done in answers.items():
            same = sum(a.tokens == b.tokens for a, b in zip(done, answers["greedy"], strict=True))
            rate = 1.0 if way == "greedy" else tokens_per_step(done)
            print(f"{way:8} {rate:5.2f} tokens a step, {same} of {len(done)} answers equal to greedy")
        print(f"smallest gap of two best logits: {min(a.gap for a in answers['greedy']):.2g}")


if __name__ == "__main__":
    main()
