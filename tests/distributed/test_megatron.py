"""Programs written for Megatron-LM train on the mesh of their plugin as plain torch does on one process."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import pytest

from processes import run_processes
from test_tensor_parallel_libraries import OFFLINE, SIZES, VOCABULARY

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

# Torch and transformers are imported inside the functions, which run in processes of their own.

STEPS, MICRO_ROWS, MICRO_BATCHES, TOKENS, END, RATE = 3, 2, 2, 12, 2, 0.5
KINDS = ("Llama", "GPT2", "MegatronBert", "MegatronBertClassifier", "T5")


def model_of(kind: str, layers: int = 2) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": END, "pad_token_id": 0}
    if kind == "Llama":
        sizes = {**SIZES, "num_hidden_layers": layers}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **ends))
    if kind == "GPT2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=layers, n_head=4, **ends
        )
        return transformers.GPT2LMHeadModel(config)
    if kind == "T5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": layers, "num_heads": 4}
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=VOCABULARY, **sizes, decoder_start_token_id=0, **ends)
        )
    sizes = {**SIZES, "num_hidden_layers": layers}
    sizes.pop("num_key_value_heads")
    config = transformers.MegatronBertConfig(**sizes, num_labels=3)
    if kind == "MegatronBert":
        return transformers.MegatronBertForMaskedLM(config)
    return transformers.MegatronBertForSequenceClassification(config)


def rows_of(kind: str, count: int) -> list[dict[str, Any]]:
    """Samples: tokens with ends in them, labels of which some do not count, padding at the end of every third row."""
    import torch

    generator = torch.Generator().manual_seed(5)
    rows = []
    for number in range(count):
        tokens = torch.randint(3, VOCABULARY, (TOKENS,), generator=generator)
        there = torch.ones(TOKENS, dtype=torch.long)
        labels = tokens.clone()
        if number % 3 == 0 and kind not in ("Llama", "GPT2"):
            there[-3:] = 0
            tokens[-3:] = 0
        labels[: 1 + number % 4] = -100
        tokens[number % TOKENS] = END
        row = {"input_ids": tokens, "attention_mask": there, "labels": labels}
        if kind == "MegatronBertClassifier":
            row["labels"] = torch.tensor(number % 3)
        if kind.startswith("MegatronBert"):
            row["token_type_ids"] = (torch.arange(TOKENS) > 5).long()
        rows.append(row)
    return rows


def loss_of(kind: str, model: Any, rows: dict[str, Any]) -> tuple[Any, Any]:
    """What plain torch computes for rows: the sum of the losses that count, and their number."""
    import torch
    from torch.nn.functional import cross_entropy, pad

    if kind in ("Llama", "GPT2"):
        tokens = rows["input_ids"]
        following = pad(tokens[:, 1:], (0, 1), value=END)
        counts = tokens != END
        counts[:, :-1] &= rows["labels"][:, 1:] != -100
        losses = cross_entropy(model(input_ids=tokens).logits.transpose(1, 2), following, reduction="none")
        return (losses * counts).sum(), counts.sum()
    outputs = model(**rows)
    labels = rows["labels"]
    count = (labels != -100).sum() if labels.ndim == 2 else torch.tensor(len(labels))
    return outputs.loss * count, count


def alone(kind: str, steps: list[list[dict[str, Any]]], by_tokens: bool, clip: float) -> tuple[list[float], Any]:
    """Losses, and the state afterwards; each step is a list of micro-batches of all processes."""
    import torch

    model = model_of(kind)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for name in ("attention_dropout", "dropout"):
        for module in model.modules():
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for micro_batches in steps:
        parts = [loss_of(kind, model, rows) for rows in micro_batches]
        if by_tokens:
            loss = sum(total for total, _ in parts) / sum(count for _, count in parts)
        else:
            loss = sum(total / count for total, count in parts) / len(parts)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def collated(rows: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def begun(**options: Any) -> Any:
    from accelerate_cpp import Accelerator
    from accelerate_cpp.state import AcceleratorState, GradientState
    from accelerate_cpp.utils import MegatronLMPlugin

    AcceleratorState._reset_state()
    GradientState._reset_state()
    options = {"num_micro_batches": MICRO_BATCHES, "gradient_clipping": 0.3, **options}
    return Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**options))


def trained(kind: str, options: dict[str, Any]) -> None:
    """Asserts that a loop as programs write it for Megatron-LM trains as :func:`alone` does."""
    import torch
    from torch.utils.data import DataLoader

    run = begun(**options)
    assert run.distributed_type == "MEGATRON_LM"
    model = model_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    copies = run._session.topology.mesh.data_size
    count = copies * MICRO_BATCHES * MICRO_ROWS
    rows = rows_of(kind, STEPS * count)
    model, optimizer, loader = run.prepare(
        model, optimizer, DataLoader(rows, batch_size=MICRO_ROWS, collate_fn=collated)
    )
    assert run.state.megatron_lm_plugin.global_batch_size == count
    steps = [
        [collated(rows[begin : begin + MICRO_ROWS]) for begin in range(step * count, (step + 1) * count, MICRO_ROWS)]
        for step in range(STEPS)
    ]
    by_tokens = options.get("calculate_per_token_loss", True) and kind != "MegatronBertClassifier"
    wanted, state = alone(kind, steps, by_tokens, options.get("gradient_clipping", 0.3))
    model.train()
    losses = []
    for batch in loader:
        outputs = model(**batch)
        run.backward(outputs.loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(outputs.loss.item())
    assert losses == pytest.approx(wanted, rel=2e-5)
    own = run.get_state_dict(model)
    for name, value in state.items() if run.is_main_process else ():
        torch.testing.assert_close(own[name], value, rtol=1e-4, atol=1e-5, msg=name)
    model.eval()
    with torch.no_grad():
        found = model(**batch).loss.item()
    assert found < losses[0]


def all_of(cases: list[tuple[str, dict[str, Any]]]) -> dict[str, str]:
    """What went wrong, by case."""
    import traceback

    found = {}
    for kind, options in cases:
        try:
            trained(kind, options)
        except Exception:
            found[f"{kind} {options}"] = traceback.format_exc()
    return found


ON_TWO: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}),
    ("Llama", {"calculate_per_token_loss": False, "recompute_granularity": "selective"}),
    ("Llama", {"tp_degree": 2, "sequence_parallelism": True, "recompute_granularity": "none"}),
    ("Llama", {"pp_degree": 2}),
    ("Llama", {"pp_degree": 2, "calculate_per_token_loss": False, "recompute_method": "block"}),
    ("Llama", {"context_parallel_size": 2}),
    ("Llama", {"context_parallel_size": 2, "calculate_per_token_loss": False}),
    ("Llama", {"use_distributed_optimizer": True}),
    ("Llama", {"use_custom_fsdp": True, "recompute_activations": True}),
    ("GPT2", {"pp_degree": 2, "gradient_clipping": 0}),
    ("MegatronBert", {"tp_degree": 2}),
    ("MegatronBertClassifier", {"tp_degree": 2}),
    ("T5", {"tp_degree": 2}),
    ("T5", {"use_distributed_optimizer": True, "calculate_per_token_loss": False}),
]
ON_FOUR: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {"tp_degree": 2, "pp_degree": 2, "sequence_parallelism": True}),
    ("Llama", {"tp_degree": 2, "use_distributed_optimizer": True}),
    ("Llama", {"pp_degree": 2, "use_distributed_optimizer": True, "calculate_per_token_loss": False}),
    ("Llama", {"pp_degree": 2, "use_custom_fsdp": True}),
    ("MegatronBert", {"tp_degree": 2}),
    ("T5", {"tp_degree": 2, "use_custom_fsdp": True}),
]


@pytest.mark.parametrize(
    ("processes", "cases"),
    [(2, ON_TWO), pytest.param(4, ON_FOUR, marks=pytest.mark.long)],
)
def test_a_program_for_megatron_trains_as_one_process_does(processes: int, cases: list[Any]) -> None:
    for found in run_processes(all_of, processes, cases, timeout=600, environment=OFFLINE):
        assert not found, "\n".join(f"{case}\n{text}" for case, text in found.items())


# What else such programs do. Each is called on two processes, one after the other.


def weighted(run: Any) -> Any:
    """A train step of the program's own, whose loss weighs rows by their first token."""
    from functools import partial

    import torch

    from accelerate_cpp.utils import GPTTrainStep, avg_losses_across_data_parallel_group

    class Weighted(GPTTrainStep):
        def __init__(self, args: Any, accelerator: Any, factor: float) -> None:
            self.factor = factor
            super().__init__(accelerator, args)

        def get_loss_func(self, accelerator: Any) -> Any:
            def loss_func(tokens: Any, loss_mask: Any, output_tensor: Any) -> Any:
                of_rows = (output_tensor * loss_mask).sum(1) / loss_mask.sum(1)
                loss = (of_rows * (1 + self.factor * (tokens[:, 0] % 2))).mean()
                return loss, {"lm loss": avg_losses_across_data_parallel_group([loss])[0]}

            return loss_func

        def get_forward_step_func(self) -> Any:
            def forward_step(data_iterator: Any, model: Any) -> Any:
                tokens, labels, mask, attention_mask, position_ids = self.get_batch(data_iterator)
                outputs = model(tokens, position_ids, attention_mask, labels=labels)
                return outputs, partial(self.loss_func, tokens, mask)

            return forward_step

    assert torch.is_grad_enabled()
    return Weighted


