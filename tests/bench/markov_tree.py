"""Trees of a first-order drafter against trees of its marginals, at equal nodes: expected accepted tokens a step.

    python -m tests.bench.markov_tree [--targets 200] [--out FILE]

Synthetic, and says nothing of any real drafter: random targets over a small vocabulary, whose next token depends on the
last two with weight ``--order2`` and else on the last one. The drafter knows the target's one-step transitions, averaged
over what the second-last token may be. The marginal tree sees only the distribution at each depth, as DFlash's heads give
it; the Markov tree the table ``[depth][state][rank]``, in which a state is a candidate of the depth before, as a pairwise
selector gives it. Expected accepted tokens are exact: the target's probability of every node's path, added up.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from dflash_kernels.build_tree import build_tree
from torch import Tensor

VOCABULARY, DEPTHS, RANKS = 24, 7, 8
NODES = (8, 16, 32, 64)


def target(generator: torch.Generator, order2: float, sharpness: float) -> Tensor:
    """P(next | second-last, last), [V, V, V]."""
    first = torch.randn(1, VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)
    second = torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)
    return torch.softmax(sharpness * ((1 - order2) * first + order2 * second), -1)


def drafted(chain: Tensor, before: int, root: int) -> tuple[Tensor, Tensor]:
    """(marginals [L, V], one-step transitions [L, V, V]) as a first-order drafter sees them from (before, root)."""
    pair = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    pair[before, root] = 1.0
    marginals, steps = [], []
    for _ in range(DEPTHS):
        joint = pair[:, :, None] * chain  # [second-last, last, next]
        pair = joint.sum(0)
        last = pair.sum(1, keepdim=True)
        steps.append(torch.where(last > 0, pair / last.clamp_min(1e-300), 0))
        marginals.append(pair.sum(0))
    return torch.stack(marginals), torch.stack(steps)


def marginal_tree(marginals: Tensor, root: int, nodes: int) -> list[tuple[int, ...]]:
    """Paths of the tree of independent depths."""
    probabilities, ids = marginals.topk(RANKS, -1)
    start = torch.tensor([root], dtype=torch.int32)
    return paths(build_tree(probabilities.log().float()[None], ids.int()[None], start, nodes, backend="naive"))


def markov_tree(marginals: Tensor, steps: Tensor, root: int, nodes: int) -> list[tuple[int, ...]]:
    """Paths of the tree whose ranks at a depth depend on the candidate before; the same candidates as above."""
    candidates = marginals.topk(RANKS, -1).indices  # [L, K]
    logprobs = torch.full((1, DEPTHS, RANKS, RANKS), -60.0)
    ids = torch.zeros(1, DEPTHS, RANKS, RANKS, dtype=torch.int32)
    following = torch.zeros(1, DEPTHS, RANKS, RANKS, dtype=torch.int32)
    for depth in range(DEPTHS):
        states = candidates[depth - 1].tolist() if depth else [root]
        for state, token in enumerate(states):
            scores, order = steps[depth, token, candidates[depth]].sort(descending=True)
            logprobs[0, depth, state] = scores.log().float().clamp_min(-60)
            ids[0, depth, state] = candidates[depth, order].int()
            following[0, depth, state] = order.int()
    start = torch.tensor([root], dtype=torch.int32)
    return paths(build_tree(logprobs, ids, start, nodes, next_state=following, backend="naive"))


def paths(tree: object) -> list[tuple[int, ...]]:
    """Token paths of all nodes but the root."""
    parent, token = tree.parent[0].tolist(), tree.token_ids[0].tolist()  # type: ignore[attr-defined]
    found: list[tuple[int, ...]] = [()]
    for node in range(1, int(tree.valid_count[0])):  # type: ignore[attr-defined]
        found.append((*found[parent[node]], token[node]))
    return found[1:]


def accepted(chain: Tensor, before: int, root: int, found: list[tuple[int, ...]]) -> float:
    """Expected tokens of one step: the target's own probability of each path, and the bonus token."""
    total = 1.0
    for path in found:
        context, probability = (before, root), 1.0
        for token in path:
            probability *= float(chain[context[0], context[1], token])
            context = (context[1], token)
        total += probability
    return total


def main() -> None:
    """Print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, default=200)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print("order2  sharpness  nodes  marginal  Markov  gain")
    for order2 in (0.0, 0.3):
        for sharpness in (2.0, 4.0):
            sums = {nodes: [0.0, 0.0] for nodes in NODES}
            generator = torch.Generator().manual_seed(0)
            for _ in range(given.targets):
                chain = target(generator, order2, sharpness)
                before, root = (int(x) for x in torch.randint(0, VOCABULARY, (2,), generator=generator))
                marginals, steps = drafted(chain, before, root)
                for nodes in NODES:
                    sums[nodes][0] += accepted(chain, before, root, marginal_tree(marginals, root, nodes))
                    sums[nodes][1] += accepted(chain, before, root, markov_tree(marginals, steps, root, nodes))
            for nodes, (one, two) in sums.items():
                one, two = one / given.targets, two / given.targets
                rows.append({"order2": order2, "sharpness": sharpness, "nodes": nodes, "marginal": one, "markov": two})
                print(f"{order2:>6}  {sharpness:>9}  {nodes:>5}  {one:>8.3f}  {two:>6.3f}  {two / one - 1:>+5.1%}")
    if given.out:
        document = {"targets": given.targets, "vocabulary": VOCABULARY, "depths": DEPTHS, "ranks": RANKS, "rows": rows}
        given.out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
