"""Recurrent layers under a tree: SGLang's own kernels, given our links, against a sequential run along each path."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.patches.wheels import wheel
from tests.scope import costly

torch = pytest.importorskip("torch")
from dflash_kernels.accepted import Accepted  # noqa: E402
from dflash_kernels.build_tree import build_tree  # noqa: E402
from dflash_kernels.ddtree import hybrid  # noqa: E402
from dflash_kernels.interpreter import keep_masks_boolean  # noqa: E402
from dflash_kernels.tree import Tree  # noqa: E402
from dflash_kernels.verify_greedy import verify_greedy  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.functional import silu, softplus  # noqa: E402

BS, NODES, DEPTHS, RANKS = 2, 14, 4, 3
HEADS, V_HEADS, K, V, WIDTH = 1, 2, 16, 16, 4
DIM = 2 * HEADS * K + V_HEADS * V
SLOTS = (3, 1)  # of the two requests, of five


@dataclass(frozen=True)
class Kernels:
    conv: Callable[..., Tensor]
    delta_rule: Callable[..., Tensor]
    scatter: Callable[..., None]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The three kernels as SGLang 0.5.16 has them, out of its wheel and without the rest of it."""
    folder = tmp_path_factory.mktemp("sglang")
    pdl = ModuleType("sglang.jit_kernel.utils")
    pdl.is_arch_support_pdl = lambda: False  # type: ignore[attr-defined]
    absent = {"sglang": ModuleType("sglang"), "sglang.jit_kernel": ModuleType("sglang.jit_kernel"), pdl.__name__: pdl}
    saved = {name: sys.modules.get(name) for name in absent}
    sys.modules.update(absent)
    try:
        with zipfile.ZipFile(wheel("sglang", "0.5.16")) as archive:
            conv, rule, scatter = (
                _module(archive, f"sglang/kernels/ops/{name}.py", folder)
                for name in (
                    "mamba/causal_conv1d_triton",
                    "attention/fla/fused_sigmoid_gating_recurrent",
                    "mamba/mamba_state_scatter_triton",
                )
            )
    finally:
        for name, module in saved.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    found = Kernels(
        conv.causal_conv1d_update,
        rule.fused_sigmoid_gating_delta_rule_update,
        scatter.scatter_mamba_states_after_mtp_verify,
    )
    keep_masks_boolean()
    return found


