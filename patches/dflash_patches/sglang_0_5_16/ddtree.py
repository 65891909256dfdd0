"""The ``ddtree`` set: algorithm DDTREE beside DFLASH in SGLang 0.5.16.

Hooks only; the worker, the arguments' handling and the kernels are in ``dflash_kernels``. DDTREE is a member of the
algorithm enum that also answers ``is_dflash()``: it drafts with DFLASH's drafter, keeps its KV rules, its request checks
and its place in every dispatch, and differs in the worker, in the arguments and in that its captured verify graph must
carry a tree mask.
"""

from __future__ import annotations

from dflash_deploy.patching.anchors import After, First, IfTest, Stmt
from dflash_deploy.patching.edits import AddBranchFirst, AddClassField, AddElement, InsertStatements, ReplaceExpression
from dflash_deploy.patching.patch import Contract, Example, Patch, PatchSet, Present, Refusal

SPEC_INFO = "srt/speculative/spec_info.py"
GRAPH_RUNNER = "srt/model_executor/runner/decode_cuda_graph_runner.py"

MEMBER = Patch(
    name="ddtree-member",
    file=SPEC_INFO,
    why="the algorithm needs a name that --speculative-algorithm and every from_string() accept",
    edit=AddClassField("SpeculativeAlgorithm", "DDTREE = auto()", after="DFLASH"),
    superseded=Present(SPEC_INFO, "SpeculativeAlgorithm.DDTREE"),
    examples=(
        Example(
            before="""
                from enum import Enum, auto

                class SpeculativeAlgorithm(Enum):
                    DFLASH = auto()
                    NONE = auto()
            """,
            after="""
                from enum import Enum, auto

                class SpeculativeAlgorithm(Enum):
                    DFLASH = auto()
                    DDTREE = auto()  # dflash-deploy: ddtree-member
                    NONE = auto()
            """,
        ),
    ),
    refuses=(
        Refusal(
            "from enum import Enum, auto\n\nclass SpeculativeAlgorithm(Enum):\n    EAGLE = auto()\n", "AnchorMissing"
        ),
    ),
)

PREDICATE = Patch(
    name="ddtree-predicate",
    file=SPEC_INFO,
    why="hooks elsewhere ask the algorithm whether it verifies a tree",
    edit=InsertStatements(
        "SpeculativeAlgorithm",
        """
        def is_ddtree(self) -> bool:
            return self == SpeculativeAlgorithm.DDTREE
        """,
        at=After(Stmt("def is_dflash(self) -> bool: ...")),
    ),
    superseded=Present(SPEC_INFO, "SpeculativeAlgorithm.is_ddtree"),
    contract=(Contract(SPEC_INFO, "SpeculativeAlgorithm", attributes=("DDTREE",)),),
    examples=(
        Example(
            before="""
                class SpeculativeAlgorithm:
                    def is_dflash(self) -> bool:
                        return self == SpeculativeAlgorithm.DFLASH

                    def is_none(self) -> bool:
                        return self == SpeculativeAlgorithm.NONE
            """,
            after="""
                class SpeculativeAlgorithm:
                    def is_dflash(self) -> bool:
                        return self == SpeculativeAlgorithm.DFLASH
                    def is_ddtree(self) -> bool:  # dflash-deploy: ddtree-predicate
                        return self == SpeculativeAlgorithm.DDTREE

                    def is_none(self) -> bool:
                        return self == SpeculativeAlgorithm.NONE
            """,
        ),
    ),
    refuses=(
        Refusal(
            """
            class SpeculativeAlgorithm:
                def is_eagle(self) -> bool:
                    return False
            """,
            "AnchorMissing",
        ),
    ),
)

FAMILY = Patch(
    name="ddtree-is-dflash",
    file=SPEC_INFO,
    why="DDTREE shares DFLASH's drafter, KV reservation, capture of hidden states and request checks",
    edit=ReplaceExpression(
        "SpeculativeAlgorithm.is_dflash",
        "self == SpeculativeAlgorithm.DFLASH",
        "self in (SpeculativeAlgorithm.DFLASH, SpeculativeAlgorithm.DDTREE)",
    ),
    contract=(Contract(SPEC_INFO, "SpeculativeAlgorithm", attributes=("DFLASH", "DDTREE")),),
    examples=(
        Example(
            before="""
                class SpeculativeAlgorithm:
                    def is_dflash(self) -> bool:
                        return self == SpeculativeAlgorithm.DFLASH
            """,
            after="""
                class SpeculativeAlgorithm:
                    def is_dflash(self) -> bool:
                        return self in (SpeculativeAlgorithm.DFLASH, SpeculativeAlgorithm.DDTREE)  # dflash-deploy: ddtree-is-dflash
            """,  # noqa: E501
        ),
    ),
    refuses=(
        Refusal(
            """
            class SpeculativeAlgorithm:
                def is_dflash(self) -> bool:
                    return self.value == 3
            """,
            "AnchorMissing",
        ),
    ),
)

