"""Patches of ``cpu`` sets that several releases take as they are."""

from __future__ import annotations

from dflash_deploy.patching.anchors import After, Assign, Def, Stmt
from dflash_deploy.patching.edits import GuardStatement, InsertStatements, ReplaceExpression, WrapCondition
from dflash_deploy.patching.patch import Contract, Example, Patch, PatchSet, Refusal

WORKER_STREAM = Patch(
    name="cpu-worker-record-stream",
    file="srt/speculative/dflash_worker_v2.py",
    why="Tensor.record_stream raises on CPU tensors, which need no stream bookkeeping",
    edit=GuardStatement(
        "DFlashWorkerV2.forward_batch_generation",
        Stmt("batch.seq_lens.record_stream(...)"),
        "batch.seq_lens.device.type != 'cpu'",
    ),
    examples=(
        Example(
            before="""
                class DFlashWorkerV2:
                    def forward_batch_generation(self, batch):
                        batch.seq_lens.record_stream(
                            current()
                        )
            """,
            after="""
                class DFlashWorkerV2:
                    def forward_batch_generation(self, batch):
                        if batch.seq_lens.device.type != 'cpu':  # dflash-deploy: cpu-worker-record-stream
                            batch.seq_lens.record_stream(
                                current()
                            )
            """,
        ),
    ),
    refuses=(
        Refusal(
            before="""
                class DFlashWorkerV2:
                    def forward_batch_generation(self, batch):
                        return None
                        batch.seq_lens.record_stream(s)
            """,
            error="ContractBroken",
        ),
    ),
)

WORKER_TRITON = Patch(
    name="cpu-worker-triton",
    file="srt/speculative/dflash_worker_v2.py",
    why="the Triton path of the worker runs under the interpreter, the fallback path does not run on a CPU",
    edit=InsertStatements(
        "DFlashWorkerV2.__init__",
        "supports_gpu_triton = supports_gpu_triton or self.device == 'cpu'\n",
        at=After(Assign("supports_gpu_triton")),
    ),
    contract=(
        Contract(
            "srt/speculative/dflash_worker_v2.py", "DFlashWorkerV2", attributes=("device", "_use_triton_prepare_block")
        ),
    ),
    examples=(
        Example(
            before="""
                class DFlashWorkerV2:
                    def __init__(self):
                        supports_gpu_triton = is_cuda() or is_hip()
                        self.x = supports_gpu_triton
            """,
            after="""
                class DFlashWorkerV2:
                    def __init__(self):
                        supports_gpu_triton = is_cuda() or is_hip()
                        supports_gpu_triton = supports_gpu_triton or self.device == 'cpu'  # dflash-deploy: cpu-worker-triton
                        self.x = supports_gpu_triton
            """,  # noqa: E501
        ),
    ),
    refuses=(
        Refusal(
            before="""
                class DFlashWorkerV2:
                    def __init__(self):
                        triton = is_cuda()
            """,
            error="AnchorMissing",
        ),
    ),
)

CACHE_LOCS = Patch(
    name="cpu-cache-locs",
    file="kernels/ops/speculative/cache_locs.py",
    why="without a platform the function returns None; its Triton kernel runs under the interpreter",
    edit=WrapCondition(
        "assign_extend_cache_locs_func",
        "_is_cuda or _is_hip or _is_musa or _is_xpu",
        "{} or (not _is_cpu and req_to_token.device.type == 'cpu')",
    ),
    examples=(
        Example(
            before="""
                def assign_extend_cache_locs_func(req_to_token):
                    if _is_cuda or _is_hip or _is_musa or _is_xpu:
                        return 1


                _is_cpu = _is_cuda = _is_hip = _is_musa = _is_xpu = False
            """,
            after="""
                def assign_extend_cache_locs_func(req_to_token):
                    if (_is_cuda or _is_hip or _is_musa or _is_xpu) or (not _is_cpu and req_to_token.device.type == 'cpu'):  # dflash-deploy: cpu-cache-locs
                        return 1


                _is_cpu = _is_cuda = _is_hip = _is_musa = _is_xpu = False
            """,  # noqa: E501
        ),
    ),
    refuses=(
        Refusal(
            before="""
                def assign_extend_cache_locs_func(req_to_token):
                    if _is_cuda or _is_hip:
                        return 1
            """,
            error="AnchorMissing",
        ),
        Refusal(
            before="""
                def assign_extend_cache_locs_func(table):
                    if _is_cuda or _is_hip or _is_musa or _is_xpu:
                        return 1
            """,
            error="ContractBroken",
        ),
    ),
)

