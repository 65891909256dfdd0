"""What of a step runs in captured graphs: all of it but the target's and the drafter's own bookkeeping.

SGLang captures the drafter over F tokens and the target over w tokens, for each width w; hooks put the head with its
top-k at the first one's tail and the greedy walk at the second one's. Small graphs of our own lie around them: *front*
(the drafter's inputs), *plan* (tree, positions, mask, the target's inputs) and *commit* (accepted rows, KV move, the
drafter's KV, counters). All read and write the same static buffers: between the graphs nothing is computed eagerly and
nothing goes to the host. Where SGLang's own bookkeeping has to run before a replay, front and the target's inputs stay
out and the worker goes through SGLang instead.
"""

from __future__ import annotations

import logging
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..accepted import Accepted, empty_accepted
from ..build_tree import build_tree
from ..ranks import Ranks
from ..tree import Tree, empty_tree
from ..tree_mask import tree_mask_full, tree_positions
from ..verify_greedy import verify_greedy
from .commit import Committed, commit_step
from .prepare import StepBuffers
from .shape import TreeShape
from .vocabulary import Vocabulary
from .widths import HOLD, AcceptanceMonitor, WidthPolicy, count_below, told_apart

logger = logging.getLogger(__name__)

_Rows = TypeVar("_Rows", Tree, Accepted)

Append = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""(hidden [n, features], slots int64 [bs, C], positions int64 [bs, C], lens int32 [bs]): into the drafter's KV."""
Move = Callable[[Tensor, Accepted], None]
"""(slots int64 [bs, W], path): accepted rows of the target's KV to the front."""
LoadDraft = Callable[[StepBuffers], None]
"""The drafter's inputs from the step's buffers, of a captured size."""
LoadTarget = Callable[[Any, Tensor, Tensor, StepBuffers], None]
"""(runner, token ids int64 [bs, Q], positions int64 [bs, Q], step): the target's inputs."""


def _first(value: _Rows, rows: int) -> _Rows:
    """The first ``rows`` requests of a batch of trees or paths, as views."""
    return replace(value, **{f.name: getattr(value, f.name)[:rows] for f in fields(value)})


@dataclass
class Width:
    """One width's buffers, the target's backend and runner for it, and its small graphs by captured batch size."""

    nodes: int
    tree: Tree
    positions: Tensor  # int64 [cap, nodes]
    backend: Any = None
    runner: Any = None
    mask: Tensor | None = None  # the backend's captured mask, flat
    hidden: dict[int, Tensor] = field(default_factory=dict)  # by batch size, [bs * nodes, features], the graph's output
    plan: dict[int, torch.cuda.CUDAGraph] = field(default_factory=dict)
    commit: dict[int, torch.cuda.CUDAGraph] = field(default_factory=dict)