def train_steps_of_the_program_train_as_they_say() -> None:
    import torch
    from torch.nn.functional import cross_entropy, pad
    from torch.utils.data import DataLoader

    for fields in ({}, {"pp_degree": 2}, {"tp_degree": 2}):
        run = begun(gradient_clipping=0, **fields)
        plugin = run.state.megatron_lm_plugin
        plugin.custom_train_step_class = weighted(run)
        plugin.custom_train_step_kwargs = {"accelerator": run, "factor": 0.5}
        model, plain = model_of("Llama"), model_of("Llama")
        count = run._session.topology.mesh.data_size * MICRO_BATCHES * MICRO_ROWS
        rows = rows_of("Llama", 2 * count)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        model, optimizer, loader = run.prepare(
            model, optimizer, DataLoader(rows, batch_size=MICRO_ROWS, collate_fn=collated)
        )
        stepping = torch.optim.SGD(plain.parameters(), lr=RATE)
        for step, batch in enumerate(loader):
            whole = collated(rows[step * count : (step + 1) * count])
            tokens = whole["input_ids"]
            counts = (tokens != END).float()
            counts[:, :-1] *= whole["labels"][:, 1:] != -100
            following = pad(tokens[:, 1:], (0, 1), value=END)
            losses = cross_entropy(plain(input_ids=tokens).logits.transpose(1, 2), following, reduction="none")
            of_rows = (losses * counts).sum(1) / counts.sum(1)
            loss = (of_rows * (1 + 0.5 * (tokens[:, 0] % 2))).mean()
            loss.backward()
            stepping.step()
            stepping.zero_grad()
            found = model(**batch)
            value = found.loss if hasattr(found, "loss") else found
            assert value.item() == pytest.approx(loss.item(), rel=1e-5), fields


