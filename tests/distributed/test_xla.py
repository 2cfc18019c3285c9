"""Training through torch_xla by two processes, over a double of it: averages, and the order of the calls.

The double exchanges tensors of the CPU over Gloo, so what is expected comes from one process with the whole batch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from processes import run_processes

DOUBLES = Path(__file__).resolve().parents[1] / "doubles"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the double stands for torch_xla on Linux")


def on_double() -> Any:
    """The double, which the package takes for torch_xla in this process."""
    sys.path.insert(0, str(DOUBLES))
    import torch_xla

    torch_xla.treat_cpu_as_xla()
    return torch_xla


def _data() -> tuple[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(24, 4, generator=generator)
    return inputs, inputs.sum(1, keepdim=True)


def _model() -> Any:
    import torch

    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def _trained_alone(batch: int, steps_each: int, max_norm: float) -> list[Any]:
    """The parameters after one pass in one process, with batches that two processes would share."""
    import torch

    model, (inputs, targets) = _model(), _data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for begin in range(0, len(inputs), batch * steps_each):
        for part in range(begin, begin + batch * steps_each, batch):
            rows = slice(part, part + batch)
            (torch.nn.functional.mse_loss(model(inputs[rows]), targets[rows]) / steps_each).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def train(steps_each: int, max_norm: float) -> tuple[list[Any], list[str], str, tuple[int, int]]:
    """Trains with clipping; returns parameters, calls of one step, and what the state says."""
    double = on_double()
    import torch

    from accelerate_cpp import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=steps_each)
    model = _model()
    if accelerator.process_index == 1:  # which the first process has to tell the second
        with torch.no_grad():
            next(model.parameters()).zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*_data()), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    double.calls.clear()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    state = accelerator.state
    return (
        [parameter.detach().clone() for parameter in model.parameters()],
        list(double.calls),
        f"{state.distributed_type.value} {state.backend}",
        (state.process_index, state.num_processes),
    )


@pytest.mark.parametrize(("steps_each", "max_norm"), [(1, 0.05), (3, 100.0)])
def test_two_processes_train_as_one_with_the_whole_batch(steps_each: int, max_norm: float) -> None:
    import torch

    outcomes = run_processes(train, 2, steps_each, max_norm)
    expected = _trained_alone(8, steps_each, max_norm)
    for rank, outcome in enumerate(outcomes):
        parameters, calls, state, place = outcome
        assert (state, place) == ("XLA xla", (rank, 2))
        torch.testing.assert_close(parameters, expected, rtol=1e-5, atol=1e-6)
        # One average of all four gradients for each step, however often gradients are added up, and one start of what
        # has been recorded.
        steps = [call for call in calls if call not in ("next", "close") and not call.startswith("ParallelLoader")]
        assert steps == ["all_reduce sum of 4", "sync"] * (3 // steps_each)
        assert calls.count("next") == 3
        assert calls.index("all_reduce sum of 4") > calls.index("next")


def exchange() -> tuple[Any, ...]:
    """Collectives of nested data, objects, and the wait for everyone."""
    double = on_double()
    import torch

    from accelerate_cpp import Accelerator
    from accelerate_cpp.utils import broadcast, broadcast_object_list, gather_object, pad_across_processes, reduce

    accelerator = Accelerator()
    rank = accelerator.process_index
    own = torch.tensor([float(rank), float("nan") if rank else 1.0])
    double.calls.clear()
    gathered = accelerator.gather({"rows": torch.tensor([[rank]]), "loss": torch.tensor(float(rank))})
    of_gather = list(double.calls)
    double.calls.clear()
    accelerator.wait_for_everyone()
    waiting = list(double.calls)
    flags = torch.tensor([rank == 0, False])
    return (
        gathered,
        reduce(torch.tensor([rank + 1]), "mean").tolist(),
        reduce(torch.tensor([rank + 1.0]), "max").tolist(),
        broadcast(own).tolist(),
        broadcast(flags).tolist(),
        gather_object([rank]),
        broadcast_object_list([rank]),
        pad_across_processes(torch.ones(1 + rank, dtype=torch.long)).tolist(),
        of_gather,
        waiting,
    )


def test_nested_data_and_objects_reach_all_processes() -> None:
    for outcome in run_processes(exchange, 2):
        gathered, mean, largest, copied, flags, objects, first, padded, of_gather, waiting = outcome
        assert gathered["rows"].tolist() == [[0], [1]]
        assert gathered["loss"].tolist() == [0.0, 1.0]
        assert (mean, largest, copied, flags) == ([1.5], [2.0], [0.0, 1.0], [True, False])
        assert (objects, first) == ([0, 1], [0])
        assert padded[0] == 1
        assert len(padded) == 2
        # What was recorded before is started first, so that all processes compile the same.
        assert of_gather == ["sync", "all_gather", "sync"] * 2
        assert waiting == ["sync"]


def weigh(ranks: int) -> Any:
    """A step of sums that are divided by their weights, of batches of different sizes."""
    on_double()
    import torch

    from accelerate_cpp import Accelerator

    accelerator = Accelerator()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    inputs, targets = _data()
    rows = slice(0, 3) if accelerator.process_index == 0 else slice(3, 10)
    loss = torch.nn.functional.mse_loss(model(inputs[rows]), targets[rows], reduction="sum")
    accelerator.backward(loss, weight=rows.stop - rows.start)
    optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_sums_are_divided_by_the_weights_of_all_processes() -> None:
    import torch

    model, (inputs, targets) = _model(), _data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.nn.functional.mse_loss(model(inputs[:10]), targets[:10]).backward()
    optimizer.step()
    for outcome in run_processes(weigh, 2, 2):
        torch.testing.assert_close(outcome, [one.detach() for one in model.parameters()], rtol=1e-5, atol=1e-6)


def save(folder: str) -> tuple[list[str], int]:
    """Saves on both processes, changes everything, and loads it again."""
    double = on_double()
    import torch

    from accelerate_cpp import Accelerator
    from accelerate_cpp.utils import set_seed

    accelerator = Accelerator()
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    set_seed(17)
    accelerator.backward(model(_data()[0]).square().mean())
    optimizer.step()
    accelerator.save_state(folder)
    set_seed(23)
    accelerator.backward(model(_data()[0]).mean())
    optimizer.step()
    accelerator.load_state(folder)
    from torch_xla.core import xla_model

    del double
    return sorted(os.listdir(folder)), xla_model.get_rng_state()


def test_states_are_saved_once_and_seeds_come_back(tmp_path: Path) -> None:
    import torch

    for outcome in run_processes(save, 2, str(tmp_path / "state")):
        files, seed = outcome
        assert files == [
            *("accelerate_cpp.json", "model.safetensors", "optimizer.bin"),
            *("random_states_0.pkl", "random_states_1.pkl"),
        ]
        assert seed == 17
    states = torch.load(tmp_path / "state" / "random_states_1.pkl", weights_only=False)
    assert states["xm_seed"] == 17  # a whole number, as the original reads it


def refused() -> str:
    on_double()
    from accelerate_cpp import Accelerator
    from accelerate_cpp.errors import InvalidArgument

    try:
        Accelerator()
    except InvalidArgument as error:
        return str(error)
    return ""


def test_processes_that_are_threads_are_refused() -> None:
    for outcome in run_processes(refused, 2, environment={"DOUBLE_DEVICES": "2"}):
        assert "torch_xla runs 2 of its 2 processes as threads of this one" in outcome


def test_a_launched_script_is_called_by_torch_xla(tmp_path: Path) -> None:
    """Its workers import the script, and call the function with the arguments of the command line."""
    (tmp_path / "train.py").write_text(
        "import os, sys\n"
        "def work():\n"
        "    names = ('ACCELERATE_MIXED_PRECISION', 'ACCELERATE_DOWNCAST_BF16', 'FORK_LAUNCHED')\n"
        "    print(__name__, sys.argv[1:], *(os.environ.get(name) for name in names), flush=True)\n"
    )
    command = [sys.executable, "-m", "accelerate_cpp.commands.accelerate_cli", "launch", "--tpu"]
    flags = ["--mixed_precision", "bf16", "--downcast_bf16", "--main_training_function"]
    environment = {**os.environ, "PYTHONPATH": str(DOUBLES), "HF_HOME": str(tmp_path)}

    def run(function: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *flags, function, "train.py", "--epochs", "2"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    done = run("work")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["train ['--epochs', '2'] bf16 true true"] * 2
    missing = run("main")
    assert missing.returncode != 0
    assert "train.py has no function 'main', which torch_xla is to call on each TPU" in missing.stderr


def by_closure(ranks: int) -> tuple[list[Any], bool, bool]:
    """A step with a closure that computes gradients again, after one whose gradients are clamped."""
    on_double()
    import torch

    from accelerate_cpp import Accelerator

    accelerator = Accelerator()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    inputs, targets = _data()
    own = slice(accelerator.process_index * 12, accelerator.process_index * 12 + 12)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = torch.nn.functional.mse_loss(model(inputs[own]), targets[own])
        accelerator.backward(found)
        return found

    loss()
    before = accelerator.gradient_state.is_xla_gradients_synced
    accelerator.clip_grad_value_(model.parameters(), 0.01)
    after = accelerator.gradient_state.is_xla_gradients_synced
    optimizer.step()
    optimizer.step(loss)
    return [parameter.detach() for parameter in model.parameters()], before, after


def test_closures_and_clamped_gradients_see_averages() -> None:
    import torch

    model, (inputs, targets) = _model(), _data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for clamps in (True, False):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        if clamps:
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
    for parameters, before, after in run_processes(by_closure, 2, 2):
        torch.testing.assert_close(parameters, [one.detach() for one in model.parameters()], rtol=1e-5, atol=1e-6)
        assert (before, after) == (False, True)


def dispatched(ranks: int) -> list[list[int]]:
    """The batches that process 0 reads for both."""
    on_double()
    import torch

    from accelerate_cpp import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(7), batch_size=2))
    return [accelerator.gather_for_metrics(batch).tolist() for batch in loader]


def test_one_process_may_read_for_all() -> None:
    assert run_processes(dispatched, 2, 2) == [[[0, 1, 2, 3], [4, 5, 6]]] * 2