WORKER = Patch(
    name="ddtree-worker",
    file=SPEC_INFO,
    why="the scheduler asks the algorithm for its worker class",
    edit=AddBranchFirst(
        "SpeculativeAlgorithm.create_worker",
        """
        if self.is_ddtree():
            from dflash_kernels.ddtree.worker import DDTreeWorker

            return DDTreeWorker
        """,
        before=IfTest("self.is_dflash()"),
    ),
    contract=(
        Contract(SPEC_INFO, "SpeculativeAlgorithm.is_ddtree", params=()),
        Contract(
            "srt/speculative/dflash_worker_v2.py",
            "DFlashWorkerV2",
            attributes=(
                "_append_target_hidden_to_draft_kv_by_loc",
                "_compute_compact_draft_seq_lens",
                "_draft_block_spec_info",
                "_ensure_draft_block_buffers",
                "_fill_compact_seq_lens_cpu_bound",
                "_make_next_draft_input_decode",
                "_mask_token_id",
                "_maybe_build_draft_sampler",
                "_rebuild_compact_draft_cache",
                "draft_model_runner",
                "use_compact_draft_cache",
            ),
        ),
        Contract(
            "srt/speculative/dflash_worker_v2.py",
            "DFlashWorkerV2.__init__",
            params=("server_args", "gpu_id", "ps", "nccl_port", "target_worker"),
        ),
        Contract(
            "srt/speculative/dflash_worker_v2.py",
            "DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc",
            params=("target_hidden", "cache_loc", "cache_loc_2d", "positions", "commit_lens"),
        ),
        Contract(
            "srt/speculative/dflash_worker_v2.py",
            "DFlashWorkerV2._make_next_draft_input_decode",
            params=("bonus_tokens", "new_seq_lens"),
        ),
        Contract(
            "srt/speculative/dflash_utils.py",
            "apply_dflash_verify_logits_adjustments",
            params=("next_token_logits", "sampling_info", "draft_token_num"),
        ),
        Contract(
            "srt/speculative/dflash_info.py",
            "DFlashVerifyInput",
            attributes=(
                "draft_token",
                "positions",
                "draft_token_num",
                "custom_mask",
                "capture_hidden_mode",
                "prepare_for_verify",
            ),
        ),
        Contract(
            "srt/speculative/dflash_info_v2.py",
            "DFlashDraftInputV2",
            attributes=("bonus_tokens", "reserved_seq_lens_cpu"),
        ),
        Contract(
            "srt/managers/utils.py",
            "GenerationBatchResult",
            attributes=(
                "next_token_ids",
                "accept_lens",
                "next_draft_input",
                "speculative_num_draft_tokens",
                "new_seq_lens",
            ),
        ),
    ),
    examples=(
        Example(
            before="""
                class SpeculativeAlgorithm:
                    def create_worker(self, server_args):
                        if self.is_dflash():
                            return 1
                        return 2
            """,
            after="""
                class SpeculativeAlgorithm:
                    def create_worker(self, server_args):
                        if self.is_ddtree():  # dflash-deploy: ddtree-worker
                            from dflash_kernels.ddtree.worker import DDTreeWorker

                            return DDTreeWorker
                        elif self.is_dflash():
                            return 1
                        return 2
            """,
        ),
    ),
    refuses=(
        Refusal(
            """
            class SpeculativeAlgorithm:
                def create_worker(self, server_args):
                    return WORKERS[self]
            """,
            "AnchorMissing",
        ),
    ),
)

ARGUMENTS = Patch(
    name="ddtree-arguments",
    file=SPEC_INFO,
    why="draft block and tree nodes are two numbers; DFLASH's own handler forces them to be one",
    edit=AddBranchFirst(
        "SpeculativeAlgorithm.handle_server_args",
        """
        if self.is_ddtree():
            from dflash_kernels.ddtree.arguments import handle_server_args

            handle_server_args(server_args)
        """,
        before=IfTest("self.is_dflash()"),
    ),
    contract=(
        Contract(SPEC_INFO, "SpeculativeAlgorithm.is_ddtree", params=()),
        Contract("srt/arg_groups/speculative_hook.py", "_handle_dflash", params=("server_args",), positional=1),
        Contract("srt/arg_groups/overrides.py", "resolved_view", params=("server_args",), positional=1),
    ),
    examples=(
        Example(
            before="""
                class SpeculativeAlgorithm:
                    def handle_server_args(self, server_args):
                        if self.is_dflash():
                            _handle_dflash(server_args)
                        elif self.is_ngram():
                            _handle_ngram(server_args)
            """,
            after="""
                class SpeculativeAlgorithm:
                    def handle_server_args(self, server_args):
                        if self.is_ddtree():  # dflash-deploy: ddtree-arguments
                            from dflash_kernels.ddtree.arguments import handle_server_args

                            handle_server_args(server_args)
                        elif self.is_dflash():
                            _handle_dflash(server_args)
                        elif self.is_ngram():
                            _handle_ngram(server_args)
            """,
        ),
    ),
    refuses=(
        Refusal(
            """
            class SpeculativeAlgorithm:
                def handle_server_args(self, server_args):
                    HANDLERS[self](server_args)
            """,
            "AnchorMissing",
        ),
    ),
)

