"""Engines of DeepSpeed train as one process on the whole batch does, and go on from checkpoints to the last bit."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from processes import run_processes, start_processes
from scenarios import failures_of
from test_sharded_training import STEPS, adamw, decoder, loss_of, one_process, same, sgd, sharded, words

# Not imported here: that sets variables of this process, with which tests can no longer be forks.
pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

# Torch is imported inside the functions: each runs in a process of its own, and the collecting one needs none of it.

SCENARIOS: dict[str, Callable[[], None]] = {}


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[function.__name__] = function
    return function


def stage() -> int:
    return int(os.environ["STAGE"])


def accelerator(config: dict[str, Any] | None = None, fields: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """One that trains in the stage of this start, without clipping unless ``fields`` or ``config`` say so."""
    from accelerate_cpp import Accelerator
    from accelerate_cpp.state import AcceleratorState, GradientState
    from accelerate_cpp.utils import DeepSpeedPlugin

    AcceleratorState._reset_state()
    GradientState._reset_state()
    given: dict[str, Any] = {"gradient_clipping": 0.0, "zero_stage": stage(), "zero3_save_16bit_model": True}
    plugin = DeepSpeedPlugin(**(given | (fields or {}))) if config is None else DeepSpeedPlugin(hf_ds_config=config)
    return Accelerator(cpu=True, deepspeed_plugin=plugin, **arguments)


def configuration(**others: Any) -> dict[str, Any]:
    zero = {"stage": stage(), "stage3_gather_16bit_weights_on_model_save": True}
    return {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "gradient_clipping": 0.0, **others}


def prepared(run: Any, make_optimizer: Callable[[Any], Any] = adamw, seed: int = 0) -> tuple[Any, Any]:
    """A decoder and its optimizer; rank 0 has the values."""
    model = decoder(seed if run.is_main_process else seed + 1)
    run.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 2
    model, optimizer = run.prepare(model, make_optimizer(model.parameters()))
    return model, optimizer


def plain_weights(run: Any, model: Any) -> dict[str, Any]:
    """Those of ``model``, on rank 0."""
    state: dict[str, Any] = run.get_state_dict(model)
    return {name: value.clone() for name, value in state.items()}


@contextmanager
def common_folder(run: Any) -> Iterator[Path]:
    """A folder of all ranks, which does not exist yet."""
    from accelerate_cpp.utils import broadcast_object_list

    (name,) = broadcast_object_list([tempfile.mkdtemp() if run.is_main_process else None])
    yield Path(name) / "checkpoint"
    run.wait_for_everyone()


def equals_one_process(make_optimizer: Callable[[Any], Any], micro_batches: int, max_norm: float) -> None:
    run = accelerator(fields={"gradient_clipping": max_norm}, gradient_accumulation_steps=micro_batches)
    model, optimizer = prepared(run, make_optimizer)
    alone = decoder(0)
    expected = one_process(alone, make_optimizer, run.num_processes, micro_batches, max_norm or None)
    found = sharded(run, model, optimizer, micro_batches, max_norm or None)
    same(found[0], expected[0], rtol=2e-5)
    same(found[1], expected[1], rtol=2e-5)
    weights = plain_weights(run, model)
    if make_optimizer is adamw:
        return  # it divides what rounding leaves of gradients near 0 by itself: single weights differ by up to its rate
    for name, value in alone.state_dict().items() if run.is_main_process else ():
        same(weights[name].tolist(), value.tolist(), rtol=1e-3)


@scenario
def it_trains_as_one_process() -> None:
    equals_one_process(adamw, 1, 0.0)


@scenario
def it_trains_as_one_process_with_accumulation() -> None:
    equals_one_process(sgd, 3, 0.0)


@scenario
def it_trains_as_one_process_with_clipping() -> None:
    equals_one_process(sgd, 1, 1.0)


@scenario
def it_trains_as_one_process_with_accumulation_and_clipping() -> None:
    equals_one_process(adamw, 2, 1.0)


@scenario
def what_is_prepared_has_the_known_types() -> None:
    import torch

    from accelerate_cpp.utils import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper

    run = accelerator()
    assert run.deepspeed_engine_wrapped is None
    model, optimizer = prepared(run)
    assert (run.distributed_type, run.state.distributed_type) == ("DEEPSPEED", "DEEPSPEED")
    assert (type(model).__name__, type(optimizer)) == ("DeepSpeedEngine", DeepSpeedOptimizerWrapper)
    assert type(run.unwrap_model(model)).__name__ == "Decoder"
    assert run.prepare(model) is model
    wrapped = run.deepspeed_engine_wrapped
    assert (type(wrapped), wrapped.engine) == (DeepSpeedEngineWrapper, model)
    assert (run.scaler, run.native_amp, run.mixed_precision) == (None, False, "no")
    assert run.deepspeed_config["train_batch_size"] == 2 * run.num_processes
    assert (optimizer.step(), optimizer.step_was_skipped) == (None, False)
    before = plain_weights(run, model)
    optimizer.step()  # backward does
    assert all(torch.equal(value, before[name]) for name, value in plain_weights(run, model).items())
    (nothing,) = run.free_memory(model)
    assert nothing is run.deepspeed_engine_wrapped is None


@scenario
def without_synchronisation_gradients_add_up_and_no_step_is_taken() -> None:
    import torch

    run = accelerator()
    model, _ = prepared(run, sgd)
    before = plain_weights(run, model)
    with run.no_sync(model):
        run.backward(loss_of(model, words(0, run.process_index)) / 2)
    assert all(torch.equal(value, before[name]) for name, value in plain_weights(run, model).items())
    run.backward(loss_of(model, words(1, run.process_index)) / 2)
    alone = decoder(0)
    optimizer = sgd(alone.parameters())
    batches = [words(m, rank) for m in range(2) for rank in range(run.num_processes)]
    loss_of(alone, torch.cat(batches)).backward()
    optimizer.step()
    weights = plain_weights(run, model)
    for name, value in alone.state_dict().items() if run.is_main_process else ():
        same(weights[name].tolist(), value.tolist())


@scenario
def a_loss_that_the_program_has_divided_is_not_divided_again() -> None:
    run = accelerator(gradient_accumulation_steps=4)
    model, _ = prepared(run, sgd)
    alone = accelerator()
    other, _ = prepared(alone, sgd)
    run.sync_gradients = True
    run.backward(loss_of(model, words(0, run.process_index)), scale_wrt_gas=False)
    alone.backward(loss_of(other, words(0, run.process_index)))
    first, second = plain_weights(run, model), plain_weights(alone, other)
    for name in first:
        same(first[name].tolist(), second[name].tolist())


@scenario
def a_step_may_be_the_boundary_of_accumulation_itself() -> None:
    run = accelerator(configuration(managed_gradient_accumulation=False), gradient_accumulation_steps=2)
    model, optimizer = prepared(run, sgd)
    expected, _ = one_process(decoder(0), sgd, run.num_processes, 2)
    same(sharded(run, model, optimizer, 2)[0], expected, rtol=2e-5)


@scenario
def bf16_follows_full_precision() -> None:
    expected, _ = one_process(decoder(0), adamw, 2 if "WORLD_SIZE" not in os.environ else int(os.environ["WORLD_SIZE"]))
    run = accelerator(mixed_precision="bf16")
    model, optimizer = prepared(run)
    assert (run.mixed_precision, run.native_amp) == ("bf16", False)
    found, _ = sharded(run, model, optimizer)
    same(found, expected, rtol=0.03)


@scenario
def a_schedule_of_torch_steps_once_for_each_process_and_one_of_the_configuration_with_the_engine() -> None:
    import torch

    from accelerate_cpp.utils import DeepSpeedSchedulerWrapper, DummyOptim, DummyScheduler

    run = accelerator()
    model = decoder()
    optimizer = sgd(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, run.num_processes, 0.5)
    run.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 2
    model, optimizer, schedule = run.prepare(model, optimizer, schedule)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run.backward(loss_of(model, words(0, 0)))
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0] == 0.05

    described = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        "scheduler": {
            "type": "WarmupLR",
            "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
            | {"warmup_type": "linear"},
        },
    }
    run = accelerator(configuration(**described))
    model = decoder()
    stand_in = DummyOptim(model.parameters(), lr=0.02)
    model, optimizer, schedule = run.prepare(model, stand_in, DummyScheduler(stand_in, warmup_num_steps=4))
    assert type(schedule) is DeepSpeedSchedulerWrapper
    rates = []
    for step in range(4):
        run.backward(loss_of(model, words(step, 0)))
        optimizer.step()
        schedule.step()
        rates.append(round(optimizer.param_groups[0]["lr"], 6))
    assert rates == [0.0, 0.005, 0.01, 0.015]  # as DeepSpeed alone has them


@scenario
def a_run_goes_on_from_its_checkpoint_as_if_it_had_not_been_interrupted() -> None:
    import torch

    from accelerate_cpp.checkpoint.manifest import read_manifest

    run = accelerator(fields={"gradient_clipping": 1.0})
    model, optimizer = prepared(run)
    with common_folder(run) as folder:
        sharded(run, model, optimizer, first=STEPS - 3)
        run.save_state(folder)
        manifest = read_manifest(folder)
        assert manifest is not None
        assert manifest.world_size == run.num_processes
        files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert files == {"accelerate_cpp.json", *manifest.files}
        assert {"latest", "pytorch_model/mp_rank_00_model_states.pt"} <= files or stage() == 3
        expected = sharded(run, model, optimizer)[0], plain_weights(run, model)

        again = accelerator(fields={"gradient_clipping": 1.0})
        other, stepping = prepared(again, seed=7)
        again.load_state(folder)
        losses = sharded(again, other, stepping)[0]
        weights = plain_weights(again, other)
    assert losses == expected[0]
    assert all(torch.equal(weights[name], value) for name, value in expected[1].items())


@scenario
def a_damaged_checkpoint_changes_nothing_and_one_that_would_run_code_is_refused() -> None:
    import torch

    from accelerate_cpp.errors import CheckpointError

    run = accelerator()
    model, _ = prepared(run)
    with common_folder(run) as folder:
        run.save_state(folder)
        before = plain_weights(run, model)
        victim = max((folder / "pytorch_model").iterdir(), key=lambda path: path.stat().st_size)
        whole = victim.read_bytes()
        run.wait_for_everyone()
        if run.is_main_process:
            victim.write_bytes(whole[: len(whole) // 2])
        run.wait_for_everyone()
        with pytest.raises(CheckpointError, match=victim.name):
            run.load_state(folder)
        assert all(torch.equal(value, before[name]) for name, value in plain_weights(run, model).items())
        run.wait_for_everyone()
        if run.is_main_process:
            (folder / "accelerate_cpp.json").unlink()  # as the original writes it
            for path in (folder / "pytorch_model").iterdir():
                torch.save({"module": Malicious(folder)}, path)
        run.wait_for_everyone()
        with pytest.raises(CheckpointError, match="would call functions that the file names"):
            run.load_state(folder)
        assert not (folder / "ran").exists()


@scenario
def a_universal_checkpoint_is_read_without_running_code() -> None:
    import torch

    from accelerate_cpp.errors import CheckpointError

    if stage() == 0:
        return  # it has none
    run = accelerator(config=configuration(zero_allow_untested_optimizer=True))
    model, optimizer = prepared(run)
    with common_folder(run) as folder:
        sharded(run, model, optimizer, first=STEPS - 3)
        run.save_state(folder)
        if run.is_main_process:
            make_universal(folder / "pytorch_model")
            (folder / "accelerate_cpp.json").unlink()
        run.wait_for_everyone()
        expected = sharded(run, model, optimizer)[0]

        universal = configuration(zero_allow_untested_optimizer=True, checkpoint={"load_universal": True})
        again = accelerator(config=universal)
        other, stepping = prepared(again, seed=7)
        again.load_state(folder)
        same(sharded(again, other, stepping)[0], expected, rtol=1e-5)
        before = plain_weights(again, other)
        again.wait_for_everyone()
        if again.is_main_process:
            torch.save({"param_groups": Malicious(folder)}, folder / "pytorch_model" / "zero" / "optimizer_state.pt")
        again.wait_for_everyone()
        with pytest.raises(CheckpointError, match=r"optimizer_state\.pt: .* would call functions that the file names"):
            again.load_state(folder)
        assert not (folder / "ran").exists()
        assert all(torch.equal(value, before[name]) for name, value in plain_weights(again, other).items())


def make_universal(tag: Path) -> None:
    """Turns the files of an engine into those that any number of processes can read, by DeepSpeed's own script."""
    from deepspeed.checkpoint import ds_to_universal

    made = tag.with_name("universal")
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    folders = {"input_folder": str(tag), "output_folder": str(made)}
    ds_to_universal.main(argparse.Namespace(**folders, **options, inject_missing_state=True))
    shutil.rmtree(tag)
    made.rename(tag)


