"""Hooks of ``ddtree`` sets that several releases take: as they are, or as functions of what differs between releases.

DDTREE is a member of the algorithm enum that also answers ``is_dflash()``: it drafts with DFLASH's drafter, keeps its KV
rules, its request checks and its place in every dispatch, and differs in the worker, in the arguments and in that its
captured verify graph must carry a tree mask.
"""

from __future__ import annotations

from dflash_deploy.patching.anchors import After, Before, First, IfTest, Stmt
from dflash_deploy.patching.edits import AddBranchFirst, AddClassField, AddElement, InsertStatements, ReplaceExpression
from dflash_deploy.patching.patch import Contract, Example, Patch, PatchSet, Present, Refusal

SPEC_INFO = "srt/speculative/spec_info.py"
SCHEDULE_BATCH = "srt/managers/schedule_batch.py"
GRAPH_RUNNER = "srt/model_executor/runner/decode_cuda_graph_runner.py"

WORKER_FILE = "srt/speculative/dflash_worker_v2.py"
WORKER_CONTRACTS = (
    Contract(
        WORKER_FILE,
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
        WORKER_FILE,
        "DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc",
        params=("target_hidden", "cache_loc", "cache_loc_2d", "positions", "commit_lens"),
    ),
    Contract(WORKER_FILE, "DFlashWorkerV2._make_next_draft_input_decode", params=("bonus_tokens", "new_seq_lens")),
    Contract(
        WORKER_FILE,
        "DFlashWorkerV2._rebuild_compact_draft_cache",
        params=(
            "req_pool_indices",
            "prefix_lens",
            "draft_prefix_lens",
            "verify_out_cache_loc_2d",
            "bs",
            "block_size",
        ),
    ),
    Contract(
        "srt/speculative/dflash_utils.py",
        "apply_dflash_verify_logits_adjustments",
        params=("next_token_logits", "sampling_info", "draft_token_num"),
    ),
    Contract(
        "srt/speculative/dflash_info.py",
        "DFlashVerifyInput",
        params=("draft_token", "positions", "draft_token_num", "custom_mask", "capture_hidden_mode"),
    ),
    Contract(
        "srt/speculative/dflash_info.py",
        "DFlashVerifyInput.prepare_for_verify",
        params=("batch", "target_worker"),
        positional=2,
    ),
    Contract("srt/speculative/dflash_info_v2.py", "DFlashDraftInputV2", attributes=("bonus_tokens",)),
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
)
"""What the step of every ``DDTreeWorker`` relies on."""


def bounds(lens: str, *params: str) -> tuple[Contract, ...]:
    """Where the host's bound of a request's slots is: the draft state's attribute, and what the worker makes of it."""
    return (
        Contract("srt/speculative/dflash_info_v2.py", "DFlashDraftInputV2", attributes=(lens,)),
        Contract(WORKER_FILE, "DFlashWorkerV2._fill_compact_seq_lens_cpu_bound", params=params),
    )


BAGS = tuple(Contract("srt/runtime_context.py", name, params=()) for name in ("get_spec", "get_exec", "get_parallel"))
"""Resolved arguments are in the process's configuration."""

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


