"""What the cost model says of a step is what the communicators of its processes count in one."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from processes import run_processes

# Torch is imported inside the functions: each runs in a process of its own, and the collecting one needs none of it.

LAYERS, WIDTH, VOCABULARY, ROWS, TOKENS = 4, 32, 96, 4, 32

Case = tuple[dict[str, int], dict[str, Any]]
TWO: dict[str, Case] = {
    "split layers": ({"tp": 2}, {}),
    "split layers, clipped": ({"tp": 2}, {"clips": True}),
    "split layers and tokens": ({"tp": 2}, {"sequence_parallel": True}),
    "split layers and losses": ({"tp": 2}, {"loss_parallel": True}),
    "split layers, accumulated": ({"tp": 2}, {"accumulates": 2}),
    "split layers with a tied embedding": ({"tp": 2}, {"tied": True}),
    "split sequences, gathered": ({"cp": 2}, {"attention": "allgather"}),
    "split sequences, in a ring": ({"cp": 2}, {"attention": "alltoall"}),
    "split sequences, by heads": ({"cp": 2}, {"attention": "ulysses"}),
    "stages": ({"pp": 2}, {"clips": True}),
    "stages of gpipe": ({"pp": 2}, {"schedule": "gpipe"}),
    "stages interleaved": ({"pp": 2}, {"schedule": "interleaved"}),
    "stages without bubbles": ({"pp": 2}, {"schedule": "zero_bubble"}),
    "stages with a tied embedding": ({"pp": 2}, {"tied": True}),
    "copies": ({"dp_replicate": 2}, {}),
    "shards": ({"dp_shard": 2}, {"clips": True}),
    "shards, accumulated": ({"dp_shard": 2}, {"accumulates": 2}),
}
FOUR: dict[str, Case] = {
    "split layers": ({"tp": 4}, {"kv_heads": 4}),
    "split layers and tokens": ({"tp": 4}, {"kv_heads": 4, "sequence_parallel": True}),
    "split sequences, gathered": ({"cp": 4}, {"attention": "allgather"}),
    "split sequences, in a ring": ({"cp": 4}, {"attention": "alltoall"}),
    "split sequences, by heads": ({"cp": 4}, {"attention": "ulysses"}),
    "stages": ({"pp": 4}, {}),
    "stages interleaved": ({"pp": 2, "dp_replicate": 2}, {"schedule": "interleaved", "tied": True}),
    "copies of split layers": ({"dp_replicate": 2, "tp": 2}, {"clips": True}),
    "copies of stages": ({"dp_replicate": 2, "pp": 2}, {"clips": True}),
    "shards of split layers": ({"dp_shard": 2, "tp": 2}, {"clips": True}),
    "shards of split layers and tokens": ({"dp_shard": 2, "tp": 2}, {"sequence_parallel": True, "accumulates": 2}),
    "copies of shards": ({"dp_replicate": 2, "dp_shard": 2}, {"clips": True}),
    "shards of stages": ({"dp_shard": 2, "pp": 2}, {"clips": True, "tied": True}),
    "sharded layers of stages": ({"dp_shard": 2, "pp": 2}, {"units_in_stages": True}),
    "split stages": ({"tp": 2, "pp": 2}, {"sequence_parallel": True, "clips": True}),
    "split stages and losses": ({"tp": 2, "pp": 2}, {"loss_parallel": True}),
    "split layers and sequences": ({"cp": 2, "tp": 2}, {"attention": "alltoall"}),
    "shards of split sequences": ({"dp_shard": 2, "cp": 2}, {"attention": "ulysses", "clips": True}),
    "shards that do not divide": ({"dp_shard": 4}, {"vocabulary": 95}),
}
EIGHT: dict[str, Case] = {
    "stages of zero bubbles": ({"pp": 2, "tp": 4}, {"kv_heads": 4, "schedule": "zero_bubble"}),
    "copies of shards of split layers": ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, {"clips": True}),
    "shards of split stages": ({"dp_shard": 2, "pp": 2, "tp": 2}, {"clips": True}),
    "copies of split stages": ({"dp_replicate": 2, "pp": 2, "tp": 2}, {"sequence_parallel": True}),
    "split sequences, gathered": ({"cp": 8}, {"attention": "allgather"}),
    "split sequences, in a ring": ({"cp": 8}, {"attention": "alltoall"}),
    "split sequences, by heads": ({"cp": 8}, {"attention": "ulysses", "heads": 8}),
    "split layers and sequences and copies": ({"dp_replicate": 2, "cp": 2, "tp": 2}, {"attention": "ulysses"}),
}


def decoder_of(options: dict[str, Any]) -> Any:
    from accelerate_cpp.parallel.costs.parts import Decoder

    return Decoder(
        layers=LAYERS,
        hidden=WIDTH,
        heads=options.get("heads", 4),
        kv_heads=options.get("kv_heads", 2),
        intermediate=2 * WIDTH,
        vocabulary=options.get("vocabulary", VOCABULARY),
        tied=options.get("tied", False),
    )


def model_of(options: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    decoder = decoder_of(options)
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=decoder.layers,
            hidden_size=decoder.hidden,
            num_attention_heads=decoder.heads,
            num_key_value_heads=decoder.kv_heads,
            intermediate_size=decoder.intermediate,
            vocab_size=decoder.vocabulary,
            tie_word_embeddings=decoder.tied,
            attn_implementation="sdpa",
        )
    )


def accelerator_of(sizes: dict[str, int], options: dict[str, Any]) -> Any:
    from accelerate_cpp import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate_cpp.state import AcceleratorState, GradientState
    from accelerate_cpp.utils import PipelineParallelConfig, TorchContextParallelConfig, TorchTensorParallelConfig

    AcceleratorState._reset_state()
    GradientState._reset_state()
    handlers: dict[str, Any] = {}
    if "tp" in sizes:
        cuts = options.get("sequence_parallel", False)
        losses = options.get("loss_parallel", False)
        handlers["tp_handler"] = TorchTensorParallelConfig(sequence_parallel=cuts, loss_parallel=losses)
    if "pp" in sizes:
        schedule = options.get("schedule", "1f1b")
        handlers["pp_handler"] = PipelineParallelConfig(schedule=schedule, micro_batches=ROWS)
    if "cp" in sizes:
        handlers["cp_handler"] = TorchContextParallelConfig(cp_comm_strategy=options["attention"])
    sharding: dict[str, Any] = {}
    if "dp_shard" in sizes:
        names = ["LlamaDecoderLayer"] if options.get("units_in_stages") else None
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=names
        )
        sharding["fsdp_plugin"] = plugin
    config = ParallelismConfig(**{f"{axis}_size": size for axis, size in sizes.items()}, **handlers)
    accumulates = options.get("accumulates", 1)
    return Accelerator(cpu=True, parallelism_config=config, gradient_accumulation_steps=accumulates, **sharding)


def counted_step(sizes: dict[str, int], options: dict[str, Any]) -> tuple[Any, Any]:
    """What this rank counts in a step: operations of its groups, and buckets."""
    import torch

    from accelerate_cpp.comm.traffic import counting

    run = accelerator_of(sizes, options)
    model = model_of(options)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = torch.randint(VOCABULARY - 1, (ROWS, TOKENS))

    def backward() -> None:
        if "pp" in sizes:
            run.train_batch({"input_ids": tokens, "labels": tokens})
            return
        buffers = [tokens.clone(), tokens.clone(), torch.arange(TOKENS).repeat(ROWS, 1)]
        with run.maybe_context_parallel(buffers=buffers, buffer_seq_dims=[1, 1, 1]):
            inputs, labels, positions = buffers
            run.backward(model(input_ids=inputs, labels=labels, position_ids=positions, use_cache=False).loss)

    def step() -> None:
        for _ in range(options.get("accumulates", 1)):
            with run.accumulate(model):
                backward()
                if options.get("clips") and run.sync_gradients:
                    run.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    step()  # the first one also finds out what stages pass on
    with counting(run._session.topology.mesh) as found:
        step()
    reducer = getattr(model, "_reducer", None)
    return {axes: {kind: tuple(count) for kind, count in kinds.items()} for axes, kinds in found.items()}, (
        [] if reducer is None else reducer.bucket_sizes_bytes
    )


def counted_steps(cases: list[Case]) -> list[Any]:
    return [counted_step(*case) for case in cases]


@functools.cache
def counts(world_size: int) -> dict[str, list[Any]]:
    """For each case, what each rank counted; all in one start, as loading the library takes longer than a step."""
    cases = {2: TWO, 4: FOUR, 8: EIGHT}[world_size]
    of_ranks = run_processes(counted_steps, world_size, list(cases.values()), timeout=500)
    return {name: [found[number] for found in of_ranks] for number, name in enumerate(cases)}


def said(rank: int, sizes: dict[str, int], options: dict[str, Any]) -> tuple[Any, Any]:
    """The same by the cost model."""
    from accelerate_cpp.comm.mesh import Mesh
    from accelerate_cpp.parallel.costs.operations import BUCKET, by_kind
    from accelerate_cpp.parallel.costs.steps import Step, operations_of, stages_of

    schedule = options.get("schedule", "1f1b")
    parts = ROWS if "pp" in sizes else options.get("accumulates", 1)
    step = Step(
        rows=1 if "pp" in sizes else ROWS,
        tokens=TOKENS,
        micro_batches=parts,
        sequence_parallel=options.get("sequence_parallel", False),
        loss_parallel=options.get("loss_parallel", False),
        attention=options.get("attention", "allgather"),
        schedule=schedule,
        sharded="dp_shard" in sizes,
        units_in_stages=options.get("units_in_stages", False),
        clips=options.get("clips", False),
    )
    mesh = Mesh(rank, sizes)
    stages = decoder_of(options).parts(len(stages_of(mesh, schedule)))
    operations = operations_of(stages, mesh, step)
    buckets = [one.size_bytes for one in operations if one.kind == BUCKET]
    return by_kind(one for one in operations if one.kind != BUCKET), buckets


def same(world_size: int, name: str, case: Case) -> None:
    for rank, (operations, buckets) in enumerate(counts(world_size)[name]):
        expected, expected_buckets = said(rank, *case)
        assert operations == expected, f"rank {rank}"
        assert buckets == expected_buckets, f"rank {rank}"


@pytest.mark.parametrize("name", TWO)
def test_two_processes_send_what_the_model_says(name: str) -> None:
    same(2, name, TWO[name])


@pytest.mark.long
@pytest.mark.parametrize("name", FOUR)
def test_four_processes_send_what_the_model_says(name: str) -> None:
    same(4, name, FOUR[name])


@pytest.mark.long
@pytest.mark.parametrize("name", EIGHT)
def test_eight_processes_send_what_the_model_says(name: str) -> None:
    same(8, name, EIGHT[name])


def traffic_of_others() -> str:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from accelerate_cpp.comm.mesh import Mesh
    from accelerate_cpp.comm.traffic import traffic_of
    from accelerate_cpp.errors import InvalidArgument

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        traffic_of(Mesh(0, {"tp": 2}))
    except InvalidArgument as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return "nothing was raised"


def test_groups_that_count_nothing_are_refused() -> None:
    (message,) = run_processes(traffic_of_others, 1)
    assert re.match(r"traffic_of: a group of 2 processes has the backend '.*fake.*', and only 'shm' counts", message)