@scenario
def what_cannot_be_pickled_is_an_error_on_all_ranks() -> None:
    run = accelerator()
    model, optimizer = prepared(run)
    with common_folder(run) as folder:
        with pytest.raises(Exception, match=r"(?i)can't pickle|can't get local object|rank \d failed with"):
            run.save_state(folder, client_state={"of the program": lambda: 0})
        run.wait_for_everyone()
        assert list(folder.parent.iterdir()) == []
        sharded(run, model, optimizer)
        run.save_state(folder, client_state={"of the program": 0})
        run.load_state(folder)


class Malicious:
    """Creates a file where it is loaded without care."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "ran")

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


@scenario
def what_contradicts_the_configuration_is_told_with_both_values() -> None:
    from accelerate_cpp.errors import InvalidArgument

    def warned(action: Callable[[], Any]) -> str:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            action()
        return "\n".join(str(one.message) for one in told)

    run = accelerator(configuration(gradient_accumulation_steps=4), gradient_accumulation_steps=2)
    text = warned(lambda: prepared(run))
    assert "gradient_accumulation_steps is 4 in the configuration of DeepSpeed, and the Accelerator has 2" in text
    assert run.gradient_accumulation_steps == 4

    run = accelerator(configuration(train_batch_size=7))
    with pytest.raises(InvalidArgument, match=r"train_batch_size=7, but train_micro_batch_size_per_gpu=2 × "):
        prepared(run)

    run = accelerator(fields={"gradient_clipping": 0.5})
    model, _ = prepared(run)
    run.backward(loss_of(model, words(0, 0)))
    text = warned(lambda: run.clip_grad_norm_(model.parameters(), 1.0))
    assert re.search("max_norm=1.0.*gradient_clipping=0.5", text)
    assert warned(lambda: run.clip_grad_norm_(model.parameters(), 0.5)) == ""
    with pytest.raises(InvalidArgument, match="clip_grad_value_: DeepSpeed has stepped in backward already"):
        run.clip_grad_value_(model.parameters(), 1.0)
    with pytest.raises(InvalidArgument, match="pass a mean, without weight"):
        run.backward(loss_of(model, words(0, 0)), weight=3.0)


@scenario
def a_model_and_its_optimizer_belong_into_one_call() -> None:
    from accelerate_cpp.errors import InvalidArgument

    run = accelerator(configuration())
    model = decoder()
    with pytest.raises(InvalidArgument, match=r"Adam\w* was given without its model"):
        run.prepare(adamw(model.parameters()))
    first, second = decoder(), decoder()
    with pytest.raises(InvalidArgument, match="steps parameters of Decoder, Decoder"):
        run.prepare(first, second, adamw([*first.parameters(), *second.parameters()]))


def run_scenarios() -> dict[str, str]:
    return failures_of(SCENARIOS, "shm")


LONG = pytest.mark.long


@pytest.fixture(
    scope="module", params=[3, *(pytest.param(stage, marks=LONG) for stage in (0, 1, 2))], ids="stage {}".format
)
def failures(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_processes(run_scenarios, 2, timeout=280, environment={"STAGE": str(request.param)})


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_every_rank(failures: list[dict[str, str]], name: str) -> None:
    report = [f"rank {rank}: {own[name]}" for rank, own in enumerate(failures) if name in own]
    assert not report, "\n".join(report)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "number"), [(1, 0), (1, 2), (1, 3), (3, 1), (3, 2), (4, 3)])
def test_on_other_numbers_of_processes(ranks: int, number: int) -> None:
    found = run_processes(run_scenarios, ranks, timeout=400, environment={"STAGE": str(number)})
    assert found == [{}] * ranks, "\n".join(text for own in found for text in own.values())


def killed_in_backward() -> tuple[str, str] | None:
    run = accelerator()
    model, _ = prepared(run)
    run.backward(loss_of(model, words(0, 0)))
    if run.process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        run.backward(loss_of(model, words(1, 0)))
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("number", [pytest.param(0, marks=LONG), pytest.param(2, marks=LONG), 3])
def test_a_killed_rank_is_named_by_the_backward_of_the_other(number: int) -> None:
    first, second = start_processes(killed_in_backward, 2, environment={"STAGE": str(number)})
    assert second.exit_code == -signal.SIGKILL
    kind, message = first.value
    assert kind == "PeerLost"
    assert re.search(r"at .*distributed/test_\w+\.py:\d+ on rank 0 waited for rank 1", message), message


ALONE = """
import json
import torch
from accelerate_cpp import Accelerator, DeepSpeedPlugin
run = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
loader = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4)
model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
for batch in loader:
    loss = model(batch).square().mean()
    run.backward(loss)
    optimizer.step()
