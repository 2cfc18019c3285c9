"""A model in stages on several ranks trains as one process on whole batches does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from processes import run_processes, start_processes

# Torch is imported inside the functions: each runs in a process of its own, and the collecting one needs none of it.

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero_bubble"]
STEPS, ROWS, TOKENS, WORDS = 10, 16, 7, 23


# Models and what trains them.


def sequence(features: int = 6) -> Any:
    """Entries that are sequences themselves, a dropout that does nothing, and one without parameters."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8)))
    layers = [nn.Linear(features, 8), nn.Tanh(), inner, nn.Dropout(0.0), nn.Linear(8, 8), nn.Flatten(), nn.Linear(8, 3)]
    return nn.Sequential(*layers)


def decoder(kind: str, **options: Any) -> Any:
    """A small one with enough layers for eight stages."""
    import torch
    import transformers as t

    torch.manual_seed(0)
    common: dict[str, Any] = {"vocab_size": WORDS, "num_hidden_layers": 7, "use_cache": True, **options}
    narrow = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "max_position_embeddings": 32}
    grouped = {**narrow, "num_key_value_heads": 1}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    models = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**grouped, **common, **ends)),
        "tied llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**grouped, **common, **ends, tie_word_embeddings=True)),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(
                n_embd=16, n_head=2, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **common, **ends
            )
        ),
        "qwen2": lambda: t.Qwen2ForCausalLM(
            t.Qwen2Config(**grouped, **common, **ends, use_sliding_window=True, sliding_window=3, max_window_layers=5)
        ),
        "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**grouped, **common, **ends, sliding_window=3)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**grouped, **common, **ends, head_dim=8)),
        "gpt_neox": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**narrow, **common, **ends)),
        "opt": lambda: t.OPTForCausalLM(
            t.OPTConfig(
                hidden_size=16,
                word_embed_proj_dim=16,
                ffn_dim=24,
                num_attention_heads=2,
                max_position_embeddings=32,
                dropout=0,
                layerdrop=0,
                **common,
                **ends,
            )
        ),
        "gemma": lambda: t.GemmaForCausalLM(t.GemmaConfig(**grouped, **common, **ends, head_dim=8)),
    }
    return models[kind]()


def rows_of_text(step: int, rows: int = ROWS, tokens: int = TOKENS, padded: bool = True) -> dict[str, Any]:
    """Rows of different lengths; the labels of padding do not count."""
    import torch

    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, WORDS, (rows, tokens), generator=generator)
    lengths = torch.randint(2, tokens + 1, (rows,), generator=generator) if padded else torch.full((rows,), tokens)
    mask = (torch.arange(tokens)[None] < lengths[:, None]).long()
    ids = ids * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def rows_of_numbers(step: int, rows: int = ROWS, features: int = 6) -> tuple[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, features, generator=generator), torch.randn(rows, 3, generator=generator)


def squares(outputs: Any, targets: Any) -> Any:
    return (outputs - targets).square().mean()


def pipeline(model: Any, schedule: str = "1f1b", **options: Any) -> Any:
    from accelerate_cpp.parallel.pipeline.pipeline import Pipeline
    from accelerate_cpp.plugins.parallelism import PipelineParallelConfig

    return Pipeline.of(model, None, PipelineParallelConfig(schedule=schedule, **options))


def sgd(model: Any) -> Any:
    import torch

    return torch.optim.SGD(list(model.parameters()), lr=0.1, momentum=0.5)


def ranks() -> int:
    import torch.distributed as dist

    return dist.get_world_size()


def union(pipe: Any, gradients: bool = False) -> dict[str, Any]:
    """The entries of all ranks."""
    import torch.distributed as dist

    named = {name: p.grad for name, p in pipe.named_parameters()} if gradients else pipe.state_dict()
    gathered: list[Any] = [None] * ranks()
    dist.all_gather_object(gathered, {name: value.detach() for name, value in named.items() if value is not None})
    return {name: value for part in gathered for name, value in part.items()}