def _module(archive: zipfile.ZipFile, name: str, folder: Path) -> Any:
    source = archive.read(name).decode()
    if not torch.cuda.is_available():
        source = source.replace(".is_cuda", ".is_cpu")  # launchers that refuse CPU tensors
    path = folder / Path(name).name
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"from_wheel_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Layer:
    """One layer's weights, its state before the step, and its inputs at every node."""

    conv_weight: Tensor  # [DIM, WIDTH]
    a_log: Tensor  # [V_HEADS]
    dt_bias: Tensor
    conv: Tensor  # [slots, DIM, WIDTH - 1]
    ssm: Tensor  # [slots, V_HEADS, V, K]
    qkv: Tensor  # [BS, NODES, DIM]
    a: Tensor  # [BS, NODES, V_HEADS]
    b: Tensor

    @classmethod
    def random(cls, device: str, seed: int = 3) -> Layer:
        draw = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=draw).to(device)

        return cls(
            normal(DIM, WIDTH), normal(V_HEADS) - 1, normal(V_HEADS), normal(5, DIM, WIDTH - 1),
            normal(5, V_HEADS, V, K), normal(BS, NODES, DIM), normal(BS, NODES, V_HEADS), normal(BS, NODES, V_HEADS),
        )  # fmt: skip

    def along(self, request: int, path: list[int]) -> tuple[Tensor, Tensor]:
        """Window and state behind the last node of a path, one node after the other."""
        window, state = self.conv[SLOTS[request]], self.ssm[SLOTS[request]]
        for node in path:
            seen = torch.cat([window, self.qkv[request, node, :, None]], 1)
            mixed = silu((seen * self.conv_weight).sum(1))
            window = seen[:, 1:]
            key = mixed[HEADS * K : 2 * HEADS * K].view(HEADS, K).repeat_interleave(V_HEADS // HEADS, 0)
            key = key / (key.square().sum(-1, keepdim=True) + 1e-6).sqrt()
            value = mixed[2 * HEADS * K :].view(V_HEADS, V)
            decay = -self.a_log.exp() * softplus(self.a[request, node] + self.dt_bias)
            state = state * decay.exp()[:, None, None]
            value = (value - torch.einsum("hvk,hk->hv", state, key)) * self.b[request, node].sigmoid()[:, None]
            state = state + value[:, :, None] * key[:, None, :]
        return window, state


def tree_of(device: str, seed: int = 5) -> Tree:
    draw = torch.Generator().manual_seed(seed)
    logprobs = torch.randn(BS, DEPTHS, RANKS, generator=draw).log_softmax(-1).sort(-1, descending=True).values
    ids = torch.stack([torch.randperm(50, generator=draw)[:RANKS] for _ in range(BS * DEPTHS)]).view_as(logprobs)
    return build_tree(logprobs.to(device), ids.to(device), torch.tensor([7, 8], device=device), NODES)


def paths_of(tree: Tree, request: int) -> dict[int, list[int]]:
    """Each node's path from the root."""
    paths: dict[int, list[int]] = {}
    for node in range(int(tree.valid_count[request])):
        parent = int(tree.parent[request, node])
        paths[node] = [*paths[parent], node] if node else [0]
    return paths


def late_siblings(tree: Tree, request: int) -> list[int]:
    """Nodes at depth two or more that are not their parent's first child."""
    first = set(tree.first_child[request].tolist())
    return [node for node in range(NODES) if int(tree.depth[request, node]) >= 2 and node not in first]


def verified(kernels: Kernels, layer: Layer, tree: Tree) -> SimpleNamespace:
    """Windows and states behind every node, as a verify pass of SGLang's GDN backend leaves them."""
    links = SimpleNamespace()
    hybrid.link(links, tree)
    device = layer.qkv.device
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=device)
    rows = torch.arange(BS, dtype=torch.int32, device=device)
    windows = torch.zeros(BS, NODES, DIM, WIDTH - 1, device=device)
    states = torch.zeros(BS, NODES, V_HEADS, V, K, device=device)
    conv, ssm = layer.conv.clone(), layer.ssm.clone()
    parents = torch.empty_like(links.retrieve_next_token)
    mixed = kernels.conv(
        layer.qkv.transpose(1, 2), conv, layer.conv_weight, None, "silu",
        conv_state_indices=slots, intermediate_conv_window=windows, intermediate_state_indices=rows,
        retrieve_next_token=links.retrieve_next_token, retrieve_next_sibling=links.retrieve_next_sibling,
        retrieve_parent_token=parents,
    )  # fmt: skip
    flat = mixed.transpose(1, 2).reshape(BS * NODES, DIM)
    q, k, v = flat.split([HEADS * K, HEADS * K, V_HEADS * V], -1)
    kernels.delta_rule(
        A_log=layer.a_log, a=layer.a.view(-1, V_HEADS), dt_bias=layer.dt_bias,
        softplus_beta=1.0, softplus_threshold=20.0,
        q=q.view(1, -1, HEADS, K), k=k.view(1, -1, HEADS, K), v=v.view(1, -1, V_HEADS, V), b=layer.b.view(-1, V_HEADS),
        initial_state_source=ssm, initial_state_indices=slots, use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.arange(0, BS * NODES + 1, NODES, dtype=torch.int32, device=device), disable_state_update=True,
        intermediate_states_buffer=states, intermediate_state_indices=rows, cache_steps=NODES,
        retrieve_parent_token=parents,
    )  # fmt: skip
    return SimpleNamespace(windows=windows, states=states, conv=conv, ssm=ssm, slots=slots, parents=parents)


def wrong_nodes(layer: Layer, tree: Tree, found: SimpleNamespace) -> set[tuple[int, int]]:
    wrong = set()
    for request in range(BS):
        for node, path in paths_of(tree, request).items():
            window, state = layer.along(request, path)
            same = torch.allclose(found.windows[request, node], window, atol=1e-5) and torch.allclose(
                found.states[request, node], state, atol=1e-4
            )
            if not same:
                wrong.add((request, node))
    return wrong