def checkpoints_go_on_where_they_were_also_on_another_mesh() -> None:
    import tempfile

    import torch
    from torch.utils.data import DataLoader

    from accelerate_cpp.utils import MegatronLMDummyScheduler, broadcast_object_list

    def start(**fields: Any) -> tuple[Any, ...]:
        run = begun(**fields)
        model = model_of("Llama")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = MegatronLMDummyScheduler(optimizer, total_num_steps=40, warmup_num_steps=4)
        copies = run._session.topology.mesh.data_size
        rows = rows_of("Llama", 48)
        loader = DataLoader(rows, batch_size=4 // copies, collate_fn=collated)
        return run, *run.prepare(model, optimizer, schedule, loader)

    def steps(model: Any, batches: list[Any], schedule: Any) -> tuple[list[float], list[float]]:
        """Losses, and the rates after them."""
        found = [(model(**batch).loss.item(), schedule.get_last_lr()[0]) for batch in batches]
        return [loss for loss, _ in found], [rate for _, rate in found]

    run, model, _, schedule, loader = start(tp_degree=2)
    assert run.state.megatron_lm_plugin.train_iters == 40
    batches = list(loader)
    model.train()
    steps(model, batches[:2], schedule)
    (folder,) = broadcast_object_list([tempfile.mkdtemp()])
    model.save_checkpoint(f"{folder}/a")
    assert (model.iteration, model.args.consumed_train_samples) == (2, 16)
    expected = steps(model, batches[2:], schedule)
    assert expected[1][:2] == pytest.approx([7.5e-3, 1e-2])
    model.load_checkpoint(f"{folder}/a")
    assert (model.iteration, model.args.consumed_train_samples) == (2, 16)
    found = steps(model, batches[2:], schedule)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1] == pytest.approx(expected[1])
    for fields in ({"pp_degree": 2}, {"use_distributed_optimizer": True}, {}):
        run, model, _, schedule, loader = start(**fields)
        run.load_state(f"{folder}/a")
        model.train()
        found = steps(model, list(loader)[2:], schedule)
        # The schedule of two copies is half as long, as its steps are counted for all of them: then rates differ.
        same = None if "pp_degree" in fields else 1
        assert found[0][:same] == pytest.approx(expected[0][:same], rel=1e-5), fields
    run, model, _, schedule, _ = start(tp_degree=2, no_save_optim=True, no_load_optim=True)
    saved = run.save_state(f"{folder}/b")
    assert not list(saved.glob("*optim*"))
    run.load_state(f"{folder}/a")