def same_weights(pipe: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    import torch

    state = union(pipe)
    assert state.keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def same_gradients(pipe: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    import torch

    found = union(pipe, gradients=True)
    theirs = {name: p.grad for name, p in expected.named_parameters(remove_duplicate=False) if p.grad is not None}
    assert {name for name, _ in expected.named_parameters() if name in theirs} <= found.keys() <= theirs.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, theirs[name], rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def close(own: Any, other: Any, rtol: float = 1e-5) -> None:
    import torch

    torch.testing.assert_close(own, other.detach().to(own.dtype), rtol=rtol, atol=1e-7)


def trains_alike(pipe: Any, expected: Any, step_of: Callable[[int], tuple[Any, Any]], steps: int = STEPS) -> None:
    """``step_of`` a number are the losses of both after their backward passes."""
    ours, theirs = sgd(pipe), sgd(expected)
    for number in range(steps):
        close(*step_of(number))
        if number in (0, 1, steps - 1):
            same_gradients(pipe, expected)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    same_weights(pipe, expected)


def backward(loss: Any) -> Any:
    loss.backward()
    return loss


# Sentences.

SCENARIOS: dict[str, Callable[[str], None]] = {}
CORE: list[str] = []


def scenario(function: Callable[[str], None]) -> Callable[[str], None]:
    SCENARIOS[function.__name__] = function
    return function


def core(function: Callable[[str], None]) -> Callable[[str], None]:
    CORE.append(function.__name__)
    return scenario(function)


@core
def a_sequence_trains_as_in_one_process(schedule: str) -> None:
    pipe, expected = pipeline(sequence(), schedule), sequence()

    def step(number: int) -> tuple[Any, Any]:
        inputs, targets = rows_of_numbers(number)
        return pipe.train_batch(inputs, squares, targets), backward(squares(expected(inputs), targets))

    trains_alike(pipe, expected, step)


def decoder_trains(schedule: str, kind: str, steps: int = STEPS) -> None:
    pipe, expected = pipeline(decoder(kind), schedule), decoder(kind)

    def step(number: int) -> tuple[Any, Any]:
        batch = rows_of_text(number)
        return pipe.train_batch(batch), backward(expected(**batch).loss)

    trains_alike(pipe, expected, step, steps)


@scenario
def a_llama_trains_as_in_one_process(schedule: str) -> None:
    decoder_trains(schedule, "llama")


@core
def a_gpt2_with_tied_weights_trains_as_in_one_process(schedule: str) -> None:
    decoder_trains(schedule, "gpt2")


@scenario
def a_llama_with_tied_weights_trains_as_in_one_process(schedule: str) -> None:
    decoder_trains(schedule, "tied llama")


@scenario
def other_decoders_train_as_in_one_process(schedule: str) -> None:
    for kind in ("qwen2", "mistral", "qwen3", "gpt_neox", "opt", "gemma"):
        decoder_trains(schedule, kind, steps=2)


@core
def gradients_accumulate_over_batches(schedule: str) -> None:
    """Also those of tied weights, whose sums over ranks must not be summed again."""
    pipe, expected = pipeline(decoder("gpt2"), schedule), decoder("gpt2")
    optimizers = sgd(pipe), sgd(expected)
    for number in range(3):
        for part in range(2):
            batch = rows_of_text(10 * number + part)
            close(pipe.train_batch(batch, loss_scale=0.5), backward(expected(**batch).loss / 2) * 2)
        same_gradients(pipe, expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
    same_weights(pipe, expected)


@core
def batches_change_their_size(schedule: str) -> None:
    """In rows that micro-batches do not divide, down to one, and in tokens."""
    pipe, expected = pipeline(decoder("gpt2"), schedule), decoder("gpt2")
    sizes = [(ROWS, 7), (ROWS, 5), (13, 7), (5, 9), (1, 7), (ROWS, 7), (2, 3), (17, 4)]

    def step(number: int) -> tuple[Any, Any]:
        batch = rows_of_text(number, *sizes[number])
        return pipe.train_batch(batch), backward(expected(**batch).loss)

    trains_alike(pipe, expected, step, len(sizes))
    pipe, expected = pipeline(sequence(), schedule), sequence()

    def step_of_numbers(number: int) -> tuple[Any, Any]:
        inputs, targets = rows_of_numbers(number, (ROWS, 11, 3, 1, ROWS)[number])
        return pipe.train_batch(inputs, squares, targets), backward(squares(expected(inputs), targets))

    trains_alike(pipe, expected, step_of_numbers, 5)


@scenario
def losses_are_weighted_by_what_counts(schedule: str) -> None:
    import torch
    from torch import nn
    from torch.nn import functional

    weight = torch.tensor([0.5, 2.0, 1.0])
    losses: list[Any] = [
        nn.CrossEntropyLoss(ignore_index=1),
        nn.CrossEntropyLoss(weight=weight),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.NLLLoss(),
        functional.cross_entropy,
        lambda outputs, targets: functional.cross_entropy(outputs, targets, ignore_index=-7),
    ]
    for number, loss_fn in enumerate(losses):
        pipe, expected = pipeline(sequence(), schedule), sequence()
        inputs, _ = rows_of_numbers(number, 13)
        targets = torch.arange(13) % 3
        if number >= 4:
            targets[::2] = -100 if number == 4 else -7
            targets[:5] = targets[0]  # nothing counts in the first parts
        counted = (lambda part: (part != -7).sum()) if number == 5 else None
        own = pipe.train_batch(inputs, loss_fn, targets, counted=counted)
        close(own, backward(loss_fn(expected(inputs), targets)))
        same_gradients(pipe, expected)
    pipe, expected = pipeline(sequence(), schedule), sequence()
    inputs, _ = rows_of_numbers(0, 13)
    own = pipe.train_batch((inputs,), lambda outputs: outputs.square().mean())
    close(own, backward(expected(inputs).square().mean()))
    same_gradients(pipe, expected)


@scenario
def a_decoder_takes_positions_and_losses_of_ones_own(schedule: str) -> None:
    import torch
    from torch.nn import functional

    def smoothed(logits: Any, part: Any) -> Any:
        labels = part if isinstance(part, torch.Tensor) else part["labels"]
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)

    for kind in ("llama", "gpt2", "opt"):
        pipe, expected = pipeline(decoder(kind), schedule), decoder(kind)
        batch = rows_of_text(1)
        positions = (torch.arange(TOKENS)[None] + 2) % 30
        positions = positions if kind == "llama" else positions.expand(ROWS, -1)
        batch["position_ids"] = positions
        own = pipe.train_batch(batch, smoothed)
        named = {name: value for name, value in batch.items() if name != "labels"}
        close(own, backward(smoothed(expected(**named).logits, batch["labels"])))
        same_gradients(pipe, expected)
        ids = rows_of_text(2, padded=False)["input_ids"]
        close(pipe.train_batch(ids, targets=ids), backward(expected(input_ids=ids, labels=ids).loss))
        same_gradients(pipe, expected)


@core
def evaluation_has_the_loss_and_the_outputs(schedule: str) -> None:
    import torch

    pipe, expected = pipeline(decoder("gpt2"), schedule).eval(), decoder("gpt2").eval()
    for rows in (ROWS, 5, ROWS):
        batch = rows_of_text(1, rows)
        theirs = expected(**batch)
        loss, logits = pipe.eval_batch(batch, gather_outputs=True)
        close(loss, theirs.loss)
        torch.testing.assert_close(logits, theirs.logits, rtol=1e-5, atol=1e-6)
        assert logits.grad_fn is None
    alone = pipe.eval_batch({name: value for name, value in batch.items() if name != "labels"})
    assert alone.loss is None
    assert (alone.outputs is not None) == pipe.has_last_stage
    assert all(parameter.grad is None for parameter in pipe.parameters())
    pipe.train(), expected.train()
    close(pipe.train_batch(batch), backward(expected(**batch).loss))
    same_gradients(pipe, expected)
    plain, other = pipeline(sequence(), schedule), sequence()
    inputs, targets = rows_of_numbers(0, 7)
    loss, outputs = plain.eval_batch(inputs, squares, targets, gather_outputs=True)
    close(loss, squares(other(inputs), targets))
    close(outputs, other(inputs))
    close(plain.eval_batch(inputs, gather_outputs=True).outputs, other(inputs))


@core
def names_are_those_of_the_model(schedule: str) -> None:
    import torch

    for make in (sequence, lambda: decoder("gpt2"), lambda: decoder("opt")):
        model = make()
        whole = model.state_dict()
        pipe = pipeline(model, schedule)
        names = [name for name, _ in pipe.named_parameters()]
        assert len(set(names)) == len(names)
        assert set(names) <= whole.keys()
        assert set(pipe.state_dict()) <= whole.keys()
        assert union(pipe).keys() == whole.keys()
        assert len(pipe.stage_modules) == len(pipe.stage_numbers) == (1 if schedule in ("gpipe", "1f1b") else 2)
        for name, parameter in pipe.named_parameters():
            assert pipe.get_parameter(name) is parameter
            assert model.get_parameter(name) is parameter
        pipe.load_state_dict({name: torch.full_like(value, 0.5) for name, value in whole.items()})
        assert all(bool((value == 0.5).all()) for value in pipe.state_dict().values())
        with pytest.raises(RuntimeError, match="missing"):
            pipe.load_state_dict({})
        with pytest.raises(RuntimeError, match="unexpected"):
            pipe.load_state_dict({**whole, "more": torch.ones(1)})
        assert pipe.load_state_dict({}, strict=False).missing_keys


@scenario
def copies_of_tied_weights_stay_equal(schedule: str) -> None:
    """Bit by bit, and from the values of the first rank; each of them is counted once."""
    import torch
    import torch.distributed as dist

    model = decoder("gpt2")
    pipe = pipeline(model, schedule)
    if dist.get_rank():
        with torch.no_grad():
            for name in pipe.copies:
                pipe.get_parameter(name).add_(1)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    for number in range(4):
        pipe.train_batch(rows_of_text(number))
        optimizer.step()
        optimizer.zero_grad()
    state = union(pipe)
    assert torch.equal(state["transformer.wte.weight"], state["lm_head.weight"])
    everywhere: list[Any] = [None] * ranks()
    dist.all_gather_object(everywhere, (set(pipe.copies), [name for name, _ in pipe.named_parameters()]))
    counted = [name for copies, names in everywhere for name in names if name not in copies]
    assert sorted(counted) == sorted(name for name, _ in model.named_parameters())


@scenario
def an_entry_that_is_used_twice_has_one_gradient(schedule: str) -> None:
    import torch
    from torch import nn

    def twice() -> Any:
        torch.manual_seed(0)
        shared = nn.Linear(6, 6)
        layers = [shared, nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), shared]
        return nn.Sequential(*layers, nn.Tanh(), nn.Linear(6, 3))

    pipe, expected = pipeline(twice(), schedule), twice()

    def step(number: int) -> tuple[Any, Any]:
        inputs, targets = rows_of_numbers(number)
        return pipe.train_batch(inputs, squares, targets), backward(squares(expected(inputs), targets))

    trains_alike(pipe, expected, step, 4)


@scenario
def frozen_parts_have_no_gradients(schedule: str) -> None:
    """Parts at the beginning, in the middle, and of tied weights."""
    for frozen in (
        "transformer.h.0.",
        "transformer.wte",
        "transformer.h.3.",
        "transformer.",
        "lm_head",
        "transformer.w",
    ):
        pair = decoder("gpt2"), decoder("gpt2")
        for model in pair:
            for name, parameter in model.named_parameters(remove_duplicate=False):
                parameter.requires_grad_(not name.startswith(frozen))
            if frozen == "transformer.":
                model.transformer.ln_f.requires_grad_(True)
        pipe, expected = pipeline(pair[0], schedule), pair[1]
        for number in range(2):
            batch = rows_of_text(number)
            close(pipe.train_batch(batch), backward(expected(**batch).loss))
        same_gradients(pipe, expected)


@scenario
def half_precision_is_that_of_one_process(schedule: str) -> None:
    """Under autocast, where hidden states are cast, and with weights of 16 bits."""
    import torch

    for make, batch_of in ((sequence, rows_of_numbers), (lambda: decoder("gpt2"), rows_of_text)):
        for whole in (False, True):
            pair = make(), make()
            if whole:
                pair = tuple(model.bfloat16() for model in pair)  # type: ignore[assignment]
            pipe, expected = pipeline(pair[0], schedule), pair[1]
            for number in range(2):
                batch: Any = batch_of(number)
                cast = nullcontext() if whole else torch.autocast("cpu", torch.bfloat16)
                with cast:
                    if isinstance(batch, dict):
                        own, other = pipe.train_batch(batch), expected(**batch).loss
                    else:
                        inputs, targets = (value.bfloat16() if whole else value for value in batch)
                        own = pipe.train_batch(inputs, squares, targets)
                        other = squares(expected(inputs), targets)
                close(own, backward(other), rtol=0.02)
            same_gradients(pipe, expected, rtol=0.05, atol=0.02)
            with nullcontext() if whole else torch.autocast("cpu", torch.bfloat16):
                if isinstance(batch, dict):
                    close(pipe.eval_batch(batch).loss, expected(**batch).loss, rtol=0.02)


@scenario
def double_precision_is_that_of_one_process(schedule: str) -> None:
    pipe, expected = pipeline(decoder("gpt2").double(), schedule), decoder("gpt2").double()
    # Transformers computes the loss of a decoder in float32.
    batch = rows_of_text(0)
    own = pipe.train_batch(batch)
    assert own.dtype.itemsize == 8
    close(own, backward(expected(**batch).loss))
    same_gradients(pipe, expected)


@scenario
def statistics_of_batch_norms_are_updated_once_for_each_part(schedule: str) -> None:
    import torch
    from torch import nn

    def normed() -> Any:
        torch.manual_seed(0)
        inner = [module for _ in range(4) for module in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())]
        return nn.Sequential(*inner, nn.Linear(6, 3))

    model, expected = normed(), normed()
    pipe = pipeline(model, schedule, micro_batches=4)
    inputs, targets = rows_of_numbers(0)
    pipe.train_batch(inputs, squares, targets)
    for part, wanted in zip(inputs.chunk(4), targets.chunk(4), strict=True):
        (squares(expected(part), wanted) / 4).backward()
    same_gradients(pipe, expected)
    same_weights(pipe, expected)