INPUT_EMBEDS = Patch(
    name="cpu-input-embeds-dtype",
    file="srt/model_executor/model_runner.py",
    why="the draft's input embeddings are cast to bf16 whatever the model's dtype; on a CPU the model is float32",
    edit=ReplaceExpression(
        "ModelRunner._extend_forward_kwargs",
        "forward_batch.input_embeds.bfloat16()",
        "forward_batch.input_embeds.to(self.dtype if self.device == 'cpu' else torch.bfloat16)",
    ),
    contract=(Contract("srt/model_executor/model_runner.py", "ModelRunner", attributes=("device", "dtype")),),
    examples=(
        Example(
            before="""
                import torch

                class ModelRunner:
                    def _extend_forward_kwargs(self, forward_batch):
                        x = forward_batch.input_embeds.bfloat16()
            """,
            after="""
                import torch

                class ModelRunner:
                    def _extend_forward_kwargs(self, forward_batch):
                        x = forward_batch.input_embeds.to(self.dtype if self.device == 'cpu' else torch.bfloat16)  # dflash-deploy: cpu-input-embeds-dtype
            """,  # noqa: E501
        ),
    ),
    refuses=(
        Refusal(
            before="""
                import torch

                class ModelRunner:
                    def _extend_forward_kwargs(self, forward_batch):
                        x = forward_batch.input_embeds
            """,
            error="AnchorMissing",
        ),
    ),
)

ROPE_NATIVE = Patch(
    name="cpu-rope-native",
    file="srt/layers/rotary_embedding/base.py",
    why="a CPU without AMX kernels falls through to an import of vLLM; the native forward suffices",
    edit=ReplaceExpression("RotaryEmbedding.__init__", "not _is_mps", "not _is_mps and cache.device.type != 'cpu'"),
    contract=(
        Contract("srt/layers/rotary_embedding/base.py", "RotaryEmbedding.forward_native"),
        Contract("srt/layers/rotary_embedding/base.py", "RotaryEmbedding._compute_cos_sin_cache", params=()),
    ),
    examples=(
        Example(
            before="""
                class RotaryEmbedding:
                    def __init__(self):
                        cache = self._compute_cos_sin_cache()
                        if (
                            not (_is_cuda)
                            and not (_is_mps)
                        ):
                            import vllm


                _is_cuda = _is_mps = False
            """,
            after="""
                class RotaryEmbedding:
                    def __init__(self):
                        cache = self._compute_cos_sin_cache()
                        if (
                            not (_is_cuda)
                            and (not _is_mps and cache.device.type != 'cpu')
                        ):  # dflash-deploy: cpu-rope-native
                            import vllm


                _is_cuda = _is_mps = False
            """,
        ),
    ),
    refuses=(
        Refusal(
            before="""
                class RotaryEmbedding:
                    def __init__(self):
                        cache = self._compute_cos_sin_cache()
                        if not _is_cuda:
                            import vllm
            """,
            error="AnchorMissing",
        ),
        Refusal(
            before="""
                class RotaryEmbedding:
                    def __init__(self):
                        if not _is_cuda and not _is_mps:
                            import vllm


                _is_cuda = _is_mps = False
            """,
            error="ContractBroken",
        ),
    ),
)

INTERPRETER = Patch(
    name="cpu-interpreter",
    file="kernels/ops/attention/extend_attention.py",
    why="the interpreter's overflow checks take half of every interpreted kernel's time",
    edit=InsertStatements(
        "",
        """
        if not torch.cuda.is_available():
            from dflash_kernels.interpreter import skip_overflow_checks
            skip_overflow_checks()
        """,
        at=After(Assign("_is_hip")),
    ),
    examples=(
        Example(
            before="""
                import torch
                _is_hip = is_hip()
                _is_gfx95 = _is_hip and is_gfx95_supported()
            """,
            after="""
                import torch
                _is_hip = is_hip()
                if not torch.cuda.is_available():  # dflash-deploy: cpu-interpreter
                    from dflash_kernels.interpreter import skip_overflow_checks
                    skip_overflow_checks()
                _is_gfx95 = _is_hip and is_gfx95_supported()
            """,
        ),
    ),
    refuses=(Refusal(before="import torch\n_is_rocm = is_hip()\n", error="AnchorMissing"),),
)