def stages_have_the_layers_that_the_plugin_counts() -> None:
    import torch
    from torch.utils.data import DataLoader

    found = []
    for fields, layers in (
        ({"num_layers_per_virtual_pipeline_stage": 1}, 4),
        ({"decoder_last_pipeline_num_layers": 1}, 4),
        ({}, 4),
    ):
        run = begun(pp_degree=2, **fields)
        model = model_of("Llama", layers)
        model, _, loader = run.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=RATE),
            DataLoader(rows_of("Llama", 8), batch_size=MICRO_ROWS, collate_fn=collated),
        )
        found.append((run.unwrap_model(model).begins[1:], [model(**batch).loss.item() for batch in loader]))
    assert [begins for begins, _ in found] == [
        ["model.layers.1", "model.layers.2", "model.layers.3"],
        ["model.layers.3"],
        ["model.layers.2"],
    ]
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)
    assert found[0][1] == pytest.approx(found[2][1], rel=1e-5)
    for fields, message in (
        ({"num_layers_per_virtual_pipeline_stage": 3}, "two or more stages of equal length"),
        ({"decoder_last_pipeline_num_layers": 4}, "expected 1 to 3"),
    ):
        with pytest.raises(Exception, match=message):
            begun(pp_degree=2, **fields).prepare(model_of("Llama", 4))


def logits_of_evaluations_are_those_of_the_process() -> None:
    import torch
    from torch.utils.data import DataLoader

    for fields in ({}, {"tp_degree": 2}, {"pp_degree": 2}):
        run = begun(return_logits=True, **fields)
        model, plain = model_of("Llama"), model_of("Llama").eval()
        model, loader = run.prepare(model, DataLoader(rows_of("Llama", 8), batch_size=2, collate_fn=collated))
        model.eval()
        for batch in loader:
            with torch.no_grad():
                found, wanted = model(**batch), plain(input_ids=batch["input_ids"]).logits
            torch.testing.assert_close(found.logits, wanted, rtol=1e-4, atol=1e-5)
        with pytest.raises(Exception, match="a step without an optimizer"):
            model.train()(**batch)


def parameters_that_conditions_name_have_groups_of_their_own() -> None:
    import torch

    run = begun(
        no_wd_decay_cond=lambda name, parameter: parameter.ndim == 1,
        scale_lr_cond=lambda name, parameter: "lm_head" in name,
        lr_mult=0.5,
    )
    model = model_of("Llama")
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2, weight_decay=0.1))
    found = {(group["lr"], group["weight_decay"], len(group["params"])) for group in optimizer.param_groups}
    assert found == {(0.2, 0.1, 15), (0.2, 0.0, 5), (0.1, 0.1, 1)}


