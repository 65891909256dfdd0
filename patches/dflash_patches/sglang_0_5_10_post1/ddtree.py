"""The ``ddtree`` set: algorithms DFLASH and DDTREE in SGLang 0.5.10.post1, the last release for CUDA 12.8.

The release has neither. Hooks only; draft model, worker, arguments and request checks are in ``dflash_kernels.dflash``.
Both algorithms are members of the enum that answer ``is_dflash()``. The release's first generation of workers takes them:
it is called with the scheduler's own batch, and overlap scheduling is off.
"""

from __future__ import annotations

from dflash_deploy.patching.anchors import After, Assign, Before, First, IfTest, Stmt
from dflash_deploy.patching.edits import AddBranchFirst, AddClassField, InsertStatements, ReplaceExpression
from dflash_deploy.patching.patch import Contract, Example, Patch, PatchSet, Present, Refusal

SPEC_INFO = "srt/speculative/spec_info.py"
SERVER_ARGS = "srt/server_args.py"
SCHEDULE_BATCH = "srt/managers/schedule_batch.py"
MODEL_RUNNER = "srt/model_executor/model_runner.py"
GRAPH_RUNNER = "srt/model_executor/cuda_graph_runner.py"
TRITON_BACKEND = "srt/layers/attention/triton_backend.py"

IS_DFLASH = Contract(SPEC_INFO, "SpeculativeAlgorithm.is_dflash", params=())