def worker(module: str, *contract: Contract) -> Patch:
    """``module``: the one of ``dflash_kernels.ddtree`` with the release's ``DDTreeWorker``."""
    return Patch(
        name="ddtree-worker",
        file=SPEC_INFO,
        why="the scheduler asks the algorithm for its worker class",
        edit=AddBranchFirst(
            "SpeculativeAlgorithm.create_worker",
            f"""
            if self.is_ddtree():
                from dflash_kernels.ddtree.{module} import DDTreeWorker

                return DDTreeWorker
            """,
            before=IfTest("self.is_dflash()"),
        ),
        contract=(Contract(SPEC_INFO, "SpeculativeAlgorithm.is_ddtree", params=()), *WORKER_CONTRACTS, *contract),
        examples=(
            Example(
                before="""
                    class SpeculativeAlgorithm:
                        def create_worker(self, server_args):
                            if self.is_dflash():
                                return 1
                            return 2
                """,
                after=f"""
                    class SpeculativeAlgorithm:
                        def create_worker(self, server_args):
                            if self.is_ddtree():  # dflash-deploy: ddtree-worker
                                from dflash_kernels.ddtree.{module} import DDTreeWorker

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


def arguments(module: str, *contract: Contract) -> Patch:
    """``module``: the one of ``dflash_kernels.ddtree`` with the release's ``handle_server_args``."""
    return Patch(
        name="ddtree-arguments",
        file=SPEC_INFO,
        why="draft block and tree nodes are two numbers; DFLASH's own handler forces them to be one",
        edit=AddBranchFirst(
            "SpeculativeAlgorithm.handle_server_args",
            f"""
            if self.is_ddtree():
                from dflash_kernels.ddtree.{module} import handle_server_args

                handle_server_args(server_args)
            """,
            before=IfTest("self.is_dflash()"),
        ),
        contract=(
            Contract(SPEC_INFO, "SpeculativeAlgorithm.is_ddtree", params=()),
            Contract("srt/arg_groups/speculative_hook.py", "_handle_dflash", params=("server_args",), positional=1),
            *contract,
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
                after=f"""
                    class SpeculativeAlgorithm:
                        def handle_server_args(self, server_args):
                            if self.is_ddtree():  # dflash-deploy: ddtree-arguments
                                from dflash_kernels.ddtree.{module} import handle_server_args

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


def budget_flag(file: str, scope: str, namespace: str = "") -> Patch:
    """``scope``: class of annotated fields that are options. ``namespace``: the annotation that such a field ends with."""
    tail, shown = (
        f"\n                {namespace}," if namespace else "",
        f"\n                            {namespace}," if namespace else "",
    )
    return Patch(
        name="ddtree-budget-flag",
        file=file,
        why="one annotated field is the option --speculative-ddtree-budget",
        edit=AddClassField(
            scope,
            f"""
            speculative_ddtree_budget: A[
                Optional[str],
                "DDTREE only. Tree nodes that the target verifies in one step, root included, or auto.",{tail}
            ] = None
            """,
            after="speculative_dflash_block_size",
        ),
        superseded=Present(file, f"{scope}.speculative_ddtree_budget"),
        examples=(
            Example(
                before=f"""
                    from a import A, NS, Optional

                    class {scope}:
                        speculative_dflash_block_size: A[Optional[str], "x"] = None
                        other: A[int, "y"] = 1
                """,
                after=f"""
                    from a import A, NS, Optional

                    class {scope}:
                        speculative_dflash_block_size: A[Optional[str], "x"] = None
                        speculative_ddtree_budget: A[  # dflash-deploy: ddtree-budget-flag
                            Optional[str],
                            "DDTREE only. Tree nodes that the target verifies in one step, root included, or auto.",{shown}
                        ] = None
                        other: A[int, "y"] = 1
                """,
            ),
        ),
        refuses=(Refusal(f"from a import A, NS, Optional\n\nclass {scope}:\n    x: int = 1\n", "AnchorMissing"),),
    )


def topk_flag(file: str, scope: str, namespace: str = "") -> Patch:
    """As :func:`budget_flag`."""
    tail, shown = (
        f"\n                {namespace}," if namespace else "",
        f"\n                            {namespace}," if namespace else "",
    )
    return Patch(
        name="ddtree-topk-flag",
        file=file,
        why="one annotated field is the option --speculative-ddtree-topk",
        edit=AddClassField(
            scope,
            f"""
            speculative_ddtree_topk: A[
                Optional[int],
                "DDTREE only. Candidate tokens kept per depth. Default: 8 up to 64 nodes, else 16.",{tail}
            ] = None
            """,
            after="speculative_eagle_topk",
        ),
        superseded=Present(file, f"{scope}.speculative_ddtree_topk"),
        examples=(
            Example(
                before=f"""
                    from a import A, NS, Optional

                    class {scope}:
                        speculative_eagle_topk: A[Optional[int], "x"] = None
                """,
                after=f"""
                    from a import A, NS, Optional

                    class {scope}:
                        speculative_eagle_topk: A[Optional[int], "x"] = None
                        speculative_ddtree_topk: A[  # dflash-deploy: ddtree-topk-flag
                            Optional[int],
                            "DDTREE only. Candidate tokens kept per depth. Default: 8 up to 64 nodes, else 16.",{shown}
                        ] = None
                """,
            ),
        ),
        refuses=(Refusal(f"from a import A, NS, Optional\n\nclass {scope}:\n    x: int = 1\n", "AnchorMissing"),),
    )


def capture_mask(mask: str) -> Patch:
    """``mask``: the Triton backend's method or property that gives its captured mask."""
    return Patch(
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
            Contract("srt/layers/attention/triton_backend.py", f"TritonAttnBackend.{mask}", params=()),
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


def draft_width(file: str, scope: str) -> Patch:
    """``file``, ``scope``: the class of options that has DFLASH's block size."""
    return Patch(
        name="ddtree-draft-width",
        file=SPEC_INFO,
        why="drafter and target read one number of tokens; the drafter's block and the tree are two",
        edit=InsertStatements(
            "SpeculativeAlgorithm.get_num_tokens_per_req_for_target_verify",
            """
            if is_draft_worker and self.is_ddtree():
                from sglang.srt.runtime_context import get_spec

                return get_spec().speculative_dflash_block_size
            """,
            at=First(),
        ),
        contract=(
            Contract(SPEC_INFO, "SpeculativeAlgorithm.is_ddtree", params=()),
            Contract("srt/runtime_context.py", "get_spec", params=()),
            Contract(file, scope, attributes=("speculative_dflash_block_size",)),
        ),
        examples=(
            Example(
                before="""
                    class SpeculativeAlgorithm:
                        def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens, is_draft_worker):
                            return num_draft_tokens
                """,
                after="""
                    class SpeculativeAlgorithm:
                        def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens, is_draft_worker):
                            if is_draft_worker and self.is_ddtree():  # dflash-deploy: ddtree-draft-width
                                from sglang.srt.runtime_context import get_spec

                                return get_spec().speculative_dflash_block_size
                            return num_draft_tokens
                """,
            ),
        ),
        refuses=(
            Refusal(
                """
                class SpeculativeAlgorithm:
                    def get_num_tokens_per_bs_for_target_verify(self, num_draft_tokens, is_draft_worker):
                        return num_draft_tokens
                """,
                "AnchorMissing",
            ),
            Refusal(
                """
                class SpeculativeAlgorithm:
                    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens, draft):
                        return num_draft_tokens
                """,
                "ContractBroken",
            ),
        ),
    )


def requests(getter: str, file: str, scope: str) -> Patch:
    """``getter``: the function that gives the resolved algorithm's name; ``file``, ``scope``: the class of its option."""
    return Patch(
        name="ddtree-requests",
        file="srt/speculative/dflash_utils.py",
        why="DFLASH's check lets penalties and minimum lengths through that no tree serves, and names the wrong algorithm",
        edit=InsertStatements(
            "validate_dflash_request",
            f"""
            from sglang.srt.runtime_context import {getter}
            if {getter}().speculative_algorithm == 'DDTREE':
                from dflash_kernels.ddtree.requests import validate_ddtree_request
                return validate_ddtree_request(req, enable_overlap)
            """,
            at=First(),
        ),
        contract=(
            Contract("srt/runtime_context.py", getter, params=()),
            Contract(file, scope, attributes=("speculative_algorithm",)),
            Contract(
                "srt/sampling/sampling_params.py",
                "SamplingParams",
                attributes=("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens"),
            ),
            Contract(
                SCHEDULE_BATCH,
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
                after=f"""
                    def validate_dflash_request(req, enable_overlap):
                        from sglang.srt.runtime_context import {getter}  # dflash-deploy: ddtree-requests
                        if {getter}().speculative_algorithm == 'DDTREE':
                            from dflash_kernels.ddtree.requests import validate_ddtree_request
                            return validate_ddtree_request(req, enable_overlap)
                        if req.return_logprob:
                            return "no"
                """,
            ),
        ),
        refuses=(Refusal("def validate_request(req, enable_overlap):\n    return None\n", "AnchorMissing"),),
    )


STOPS = Patch(
    name="ddtree-stop-before-limit",
    file=SCHEDULE_BATCH,
    why="a step of several tokens that reaches the limit answers with what follows a stop in it; 0.5.18 looks for stops first",
    edit=InsertStatements(
        "Req.update_finish_state",
        """
        if new_accepted_len > 1 and len(self.output_ids) >= self.sampling_params.max_new_tokens:
            from dflash_kernels.ddtree.finish import stopped_before_limit

            if stopped_before_limit(self, new_accepted_len):
                return
        """,
        at=Before(IfTest("len(self.output_ids) >= self.sampling_params.max_new_tokens")),
    ),
    superseded=Present(SCHEDULE_BATCH, "Req._cap_finished_len_at_max_new_tokens"),
    contract=(
        Contract(SCHEDULE_BATCH, "Req.update_finish_state", params=("new_accepted_len",), positional=1),
        Contract(SCHEDULE_BATCH, "Req", attributes=("finished", "grammar", "output_ids", "sampling_params")),
    ),
    examples=(
        Example(
            before="""
                class Req:
                    def update_finish_state(self, new_accepted_len=1):
                        if self.finished():
                            return
                        if len(self.output_ids) >= self.sampling_params.max_new_tokens:
                            self.finished_reason = FINISH_LENGTH()
                            return
                        self._check_token_based_finish(self.output_ids[-new_accepted_len:])
            """,
            after="""
                class Req:
                    def update_finish_state(self, new_accepted_len=1):
                        if self.finished():
                            return
                        if new_accepted_len > 1 and len(self.output_ids) >= self.sampling_params.max_new_tokens:  # dflash-deploy: ddtree-stop-before-limit
                            from dflash_kernels.ddtree.finish import stopped_before_limit

                            if stopped_before_limit(self, new_accepted_len):
                                return
                        if len(self.output_ids) >= self.sampling_params.max_new_tokens:
                            self.finished_reason = FINISH_LENGTH()
                            return
                        self._check_token_based_finish(self.output_ids[-new_accepted_len:])
            """,  # noqa: E501
        ),
    ),
    refuses=(
        Refusal(
            """
            class Req:
                def update_finish_state(self, new_accepted_len=1):
                    if len(self.output_ids) > self.limit:
                        self.finished_reason = FINISH_LENGTH()
            """,
            "AnchorMissing",
        ),
        Refusal(
            """
            class Req:
                def update_finish_state(self, accepted=1):
                    if len(self.output_ids) >= self.sampling_params.max_new_tokens:
                        self.finished_reason = FINISH_LENGTH()
            """,
            "ContractBroken",
        ),
    ),
)


def ddtree_set(
    worker_patch: Patch,
    arguments_patch: Patch,
    window: Patch,
    file: str,
    scope: str,
    namespace: str,
    *releases: str,
    more: tuple[Patch, ...] = (),
) -> PatchSet:
    """The set of releases since 0.5.17, which have resolved arguments and the verify mask as properties and a drafter
    without arguments of its own. ``file``, ``scope``, ``namespace``: as in :func:`budget_flag`. ``more``: what these
    releases need beside that."""
    return PatchSet(
        name="ddtree",
        package="sglang",
        versions=f">={releases[0]},<={releases[-1]}" if len(releases) > 1 else f"=={releases[0]}",
        patches=(
            MEMBER,
            PREDICATE,
            FAMILY,
            worker_patch,
            arguments_patch,
            budget_flag(file, scope, namespace),
            topk_flag(file, scope, namespace),
            HIDDEN_STATES,
            window,
            capture_mask("verify_mask"),
            draft_width(file, scope),
            requests("get_spec", file, scope),
            *more,
        ),
        tested=releases,
        payload=True,
        summary="algorithm DDTREE beside DFLASH: a tree of the drafter's marginals, verified in one pass",
        superseded=Present(SPEC_INFO, "SpeculativeAlgorithm.DDTREE"),
    )
