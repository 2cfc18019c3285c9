"""The features of torch.distributed, each with the check that it runs on backend ``shm``.

Plain data, read without torch: a feature names its check, ``plain`` in the area ``ddp`` being ``features_ddp.plain``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Feature:
    """``how`` its check decides. ``refusal`` is why it does not run; the check then is that it is refused.

    The check is called with its :class:`features_common.Ranks` on every one of ``processes`` ranks. ``gloo`` is whether
    it holds on Gloo, too.
    """

    check: str
    name: str
    how: str
    refusal: str = ""
    processes: int = 2
    gloo: bool = True
    long: bool = False


@dataclass(frozen=True)
class Area:
    """Features whose checks are in one file."""

    file: str
    title: str
    features: tuple[Feature, ...]


VALUES = "the values on every rank"
TRAINED = "weights after four steps are those of one process with all batches"
PIPED = "weights and losses after two steps are those of one process"
STEPPED = "weights, and weights after one more step, are those that were saved"
REFUSED = "the error"
FOR_ACCELERATORS = "torch has it for accelerators only"

COLLECTIVES = Area(
    "collectives",
    "Collectives",
    (
        Feature("all_reduce", "`all_reduce`", VALUES + "; sum, min, max, product; seven dtypes; three sizes"),
        Feature("all_reduce_of_bfloat16", "`all_reduce` of bfloat16", VALUES),
        Feature("all_reduce_average", "`all_reduce` with `AVG`", VALUES + "; four floating dtypes"),
        Feature("bitwise", "`all_reduce` with `BAND`, `BOR`, `BXOR`", VALUES + "; four integer dtypes"),
        Feature("premultiplied_sum", "`all_reduce`, `reduce_scatter` with `PREMUL_SUM`", VALUES, gloo=False),
        Feature("strided_tensors", "strided tensors", VALUES + "; gaps between elements stay as they are", gloo=False),
        Feature("awkward_tensors", "0-dim, empty, complex, boolean, channels-last tensors", VALUES),
        Feature("broadcast", "`broadcast`", VALUES + "; from every rank"),
        Feature("reduce", "`reduce`", VALUES + "; to every rank"),
        Feature("all_gather", "`all_gather`, `all_gather_into_tensor`", VALUES + "; nine dtypes"),
        Feature("all_gather_of_different_sizes", "`all_gather` of different sizes", VALUES, gloo=False),
        Feature("gather_and_scatter", "`gather`, `scatter`", VALUES + "; at and from every rank"),
        Feature("reduce_scatter", "`reduce_scatter`, `reduce_scatter_tensor`", VALUES + "; sum and average"),
        Feature("all_to_all_single", "`all_to_all_single`", VALUES),
        Feature("all_to_all_of_different_sizes", "`all_to_all_single` with splits", VALUES + "; an empty piece"),
        Feature("all_to_all", "`all_to_all`", VALUES),
        Feature("all_to_all_of_lists_of_different_sizes", "`all_to_all` of different sizes", VALUES, gloo=False),
        Feature("all_reduce_coalesced", "`all_reduce_coalesced`", VALUES),
        Feature("coalescing_manager", "coalescing manager", VALUES + "; sync and async; a collective afterwards"),
        Feature("coalescing_on_device", "coalescing manager with a device", VALUES, gloo=False),
        Feature("asynchronous", "`async_op=True`, futures", "many at once, waited for in another order"),
        Feature("from_callbacks", "collectives issued by callbacks of futures", VALUES),
        Feature("with_gradients", "`torch.distributed.nn.functional`", "derivatives"),
        Feature(
            "objects", "`all_gather_object`, `gather_object`, `scatter_object_list`, `broadcast_object_list`", VALUES
        ),
        Feature("barrier", "`barrier`", "nobody leaves before everybody has come"),
        Feature("mismatch", "ranks that disagree", "the same error on every rank; the group goes on", gloo=False),
    ),
)

P2P = Area(
    "p2p",
    "Point to point",
    (
        Feature("send_and_receive", "`send`, `recv`", "the values; five dtypes, three sizes"),
        Feature("crossing_orders", "`isend`, `irecv` with tags", "ranks post in opposite orders"),
        Feature("same_tag", "`isend`, `irecv` with one tag", "messages arrive in order"),
        Feature("both_send_first", "`send` that waits for no `recv`", "both ranks send, then both receive", gloo=False),
        Feature("any_source", "`recv` from any rank", "senders and the order of their messages", processes=4),
        Feature("batched", "`batch_isend_irecv`", "a ring in both directions, listed in two orders", processes=4),
        Feature("batched_without_tags", "`batch_isend_irecv` without tags", "two messages each way", processes=4),
        Feature("beside_collectives", "messages beside collectives", "both under way at once, in different orders"),
        Feature("in_a_subgroup", "messages in a subgroup", "ranks of the world and of the group", processes=4),
        Feature("objects", "`send_object_list`, `recv_object_list`", "the objects"),
    ),
)

GROUPS = Area(
    "groups",
    "Process groups and device meshes",
    (
        Feature("subset", "`new_group`", VALUES + " of a group listed out of order", processes=4),
        Feature("group_of_one", "`new_group` of one rank", "the values"),
        Feature("subgroups", "`new_subgroups`, `new_subgroups_by_enumeration`", VALUES, processes=4),
        Feature("made_by_members_only", "`new_group(use_local_synchronization=True)`", VALUES, processes=4),
        Feature("overlapping", "overlapping groups", "ranks use them in opposite orders, async", processes=4),
        Feature("gloo_beside", "a Gloo group beside", "both at work at once"),
        Feature("begun_again", "`destroy_process_group`, `init_process_group`", "three times in one process"),
        Feature("timeout_is_kept", "`init_process_group(timeout=)`", "the options of the group"),
        Feature("timeout_of_group", "`new_group(timeout=)`", "an all-reduce without the other rank", long=True),
        Feature("timeout_of_call", "timeout of one call", "an all-reduce without the other rank"),
        Feature("timeout_of_wait", "`Work.wait(timeout)`", "an all-reduce without the other rank"),
        Feature("monitored_barrier", "`ProcessGroup.monitored_barrier`", "passes; names the rank that is missing"),
        Feature(
            "monitored_barrier_function_refused",
            "`torch.distributed.monitored_barrier`",
            REFUSED,
            "torch allows this function for Gloo only; `ProcessGroup.monitored_barrier` does the same",
            gloo=False,
        ),
        Feature("debug_detail", "`TORCH_DISTRIBUTED_DEBUG=DETAIL`", VALUES + "; torch's own report of a mismatch"),
        Feature("mesh_in_two_dimensions", "`init_device_mesh`, two dimensions", VALUES + " of both", processes=4),
        Feature("mesh_in_three_dimensions", "slices and merged dimensions of a mesh", VALUES, processes=4),
        Feature("mesh_from_groups", "`DeviceMesh.from_group`", VALUES, processes=4),
        Feature(
            "split_group_refused", "`split_group`", REFUSED, "torch has it for groups bound to an accelerator only"
        ),
        Feature("shrink_group_refused", "`shrink_group`", REFUSED, "torch has it for NCCL only"),
    ),
)

DDP = Area(
    "ddp",
    "DistributedDataParallel and its optimizers",
    (
        Feature("plain", "DDP", TRAINED),
        Feature("static_graph", "DDP, `static_graph=True`", TRAINED),
        Feature("bucket_views", "DDP, `gradient_as_bucket_view=True`", TRAINED),
        Feature("many_buckets", "DDP, a bucket per parameter", TRAINED),
        Feature("first_rank_weights", "DDP, weights and buffers of rank 0", "ranks begin with different ones"),
        Feature("unused_parameters", "DDP, `find_unused_parameters=True`", TRAINED + "; ranks use different heads"),
        Feature("no_sync", "DDP, `no_sync`", "gradients of three batches are those of one process"),
        Feature("sparse_gradients", "DDP, sparse gradients", "the gradient of an embedding"),
        Feature("uneven_inputs", "DDP in `Join`", TRAINED + "; one rank has fewer batches"),
        Feature("early_termination", "DDP in `Join(throw_on_early_termination=True)`", "every rank raises"),
        Feature("allreduce_hook", "DDP, `allreduce_hook`", TRAINED),
        Feature("fp16_hook", "DDP, `fp16_compress_hook`", TRAINED + ", to 2e-3"),
        Feature("builtin_fp16_hook", "DDP, built-in `FP16_COMPRESS`", TRAINED + ", to 2e-3"),
        Feature("noop_hook", "DDP, `noop_hook`", "weights are those of one process with one rank's batches"),
        Feature("own_hook", "DDP, a hook of one's own", TRAINED),
        Feature("powersgd", "DDP, PowerSGD hook", TRAINED + ", with a rank that loses nothing"),
        Feature("post_local_sgd", "post-local SGD: hook, optimizer, averager", "weights are those of the algorithm"),
        Feature("hierarchical_averaging", "hierarchical model averaging", "averages of pairs and of all", processes=4),
        Feature("zero_optimizer", "`ZeroRedundancyOptimizer`", TRAINED + "; the consolidated state, too"),
        Feature("compiled", "DDP under `torch.compile`", TRAINED),
        Feature("compiled_with_inductor", "DDP under `torch.compile`, inductor", TRAINED, long=True),
        Feature("bf16_hook_refused", "DDP, `bf16_compress_hook`", REFUSED, FOR_ACCELERATORS),
        Feature("mixed_precision_refused", "DDP, `mixed_precision=`", REFUSED, FOR_ACCELERATORS),
        Feature("sync_batch_norm_refused", "`SyncBatchNorm`", REFUSED, FOR_ACCELERATORS),
        Feature(
            "quantization_hooks_refused",
            "DDP, quantization hooks",
            REFUSED,
            "they rely on NCCL's form of futures",
            gloo=False,
        ),
        Feature(
            "batched_powersgd_refused", "DDP, batched PowerSGD hook", REFUSED, "its own assertion fails on any backend"
        ),
    ),
)

FSDP = Area(
    "fsdp",
    "Fully sharded data parallelism",
    (
        Feature("plain", "`fully_shard`", TRAINED),
        Feature("kept_gathered", "`fully_shard`, `reshard_after_forward=False`", TRAINED),
        Feature(
            "uneven_shards", "`fully_shard`, uneven shards", TRAINED + "; one rank has an empty shard", processes=4
        ),
        Feature("hybrid", "`fully_shard` on a 2 by 2 mesh (HSDP)", TRAINED, processes=4),
        Feature("replicated", "composable `replicate`", TRAINED),
        Feature("bfloat16", "`fully_shard`, bfloat16 parameters", TRAINED + ", to 1e-2; fp32 and bf16 reduction"),
        Feature("float16", "`fully_shard`, float16 parameters and reduction", TRAINED + ", to 2e-3"),
        Feature("clipping", "`fully_shard`, `clip_grad_norm_`", TRAINED),
        Feature("accumulation", "`fully_shard`, `set_requires_gradient_sync`", "gradients are those of one process"),
        Feature("early_unshard", "`fully_shard`, `unshard(async_op=True)`", "whole weights; " + TRAINED),
        Feature("cpu_offload", "`fully_shard`, `CPUOffloadPolicy`", TRAINED),
        Feature("compiled", "`fully_shard` under `torch.compile`", TRAINED),
        Feature("compiled_with_inductor", "`fully_shard` under `torch.compile`, inductor", TRAINED, long=True),
        Feature("older", "FSDP 1 with `device_id=cpu`, three strategies", TRAINED),
        Feature("older_hybrid", "FSDP 1, `HYBRID_SHARD`", TRAINED, processes=4),
        Feature("older_mixed_precision", "FSDP 1, bfloat16", TRAINED + ", to 1e-2"),
        Feature("older_clipping", "FSDP 1, `clip_grad_norm_`", "the norm, and the weights after a step"),
        Feature("older_state", "FSDP 1, full state", "the state, saved and loaded, is that of one process"),
        Feature("gradient_scaler", "`ShardedGradScaler`", "an overflow on one rank makes all skip the step"),
        Feature("without_device_refused", "FSDP 1 without `device_id`", REFUSED, "it then looks for an accelerator"),
    ),
)

TENSOR = Area(
    "tensor",
    "DTensor, tensor, sequence and context parallelism",
    (
        Feature("redistribution", "DTensor, `redistribute`", "all pairs of replicated and sharded, uneven shards"),
        Feature("partial_sums", "DTensor, `Partial`", "sum, average, min, max to replicated and sharded"),
        Feature("redistribution_in_two_dimensions", "DTensor on a 2 by 2 mesh", "all pairs of placements", processes=4),
        Feature("operations", "DTensor operations", "values and gradients are those of plain tensors"),
        Feature("made_on_all_ranks", "DTensor factories", "the whole tensor"),
        Feature("distributed_module", "`distribute_module`", "weights of rank 0; outputs of one process"),
        Feature("mapped_locally", "`local_map`", "a product divided over its inner dimension"),
        Feature("tensor_parallel", "tensor parallelism", TRAINED + "; one collective forward"),
        Feature("sequence_parallel", "sequence parallelism", "weights after three steps are those of one process"),
        Feature("parallel_loss", "`loss_parallel`", "weights after three steps are those of one process"),
        Feature("prepared_output", "`PrepareModuleOutput`", "the whole output"),
        Feature(
            "tensor_parallel_and_fully_sharded", "tensor parallelism and `fully_shard` together", TRAINED, processes=4
        ),
        Feature("compiled", "tensor parallelism under `torch.compile`", TRAINED + "; one graph"),
        Feature("context_parallel_attention", "`context_parallel`", "outputs and gradients are those of one process"),
        Feature("causal_context_parallel_refused", "`context_parallel`, causal", REFUSED, FOR_ACCELERATORS),
        Feature("random_tensors_refused", "`torch.distributed.tensor.randn`", REFUSED, FOR_ACCELERATORS),
    ),
)

FUNCTIONAL = Area(
    "functional",
    "Functional collectives",
    (
        Feature("reductions", "`all_reduce`, `reduce_scatter_tensor`, `broadcast`", VALUES),
        Feature("gathers", "`all_gather_tensor`", VALUES + "; two dimensions"),
        Feature("exchanges", "`all_to_all_single`, `permute_tensor`", VALUES + "; different sizes"),
        Feature("coalesced", "coalesced functional collectives", VALUES),
        Feature("gradients", "functional collectives with autograd", "derivatives"),
        Feature("ordinary_calls", "collectives of `torch.distributed`", VALUES + " (compiled below)"),
        Feature("messages", "`batch_isend_irecv`", VALUES + " (compiled below)"),
        Feature("compiled", "all of these under `torch.compile`", VALUES + "; one graph each"),
        Feature("compiled_with_inductor", "all of these under `torch.compile`, inductor", VALUES, long=True),
    ),
)

PIPELINE = Area(
    "pipeline",
    "Pipeline parallelism",
    (
        Feature("gpipe", "`ScheduleGPipe`", PIPED),
        Feature("one_forward_one_backward", "`Schedule1F1B`", PIPED),
        Feature("four_stages", "`Schedule1F1B` on four ranks", PIPED, processes=4),
        Feature("looped_breadth_first", "`ScheduleLoopedBFS`", PIPED),
        Feature("interleaved", "`ScheduleInterleaved1F1B`", PIPED),
        Feature("interleaved_zero_bubble", "`ScheduleInterleavedZeroBubble`", PIPED),
        Feature("zero_bubble_v", "`ScheduleZBVZeroBubble`", PIPED),
        Feature("dual_pipe_v", "`ScheduleDualPipeV`", PIPED),
        Feature("evaluation", "`schedule.eval`", "the output of one process"),
        Feature("traced", "stages cut by `pipeline`", PIPED),
        Feature("three_kinds", "pipeline, tensor parallelism and `fully_shard`, 1F1B", PIPED, processes=8),
        Feature("three_kinds_interleaved", "the same, interleaved", PIPED, processes=8),
        Feature("three_kinds_zero_bubble", "the same, zero bubble", PIPED, processes=8),
    ),
)

CHECKPOINT = Area(
    "checkpoint",
    "Distributed checkpoints",
    (
        Feature("save_and_load", "`save`, `load` of shards", STEPPED),
        Feature("data_parallel", "`save`, `load` of a DDP model", "the weights; they are written once"),
        Feature("from_a_thread", "`async_save` in a thread", "the weights, while training goes on"),
        Feature("from_a_process", "`async_save` in a process", STEPPED + "; two in a row"),
        Feature(
            "on_fewer_ranks", "`load` on fewer ranks", "saved by four; loaded by two, and by one alone", processes=4
        ),
        Feature("on_another_mesh", "`load` on another mesh", STEPPED + "; FSDP to HSDP and back", processes=4),
        Feature("whole_state", "`get_model_state_dict`, `set_model_state_dict`, full and broadcast", STEPPED),
        Feature("as_one_file", "`dcp_to_torch_save`", "the weights"),
    ),
)

AREAS = (COLLECTIVES, P2P, GROUPS, DDP, FSDP, TENSOR, FUNCTIONAL, PIPELINE, CHECKPOINT)

# By the name that tests and command lines use: "ddp:plain".
FEATURES = {f"{area.file}:{feature.check}": feature for area in AREAS for feature in area.features}


def function_of(name: str) -> Callable[[Any], None]:
    """The check of a feature; imports torch."""
    area, check = name.split(":")
    function: Callable[[Any], None] = getattr(importlib.import_module(f"features_{area}"), check)
    return function