@scenario
def stages_can_be_changed_before_they_run(schedule: str) -> None:
    """In place: activations recomputed, and layers replaced by others."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    pipe, expected = pipeline(decoder("llama"), schedule), decoder("llama")
    for stage in pipe.stage_modules:
        layers = stage.get_submodule("model.layers")
        for name, layer in layers.named_children():
            layers._modules[name] = checkpoint_wrapper(layer)
    batch = rows_of_text(0)
    close(pipe.train_batch(batch), backward(expected(**batch).loss))
    same_weights(pipe, expected)


@core
def only_the_stages_of_this_rank_are_kept(schedule: str) -> None:
    for make in (lambda: decoder("llama"), sequence):
        model = make()
        pipe = pipeline(model, schedule)
        kept = {id(parameter) for parameter in pipe.parameters()}
        others = [weakref.ref(parameter) for parameter in model.parameters() if id(parameter) not in kept]
        assert others
        del model
        gc.collect()
        assert [reference for reference in others if reference() is not None] == []


@core
def split_points_choose_the_stages(schedule: str) -> None:
    import torch.distributed as dist

    if ranks() != 2 or schedule not in ("gpipe", "1f1b"):
        return
    pipe = pipeline(decoder("llama"), schedule, split_points=("model.layers.6",))
    assert pipe.begins == ["model.embed_tokens", "model.layers.6"]
    expected = decoder("llama")
    batch = rows_of_text(0)
    close(pipe.train_batch(batch), backward(expected(**batch).loss))
    same_gradients(pipe, expected)
    for point in ("model.norm", "lm_head", "model.layers.0"):
        pipe, expected = (
            pipeline(decoder("llama"), schedule, split_points=(point,)),
            decoder("llama"),
        )
        close(pipe.train_batch(batch), backward(expected(**batch).loss))
        same_gradients(pipe, expected)
    pipe = pipeline(sequence(), schedule, split_points=("2.2.1",))
    names = {name.rpartition(".")[0] for name in pipe.state_dict()}
    assert names == ({"2.2.2", "4", "6"} if dist.get_rank() else {"0", "2.0", "2.2.0"})


@core
def what_cannot_be_computed_is_refused(schedule: str) -> None:
    from accelerate_cpp import PartialState
    from accelerate_cpp.errors import InvalidArgument

    pipe = pipeline(decoder("gpt2"), schedule)
    batch = rows_of_text(0)
    with pytest.raises(InvalidArgument, match="no forward pass of its own; call train_batch"):
        pipe(**batch)
    with pytest.raises(InvalidArgument, match="GPT2LMHeadModel does not take token_type_ids"):
        pipe.train_batch({**batch, "token_type_ids": batch["input_ids"]})
    with pytest.raises(InvalidArgument, match="pass labels, or loss_fn"):
        pipe.train_batch({"input_ids": batch["input_ids"]})
    with pytest.raises(InvalidArgument, match=r"attention_mask has shape \[3, 7\], but the batch has 16 rows"):
        pipe.train_batch({**batch, "attention_mask": batch["attention_mask"][:3]})
    with pytest.raises(InvalidArgument, match="equally many rows, at least one"):
        pipe.train_batch(batch["input_ids"][:0], squares)
    with pytest.raises(InvalidArgument, match="takes input_ids"):
        pipe.train_batch("text", squares)
    wrapped = decoder("gpt2")
    wrapped.forward = wrapped.forward
    with pytest.raises(InvalidArgument, match="the forward method of GPT2LMHeadModel was replaced"):
        pipeline(wrapped, schedule)
    plain = pipeline(sequence(), schedule)
    with pytest.raises(InvalidArgument, match="pass labels, or loss_fn"):
        plain.train_batch(*rows_of_numbers(0)[:1])
    with pytest.raises(InvalidArgument, match="takes a tensor or a tuple of tensors, but got dict"):
        plain.train_batch({"inputs": 1}, squares)
    with pytest.raises(InvalidArgument, match="takes no named inputs, but got mask"):
        plain.train_batch(rows_of_numbers(0)[0], squares, kwargs={"mask": 1})
    with pytest.raises((InvalidArgument, RuntimeError), match=r"stage 0 on rank 0 raised|mat1 and mat2"):
        plain.train_batch(rows_of_numbers(0, features=5)[0], squares, rows_of_numbers(0)[1])
    if schedule == "1f1b":
        with pytest.raises(
            InvalidArgument, match=f"needs at least {ranks()} micro-batches, but micro_batches=1; choose"
        ):
            pipeline(sequence(), schedule, micro_batches=1)
    # After all of these the ranks still agree.
    close(pipe.train_batch(batch), backward(decoder("gpt2")(**batch).loss))
    PartialState().wait_for_everyone()


# Tests.


def run_all(schedules: list[str], backend: str, names: list[str]) -> None:
    """A sentence that fails ends the process, and so the others that wait for it."""
    import torch

    from accelerate_cpp import PartialState

    torch.set_num_threads(1)
    assert PartialState(cpu=True, backend=backend).backend == backend
    for schedule in schedules:
        for name in names:
            try:
                SCENARIOS[name](schedule)
            except BaseException as error:
                error.add_note(f"in {name}({schedule!r})")
                raise


def assert_all(world_size: int, schedules: list[str], backend: str, names: list[str]) -> None:
    pytest.importorskip("transformers")
    run_processes(run_all, world_size, schedules, backend, names, timeout=280)


def test_two_ranks_train_a_model_in_stages() -> None:
    assert_all(2, ["1f1b"], "shm", CORE)
    assert_all(2, ["zero_bubble"], "shm", ["gradients_accumulate_over_batches", "batches_change_their_size"])


@pytest.mark.long
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_train_a_model_in_stages(world_size: int, backend: str, schedule: str) -> None:
    assert_all(world_size, [schedule], backend, list(SCENARIOS))


def sharded_stages(schedules: list[str], kinds: list[str]) -> None:
    """Stages of two ranks, each of which two others share: as shards, or with split layers."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from accelerate_cpp import PartialState
    from accelerate_cpp.parallel.pipeline.pipeline import Pipeline
    from accelerate_cpp.plugins.parallelism import PipelineParallelConfig

    torch.set_num_threads(1)
    PartialState(cpu=True, backend="shm")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "other"))
    plan = {"mlp.up_proj": ColwiseParallel(), "mlp.gate_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for schedule in schedules:
        for kind in kinds:
            split = kind.endswith("split")
            name = kind.removesuffix(" split")
            options = PipelineParallelConfig(schedule=schedule, micro_batches=4)
            pipe = Pipeline.of(decoder(name), mesh.get_group("pp"), options)
            expected = decoder(name)
            if not split and schedule == "zero_bubble" and name == "gpt2":
                continue  # both stages with the tied weight are on one rank, and would shard it twice
            within = not split and schedule != "zero_bubble"
            for stage in pipe.stage_modules:
                layers = stage.get_submodule("transformer.h" if name == "gpt2" else "model.layers")
                for layer in layers.children():
                    if within:
                        fully_shard(layer, mesh=mesh["other"])
                    if split:
                        parallelize_module(layer, mesh["other"], plan)
                if not split:
                    fully_shard(stage, mesh=mesh["other"], reshard_after_forward=False)
            ours, theirs = sgd(pipe), sgd(expected)
            for number in range(4):
                for part in range(2):
                    batch = rows_of_text(10 * number + part, padded=False)
                    half = mesh.get_local_rank("other")
                    own = batch if split else {key: value.tensor_split(2)[half] for key, value in batch.items()}
                    loss = pipe.train_batch(own)
                    dist.all_reduce(loss, dist.ReduceOp.AVG, mesh.get_group("other"))
                    close(loss, backward(expected(**batch).loss))
                for optimizer in (ours, theirs):
                    optimizer.step()
                    optimizer.zero_grad()
            for key, value in pipe.state_dict().items():
                value = value.full_tensor() if hasattr(value, "full_tensor") else value
                torch.testing.assert_close(value, expected.state_dict()[key], rtol=1e-5, atol=1e-6, msg=key)


def sharded_within() -> None:
    """Torch would leave out gradients."""
    from torch.distributed.fsdp import fully_shard

    from accelerate_cpp import PartialState
    from accelerate_cpp.errors import InvalidArgument

    PartialState(cpu=True, backend="shm")
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "other"))
    pipe = pipeline(sequence(), "zero_bubble")
    for stage in pipe.stage_modules:
        fully_shard(next(stage.children()), mesh=mesh["other"])
    with pytest.raises(InvalidArgument, match="loses gradients of modules that are sharded within a stage"):
        pipe.train_batch(rows_of_numbers(0)[0], squares, rows_of_numbers(0)[1])