def test_every_node_has_the_state_of_its_path(kernels: Kernels, device: str) -> None:
    layer, tree = Layer.random(device), tree_of(device)
    assert all(late_siblings(tree, request) for request in range(BS))
    found = verified(kernels, layer, tree)
    for request in range(BS):
        valid = int(tree.valid_count[request])
        assert found.parents[request, 1:valid].tolist() == tree.parent[request, 1:valid].tolist()
    assert wrong_nodes(layer, tree, found) == set()


def test_descending_children_are_told(kernels: Kernels, device: str) -> None:
    """The control: the same tree with its child lists reversed is what the kernels get wrong."""
    layer, tree = Layer.random(device), tree_of(device)
    first, following = tree.first_child.clone(), tree.next_sibling.clone()
    for request in range(BS):
        for parent in range(NODES):
            children = [n for n in range(1, NODES) if int(tree.parent[request, n]) == parent][::-1]
            first[request, parent] = children[0] if children else -1
            for child, after in zip(children, [*children[1:], -1], strict=False):
                following[request, child] = after
    wrong = wrong_nodes(layer, tree, verified(kernels, layer, replace(tree, first_child=first, next_sibling=following)))
    for request in range(BS):
        assert any((request, node) in wrong for node in range(NODES) if int(tree.depth[request, node]) >= 2)


def accept(tree: Tree, ends: list[int]) -> Accepted:
    """What a greedy target accepts that wants the path to each request's end, and then something else."""
    choice = torch.full((BS, NODES), 99, device=tree.token_ids.device)
    for request, end in enumerate(ends):
        path = paths_of(tree, request)[end]
        for node, after in itertools.pairwise(path):
            choice[request, node] = tree.token_ids[request, after]
    return verify_greedy(tree, choice, DEPTHS)


def commit(kernels: Kernels, found: SimpleNamespace, accepted: Accepted) -> None:
    """As the worker, over SGLang's scatter; ``found.conv`` and ``found.ssm`` are the layer's states."""
    pools = SimpleNamespace(
        conv=[found.conv[None]], temporal=found.ssm[None],
        intermediate_conv_window=[found.windows[None]], intermediate_ssm=found.states[None],
    )  # fmt: skip

    class Backend:
        """As ``HybridLinearAttnBackend``: the method that the commit goes through."""

        def update_mamba_state_after_mtp_verify(
            self, last_correct_step_indices: Tensor, mamba_track_indices: None, mamba_steps_to_track: None, model: Any
        ) -> None:
            kernels.scatter(pools, found.slots, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track)

    hybrid.commit_states(SimpleNamespace(attn_backend=Backend(), model=None), accepted)


@pytest.mark.parametrize("which", ["siblings", "root"])
def test_the_accepted_state_becomes_the_requests(kernels: Kernels, device: str, which: str) -> None:
    layer, tree = Layer.random(device), tree_of(device)
    found = verified(kernels, layer, tree)
    ends = [max(late_siblings(tree, request)) if which == "siblings" else 0 for request in range(BS)]
    accepted = accept(tree, ends)
    assert hybrid.last_nodes(accepted).tolist() == ends
    commit(kernels, found, accepted)
    for request, slot in enumerate(SLOTS):
        window, state = layer.along(request, paths_of(tree, request)[ends[request]])
        torch.testing.assert_close(found.conv[slot], window, atol=1e-5, rtol=0)
        torch.testing.assert_close(found.ssm[slot], state, atol=1e-4, rtol=0)
    for slot in {0, 2, 4}:
        assert torch.equal(found.conv[slot], layer.conv[slot]) and torch.equal(found.ssm[slot], layer.ssm[slot])