print(json.dumps([run.num_processes, str(run.distributed_type), loss.item()]))
"""


@pytest.mark.long
def test_one_process_needs_no_launcher(tmp_path: Path) -> None:
    environment = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    ended = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    processes, kind, loss = json.loads(ended.stdout.splitlines()[-1])
    assert (processes, kind.removeprefix("DistributedType.")) == (1, "DEEPSPEED")
    assert 0.0 < loss < 10.0


def offloaded(number: int) -> list[float]:
    os.environ["STAGE"] = str(number)
    run = accelerator(
        fields={"gradient_clipping": 1.0, "offload_optimizer_device": "cpu"}, gradient_accumulation_steps=2
    )
    model, optimizer = prepared(run)
    inner: Any = optimizer.optimizer
    assert type(getattr(inner, "optimizer", inner)).__name__ == "DeepSpeedCPUAdam"
    losses, _ = sharded(run, model, optimizer, 2, 1.0)
    expected, _ = one_process(decoder(0), adamw, run.num_processes, 2, 1.0)
    same(losses, expected, rtol=1e-4)
    return losses


@pytest.mark.long  # its operator is compiled first, for a minute
@pytest.mark.parametrize("number", [1, 2, 3])
def test_states_of_the_optimizer_may_be_offloaded(number: int) -> None:
    run_processes(offloaded, 2, number, timeout=400)


def killed_while_it_saves(folder: Path) -> str | None:
    run = accelerator()
    model, _ = prepared(run)
    run.backward(loss_of(model, words(0, 0)))
    run.save_state(folder / "first")
    before = plain_weights(run, model)
    run.backward(loss_of(model, words(1, 0)))
    if run.process_index == 1:
        model.save_checkpoint = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    try:
        run.save_state(folder / "second")
    except Exception as error:
        torch_save(before, folder / "weights.pt")
        return type(error).__name__
    return None


def torch_save(state: Any, path: Path) -> None:
    import torch

    torch.save(state, path)


def resumed(folder: Path) -> bool:
    import torch

    run = accelerator()
    model, _ = prepared(run, seed=3)
    run.load_state(folder / "first")
    weights, expected = plain_weights(run, model), torch.load(folder / "weights.pt")
    return not run.is_main_process or all(torch.equal(weights[name], value) for name, value in expected.items())


@pytest.mark.long
def test_a_rank_that_is_killed_in_a_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    environment = {"STAGE": "2"}
    first, second = start_processes(killed_while_it_saves, 2, tmp_path, environment=environment)
    assert second.exit_code == -signal.SIGKILL
    assert first.value == "PeerLost", first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "weights.pt"]
    assert run_processes(resumed, 2, tmp_path, environment=environment) == [True, True]
