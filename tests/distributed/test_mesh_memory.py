"""What an estimate says that ranks hold is what they hold."""

from __future__ import annotations

from typing import Any

from processes import run_processes
from test_costs import LAYERS, ROWS, TOKENS, VOCABULARY, Case, accelerator_of, model_of

# Torch is imported inside the functions: each runs in a process of its own, and the collecting one needs none of it.

CASES: dict[str, Case] = {
    "split layers": ({"tp": 2}, {"tied": True}),
    "split layers and tokens": ({"tp": 2}, {"tied": True, "sequence_parallel": True}),
    "split entries of the embedding": ({"tp": 2}, {}),
    "split losses": ({"tp": 2}, {"loss_parallel": True}),
    "shards that do not divide": ({"dp_shard": 2}, {"vocabulary": 95}),
    "stages": ({"pp": 2}, {}),
    "stages interleaved": ({"pp": 2}, {"schedule": "interleaved"}),
    "stages with a tied embedding": ({"pp": 2}, {"tied": True}),
}


def held_in_training(sizes: dict[str, int], options: dict[str, Any]) -> tuple[int, int, int, int | None]:
    """Bytes of weights, gradients and states of the optimizer, and of activations where layers alone are split."""
    import torch

    from accelerate_cpp.devices.shards import local_part
    from accelerate_cpp.placement.model_memory import saved_bytes

    run = accelerator_of(sizes, options)
    model = model_of(options)
    model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
    tokens = torch.randint(VOCABULARY - 1, (ROWS, TOKENS))
    saved = None
    if "pp" in sizes:
        run.train_batch({"input_ids": tokens, "labels": tokens})
    else:
        losses: list[Any] = []

        def forward() -> None:
            losses.append(model(input_ids=tokens, labels=tokens, use_cache=False).loss)

        if "tp" in sizes:
            own = [local_part(one) for one in (*model.parameters(), *model.buffers())]
            saved = saved_bytes(forward, own)
        else:
            forward()
        run.backward(losses[0])
    stepped = [one for group in optimizer.param_groups for one in group["params"]]
    gradients = [local_part(one.grad) for one in stepped]
    optimizer.step()
    states = [local_part(value) for state in optimizer.state.values() for value in state.values()]

    def size(tensors: list[Any]) -> int:
        return sum(one.nbytes for one in tensors)

    return size([local_part(one) for one in stepped]), size(gradients), size(states), saved


def all_held(cases: list[Case]) -> list[Any]:
    return [held_in_training(*case) for case in cases]


def estimated(cases: list[Case]) -> list[list[tuple[int, int, int, int]]]:
    """For each case and place along the pipeline, the same by the estimate."""
    import torch

    from accelerate_cpp.comm.mesh import Mesh
    from accelerate_cpp.parallel.costs.steps import Step
    from accelerate_cpp.placement.mesh_memory import held_by_ranks

    found = []
    for sizes, options in cases:
        step = Step(
            rows=1 if "pp" in sizes else ROWS,
            tokens=TOKENS,
            micro_batches=ROWS if "pp" in sizes else 1,
            sequence_parallel=options.get("sequence_parallel", False),
            loss_parallel=options.get("loss_parallel", False),
            schedule=options.get("schedule", "1f1b"),
            sharded="dp_shard" in sizes,
        )
        with torch.device("meta"):
            model = model_of(options).train()
        parts, held = held_by_ranks(model, Mesh(0, sizes), step, "adam", None)
        assert sum(part.attentions for part in parts) == LAYERS
        found.append([(one.weights, one.gradients, one.optimizer, one.activations) for one in held])
    return found


def test_ranks_hold_what_the_estimate_says() -> None:
    cases = list(CASES.values())
    real = run_processes(all_held, 2, cases)
    (said,) = run_processes(estimated, 1, cases)
    for number, (name, (sizes, options)) in enumerate(CASES.items()):
        for rank in range(2):
            *fixed, saved = real[rank][number]
            *expected, activations = said[number][rank if "pp" in sizes else 0]
            if "dp_shard" in sizes and rank > 0:  # the estimate is of the rank with the most rows, the first one
                assert all(one <= most for one, most in zip(fixed, expected, strict=True))
            else:
                assert fixed == expected, (name, rank)
            if options.get("tied") and "tp" in sizes:  # of a split embedding, torch also saves which entries are here
                assert saved == activations, (name, rank)


def kept_by_schedules() -> list[list[int]]:
    from accelerate_cpp.placement.mesh_memory import kept_activations

    return [
        kept_activations("gpipe", 4, 8, [1, 1, 1, 10]),
        kept_activations("1f1b", 4, 8, [1, 1, 1, 10]),
        kept_activations("1f1b", 4, 4, [1, 1, 1, 10]),
        kept_activations("interleaved", 2, 4, [1, 1, 1, 1]),
        kept_activations("zero_bubble", 2, 4, [1, 1, 1, 1]),
        kept_activations("zero_bubble", 2, 4, [1, 0, 0, 100]),
        kept_activations("gpipe", 1, 8, [7]),
    ]


def test_ranks_keep_the_activations_of_what_they_have_begun() -> None:
    (found,) = run_processes(kept_by_schedules, 1)
    assert found == [
        [8, 8, 8, 80],
        [4, 3, 2, 10],
        [4, 3, 2, 10],
        [5, 3],  # a round of both ranks through the first stage, two for each rank after this one, one more
        [4, 4],  # two for each rank, as the backward pass of the last stage follows its forward pass
        found[5],
        [7],
    ]
    assert found[5][0] < 4 * 100  # the last stage keeps less than all


def refused_in_a_group() -> str:
    import torch.distributed as dist

    from accelerate_cpp.errors import InvalidArgument
    from accelerate_cpp.placement.mesh_memory import kept_activations

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        kept_activations("interleaved", 2, 4, [1, 1, 1, 1])
    except InvalidArgument as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return "nothing was raised"


def test_an_estimate_within_a_process_group_is_refused() -> None:
    (message,) = run_processes(refused_in_a_group, 1)
    assert message.endswith("this process is in a process group already; run the command by itself")


def refused_models() -> list[str]:
    import torch
    import transformers

    from accelerate_cpp.comm.mesh import Mesh
    from accelerate_cpp.errors import InvalidArgument
    from accelerate_cpp.parallel.costs.steps import Step
    from accelerate_cpp.placement.mesh_memory import held_by_ranks

    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
    with torch.device("meta"):
        encoder = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
        reading = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    reading.model.layers[1].register_forward_pre_hook(lambda _, args: bool(args[0].sum() > 0))
    found = []
    for model in (encoder, reading):
        try:
            held_by_ranks(model, Mesh(0, {"dp_shard": 2}), Step(1, 8, sharded=True), "sgd", None)
        except InvalidArgument as error:
            found.append(str(error))
    return found


def test_models_of_which_too_little_is_known_are_refused() -> None:
    ((encoder, reading),) = run_processes(refused_models, 1)
    assert "BertForMaskedLM is no decoder of transformers" in encoder
    assert "a forward pass of LlamaForCausalLM without data fails" in reading