def _attention(kind: str, file: str) -> Patch:
    launcher, passed = f"{kind}_attention_fwd", {"extend": ("q_extend", "o_extend"), "decode": ("q", "o")}[kind]
    code = f"""
        from dflash_kernels.cpu_attention import {kind}_on_cpu
        {launcher} = {kind}_on_cpu({launcher})
    """
    return Patch(
        name=f"cpu-{kind}-attention",
        file=file,
        why="interpreted attention takes nearly all of a server's time, and is wrong in bf16: it runs in PyTorch",
        edit=InsertStatements("", code, at=After(Def(launcher))),
        examples=(
            Example(
                before=f"""
                    def {launcher}({passed[0]}, k_buffer, {passed[1]}):
                        kernel[1]({passed[0]}, k_buffer, {passed[1]})
                """,
                after=f"""
                    def {launcher}({passed[0]}, k_buffer, {passed[1]}):
                        kernel[1]({passed[0]}, k_buffer, {passed[1]})
                    from dflash_kernels.cpu_attention import {kind}_on_cpu  # dflash-deploy: cpu-{kind}-attention
                    {launcher} = {kind}_on_cpu({launcher})
                """,
            ),
        ),
        refuses=(Refusal(before=f"def {kind}_attention(q):\n    return q\n", error="AnchorMissing"),),
    )


def attention(folder: str) -> tuple[Patch, ...]:
    """Attention of PyTorch in place of the interpreted kernels that are in ``folder``."""
    return tuple(_attention(kind, f"{folder}/{kind}_attention.py") for kind in ("extend", "decode"))


ATTENTION = attention("kernels/ops/attention")


def fork(args: str) -> Patch:
    """``args``: the name that has the server's resolved arguments where processes are prepared."""
    view = f"{args} = view(server_args)" if args != "server_args" else "pass"
    called = f"'fork' if {args}.device == 'cpu' else 'spawn'"

    def engine(line: str) -> str:
        return f"""
            import torch.multiprocessing as mp

            def _set_envs_and_config(server_args):
                {view}
                {line}
        """

    return Patch(
        name="cpu-fork",
        file="srt/entrypoints/engine.py",
        why="spawned processes import everything again, which only CUDA needs: half of a start's time on a CPU",
        edit=ReplaceExpression(
            "_set_envs_and_config",
            "mp.set_start_method('spawn', force=True)",
            f"mp.set_start_method({called}, force=True)",
        ),
        contract=(
            (Contract("srt/server_args.py", "ServerArgs", attributes=("device",)),) if args == "server_args" else ()
        ),
        examples=(
            Example(
                before=engine('mp.set_start_method("spawn", force=True)'),
                after=engine(f"mp.set_start_method({called}, force=True)  # dflash-deploy: cpu-fork"),
            ),
        ),
        refuses=(Refusal(before=engine('mp.set_start_method("forkserver", force=True)'), error="AnchorMissing"),),
    )


FORK = fork("server_args")


def dflash_allowed(args: str, last: str) -> Patch:
    """For releases with a list of devices. ``args``: the name that has them in the handler; ``last``: a device of the list."""
    return Patch(
        name="cpu-dflash-allowed",
        file="srt/arg_groups/speculative_hook.py",
        why="DFLASH is refused on a device that is not in its list, yet its worker runs on a CPU too",
        edit=ReplaceExpression("_handle_dflash", f"{args}.device == '{last}'", f"{args}.device in ('{last}', 'cpu')"),
        examples=(
            Example(
                before=f"""
                    def _handle_dflash(server_args):
                        {args} = view(server_args)
                        allowed = (
                            {args}.device.startswith("cuda") or {args}.device == "{last}"
                        )
                """,
                after=f"""
                    def _handle_dflash(server_args):
                        {args} = view(server_args)
                        allowed = (
                            {args}.device.startswith("cuda") or ({args}.device in ('{last}', 'cpu'))
                        )  # dflash-deploy: cpu-dflash-allowed
                """,
            ),
        ),
        refuses=(
            Refusal(
                before=f"""
                    def _handle_dflash(server_args):
                        {args} = view(server_args)
                        allowed = {args}.device.startswith("cuda")
                """,
                error="AnchorMissing",
            ),
            Refusal(
                before=f"""
                    def _handle_dflash(server_args):
                        {args} = view(server_args)
                        return {args}.device == "{last}" or not {args}.device == "{last}"
                """,
                error="AnchorAmbiguous",
            ),
        ),
    )


def cpu_set(args: str, last: str, *releases: str) -> PatchSet:
    """The set of releases since 0.5.17, whose relay between scheduler and worker minds CPU tensors by itself. ``args``
    and ``last`` as in :func:`dflash_allowed`."""
    return PatchSet(
        name="cpu",
        package="sglang",
        versions=f">={releases[0]},<={releases[-1]}" if len(releases) > 1 else f"=={releases[0]}",
        tested=releases,
        patches=(
            dflash_allowed(args, last),
            ROPE_NATIVE,
            WORKER_STREAM,
            WORKER_TRITON,
            CACHE_LOCS,
            INPUT_EMBEDS,
            INTERPRETER,
            *ATTENTION,
            fork(args),
        ),
        device="cpu",
        summary="run on a CPU through Triton's interpreter, in float32",
    )