class StepGraphs:
    """The static buffers of a step, the capture hooks that fill them, and the replays around the target's.

    step: the buffers that :func:`prepare_step` fills. widths: node counts, the widest last.
    """

    def __init__(
        self,
        shape: TreeShape,
        widths: Sequence[int],
        vocabulary: Vocabulary,
        ranks: Ranks,
        step: StepBuffers,
        device: Any,
    ) -> None:
        cap, depths = step.cap, shape.depths
        self._shape = shape
        self._vocabulary = vocabulary
        self._ranks = ranks
        self._step = step
        self._logprobs = torch.zeros((cap, depths, shape.topk), dtype=torch.float32, device=device)
        self._ids = torch.zeros((cap, depths, shape.topk), dtype=torch.int64, device=device)
        self._accepted = empty_accepted(cap, depths, device)
        for each in fields(self._accepted):
            getattr(self._accepted, each.name).zero_()
        self._committed = Committed.empty(cap, shape.block, device)
        self._sizes: list[int] = []
        self._front: dict[int, torch.cuda.CUDAGraph] = {}
        self._load_target: LoadTarget | None = None
        self._drafted: set[int] = set()
        self.widths = {nodes: self._width(nodes, device) for nodes in widths}
        self.policy: WidthPolicy | None = None
        self._monitor: AcceptanceMonitor | None = None
        self._last: tuple[int, int, float] | None = None
        # For whoever doubts that every rank grows the same tree: a gather and a comparison in each step's plan.
        compare = ranks.count > 1 and os.environ.get("DFLASH_COMPARE_RANKS") == "1"
        self._differing = torch.zeros(2, dtype=torch.int64, device=device) if compare else None
        self._steps = 0
        self._agreed = (0, 0, 0)  # width, bucket, steps since it was asked for

    def _width(self, nodes: int, device: Any) -> Width:
        tree = empty_tree(self._step.cap, nodes, device, index_dtype=torch.int64)
        for each in fields(tree):
            getattr(tree, each.name).zero_()
        positions = torch.zeros((self._step.cap, nodes), dtype=torch.int64, device=device)
        return Width(nodes, tree, positions)

    # Capture

    def draft_tail(self, runner: Any, out: Any, forward_batch: Any, num_tokens: int) -> None:
        """After the drafter's layers: head and top-k."""
        block = self._shape.block
        bs = num_tokens // block
        logprobs, ids = self._vocabulary.draft(out.hidden_states[:num_tokens].view(bs, block, -1))
        self._logprobs[:bs].copy_(logprobs)
        self._ids[:bs].copy_(ids)
        self._drafted.add(bs)

    def verify_tail(self, runner: Any, out: Any, forward_batch: Any, num_tokens: int) -> None:
        """After the target's head: arg-max of every node and the greedy walk."""
        bs = int(forward_batch.batch_size)
        width = self.widths[num_tokens // bs]
        choice = self._vocabulary.argmax(out.next_token_logits[:num_tokens]).view(bs, width.nodes)
        verify_greedy(_first(width.tree, bs), choice, self._shape.depths, out=_first(self._accepted, bs))
        width.hidden[bs] = out.hidden_states[:num_tokens]

    def capture(
        self,
        move: Move,
        append: Append,
        *,
        policy: bool,
        load_draft: LoadDraft | None = None,
        load_target: LoadTarget | None = None,
    ) -> None:
        """Capture *front*, *plan* and *commit* of every width and batch size; ``policy``: also begin to choose among them.

        Called when the target's graphs of every width and the drafter's are captured. ``load_draft``, ``load_target``:
        only where replays need nothing else from the host.
        """
        sizes = sorted(set.intersection(*(set(width.hidden) for width in self.widths.values())))
        if not self._drafted or not sizes:
            return
        self._sizes = sizes
        if policy:
            self.policy = WidthPolicy(sorted(self.widths), told_apart(self._sizes), {})
            self._monitor = AcceptanceMonitor(self.policy, self._logprobs.device)
        pool = torch.cuda.graph_pool_handle()
        with self._ranks.capturing() as stream:
            self._capture_loading(load_draft, load_target, pool, stream)
            for width in self.widths.values():
                for bs in sorted(width.hidden, reverse=True):
                    width.plan[bs] = _captured(lambda w=width, n=bs: self._run_plan(w, n), pool, stream)  # type: ignore[misc]
                    width.commit[bs] = _captured(
                        lambda w=width, n=bs: self._run_commit(w, n, move, append),  # type: ignore[misc]
                        pool,
                        stream,
                    )

    def _capture_loading(
        self, load_draft: LoadDraft | None, load_target: LoadTarget | None, pool: Any, stream: torch.cuda.Stream | None
    ) -> None:
        """Keep the loaders that can be captured: what one does is the release's, and a plugin may have changed it."""
        try:
            if load_draft is not None:
                front = {
                    bs: _captured(lambda n=bs: load_draft(self._step.rows(n)), pool, stream)  # type: ignore[misc]
                    for bs in sorted(self._sizes, reverse=True)
                }
                self._front = front
            if load_target is not None:
                step = self._step.rows(self._sizes[0])
                for width in self.widths.values():
                    tokens, positions = width.tree.token_ids[: step.cap], width.positions[: step.cap]
                    _captured(lambda w=width, t=tokens, p=positions: load_target(w.runner, t, p, step), pool, stream)  # type: ignore[misc]
                self._load_target = load_target
        except (RuntimeError, AttributeError, TypeError) as error:
            logger.warning("DDTREE leaves loading to SGLang, which is slower: it cannot be captured (%s).", error)

    def _run_plan(self, width: Width, bs: int) -> None:
        tree, prefix = _first(width.tree, bs), self._step.prefix[:bs]
        build_tree(self._logprobs[:bs], self._ids[:bs], self._step.roots[:bs], width.nodes, out=tree)
        tree_positions(tree, prefix, out=width.positions[:bs])
        if width.mask is not None:
            tree_mask_full(tree, prefix, width.mask)
        if self._differing is not None:
            mine = torch.cat([tree.token_ids.reshape(-1).to(torch.int64), tree.parent.reshape(-1).to(torch.int64)])
            everyone = self._ranks.gather(mine)
            self._differing[0] += (everyone != everyone[0]).any()
            self._differing[1] += 1
        if self._load_target is not None:
            self._load_target(width.runner, tree.token_ids, width.positions[:bs], self._step.rows(bs))

    def _run_commit(self, width: Width, bs: int, move: Move, append: Append) -> None:
        step, accepted = self._step.rows(bs), _first(self._accepted, bs)
        committed = commit_step(accepted, step.prefix, width.nodes, out=self._committed)
        if width.nodes > 1:
            move(step.slots, accepted)
        columns = min(self._shape.block, width.nodes)
        rows = committed.rows[: bs * self._shape.block].view(bs, -1)[:, :columns]
        append(
            width.hidden[bs].index_select(0, rows.reshape(-1)),
            step.draft_slots[:, :columns].contiguous(),
            step.block_positions[:, :columns].contiguous(),
            committed.lens,
        )
        if self._monitor is not None:
            count_below(accepted, step.slots, self._monitor.limits, self._monitor.row(width.nodes))

    def time_widths(self, draft_runner: Any, repeats: int = 4) -> None:
        """Measure what the GPU alone needs for a step of every width and batch size, by replaying its graphs."""
        if self.policy is None:
            return
        floor: dict[tuple[int, int], float] = {}
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for width in self.widths.values():
            for bs in self._sizes:
                for count in (1, repeats):
                    start.record()
                    for _ in range(count):
                        if width.nodes > 1:
                            if bs in self._front:
                                self._front[bs].replay()
                            _replay(draft_runner, bs)
                        width.plan[bs].replay()
                        _replay(width.runner, bs)
                        width.commit[bs].replay()
                    end.record()
                    end.synchronize()
                floor[width.nodes, bs] = start.elapsed_time(end) / repeats / 1e3
        self.policy.floor = floor
        if self._monitor is not None:
            self._monitor.counts.zero_()

    # Serving

    def covers(self, bs: int) -> bool:
        """Whether a batch of this size fits the captured graphs."""
        return bool(self._sizes) and bs <= self._sizes[-1]

    def padded(self, bs: int) -> int:
        """The captured batch size that SGLang's runner takes for ``bs`` requests: the next larger one."""
        return self._sizes[bisect_left(self._sizes, bs)]

    @property
    def loads_draft(self) -> bool:
        """Whether :meth:`draft` stands for the drafter's whole pass."""
        return bool(self._front)

    @property
    def loads_target(self) -> bool:
        """Whether :meth:`verify` stands for the target's whole pass."""
        return bool(self._sizes) and self._load_target is not None

    def choose(self, bs: int) -> int:
        """Nodes of the next tree."""
        self._steps += 1
        if self._differing is not None and self._steps % 512 == 0:
            differing, steps = self._differing.tolist()
            logger.info("DDTREE ranks: trees differed in %d of %d steps", differing, steps)
        if self.policy is None:
            return self._shape.nodes
        now = time.perf_counter()
        if self._last is not None:
            width, before, since = self._last
            if before == bs:
                self.policy.took(width, bs, now - since)
        if self._monitor is not None:
            self._monitor.poll()
        chosen = self._agree(bs)
        steps = self.policy.steps
        if steps >= 256 and steps & (steps - 1) == 0:
            logger.info("DDTREE auto after %d steps: %s", steps, self.policy.summary())
        self._last = (chosen, bs, now)
        return chosen

    def _agree(self, bs: int) -> int:
        """The policy's choice. Ranks measure differently, so the first one's holds, and is asked for now and then."""
        assert self.policy is not None
        if self._ranks.count == 1:
            return self.policy.choose(bs)
        width, size, since = self._agreed
        if size != self.policy.bucket(bs) or since >= HOLD:
            width, size, since = self._ranks.agree(self.policy.choose(bs)), self.policy.bucket(bs), 0
        self._agreed = width, size, since + 1
        return width

    def interrupted(self) -> None:
        """Something else than a decode step ran: the time since the last one says nothing about its width."""
        self._last = None

    def draft(self, runner: Any, bs: int) -> None:
        """The drafter's pass over the step's blocks; its top-k stays in our buffers."""
        size = self.padded(bs)
        self._front[size].replay()
        _replay(runner, size)

    def plan(self, nodes: int, bs: int) -> tuple[Tree, Tensor]:
        """Tree of what the last draft replay left, and positions int64 [bs, nodes]; the mask is written too."""
        width = self.widths[nodes]
        width.plan[self.padded(bs)].replay()
        return _first(width.tree, bs), width.positions[:bs]

    def verify(self, nodes: int, bs: int) -> Tensor:
        """The target's pass over the planned trees: its logits [bs * nodes, vocabulary or this rank's part of it]."""
        out = _replay(self.widths[nodes].runner, self.padded(bs))
        logits: Tensor = out.next_token_logits[: bs * nodes]
        return logits

    def take(self, accepted: Accepted) -> None:
        """Put a path that was worked out eagerly where the greedy walk would have left it."""
        for each in fields(accepted):
            mine: Tensor = getattr(self._accepted, each.name)
            theirs: Tensor = getattr(accepted, each.name)
            mine[: theirs.shape[0]].copy_(theirs)

    def accepted(self, bs: int) -> Accepted:
        """The path that :meth:`commit` will follow, until the next step."""
        return _first(self._accepted, bs)

    def commit(self, nodes: int, bs: int) -> Committed:
        """Move, append and count along the path that the walk left; the result outlives the next step."""
        width = self.widths[nodes]
        width.commit[self.padded(bs)].replay()
        return self._committed.first(bs).lasting()

    @contextmanager
    def target(self, nodes: int, model_runner: Any) -> Iterator[None]:
        """The target verifies trees of this width inside; prefill keeps the backend that it was started with."""
        width = self.widths[nodes]
        saved = model_runner.attn_backend, model_runner.decode_cuda_graph_runner
        model_runner.attn_backend, model_runner.decode_cuda_graph_runner = width.backend, width.runner
        try:
            yield
        finally:
            model_runner.attn_backend, model_runner.decode_cuda_graph_runner = saved


def _replay(runner: Any, bs: int) -> Any:
    """The graph of ``bs`` requests, on whatever lies in its buffers, and what it was captured to return."""
    return runner.backend.replay(runner._make_graph_key(bs), None)


def _captured(work: Callable[[], None], pool: Any, stream: torch.cuda.Stream | None) -> torch.cuda.CUDAGraph:
    """``work`` as a graph; it runs once before, so that its kernels are compiled and its libraries ready."""
    stream = torch.cuda.Stream() if stream is None else stream
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        work()
    return graph