BUDGET_FLAG = Patch(
    name="ddtree-budget-flag",
    file="srt/server_args.py",
    why="one annotated field is the option --speculative-ddtree-budget",
    edit=AddClassField(
        "ServerArgs",
        """
        speculative_ddtree_budget: A[
            Optional[int],
            "DDTREE only. Tree nodes that the target verifies in one step, root included.",
        ] = None
        """,
        after="speculative_dflash_block_size",
    ),
    superseded=Present("srt/server_args.py", "ServerArgs.speculative_ddtree_budget"),
    examples=(
        Example(
            before="""
                from a import A, Optional

                class ServerArgs:
                    speculative_dflash_block_size: A[Optional[int], "x"] = None
                    other: A[int, "y"] = 1
            """,
            after="""
                from a import A, Optional

                class ServerArgs:
                    speculative_dflash_block_size: A[Optional[int], "x"] = None
                    speculative_ddtree_budget: A[  # dflash-deploy: ddtree-budget-flag
                        Optional[int],
                        "DDTREE only. Tree nodes that the target verifies in one step, root included.",
                    ] = None
                    other: A[int, "y"] = 1
            """,
        ),
    ),
    refuses=(Refusal("from a import A, Optional\n\nclass ServerArgs:\n    x: int = 1\n", "AnchorMissing"),),
)

TOPK_FLAG = Patch(
    name="ddtree-topk-flag",
    file="srt/server_args.py",
    why="one annotated field is the option --speculative-ddtree-topk",
    edit=AddClassField(
        "ServerArgs",
        """
        speculative_ddtree_topk: A[
            Optional[int],
            "DDTREE only. Candidate tokens kept per depth. Default: 8 up to 64 nodes, else 16.",
        ] = None
        """,
        after="speculative_eagle_topk",
    ),
    superseded=Present("srt/server_args.py", "ServerArgs.speculative_ddtree_topk"),
    examples=(
        Example(
            before="""
                from a import A, Optional

                class ServerArgs:
                    speculative_eagle_topk: A[Optional[int], "x"] = None
            """,
            after="""
                from a import A, Optional

                class ServerArgs:
                    speculative_eagle_topk: A[Optional[int], "x"] = None
                    speculative_ddtree_topk: A[  # dflash-deploy: ddtree-topk-flag
                        Optional[int],
                        "DDTREE only. Candidate tokens kept per depth. Default: 8 up to 64 nodes, else 16.",
                    ] = None
            """,
        ),
    ),
    refuses=(Refusal("from a import A, Optional\n\nclass ServerArgs:\n    x: int = 1\n", "AnchorMissing"),),
)

HIDDEN_STATES = Patch(
    name="ddtree-hidden-states",
    file="srt/speculative/spec_utils.py",
    why="like DFLASH, DDTREE relays no hidden states between steps; the list compares names, not predicates",
    edit=AddElement("spec_need_hidden_states", ('"STANDALONE"', '"DFLASH"'), '"DDTREE"'),
    examples=(
        Example(
            before="""
                def spec_need_hidden_states(server_args):
                    if server_args.speculative_algorithm in ("STANDALONE", "DFLASH", "DSPARK"):
                        return False
                    return True
            """,
            after="""
                def spec_need_hidden_states(server_args):
                    if server_args.speculative_algorithm in ("STANDALONE", "DFLASH", "DSPARK", "DDTREE"):  # dflash-deploy: ddtree-hidden-states
                        return False
                    return True
            """,  # noqa: E501
        ),
    ),
    refuses=(Refusal("def spec_need_hidden_states(server_args):\n    return True\n", "AnchorMissing"),),
)

