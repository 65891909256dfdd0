"""The order of a step around captured graphs, held against the same step computed plainly. Graphs are recorded work."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dflash_kernels.build_tree import build_tree  # noqa: E402
from dflash_kernels.ddtree import graphs as module  # noqa: E402
from dflash_kernels.ddtree.graphs import StepGraphs  # noqa: E402
from dflash_kernels.ddtree.prepare import StepBuffers, prepare_step  # noqa: E402
from dflash_kernels.ddtree.shape import TreeShape  # noqa: E402
from dflash_kernels.ddtree.widths import HOLD  # noqa: E402
from dflash_kernels.ranks import Ranks  # noqa: E402
from dflash_kernels.tree_mask import tree_positions  # noqa: E402
from dflash_kernels.verify import verify_tree  # noqa: E402

BLOCK, WIDTHS, TOPK, VOCAB, HIDDEN, SIZES = 4, (1, 8), 3, 19, 5, (1, 2, 4)
SHAPE = TreeShape(BLOCK, WIDTHS[-1], TOPK)


class Recorded:
    """What a captured graph is to whoever replays it."""

    def __init__(self, work: Callable[[], None]) -> None:
        work()
        self.replay = work


class Vocabulary:
    """Log-probs and choices that depend on what was loaded, so that a step on stale inputs is found out."""

    def draft(self, hidden: Any) -> tuple[Any, Any]:
        spread = hidden[:, 1:, :TOPK]
        logprobs = torch.log_softmax(spread, -1).sort(dim=-1, descending=True).values
        ids = (hidden[:, 1:, :1].abs() * 7).to(torch.int64) % 11 + torch.arange(TOPK)
        return logprobs, ids

    def argmax(self, logits: Any) -> Any:
        return torch.argmax(logits, dim=-1)


class Runner:
    """A graph runner of SGLang: static inputs, and a pass over them with the hook at its tail."""

    def __init__(self, width: int, tail: Callable[..., None]) -> None:
        self.width, self.tail, self.inputs, self.replays = width, tail, torch.zeros(4 * width, dtype=torch.int64), []
        self.backend = self

    def _make_graph_key(self, size: int) -> int:
        return size

    def replay(self, size: int, _: Any) -> Any:
        self.replays.append(size)
        rows = self.inputs[: size * self.width].double()
        hidden = torch.sin(rows[:, None] * 0.37 + torch.arange(HIDDEN)).float()
        logits = torch.sin(rows[:, None] * 1.3 + torch.arange(VOCAB) * 0.7).float()
        out = SimpleNamespace(hidden_states=hidden, next_token_logits=logits)
        self.tail(None, out, SimpleNamespace(batch_size=size), size * self.width)
        return out


def made(monkeypatch: pytest.MonkeyPatch, load: bool = True, ranks: Any = None, **options: Any) -> Any:
    monkeypatch.setattr(module, "_captured", lambda work, pool, stream: Recorded(work))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    step = StepBuffers.empty(4, BLOCK, SHAPE.reserved, "cpu")
    graphs = StepGraphs(SHAPE, WIDTHS, Vocabulary(), ranks or Ranks(SimpleNamespace(world_size=1)), step, "cpu")  # type: ignore[arg-type]
    drafter = Runner(BLOCK, graphs.draft_tail)
    appended: list[Any] = []
    for nodes, width in graphs.widths.items():
        width.runner = Runner(nodes, graphs.verify_tail)
        for size in SIZES:
            width.runner.replay(size, None)
    for size in SIZES:
        drafter.replay(size, None)

    def load_draft(rows: StepBuffers) -> None:
        drafter.inputs[: rows.cap * BLOCK].copy_((rows.block_ids + rows.block_positions).reshape(-1))

    def load_target(runner: Runner, ids: Any, positions: Any, rows: StepBuffers) -> None:
        runner.inputs[: ids.numel()].copy_((ids + positions).reshape(-1))

    loaders = {"load_draft": load_draft, "load_target": load_target} if load else {}
    graphs.capture(lambda *_: None, lambda *got: appended.append(got), policy=False, **{**loaders, **options})
    appended.clear()
    return SimpleNamespace(graphs=graphs, step=step, drafter=drafter, appended=appended)


@pytest.mark.parametrize("nodes", WIDTHS)
@pytest.mark.parametrize("bs", [1, 3])
def test_step(monkeypatch: pytest.MonkeyPatch, nodes: int, bs: int) -> None:
    have = made(monkeypatch)
    graphs, step = have.graphs, have.step
    table = torch.arange(1, 201).view(5, 40)
    for turn in range(3):
        bonus, prefix = torch.arange(bs) + 3 + turn, torch.arange(bs) * 4 + 6 + turn
        pool = torch.arange(bs) + 1
        prepare_step(bonus, prefix, pool, table, 2, step)
        if nodes > 1:
            graphs.draft(have.drafter, bs)
        tree, positions = graphs.plan(nodes, bs)
        logits = graphs.verify(nodes, bs)
        committed = graphs.commit(nodes, bs)

        # The same, plainly.
        ids = torch.full((bs, BLOCK), 2)
        ids[:, 0] = bonus
        rows = (ids + prefix[:, None] + torch.arange(BLOCK)).double().reshape(-1)
        hidden = torch.sin(rows[:, None] * 0.37 + torch.arange(HIDDEN)).float().view(bs, BLOCK, HIDDEN)
        expected = build_tree(*Vocabulary().draft(hidden), bonus, nodes)
        assert torch.equal(tree.token_ids, expected.token_ids.to(tree.token_ids.dtype))
        places = tree_positions(expected, prefix)
        assert torch.equal(positions, places)
        rows = (expected.token_ids + places).double().reshape(-1)
        wanted = torch.sin(rows[:, None] * 1.3 + torch.arange(VOCAB) * 0.7).float()
        assert torch.equal(logits, wanted)
        path = verify_tree(expected, wanted, None, prefix, SHAPE.depths)
        assert committed.lens.tolist() == (path.length + 1).tolist()
        assert committed.seq_lens.tolist() == (prefix + path.length + 1).tolist()
        for b, length in enumerate(path.length.tolist()):
            assert committed.tokens[b, : length + 1].tolist() == path.tokens[b, : length + 1].tolist()
        size = min(s for s in SIZES if s >= bs)
        assert graphs.widths[nodes].runner.replays[-1] == size
        assert step.req_pool.tolist() == pool.tolist() + [0] * (4 - bs)


def test_what_cannot_be_captured_is_left_to_sglang(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    have = made(monkeypatch, load_target=fails)
    assert (have.graphs.loads_draft, have.graphs.loads_target) == (True, False)
    assert "not permitted when stream is capturing" in caplog.text
    none = made(monkeypatch, load=False)
    assert (none.graphs.loads_draft, none.graphs.loads_target) == (False, False)


def test_ranks_keep_the_first_ones_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank's own opinion must never show, and the first one is not asked at every step."""
    asked: list[int] = []

    class Several(Ranks):
        def agree(self, value: int) -> int:
            asked.append(value)
            return 8

    group = SimpleNamespace(world_size=2)
    have = made(monkeypatch)
    graphs = have.graphs
    graphs._ranks = Several(group)
    graphs.policy = SimpleNamespace(
        choose=lambda bs: 1, bucket=lambda bs: min(s for s in SIZES if s >= bs), took=lambda *_: None, steps=0
    )
    steps = 2 * HOLD + 1
    assert [graphs.choose(1) for _ in range(steps)] == [8] * steps
    assert len(asked) == 3
    graphs.choose(4)  # another bucket: asked at once
    assert len(asked) == 4