def data_in_megatrons_form_comes_from_a_function_of_the_program() -> None:
    import torch

    from accelerate_cpp.utils import MegatronLMDummyDataLoader

    asked = []

    def provider(numbers: list[int]) -> tuple[Any, Any, Any]:
        asked.append(numbers)
        texts = torch.randint(3, VOCABULARY, (16, TOKENS + 1), generator=torch.Generator().manual_seed(0))
        return [{"text": text} for text in texts], [{"text": text} for text in texts[:8]], None

    run = begun(train_iters=4, eval_iters=2, custom_megatron_datasets_provider_function=provider)
    stand_in = MegatronLMDummyDataLoader(micro_batch_size=2)
    model = model_of("GPT2")
    model, optimizer, training, validation, test = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=RATE), stand_in, stand_in, stand_in
    )
    assert (asked, len(training), len(validation), test) == ([[32, 16, 16]], 2, 1, None)
    losses = [model(**batch).loss.item() for batch in training]
    assert all(3 < loss < 5 for loss in losses)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(RATE / 2)  # of the schedule over 4 steps


def the_engine_steps_and_everything_else_leaves_it_alone() -> None:
    import warnings

    import torch
    from torch.utils.data import DataLoader

    from accelerate_cpp.utils import (
        MegatronEngine,
        MegatronLMOptimizerWrapper,
        MegatronLMSchedulerWrapper,
        gather_across_data_parallel_groups,
    )

    run = begun(gradient_clipping=0.1)
    model, rows = model_of("GPT2"), rows_of("GPT2", 16)
    plain = torch.optim.SGD(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.ConstantLR(plain, factor=0.5, total_iters=1)
    model, optimizer, loader, prepared = run.prepare(
        model, plain, DataLoader(rows, batch_size=2, collate_fn=collated), schedule
    )
    assert (type(model), type(optimizer)) == (MegatronEngine, MegatronLMOptimizerWrapper)
    assert type(prepared) is MegatronLMSchedulerWrapper
    assert run.prepare(model) is model
    assert type(run.unwrap_model(model)).__name__ == "GPT2LMHeadModel"
    for batch in loader:
        with run.accumulate(model):
            outputs = model(**batch)
            run.backward(outputs.loss)
            norm = run.clip_grad_norm_(model.parameters(), 0.1)
            before = next(model.parameters()).detach().clone()
            optimizer.step()
            prepared.step()
            optimizer.zero_grad()
            assert torch.equal(before, next(model.parameters()))
    assert norm > 0.1
    assert (model.iteration, optimizer.step_was_skipped, prepared.get_last_lr()) == (2, False, [RATE])
    with pytest.raises(Exception, match="Megatron-LM's engine has stepped already, and clips norms alone"):
        run.clip_grad_value_(model.parameters(), 0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.clip_grad_norm_(model.parameters(), 1.0)
        run.clip_grad_norm_(model.parameters(), 1.0)
    assert ["gradient_clipping=0.1" in str(one.message) for one in told] == [True]
    found = gather_across_data_parallel_groups({"loss": outputs.loss, "rank": torch.tensor([run.process_index])})
    assert (found["loss"].tolist(), found["rank"].tolist()) == ([outputs.loss.item()] * 2, [0, 1])
    with pytest.raises(Exception, match="a second model with megatron_lm_plugin"):
        run.prepare(model_of("GPT2"))
    model, optimizer = run.free_memory(model, optimizer)
    run.prepare(model_of("GPT2"))
    begun(gradient_clipping=0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        other = begun()
        other.gradient_accumulation_steps = 2
        other.prepare(model_of("GPT2"))
    assert any("gradient_accumulation_steps=2 has no effect" in str(one.message) for one in told)
    assert other.gradient_accumulation_steps == 1


def low_precision_trains() -> None:
    import torch
    from torch.utils.data import DataLoader

    from accelerate_cpp import Accelerator
    from accelerate_cpp.state import AcceleratorState, GradientState
    from accelerate_cpp.utils import MegatronLMPlugin

    for precision, fields in (("bf16", {"tp_degree": 2}), ("fp16", {}), ("fp16", {"pp_degree": 2})):
        AcceleratorState._reset_state()
        GradientState._reset_state()
        plugin = MegatronLMPlugin(num_micro_batches=2, **fields)
        run = Accelerator(cpu=True, mixed_precision=precision, megatron_lm_plugin=plugin)
        assert plugin.megatron_lm_default_args[precision] is True
        model = model_of("Llama")
        model, _, loader = run.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=RATE),
            DataLoader(rows_of("Llama", 4) * 8, batch_size=2, collate_fn=collated),
        )
        losses = [model(**batch).loss.item() for batch in loader]
        assert losses[-1] < losses[0] - 0.1, (precision, fields, losses)


def losses_rates_and_norms_are_logged_once() -> None:
    import io
    import tempfile
    from contextlib import redirect_stdout

    import torch
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.data import DataLoader

    from accelerate_cpp.utils import broadcast_object_list

    (folder,) = broadcast_object_list([tempfile.mkdtemp()])
    run = begun(tensorboard_dir=folder)
    model = model_of("Llama")
    model, _, loader = run.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=RATE),
        DataLoader(rows_of("Llama", 16), batch_size=2, collate_fn=collated),
    )
    losses = [model(**batch).loss.item() for batch in loader]
    model.eval()
    validated = [model(**batch).loss.item() for batch in loader]
    printed = io.StringIO()
    with redirect_stdout(printed):
        model.train()
    mean = sum(validated) / 2
    expected = f"validation loss at iteration 2 | lm loss value: {mean:.6E} | lm loss PPL: {math.exp(mean):.6E}\n"
    assert printed.getvalue() == (expected if run.is_last_process else "")
    if run.is_last_process:
        model._writer.close()
        events = EventAccumulator(folder)
        events.Reload()
        logged = {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
        assert logged["lm loss"] == pytest.approx(losses)
        assert logged["learning-rate"] == [RATE, RATE]
        assert logged["lm loss validation"] == pytest.approx([mean])
        assert min(logged["grad-norm"]) > 0
        assert logged["skipped"] == [0, 0]


def prepared_llama(run: Any, rows: int = 16, **loader: Any) -> tuple[Any, Any, Any]:
    import torch
    from torch.utils.data import DataLoader

    model = model_of("Llama")
    data = DataLoader(rows_of("Llama", rows), batch_size=MICRO_ROWS, collate_fn=collated, **loader)
    prepared: tuple[Any, Any, Any] = run.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE), data)
    return prepared