DRAFT_WINDOW = Patch(
    name="ddtree-draft-window",
    file="srt/arg_groups/speculative_hook.py",
    why="--speculative-draft-window-size works for DDTREE and must not be called ineffective",
    edit=AddElement("handle_speculative_decoding", ('"EAGLE3"', '"DFLASH"'), '"DDTREE"'),
    examples=(
        Example(
            before="""
                def handle_speculative_decoding(server_args):
                    if server_args.speculative_algorithm not in ("EAGLE3", "DFLASH"):
                        warn()
            """,
            after="""
                def handle_speculative_decoding(server_args):
                    if server_args.speculative_algorithm not in ("EAGLE3", "DFLASH", "DDTREE"):  # dflash-deploy: ddtree-draft-window
                        warn()
            """,  # noqa: E501
        ),
    ),
    refuses=(Refusal("def handle_speculative_decoding(server_args):\n    pass\n", "AnchorMissing"),),
)

CAPTURE_MASK = Patch(
    name="ddtree-capture-mask",
    file=GRAPH_RUNNER,
    why="a verify graph captured without a mask is plain causal and ignores the tree at replay, with plausible wrong output",
    edit=InsertStatements(
        "DecodeCudaGraphRunner.get_spec_info",
        """
        if getattr(self.model_runner.spec_algorithm, "is_ddtree", bool)():
            build_custom_mask = True
        """,
        at=After(Stmt("_, build_custom_mask = resolve_dflash_verify_mask_policy(...)")),
    ),
    contract=(
        Contract(SPEC_INFO, "SpeculativeAlgorithm.is_ddtree", params=()),
        Contract(
            "srt/layers/attention/triton_backend.py",
            "TritonAttnBackend.get_verify_buffers_to_fill_after_draft",
            params=(),
        ),
    ),
    examples=(
        Example(
            before="""
                class DecodeCudaGraphRunner:
                    def get_spec_info(self, num_tokens):
                        _, build_custom_mask = resolve_dflash_verify_mask_policy(
                            self.model_runner.attn_backend
                        )
                        return None if not build_custom_mask else self.buffers.custom_mask
            """,
            after="""
                class DecodeCudaGraphRunner:
                    def get_spec_info(self, num_tokens):
                        _, build_custom_mask = resolve_dflash_verify_mask_policy(
                            self.model_runner.attn_backend
                        )
                        if getattr(self.model_runner.spec_algorithm, "is_ddtree", bool)():  # dflash-deploy: ddtree-capture-mask
                            build_custom_mask = True
                        return None if not build_custom_mask else self.buffers.custom_mask
            """,  # noqa: E501
        ),
    ),
    refuses=(
        Refusal(
            """
            class DecodeCudaGraphRunner:
                def get_spec_info(self, num_tokens):
                    return None
            """,
            "AnchorMissing",
        ),
    ),
)

REQUESTS = Patch(
    name="ddtree-requests",
    file="srt/speculative/dflash_utils.py",
    why="DFLASH's check lets penalties and minimum lengths through that no tree serves, and names the wrong algorithm",
    edit=InsertStatements(
        "validate_dflash_request",
        """
        from sglang.srt.runtime_context import get_server_args
        if get_server_args().speculative_algorithm == 'DDTREE':
            from dflash_kernels.ddtree.requests import validate_ddtree_request
            return validate_ddtree_request(req, enable_overlap)
        """,
        at=First(),
    ),
    contract=(
        Contract("srt/runtime_context.py", "get_server_args", params=()),
        Contract("srt/server_args.py", "ServerArgs", attributes=("speculative_algorithm",)),
        Contract(
            "srt/sampling/sampling_params.py",
            "SamplingParams",
            attributes=("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens"),
        ),
        Contract(
            "srt/managers/schedule_batch.py",
            "Req",
            attributes=("return_logprob", "return_hidden_states", "custom_logit_processor", "lora_id"),
        ),
    ),
    examples=(
        Example(
            before="""
                def validate_dflash_request(req, enable_overlap):
                    if req.return_logprob:
                        return "no"
            """,
            after="""
                def validate_dflash_request(req, enable_overlap):
                    from sglang.srt.runtime_context import get_server_args  # dflash-deploy: ddtree-requests
                    if get_server_args().speculative_algorithm == 'DDTREE':
                        from dflash_kernels.ddtree.requests import validate_ddtree_request
                        return validate_ddtree_request(req, enable_overlap)
                    if req.return_logprob:
                        return "no"
            """,
        ),
    ),
    refuses=(Refusal("def validate_request(req, enable_overlap):\n    return None\n", "AnchorMissing"),),
)

DDTREE = PatchSet(
    name="ddtree",
    package="sglang",
    versions="==0.5.16",
    patches=(
        MEMBER,
        PREDICATE,
        FAMILY,
        WORKER,
        ARGUMENTS,
        BUDGET_FLAG,
        TOPK_FLAG,
        HIDDEN_STATES,
        DRAFT_WINDOW,
        CAPTURE_MASK,
        REQUESTS,
    ),
    tested=("0.5.16",),
    payload=True,
    summary="algorithm DDTREE beside DFLASH: a tree of the drafter's marginals, verified in one pass",
)