def test_zero_bubble_refuses_what_is_sharded_within_a_stage() -> None:
    run_processes(sharded_within, 2)


@pytest.mark.long
def test_stages_can_be_shared_by_other_ranks() -> None:
    pytest.importorskip("transformers")
    run_processes(sharded_stages, 4, SCHEDULES, ["llama", "gpt2", "llama split"], timeout=280)


def alone(schedule: str) -> None:
    """In a group of one rank."""
    import torch

    from accelerate_cpp import PartialState

    PartialState(cpu=True)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    model, expected = decoder("gpt2"), decoder("gpt2")
    pipe = pipeline(model, schedule)
    for rows in (ROWS, 5):
        batch = rows_of_text(rows, rows)
        close(pipe.train_batch(batch), backward(expected(**batch).loss))
        same_gradients(pipe, expected)
        close(pipe.eval_batch(batch).loss, expected(**batch).loss)
    torch.testing.assert_close(pipe(**batch).loss, expected(**batch).loss)
    same_weights(pipe, expected)


def test_one_rank_has_the_whole_model() -> None:
    pytest.importorskip("transformers")
    run_processes(alone, 1, "interleaved")


def a_loss_raises() -> None:
    import torch

    from accelerate_cpp import PartialState

    PartialState(cpu=True, backend="shm")
    pipe = pipeline(sequence())

    def wrong(outputs: Any, targets: Any) -> Any:
        raise ArithmeticError("no loss today")

    inputs, targets = rows_of_numbers(0)
    assert torch.isfinite(pipe.train_batch(inputs, squares, targets))
    pipe.train_batch(inputs, wrong, targets)


def test_an_error_in_one_stage_ends_all_ranks() -> None:
    outcomes = start_processes(a_loss_raises, 2)
    assert "no loss today" in outcomes[1].stderr
    assert all(outcome.exit_code == 1 for outcome in outcomes), [outcome.stderr for outcome in outcomes]
