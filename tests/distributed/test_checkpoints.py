"""Checkpoints of two processes: all of it or nothing, whoever fails or is killed, and whenever."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from processes import Outcome, run_processes, running, start_processes
from rank_process import await_end

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

FAILING = 1  # the rank
# When torch's wrapper has the last reference to a Gloo group, as the other package's may, its end can wait for a thread
# of the group that waits for Python's lock, and both for ever. So such groups stay until the program ends.
KEPT_GROUPS: list[Any] = []


def started(
    folder: str,
    seed: int = 0,
    package: str = "accelerate_cpp",
    width: int = 4,
    shards: dict[str, Any] | None = None,
    **project: Any,
) -> tuple[Any, Any, Any]:
    """An accelerator that numbers its checkpoints in ``folder``, a model and its optimizer, in ``shards`` if given."""
    import importlib

    import torch

    accelerate = importlib.import_module(package)
    options = {"project_dir": folder, "automatic_checkpoint_naming": True, **project}
    configuration = importlib.import_module(f"{package}.utils").ProjectConfiguration(**options)
    plugin = shards and accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, **shards)
    accelerator = accelerate.Accelerator(cpu=True, project_config=configuration, fsdp_plugin=plugin)
    if package == "accelerate":
        KEPT_GROUPS.append(torch.distributed.group.WORLD)
    torch.manual_seed(seed)
    model = torch.nn.Linear(width, width)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
    return accelerator, model, optimizer


def train(accelerator: Any, model: Any, optimizer: Any) -> list[float]:
    """Three steps on random batches; returns the losses."""
    import torch

    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 4)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def saves(folder: str, package: str, blocking: bool) -> list[float]:
    import torch

    accelerator, model, optimizer = started(folder, package=package)
    torch.manual_seed(accelerator.process_index)
    train(accelerator, model, optimizer)
    accelerator.save_state(**({} if blocking else {"blocking": False}))
    losses = train(accelerator, model, optimizer)
    accelerator.end_training()
    return losses


def continues(folder: str, package: str) -> tuple[list[float], int]:
    accelerator, model, optimizer = started(folder, seed=1, package=package)
    accelerator.load_state()
    return train(accelerator, model, optimizer), accelerator.save_iteration


@pytest.mark.parametrize("blocking", [True, False])
def test_every_rank_continues_where_it_was(tmp_path: Path, blocking: bool) -> None:
    expected = run_processes(saves, 2, str(tmp_path), "accelerate_cpp", blocking)
    assert expected[0] != expected[1]
    names = set(os.listdir(tmp_path / "checkpoints" / "checkpoint_0"))
    own = {"random_states_0.pkl", "random_states_1.pkl", "accelerate_cpp.json"}
    assert names == {"model.safetensors", "optimizer.bin"} | own
    assert run_processes(continues, 2, str(tmp_path), "accelerate_cpp") == [(losses, 1) for losses in expected]


@pytest.mark.parametrize(("writer", "reader"), [("accelerate_cpp", "accelerate"), ("accelerate", "accelerate_cpp")])
def test_each_package_continues_what_the_other_saved(tmp_path: Path, writer: str, reader: str) -> None:
    expected = run_processes(saves, 2, str(tmp_path), writer, True)
    found = run_processes(continues, 2, str(tmp_path), reader)
    assert [losses for losses, _ in found] == [pytest.approx(losses, rel=1e-5) for losses in expected]


def test_another_number_of_processes_goes_on(tmp_path: Path) -> None:
    run_processes(saves, 2, str(tmp_path), "accelerate_cpp", True)
    assert len(run_processes(continues, 1, str(tmp_path), "accelerate_cpp")) == 1
    assert len(run_processes(continues, 3, str(tmp_path), "accelerate_cpp")) == 3


def fails_on_one_rank(folder: str, blocking: bool) -> list[tuple[str, str]]:
    """What is raised on this rank when files of rank ``FAILING`` meet a full disk, and that training then goes on."""
    import torch

    from accelerate_cpp.checkpoint import layout as state_files

    accelerator, model, optimizer = started(folder)
    accelerator.save_state()
    write, raised = state_files.write_pickle, []
    if accelerator.process_index == FAILING:
        state_files.write_pickle = lambda path, content: write(Path("/dev/full"), [content, torch.zeros(1 << 18)])
    try:
        accelerator.save_state(blocking=blocking)
        train(accelerator, model, optimizer)
        accelerator.wait_for_checkpoint()
    except Exception as error:
        raised.append((type(error).__name__, str(error)))
    state_files.write_pickle = write
    train(accelerator, model, optimizer)
    accelerator.load_state()
    raised.append(("saved", accelerator.save_state().name))
    return raised


@pytest.mark.parametrize("blocking", [True, False])
def test_a_full_disk_of_one_rank_is_an_error_on_all_and_leaves_nothing(tmp_path: Path, blocking: bool) -> None:
    first, failing = run_processes(fails_on_one_rank, 2, str(tmp_path), blocking)
    assert first[0][0] == "OtherRankFailed"
    assert f"rank {FAILING} failed with SystemFailure" in first[0][1]
    assert "No space left" in first[0][1]
    assert failing[0][0] == "SystemFailure"
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_0", "checkpoint_1"]
    assert first[1] == failing[1] == ("saved", "checkpoint_1")


def ends_when_it_could_not_be_written(folder: str) -> None:
    from accelerate_cpp.checkpoint import layout as state_files

    accelerator, _, _ = started(folder)
    accelerator.save_state()
    write = state_files.write_pickle
    if accelerator.process_index == FAILING:
        state_files.write_pickle = lambda path, content: write(Path("/dev/full"), [content, bytes(1 << 20)])
    accelerator.save_state(blocking=False)


def test_a_program_whose_last_checkpoint_was_not_written_fails(tmp_path: Path) -> None:
    first, failing = start_processes(ends_when_it_could_not_be_written, 2, str(tmp_path), finalize=True)
    assert (first.exit_code, failing.exit_code) == (1, 1), failing.stderr
    assert f"rank {FAILING} failed with SystemFailure" in first.stderr.splitlines()[-1]
    assert "No space left" in failing.stderr.splitlines()[-1]
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_0"]


def dies_while_saving(folder: str) -> None:
    from accelerate_cpp.checkpoint import writing as saving

    accelerator, _, _ = started(folder)
    accelerator.save_state()
    if accelerator.process_index == FAILING:
        saving.Checkpoint._write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    accelerator.save_state()


def test_a_rank_that_dies_while_it_saves_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    first, dead = start_processes(dies_while_saving, 2, str(tmp_path))
    assert dead.exit_code == -signal.SIGKILL
    assert first.exit_code == 1
    assert f"rank {FAILING}" in first.stderr
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_0"]


def exits_while_it_is_written(folder: str) -> None:
    accelerator, _, _ = started(folder)
    accelerator.save_state(blocking=False)


def test_the_end_of_the_program_waits_for_the_writer(tmp_path: Path) -> None:
    outcomes: list[Outcome] = start_processes(exits_while_it_is_written, 2, str(tmp_path), fresh=True)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], [outcome.stderr for outcome in outcomes]
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_0"]


def saves_always(folder: str, blocking: bool, shards: dict[str, Any] | None) -> None:
    """Saves as often as it can, each time with its count as weights and moments; prints each count once it is saved.

    It is killed long before it ends.
    """
    import torch

    accelerator, model, optimizer = started(folder, width=200, shards=shards, total_limit=2)
    accelerator.backward(model(torch.ones(1, 200)).sum())
    optimizer.step()
    counted = [*model.parameters(), *(optimizer.state[weight]["exp_avg"] for weight in model.parameters())]
    count, checkpoints = 0, Path(folder, "checkpoints")
    if checkpoints.is_dir() and any(path.name.startswith("checkpoint_") for path in checkpoints.iterdir()):
        accelerator.load_state()
        counted = [*model.parameters(), *(optimizer.state[weight]["exp_avg"] for weight in model.parameters())]
        whole: list[Any] = [one.full_tensor() if shards else one for one in counted]
        values = torch.cat([one.detach().flatten() for one in whole])
        count = int(values[0])
        assert torch.equal(values, torch.full_like(values, count)), "of several checkpoints"
        accelerator.print("loaded", count, flush=True)
    accelerator.print("begins", flush=True)
    end = time.monotonic() + 300
    while time.monotonic() < end:
        count += 1
        with torch.no_grad():
            for one in counted:
                one.fill_(count)
        accelerator.save_state(blocking=blocking)
        if not blocking:
            accelerator.wait_for_checkpoint()
        accelerator.print("saved", count, flush=True)


def killed_at_random(
    folder: Path, world_size: int, blocking: bool, shards: dict[str, Any] | None, chance: random.Random
) -> tuple[int, list[int]]:
    """Runs :func:`saves_always` and kills all ranks at a random moment after none, one or two saves.

    Returns:
        What it loaded, and what it surely saved.
    """
    with running(saves_always, world_size, str(folder), blocking, shards) as job:
        deadline = time.monotonic() + 120
        saves = chance.randrange(3)
        while job.stdout(0).count("begins") + job.stdout(0).count("saved") <= saves:
            assert time.monotonic() < deadline, job.stdout(0)
            ended = [job.outcome(rank) for rank, process in enumerate(job.processes) if process.poll() is not None]
            assert not ended, ended
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.1))  # the moment is what the test is about
        for number in (signal.SIGSTOP, signal.SIGKILL):  # the first, that none outlives another and fails
            for process in chance.sample(job.processes, world_size):
                os.kill(process.pid, number)
        for process in job.processes:
            assert await_end(process, deadline) == -signal.SIGKILL
        lines = [line.split() for line in job.stdout(0).splitlines()]
    loaded = [int(count) for word, *rest in lines if word == "loaded" for count in rest]
    saved = [int(count) for word, *rest in lines if word == "saved" for count in rest]
    return (loaded or [0])[0], saved


def survives(folder: Path, kills: int, world_size: int, blocking: bool, shards: dict[str, Any] | None = None) -> None:
    chance, last, most = random.Random(world_size), 0, 2
    for _ in range(kills):
        loaded, saved = killed_at_random(folder, world_size, blocking, shards, chance)
        assert loaded >= last, f"checkpoint {last} was on the disk, and {loaded} was loaded"
        last = saved[-1] if saved else loaded
        # Whoever saves removes the oldest, down to two; and the kill may have come before that, time after time.
        most = 1 + (2 if saved else most)
        checkpoints = list((folder / "checkpoints").glob("checkpoint_*"))
        assert len(checkpoints) <= most
    assert last > 0


@pytest.mark.parametrize(("world_size", "blocking"), [(1, True), (1, False), (2, True)])
def test_no_kill_loses_the_last_checkpoint(tmp_path: Path, world_size: int, blocking: bool) -> None:
    survives(tmp_path, 3, world_size, blocking)


IN_SHARDS = [
    {"state_dict_type": f"{kind}_STATE_DICT", **({"zero_stage": stage} if stage else {})}
    for stage in (None, 1, 2)
    for kind in ("SHARDED", "FULL")
]


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "in the background"])
@pytest.mark.parametrize("kind", ["SHARDED", "FULL"])
def test_no_kill_loses_the_last_checkpoint_of_zero(tmp_path: Path, kind: str, blocking: bool) -> None:
    survives(tmp_path, 3, 2, blocking, {"zero_stage": 2, "state_dict_type": f"{kind}_STATE_DICT"})


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "in the background"])
@pytest.mark.parametrize("shards", IN_SHARDS, ids=lambda one: " ".join(map(str, one.values())))
def test_twenty_kills_never_lose_the_last_checkpoint_in_shards(
    tmp_path: Path, shards: dict[str, Any], blocking: bool
) -> None:
    survives(tmp_path, 20, 2, blocking, shards)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [1, 2])
def test_fifty_kills_never_lose_the_last_checkpoint(tmp_path: Path, world_size: int) -> None:
    survives(tmp_path, 50, world_size, blocking=True)