def schedules_may_come_later_and_need_an_engine() -> None:
    import torch

    from accelerate_cpp.utils import MegatronLMDummyScheduler

    run = begun()
    with pytest.raises(Exception, match="a MegatronLMDummyScheduler without its model and optimizer"):
        run.prepare(MegatronLMDummyScheduler(None, total_num_steps=4))
    model, optimizer, loader = prepared_llama(run)
    schedule = run.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer.optimizer, lambda step: 0.1**step))
    for batch in loader:
        model(**batch)
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(RATE / 100)
    other = begun(no_wd_decay_cond=lambda name, parameter: False)
    plain = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    with pytest.raises(Exception, match=r"a ConstantLR with megatron_lm_plugin, .* pass a MegatronLMDummyScheduler"):
        other.prepare(model_of("Llama"), plain, torch.optim.lr_scheduler.ConstantLR(plain))


def only_the_engine_steps() -> None:
    import torch

    run = begun()
    model, _, loader = prepared_llama(run)
    batch = next(iter(loader))
    with pytest.raises(Exception, match=r"train_batch: with megatron_lm_plugin, .* is a whole step"):
        run.train_batch(batch)
    with pytest.raises(Exception, match="backward: a loss with a graph in a run with megatron_lm_plugin"):
        run.backward(next(model.parameters()).sum())
    with torch.no_grad(), pytest.raises(Exception, match="a call in training mode is a step, but gradients are off"):
        model(**batch)
    with pytest.raises(Exception, match="a batch with no tensor"):
        model()
    with pytest.warns(UserWarning, match="join_uneven_inputs has no effect"), run.join_uneven_inputs([model]):
        pass
    uneven = begun()
    uneven.even_batches = False
    with pytest.raises(Exception, match="even_batches=False with megatron_lm_plugin"):
        uneven.prepare(model_of("Llama"))
    with pytest.raises(Exception, match="already has a state without this plugin"):
        from accelerate_cpp import Accelerator
        from accelerate_cpp.utils import MegatronLMPlugin

        Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(num_micro_batches=7))
    same = type(run)(cpu=True, megatron_lm_plugin=uneven.state.megatron_lm_plugin)
    assert same.distributed_type == "MEGATRON_LM"