@costly
def test_fifty_steps_carry_the_state(kernels: Kernels, device: str) -> None:
    """Fifty trees one after the other, each accepted along another path, against one sequential run."""
    served = Layer.random(device)
    truth = served
    siblings = 0
    for step in range(50):
        tree, inputs = tree_of(device, 100 + step), Layer.random(device, 200 + step)
        new = {"qkv": inputs.qkv, "a": inputs.a, "b": inputs.b}
        served, truth = replace(served, **new), replace(truth, **new)
        late = [late_siblings(tree, request) for request in range(BS)]
        ends = [nodes[step % len(nodes)] if nodes and step % 3 else step % 2 for nodes in late]
        siblings += sum(end in nodes for end, nodes in zip(ends, late, strict=True))
        found = verified(kernels, served, tree)
        commit(kernels, found, accept(tree, ends))
        conv, ssm = truth.conv.clone(), truth.ssm.clone()
        for request, slot in enumerate(SLOTS):
            conv[slot], ssm[slot] = truth.along(request, paths_of(tree, request)[ends[request]])
        served, truth = replace(served, conv=found.conv, ssm=found.ssm), replace(truth, conv=conv, ssm=ssm)
        torch.testing.assert_close(served.conv, truth.conv, atol=1e-4, rtol=0)
        torch.testing.assert_close(served.ssm, truth.ssm, atol=1e-3, rtol=0)
    assert siblings > 40


def test_width_is_capped_by_memory() -> None:
    """Sixty-four requests of a state of 64 MiB, 100 GiB: four of them are their own states, 96 are for trees."""
    size = {"state": 2**26, "requests": 64, "states": None, "free": 100 * 2**30}
    hybrid.check_width(nodes=16, **size)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError) as caught:
        hybrid.check_width(nodes=32, **size)  # type: ignore[arg-type]
    message = str(caught.value)
    for part in ("32 nodes", "64.0 MiB", "64 requests 128.0 GiB", "there are 96.0 GiB", "to 23 or less"):
        assert part in message
    hybrid.check_width(nodes=23, **size)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        hybrid.check_width(nodes=24, **size)  # type: ignore[arg-type]
    hybrid.check_width(nodes=32, **{**size, "states": 32})  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"there are 0.0 GiB. Lower --max-running-requests"):
        hybrid.check_width(nodes=2, **{**size, "free": 2**30})  # type: ignore[arg-type]


def arguments(**changed: Any) -> SimpleNamespace:
    """What ``hybrid_arguments`` reads of the server's arguments; ``kind``: the target's recurrent layers."""
    kind = changed.pop("kind", "gdn")
    config = SimpleNamespace(architectures=["Qwen3NextForCausalLM"], kind=kind)
    given = {
        "get_model_config": lambda: SimpleNamespace(hf_config=config),
        "speculative_ddtree_budget": 16,
        "speculative_eagle_topk": 1,
        "disable_radix_cache": True,
        "enable_gdn_replayssm_spec": False,
        "enable_linear_replayssm": False,
        "page_size": 1,
    }
    return SimpleNamespace(**{**given, **changed})


@pytest.fixture
def architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's two questions to a model's configuration."""
    module = ModuleType("sglang.srt.configs.hybrid_arch")
    module.mambaish_config = lambda model: model.hf_config if model.hf_config.kind else None  # type: ignore[attr-defined]
    module.hybrid_gdn_config = lambda model: model.hf_config if model.hf_config.kind == "gdn" else None  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.configs"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("architectures")
def test_arguments_of_a_hybrid() -> None:
    hybrid.hybrid_arguments(served := arguments())
    assert served.speculative_eagle_topk > 1
    hybrid.hybrid_arguments(dense := arguments(kind=None, disable_radix_cache=False, speculative_ddtree_budget="auto"))
    assert dense.speculative_eagle_topk == 1
    hybrid.refuse_hybrid(dense)
    with pytest.raises(ValueError, match=r"0\.5\.16 only"):
        hybrid.refuse_hybrid(arguments())


@pytest.mark.usefixtures("architectures")
@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"kind": "mamba2"}, "Qwen3NextForCausalLM has others"),
        ({"speculative_ddtree_budget": "auto"}, "--speculative-ddtree-budget 16"),
        ({"disable_radix_cache": False}, "add --disable-radix-cache"),
        ({"enable_gdn_replayssm_spec": True}, "--enable-gdn-replayssm-spec"),
        ({"page_size": 64}, "--page-size is 64"),
    ],
)
def test_arguments_that_a_hybrid_does_not_have(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        hybrid.hybrid_arguments(arguments(**changed))