MEMBERS = Patch(
    name="dflash-members",
    file=SPEC_INFO,
    why="the algorithms need names that every from_string() accepts",
    edit=AddClassField("SpeculativeAlgorithm", "DFLASH = auto()\nDDTREE = auto()\n", after="NGRAM"),
    superseded=Present(SPEC_INFO, "SpeculativeAlgorithm.DFLASH"),
    examples=(
        Example(
            before="""
                from enum import Enum, auto

                class SpeculativeAlgorithm(Enum):
                    NGRAM = auto()
                    NONE = auto()
            """,
            after="""
                from enum import Enum, auto

                class SpeculativeAlgorithm(Enum):
                    NGRAM = auto()
                    DFLASH = auto()  # dflash-deploy: dflash-members
                    DDTREE = auto()
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
    name="dflash-predicate",
    file=SPEC_INFO,
    why="hooks elsewhere ask the algorithm whether it drafts with a DFlash drafter",
    edit=InsertStatements(
        "SpeculativeAlgorithm",
        """
        def is_dflash(self) -> bool:
            return self in (SpeculativeAlgorithm.DFLASH, SpeculativeAlgorithm.DDTREE)
        """,
        at=After(Stmt("def is_ngram(self) -> bool: ...")),
    ),
    contract=(Contract(SPEC_INFO, "SpeculativeAlgorithm", attributes=("DFLASH", "DDTREE")),),
    examples=(
        Example(
            before="""
                class SpeculativeAlgorithm:
                    def is_ngram(self) -> bool:
                        return self == SpeculativeAlgorithm.NGRAM

                    def supports_spec_v2(self) -> bool:
                        return False
            """,
            after="""
                class SpeculativeAlgorithm:
                    def is_ngram(self) -> bool:
                        return self == SpeculativeAlgorithm.NGRAM
                    def is_dflash(self) -> bool:  # dflash-deploy: dflash-predicate
                        return self in (SpeculativeAlgorithm.DFLASH, SpeculativeAlgorithm.DDTREE)

                    def supports_spec_v2(self) -> bool:
                        return False
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

WORKER = Patch(
    name="dflash-worker",
    file=SPEC_INFO,
    why="the scheduler asks the algorithm for its worker class",
    edit=AddBranchFirst(
        "SpeculativeAlgorithm.create_worker",
        """
        if self.is_dflash():
            from dflash_kernels.dflash import worker_class

            return worker_class(self.name)
        """,
        before=IfTest("self.is_eagle() and server_args.enable_multi_layer_eagle"),
    ),
    contract=(
        IS_DFLASH,
        Contract(
            "srt/managers/tp_worker.py",
            "TpModelWorker.__init__",
            params=(
                "server_args",
                "gpu_id",
                "tp_rank",
                "moe_ep_rank",
                "pp_rank",
                "attn_cp_rank",
                "moe_dp_rank",
                "dp_rank",
                "nccl_port",
                "is_draft_worker",
                "req_to_token_pool",
                "token_to_kv_pool_allocator",
                "memory_pool_config",
            ),
        ),
        Contract(
            "srt/managers/tp_worker.py",
            "TpModelWorker.forward_batch_generation",
            params=("model_worker_batch", "forward_batch", "is_verify"),
            positional=1,
        ),
        Contract(
            "srt/managers/utils.py",
            "GenerationBatchResult",
            attributes=(
                "logits_output",
                "next_token_ids",
                "num_accepted_tokens",
                "accept_length_per_req_cpu",
                "accept_lens",
                "can_run_cuda_graph",
            ),
        ),
        Contract(
            SCHEDULE_BATCH,
            "Req",
            attributes=(
                "check_finished",
                "decode_batch_idx",
                "kv_allocated_len",
                "kv_committed_len",
                "output_ids",
                "spec_accepted_tokens",
                "spec_verify_ct",
                "update_spec_acceptance_histogram",
            ),
        ),
        Contract(
            SCHEDULE_BATCH,
            "ScheduleBatch",
            attributes=(
                "extend_lens",
                "forward_mode",
                "input_ids",
                "out_cache_loc",
                "prefix_lens",
                "req_pool_indices",
                "req_to_token_pool",
                "reqs",
                "sampling_info",
                "seq_lens",
                "seq_lens_cpu",
                "seq_lens_sum",
                "spec_info",
                "token_to_kv_pool_allocator",
                "tree_cache",
            ),
        ),
        Contract(SCHEDULE_BATCH, "ScheduleBatch.get_model_worker_batch", params=()),
        Contract("srt/mem_cache/common.py", "alloc_token_slots", params=("tree_cache", "num_tokens"), positional=2),
        Contract(
            "srt/speculative/spec_utils.py",
            "assign_req_to_token_pool_func",
            params=("req_pool_indices", "req_to_token", "start_offset", "end_offset", "out_cache_loc", "batch_size"),
            positional=6,
        ),
        Contract(SPEC_INFO, "SpecInput.__init__", params=("spec_input_type",), positional=1),
        Contract(
            "srt/model_executor/forward_batch_info.py",
            "ForwardBatch",
            attributes=(
                "attn_backend",
                "batch_size",
                "capture_hidden_mode",
                "forward_mode",
                "init_new",
                "input_ids",
                "out_cache_loc",
                "positions",
                "req_pool_indices",
                "req_to_token_pool",
                "seq_lens",
                "seq_lens_cpu",
                "seq_lens_sum",
                "spec_algorithm",
                "spec_info",
                "token_to_kv_pool",
            ),
        ),
        Contract(TRITON_BACKEND, "TritonAttnBackend", attributes=("cuda_graph_custom_mask", "num_draft_tokens")),
        Contract("srt/models/qwen3.py", "Qwen3DecoderLayer.__init__", params=("config", "layer_id", "prefix")),
        Contract(
            "srt/models/qwen3.py",
            "Qwen3Attention",
            attributes=("attn", "head_dim", "k_norm", "kv_size", "q_size", "qkv_proj", "rotary_emb"),
        ),
        Contract("srt/layers/radix_attention.py", "AttentionType", attributes=("ENCODER_ONLY",)),
    ),
    examples=(
        Example(
            before="""
                class SpeculativeAlgorithm:
                    def create_worker(self, server_args):
                        if self.is_eagle() and server_args.enable_multi_layer_eagle:
                            return 1
                        return 2
            """,
            after="""
                class SpeculativeAlgorithm:
                    def create_worker(self, server_args):
                        if self.is_dflash():  # dflash-deploy: dflash-worker
                            from dflash_kernels.dflash import worker_class

                            return worker_class(self.name)
                        elif self.is_eagle() and server_args.enable_multi_layer_eagle:
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
    name="dflash-arguments",
    file=SERVER_ARGS,
    why="the widths of a step follow from the drafter, and what is not served is refused before anything is loaded",
    edit=InsertStatements(
        "ServerArgs._handle_speculative_decoding",
        """
        if self.speculative_algorithm in ("DFLASH", "DDTREE"):
            from dflash_kernels.dflash.arguments import handle_server_args

            handle_server_args(self)
        """,
        at=Before(IfTest('self.speculative_algorithm == "NEXTN"')),
    ),
    contract=(
        Contract(SERVER_ARGS, "ServerArgs.get_model_config", params=()),
        Contract(
            SERVER_ARGS,
            "ServerArgs",
            attributes=(
                "attention_backend",
                "decode_attention_backend",
                "disable_overlap_schedule",
                "disaggregation_mode",
                "enable_deterministic_inference",
                "enable_dp_attention",
                "enable_hierarchical_cache",
                "enable_lora",
                "enable_mixed_chunk",
                "enable_pdmux",
                "enable_return_hidden_states",
                "enable_two_batch_overlap",
                "enforce_piecewise_cuda_graph",
                "max_running_requests",
                "pp_size",
                "prefill_attention_backend",
                "speculative_accept_threshold_acc",
                "speculative_accept_threshold_single",
                "speculative_ddtree_budget",
                "speculative_ddtree_topk",
                "speculative_draft_attention_backend",
                "speculative_draft_model_path",
                "speculative_draft_model_quantization",
                "speculative_draft_model_revision",
                "speculative_eagle_topk",
                "speculative_num_draft_tokens",
                "speculative_num_steps",
                "tp_size",
            ),
        ),
        Contract(
            "srt/configs/model_config.py",
            "ModelConfig.from_server_args",
            params=("server_args", "model_path", "model_revision", "is_draft_model"),
            positional=4,  # its **kwargs would take a name that has changed, and lose it
        ),
    ),
    examples=(
        Example(
            before="""
                class ServerArgs:
                    def _handle_speculative_decoding(self):
                        if self.speculative_algorithm == "NEXTN":
                            self.speculative_algorithm = "EAGLE"
            """,
            after="""
                class ServerArgs:
                    def _handle_speculative_decoding(self):
                        if self.speculative_algorithm in ("DFLASH", "DDTREE"):  # dflash-deploy: dflash-arguments
                            from dflash_kernels.dflash.arguments import handle_server_args

                            handle_server_args(self)
                        if self.speculative_algorithm == "NEXTN":
                            self.speculative_algorithm = "EAGLE"
            """,
        ),
    ),
    refuses=(
        Refusal(
            """
            class ServerArgs:
                def _handle_speculative_decoding(self):
                    self.speculative_algorithm = ALIASES[self.speculative_algorithm]
            """,
            "AnchorMissing",
        ),
    ),
)

BACKEND = Patch(
    name="dflash-attention-default",
    file=SERVER_ARGS,
    why="what the release would choose by itself cannot run a draft pass that is not causal",
    edit=InsertStatements(
        "ServerArgs._handle_attention_backend_compatibility",
        """
        if self.speculative_algorithm in ("DFLASH", "DDTREE") and self.attention_backend is None:
            self.attention_backend = "triton"
        """,
        at=First(),
    ),
    contract=(Contract(SERVER_ARGS, "ServerArgs", attributes=("attention_backend", "speculative_algorithm")),),
    examples=(
        Example(
            before="""
                class ServerArgs:
                    def _handle_attention_backend_compatibility(self):
                        choose(self)
            """,
            after="""
                class ServerArgs:
                    def _handle_attention_backend_compatibility(self):
                        if self.speculative_algorithm in ("DFLASH", "DDTREE") and self.attention_backend is None:  # dflash-deploy: dflash-attention-default
                            self.attention_backend = "triton"
                        choose(self)
            """,
        ),
    ),
    refuses=(
        Refusal(
            """
            class ServerArgs:
                def _handle_attention_backend(self):
                    choose(self)
            """,
            "AnchorMissing",
        ),
    ),
)

FIELDS = Patch(
    name="ddtree-fields",
    file=SERVER_ARGS,
    why="size and width of the tree need a place in the arguments",
    edit=AddClassField(
        "ServerArgs",
        """
        speculative_ddtree_budget: Optional[int] = None
        speculative_ddtree_topk: Optional[int] = None
        """,
        after="speculative_num_draft_tokens",
    ),
    superseded=Present(SERVER_ARGS, "ServerArgs.speculative_ddtree_budget"),
    examples=(
        Example(
            before="""
                from typing import Optional

                class ServerArgs:
                    speculative_num_draft_tokens: Optional[int] = None
                    other: int = 1
            """,
            after="""
                from typing import Optional

                class ServerArgs:
                    speculative_num_draft_tokens: Optional[int] = None
                    speculative_ddtree_budget: Optional[int] = None  # dflash-deploy: ddtree-fields
                    speculative_ddtree_topk: Optional[int] = None
                    other: int = 1
            """,
        ),
    ),
    refuses=(Refusal("from typing import Optional\n\nclass ServerArgs:\n    x: int = 1\n", "AnchorMissing"),),
)

OPTIONS = Patch(
    name="ddtree-options",
    file=SERVER_ARGS,
    why="the command line of this release lists each option by hand",
    edit=InsertStatements(
        "ServerArgs.add_cli_args",
        """
        parser.add_argument(
            "--speculative-ddtree-budget",
            type=int,
            help="DDTREE only. Tree nodes that the target verifies in one step, root included.",
        )
        parser.add_argument(
            "--speculative-ddtree-topk",
            type=int,
            help="DDTREE only. Candidate tokens kept per depth. Default: 8 up to 64 nodes, else 16.",
        )
        """,
        at=After(
            Stmt(
                'parser.add_argument("--speculative-num-draft-tokens", type=int, help=..., '
                "default=ServerArgs.speculative_num_draft_tokens)"
            )
        ),
    ),
    examples=(
        Example(
            before="""
                class ServerArgs:
                    @staticmethod
                    def add_cli_args(parser):
                        parser.add_argument(
                            "--speculative-num-draft-tokens",
                            type=int,
                            help="x",
                            default=ServerArgs.speculative_num_draft_tokens,
                        )
            """,
            after="""
                class ServerArgs:
                    @staticmethod
                    def add_cli_args(parser):
                        parser.add_argument(
                            "--speculative-num-draft-tokens",
                            type=int,
                            help="x",
                            default=ServerArgs.speculative_num_draft_tokens,
                        )
                        parser.add_argument(  # dflash-deploy: ddtree-options
                            "--speculative-ddtree-budget",
                            type=int,
                            help="DDTREE only. Tree nodes that the target verifies in one step, root included.",
                        )
                        parser.add_argument(
                            "--speculative-ddtree-topk",
                            type=int,
                            help="DDTREE only. Candidate tokens kept per depth. Default: 8 up to 64 nodes, else 16.",
                        )
            """,
        ),
    ),
    refuses=(
        Refusal(
            """
            class ServerArgs:
                @staticmethod
                def add_cli_args(parser):
                    add_fields(parser, ServerArgs)
            """,
            "AnchorMissing",
        ),
    ),
)


CHOICES = Patch(
    name="dflash-choices",
    file=SERVER_ARGS,
    why="--speculative-algorithm accepts only the names of a closed list",
    edit=ReplaceExpression(
        "ServerArgs.add_cli_args",
        '["EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM"]',
        '["EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH", "DDTREE"]',
    ),
    examples=(
        Example(
            before="""
                class ServerArgs:
                    @staticmethod
                    def add_cli_args(parser):
                        parser.add_argument(
                            "--speculative-algorithm",
                            choices=["EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM"],
                        )
            """,
            after="""
                class ServerArgs:
                    @staticmethod
                    def add_cli_args(parser):
                        parser.add_argument(
                            "--speculative-algorithm",
                            choices=["EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH", "DDTREE"],
                        )  # dflash-deploy: dflash-choices
            """,
        ),
    ),
    refuses=(
        Refusal(
            """
            class ServerArgs:
                @staticmethod
                def add_cli_args(parser):
                    parser.add_argument("--speculative-algorithm", choices=["EAGLE", "SUFFIX"])
            """,
            "AnchorMissing",
        ),
    ),
)

CAPTURE = Patch(
    name="dflash-capture",
    file=MODEL_RUNNER,
    why="the drafter reads the target's hidden states; graphs captured before they are handed out would not have them",
    edit=InsertStatements(
        "ModelRunner.initialize",
        """
        if self.spec_algorithm.is_dflash() and not self.is_draft_worker:
            from dflash_kernels.dflash.capture import capture_hidden_states

            capture_hidden_states(self)
        """,
        at=Before(Stmt("self.init_memory_pool(pre_model_load_memory)")),
    ),
    contract=(
        IS_DFLASH,
        Contract(
            MODEL_RUNNER,
            "ModelRunner",
            attributes=(
                "attn_backend",
                "graph_runner",
                "init_device_graphs",
                "is_draft_worker",
                "is_hybrid_swa",
                "memory_pool_config",
                "model",
                "model_config",
                "req_to_token_pool",
                "server_args",
                "sliding_window_size",
                "spec_algorithm",
                "use_mla_backend",
            ),
        ),
        *(
            Contract(
                f"srt/models/{file}.py", f"{model}.set_eagle3_layers_to_capture", params=("layer_ids",), positional=1
            )
            for file, model in (
                ("llama", "LlamaForCausalLM"),
                ("qwen2", "Qwen2ForCausalLM"),
                ("qwen2_moe", "Qwen2MoeForCausalLM"),
                ("qwen3", "Qwen3ForCausalLM"),
                ("qwen3_moe", "Qwen3MoeForCausalLM"),
            )
        ),
    ),
    examples=(
        Example(
            before="""
                class ModelRunner:
                    def initialize(self, pre_model_load_memory):
                        self.configure_kv_cache_dtype()

                        # Init memory pool and attention backends
                        self.init_memory_pool(pre_model_load_memory)
            """,
            after="""
                class ModelRunner:
                    def initialize(self, pre_model_load_memory):
                        self.configure_kv_cache_dtype()
                        if self.spec_algorithm.is_dflash() and not self.is_draft_worker:  # dflash-deploy: dflash-capture
                            from dflash_kernels.dflash.capture import capture_hidden_states

                            capture_hidden_states(self)

                        # Init memory pool and attention backends
                        self.init_memory_pool(pre_model_load_memory)
            """,
        ),
    ),
    refuses=(
        Refusal(
            """
            class ModelRunner:
                def initialize(self, pre_model_load_memory):
                    self.init_memory_pool()
            """,
            "AnchorMissing",
        ),
    ),
)

MEMORY = Patch(
    name="dflash-memory",
    file="srt/model_executor/model_runner_kv_cache_mixin.py",
    why="the drafter's KV pool has as many slots as the target's and must fit beside it",
    edit=InsertStatements(
        "ModelRunnerKVCacheMixin.profile_max_num_token",
        """
        if self.spec_algorithm.is_dflash() and not self.is_draft_worker:
            from dflash_kernels.dflash.memory import draft_cell_size

            cell_size += draft_cell_size(self)
        """,
        at=After(Assign("cell_size")),
    ),
    contract=(
        IS_DFLASH,
        Contract(
            "srt/configs/model_config.py",
            "ModelConfig",
            attributes=("get_num_kv_heads", "head_dim", "num_hidden_layers", "dtype", "hf_config", "hf_text_config"),
        ),
    ),
    examples=(
        Example(
            before="""
                class ModelRunnerKVCacheMixin:
                    def profile_max_num_token(self, layers):
                        cell_size = self.get_cell_size_per_token(layers)
                        return self.rest // cell_size
            """,
            after="""
                class ModelRunnerKVCacheMixin:
                    def profile_max_num_token(self, layers):
                        cell_size = self.get_cell_size_per_token(layers)
                        if self.spec_algorithm.is_dflash() and not self.is_draft_worker:  # dflash-deploy: dflash-memory
                            from dflash_kernels.dflash.memory import draft_cell_size

                            cell_size += draft_cell_size(self)
                        return self.rest // cell_size
            """,
        ),
    ),
    refuses=(
        Refusal(
            """
            class ModelRunnerKVCacheMixin:
                def profile_max_num_token(self, layers):
                    return self.rest // self.get_cell_size_per_token(layers)
            """,
            "AnchorMissing",
        ),
    ),
)

GRAPH_WIDTH = Patch(
    name="dflash-graph-width",
    file=GRAPH_RUNNER,
    why="target and drafter run their passes of several tokens a request in graphs, and the drafter may have some",
    edit=AddBranchFirst(
        "CudaGraphRunner.__init__",
        """
        if model_runner.spec_algorithm.is_dflash():
            self.capture_forward_mode = ForwardMode.TARGET_VERIFY
            self.num_tokens_per_bs = model_runner.server_args.speculative_num_draft_tokens
        """,
        before=IfTest(
            "model_runner.spec_algorithm.is_eagle() or model_runner.spec_algorithm.is_standalone() "
            "or model_runner.spec_algorithm.is_ngram()"
        ),
    ),
    contract=(
        IS_DFLASH,
        Contract(GRAPH_RUNNER, "CudaGraphRunner", attributes=("capture_forward_mode", "num_tokens_per_bs")),
        Contract(GRAPH_RUNNER, "CudaGraphRunner.can_run", params=("forward_batch",), positional=1),
    ),
    examples=(
        Example(
            before="""
                from a import ForwardMode

                class CudaGraphRunner:
                    def __init__(self, model_runner):
                        if (
                            model_runner.spec_algorithm.is_eagle()
                            or model_runner.spec_algorithm.is_standalone()
                            or model_runner.spec_algorithm.is_ngram()
                        ):
                            self.num_tokens_per_bs = 2
            """,
            after="""
                from a import ForwardMode

                class CudaGraphRunner:
                    def __init__(self, model_runner):
                        if model_runner.spec_algorithm.is_dflash():  # dflash-deploy: dflash-graph-width
                            self.capture_forward_mode = ForwardMode.TARGET_VERIFY
                            self.num_tokens_per_bs = model_runner.server_args.speculative_num_draft_tokens
                        elif (
                            model_runner.spec_algorithm.is_eagle()
                            or model_runner.spec_algorithm.is_standalone()
                            or model_runner.spec_algorithm.is_ngram()
                        ):
                            self.num_tokens_per_bs = 2
            """,
        ),
    ),
    refuses=(
        Refusal(
            """
            from a import ForwardMode

            class CudaGraphRunner:
                def __init__(self, model_runner):
                    self.num_tokens_per_bs = model_runner.spec_algorithm.width()
            """,
            "AnchorMissing",
        ),
    ),
)

GRAPH_INPUT = Patch(
    name="dflash-graph-input",
    file=GRAPH_RUNNER,
    why="a verify graph captured without a mask is plain causal and ignores a tree at replay, with plausible output",
    edit=AddBranchFirst(
        "CudaGraphRunner.get_spec_info",
        """
        if self.model_runner.spec_algorithm.is_dflash():
            from dflash_kernels.dflash.inputs import capture_input

            return capture_input(self.model_runner, self.buffers.custom_mask, self.num_tokens_per_bs)
        """,
        before=IfTest(
            "self.model_runner.spec_algorithm.is_eagle() or self.model_runner.spec_algorithm.is_standalone()"
        ),
    ),
    contract=(
        IS_DFLASH,
        Contract(GRAPH_RUNNER, "CudaGraphRunner", attributes=("buffers", "model_runner")),
        Contract(GRAPH_RUNNER, "DecodeInputBuffers", attributes=("custom_mask",)),
        Contract(TRITON_BACKEND, "TritonAttnBackend.init_forward_metadata_replay_cuda_graph"),
    ),
    examples=(
        Example(
            before="""
                class CudaGraphRunner:
                    def get_spec_info(self, num_tokens):
                        spec_info = None
                        if (
                            self.model_runner.spec_algorithm.is_eagle()
                            or self.model_runner.spec_algorithm.is_standalone()
                        ):
                            spec_info = 1
                        return spec_info
            """,
            after="""
                class CudaGraphRunner:
                    def get_spec_info(self, num_tokens):
                        spec_info = None
                        if self.model_runner.spec_algorithm.is_dflash():  # dflash-deploy: dflash-graph-input
                            from dflash_kernels.dflash.inputs import capture_input

                            return capture_input(self.model_runner, self.buffers.custom_mask, self.num_tokens_per_bs)
                        elif (
                            self.model_runner.spec_algorithm.is_eagle()
                            or self.model_runner.spec_algorithm.is_standalone()
                        ):
                            spec_info = 1
                        return spec_info
            """,
        ),
    ),
    refuses=(
        Refusal(
            """
            class CudaGraphRunner:
                def get_spec_info(self, num_tokens):
                    return None
            """,
            "AnchorMissing",
        ),
    ),
)

REQUESTS = Patch(
    name="dflash-requests",
    file="srt/managers/scheduler.py",
    why="a request that asks for what a draft cannot honour gets an error, not a wrong answer",
    edit=InsertStatements(
        "Scheduler.handle_generate_request",
        """
        if self.spec_algorithm.is_dflash():
            from dflash_kernels.dflash.request import refusal

            error_msg = refusal(req, self.spec_algorithm.name)
            if error_msg:
                req.set_finish_with_abort(error_msg)
                self._add_request_to_queue(req)
                return
        """,
        at=Before(Stmt("error_msg = validate_input_length(...)")),
    ),
    contract=(
        IS_DFLASH,
        Contract(SCHEDULE_BATCH, "Req.set_finish_with_abort", params=("error_msg",), positional=1),
        Contract("srt/managers/scheduler.py", "Scheduler._add_request_to_queue", params=("req",), positional=1),
        Contract(
            SCHEDULE_BATCH,
            "Req",
            attributes=(
                "custom_logit_processor",
                "input_embeds",
                "lora_id",
                "return_hidden_states",
                "return_logprob",
                "sampling_params",
            ),
        ),
        Contract(
            "srt/sampling/sampling_params.py",
            "SamplingParams",
            attributes=(
                "ebnf",
                "frequency_penalty",
                "json_schema",
                "min_new_tokens",
                "presence_penalty",
                "regex",
                "repetition_penalty",
                "structural_tag",
            ),
        ),
    ),
    examples=(
        Example(
            before="""
                class Scheduler:
                    def handle_generate_request(self, recv_req):
                        req = make(recv_req)
                        error_msg = validate_input_length(req)
                        if error_msg:
                            return
            """,
            after="""
                class Scheduler:
                    def handle_generate_request(self, recv_req):
                        req = make(recv_req)
                        if self.spec_algorithm.is_dflash():  # dflash-deploy: dflash-requests
                            from dflash_kernels.dflash.request import refusal

                            error_msg = refusal(req, self.spec_algorithm.name)
                            if error_msg:
                                req.set_finish_with_abort(error_msg)
                                self._add_request_to_queue(req)
                                return
                        error_msg = validate_input_length(req)
                        if error_msg:
                            return
            """,
        ),
    ),
    refuses=(
        Refusal(
            """
            class Scheduler:
                def handle_generate_request(self, recv_req):
                    req = make(recv_req)
                    check(req)
            """,
            "AnchorMissing",
        ),
    ),
)

DDTREE = PatchSet(
    name="ddtree",
    package="sglang",
    versions="==0.5.10.post1",
    patches=(
        MEMBERS,
        PREDICATE,
        WORKER,
        ARGUMENTS,
        BACKEND,
        FIELDS,
        OPTIONS,
        CHOICES,
        CAPTURE,
        MEMORY,
        GRAPH_WIDTH,
        GRAPH_INPUT,
        REQUESTS,
    ),
    tested=("0.5.10.post1",),
    payload=True,
    summary="algorithms DFLASH and DDTREE, which the release lacks: draft a block, verify a chain or a tree in one pass",
    superseded=Present(SPEC_INFO, "SpeculativeAlgorithm.DDTREE"),
)