def only_known_batches_are_split_along_the_sequence() -> None:
    for kind, fields in (
        ("MegatronBert", {}),
        ("Llama", {"custom_get_batch_function": lambda iterator: next(iterator)}),
        ("Llama", {"return_logits": True}),
    ):
        run = begun(context_parallel_size=2, **fields)
        with pytest.raises(Exception, match="context_parallel_size"):
            run.prepare(model_of(kind))


def reports_are_means_quotients_or_rows() -> None:
    import torch

    def loss_func(mask: Any, losses: Any) -> Any:
        rows = (losses * mask).sum(1)
        reported = {"lm loss": rows.mean(), "rows": rows, "share": (rows.sum(), mask.sum())}
        return rows.mean(), reported

    for fields in ({}, {"pp_degree": 2}):
        run = begun(custom_loss_function=loss_func, **fields)
        model, _, loader = prepared_llama(run)
        batch = next(iter(loader))
        model.eval()
        with torch.no_grad():
            found = model.eval_step(**batch)
        assert found["rows"].shape == (len(batch["input_ids"]),)
        assert found["share"] < found["lm loss"]
        outputs = model(**batch)
        assert outputs.loss.item() == pytest.approx((found["lm loss"] + found["share"]).item())


def batches_are_made_once() -> None:
    import torch

    made = []

    def get_batch(iterator: Any) -> Any:
        data = next(iterator)
        tokens = data["input_ids"]
        made.append(len(tokens))
        mask = torch.ones_like(tokens, dtype=torch.float)
        return tokens, tokens.roll(-1, 1), mask, None, None

    run = begun(custom_get_batch_function=get_batch)
    model, _, loader = prepared_llama(run)
    model(**next(iter(loader)))
    assert made == [MICRO_ROWS] * MICRO_BATCHES


def a_model_of_the_program_keeps_groups_and_the_end_of_its_texts() -> None:
    import torch

    run = begun(custom_model_provider_function=lambda: model_of("GPT2"))
    given = model_of("GPT2")
    names = dict(given.named_parameters())
    groups = [
        {"params": [one for one in names.values() if one.ndim > 1], "weight_decay": 0.5},
        {"params": [one for one in names.values() if one.ndim == 1], "weight_decay": 0.0, "lr": 0.2},
    ]
    _, optimizer = run.prepare(given, torch.optim.AdamW(groups, lr=0.1))
    found = [(group["lr"], group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]
    assert found == [(0.1, 0.5, 10), (0.2, 0.0, 18)]
    plugin = run.state.megatron_lm_plugin
    assert plugin.megatron_lm_default_args["eos_token_id"] == END
    run.free_memory()
    plugin.custom_model_provider_function = None
    other = model_of("Llama")
    other.config.eos_token_id = [5, 6]
    run.prepare(other)
    assert plugin.megatron_lm_default_args["eos_token_id"] == 5
    with pytest.raises(Exception, match="custom_prepare_model_function without custom_model_provider_function"):
        begun(custom_prepare_model_function=lambda provider: provider()).prepare(model_of("GPT2"))


SCENARIOS = [
    schedules_may_come_later_and_need_an_engine,
    only_the_engine_steps,
    only_known_batches_are_split_along_the_sequence,
    reports_are_means_quotients_or_rows,
    batches_are_made_once,
    a_model_of_the_program_keeps_groups_and_the_end_of_its_texts,
    losses_rates_and_norms_are_logged_once,
    train_steps_of_the_program_train_as_they_say,
    checkpoints_go_on_where_they_were_also_on_another_mesh,
    stages_have_the_layers_that_the_plugin_counts,
    logits_of_evaluations_are_those_of_the_process,
    parameters_that_conditions_name_have_groups_of_their_own,
    data_in_megatrons_form_comes_from_a_function_of_the_program,
    the_engine_steps_and_everything_else_leaves_it_alone,
    low_precision_trains,
]


def scenarios() -> dict[str, str]:
    """What went wrong, by scenario."""
    import traceback

    found = {}
    for scenario in SCENARIOS:
        try:
            scenario()
        except Exception:
            found[scenario.__name__] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    return run_processes(scenarios, 2, timeout=600, environment=OFFLINE)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_programs_for_megatron(failures: list[dict[str, str]], scenario: Any) -> None:
    for found in failures:
        assert scenario.__name__ not in found, found[scenario.__name__]
