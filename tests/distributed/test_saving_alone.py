"""``save_state`` and ``load_state`` on some of the processes: ``if accelerator.is_main_process: ...``."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from network_namespaces import ADDRESSES, Host
from processes import run_processes, start_processes

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

BACKENDS = pytest.mark.parametrize("backend", ["cpu:shm", "gloo"])
FILES = {"accelerate_cpp.json", "model.safetensors", "optimizer.bin", "random_states_0.pkl"}


def started(folder: str, backend: str = "cpu:shm", **project: Any) -> tuple[Any, Any, Any]:
    import torch

    from accelerate_cpp import Accelerator
    from accelerate_cpp.utils import InitProcessGroupKwargs, ProjectConfiguration

    configuration, group = ProjectConfiguration(project_dir=folder, **project), InitProcessGroupKwargs(backend=backend)
    accelerator = Accelerator(cpu=True, project_config=configuration, kwargs_handlers=[group])
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    return accelerator, *accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))


def train(accelerator: Any, model: Any, optimizer: Any, steps: int = 2) -> None:
    import torch

    for _ in range(steps):
        accelerator.backward(model(torch.randn(2, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def weights(accelerator: Any, model: Any) -> list[float]:
    import torch

    return torch.cat([weight.detach().flatten() for weight in accelerator.unwrap_model(model).parameters()]).tolist()


class Heard(logging.Handler):
    """The warnings of this package."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("accelerate_cpp").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def saves_on_the_main_process(folder: str, backend: str, blocking: bool) -> tuple[list[float], list[float], list[str]]:
    """Weights when they were saved, and at the end; the checkpoint is loaded by all after more training."""
    accelerator, model, optimizer = started(folder, backend)
    heard = Heard()
    accelerator.register_save_state_pre_hook(lambda _models, _weights, path: Path(path, "hook.txt").write_text("x"))
    for step in range(3):
        train(accelerator, model, optimizer)
        if accelerator.is_main_process:
            accelerator.save_state(os.path.join(folder, "checkpoint"), blocking=blocking)
            accelerator.save_model(model, os.path.join(folder, f"model-{step}"))
    saved = weights(accelerator, model)
    train(accelerator, model, optimizer)
    accelerator.wait_for_everyone()
    accelerator.load_state(os.path.join(folder, "checkpoint"))
    loaded = weights(accelerator, model)
    train(accelerator, model, optimizer)
    accelerator.end_training()
    return saved, loaded, heard.lines


@BACKENDS
@pytest.mark.parametrize("blocking", [True, False])
def test_a_checkpoint_of_the_main_process_is_whole_and_all_load_it(
    tmp_path: Path, backend: str, blocking: bool
) -> None:
    outcomes = run_processes(saves_on_the_main_process, 2, str(tmp_path), backend, blocking)
    assert outcomes[0][0] == outcomes[0][1] == outcomes[1][0] == outcomes[1][1]
    assert set(os.listdir(tmp_path / "checkpoint")) == FILES | {"hook.txt"}
    assert (tmp_path / "model-2" / "model.safetensors").is_file()
    assert outcomes[0][2] == []
    assert len(outcomes[1][2]) == 1
    assert "random_states_1.pkl is missing (the random states of rank 1)" in outcomes[1][2][0]


def trains_and_may_save(folder: str, backend: str, saver: int | None) -> list[float]:
    import torch

    accelerator, model, optimizer = started(folder, backend)
    torch.manual_seed(accelerator.process_index)
    for step in range(4):
        if saver == accelerator.process_index:
            accelerator.save_state(os.path.join(folder, str(step)))
        train(accelerator, model, optimizer)
        accelerator.gather(torch.ones(2))
    return weights(accelerator, model)


@BACKENDS
def test_training_is_the_same_whether_somebody_saves_alone(tmp_path: Path, backend: str) -> None:
    expected = run_processes(trains_and_may_save, 3, str(tmp_path), backend, None)
    assert run_processes(trains_and_may_save, 3, str(tmp_path), backend, 0) == expected
    assert set(os.listdir(tmp_path / "3")) == FILES


def saves_on_another_process(folder: str) -> list[str]:
    accelerator, model, optimizer = started(folder)
    heard = Heard()
    if accelerator.process_index == 1:
        accelerator.save_state(os.path.join(folder, "checkpoint"))
    train(accelerator, model, optimizer)
    return heard.lines


def test_a_process_that_is_not_the_main_one_saves_nothing_alone_and_says_so(tmp_path: Path) -> None:
    main, other = run_processes(saves_on_another_process, 2, str(tmp_path))
    assert main == []
    assert len(other) == 1
    assert "save_state was called on rank 1, but neither on all ranks" in other[0]
    assert os.listdir(tmp_path) == []


def saves_in_turns(folder: str, backend: str, numbered: bool) -> list[str]:
    import torch

    accelerator, model, optimizer = started(folder, backend, automatic_checkpoint_naming=numbered, total_limit=4)
    torch.manual_seed(accelerator.process_index)
    places = []
    for name in ("a", "b", "a"):
        if accelerator.is_main_process:
            accelerator.save_state(None if numbered else os.path.join(folder, name))
        if numbered:  # two calls that name no folder are the same call if nothing is between them
            train(accelerator, model, optimizer)
        places.append(accelerator.save_state(None if numbered else os.path.join(folder, f"{name}-all")).name)
        train(accelerator, model, optimizer)
    return places


@BACKENDS
@pytest.mark.parametrize("numbered", [False, True])
def test_checkpoints_of_one_and_of_all_follow_each_other(tmp_path: Path, backend: str, numbered: bool) -> None:
    outcomes = run_processes(saves_in_turns, 2, str(tmp_path), backend, numbered)
    expected = ["checkpoint_1", "checkpoint_3", "checkpoint_5"] if numbered else ["a-all", "b-all", "a-all"]
    assert outcomes == [expected, expected]
    place = tmp_path / "checkpoints" if numbered else tmp_path
    assert set(os.listdir(place / expected[-1])) == FILES | {"random_states_1.pkl"}
    assert set(os.listdir(place / ("checkpoint_4" if numbered else "a"))) == FILES


def loads_alone(folder: str, backend: str) -> tuple[list[float], list[float]]:
    accelerator, model, optimizer = started(folder, backend)
    accelerator.save_state(os.path.join(folder, "checkpoint"))
    before = weights(accelerator, model)
    train(accelerator, model, optimizer)
    if accelerator.process_index == 1:
        accelerator.load_state(os.path.join(folder, "checkpoint"))
    after = weights(accelerator, model)
    accelerator.wait_for_everyone()
    return before, after


@BACKENDS
def test_one_process_may_load_alone(tmp_path: Path, backend: str) -> None:
    (before, after), (start, loaded) = run_processes(loads_alone, 2, str(tmp_path), backend)
    assert before == start == loaded
    assert after != before


def dies_while_the_main_process_saves(folder: str, who: int) -> list[str]:
    from accelerate_cpp.checkpoint import writing as saving

    accelerator, model, optimizer = started(folder)
    train(accelerator, model, optimizer)
    path = os.path.join(folder, "checkpoint")
    if accelerator.is_main_process:
        accelerator.save_state(path)
    train(accelerator, model, optimizer)
    if who == 0:
        saving.Checkpoint._write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    if accelerator.process_index == who == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if accelerator.is_main_process:
        accelerator.save_state(path)
    else:
        accelerator.wait_for_everyone()
    return sorted(os.listdir(path))


@pytest.mark.parametrize("who", [0, 1])
def test_a_death_meanwhile_loses_no_checkpoint(tmp_path: Path, who: int) -> None:
    outcomes = start_processes(dies_while_the_main_process_saves, 2, str(tmp_path), who)
    assert outcomes[who].exit_code == -signal.SIGKILL
    if who == 0:
        assert outcomes[1].exit_code == 1
        assert "PeerLost" in outcomes[1].stderr
    else:
        assert outcomes[0].value == sorted(FILES)
    assert [name for name in os.listdir(tmp_path) if not name.startswith(".")] == ["checkpoint"]
    assert run_processes(reads, 1, str(tmp_path / "checkpoint")) == [True]


def dies_before_a_checkpoint_of_all(folder: str, backend: str, way: str, by: str) -> tuple[str, list[str]]:
    """A program that saves on all processes, as far as ``way`` tells; rank 1 dies, rank 0 saves, and saves again."""
    from accelerate_cpp.errors import PeerLost

    accelerator, model, optimizer = started(folder, backend, automatic_checkpoint_naming=True)
    if way == "resumed" and not accelerator.resume():
        accelerator.save_state()
        return "", []
    assert way != "saved" or accelerator.save_state()
    assert way != "would resume" or not accelerator.resume()
    train(accelerator, model, optimizer)
    if accelerator.process_index == 1:
        if by == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("no such batch")
    told = ""
    try:
        accelerator.save_state()
    except PeerLost as lost:
        told = str(lost)
    before = sorted(os.listdir(os.path.join(folder, "checkpoints"))) if os.path.exists(folder + "/checkpoints") else []
    accelerator.save_state()  # the program knows now, and saves what it has
    return told, before


@pytest.mark.parametrize("way", ["saved", "resumed", "would resume", "unknown"])
def test_a_death_before_a_checkpoint_of_all_leaves_the_one_before(tmp_path: Path, way: str) -> None:
    if way == "resumed":
        run_processes(dies_before_a_checkpoint_of_all, 2, str(tmp_path), "cpu:shm", way, "kill")
    outcomes = start_processes(dies_before_a_checkpoint_of_all, 2, str(tmp_path), "cpu:shm", way, "kill")
    assert outcomes[1].exit_code == -signal.SIGKILL
    told, before = outcomes[0].value
    earlier = ["checkpoint_0"] if way in ("saved", "resumed") else []
    if way == "unknown":  # what was trained must not be lost
        assert (told, before) == ("", ["checkpoint_0"])
        assert "only rank 0 takes part: save_state at" in outcomes[0].stderr
    else:
        assert "waited for rank 1: rank 1 has ended" in told
        assert before == earlier
        assert set(os.listdir(tmp_path / "checkpoints" / f"checkpoint_{len(earlier)}")) == FILES


def test_a_process_that_would_save_nothing_alone_misses_one_that_died(tmp_path: Path) -> None:
    """It may not go on as if the checkpoint were there: where all were to save, the main process may have failed."""
    outcomes = start_processes(dies_before_a_checkpoint_of_all, 3, str(tmp_path), "cpu:shm", "unknown", "kill")
    assert outcomes[0].value == ("", ["checkpoint_0"])
    assert "waited for rank 1: rank 1 has ended" in outcomes[2].value[0]


def saves_when_one_has_left(folder: str, backend: str, gone: int) -> str:
    from accelerate_cpp.errors import PeerLost

    accelerator, model, optimizer = started(folder, backend)
    train(accelerator, model, optimizer)
    if accelerator.process_index == gone:
        return "left"
    try:
        accelerator.save_state(os.path.join(folder, "checkpoint"))
    except PeerLost as lost:
        return str(lost)
    return "went on"


@BACKENDS
def test_a_process_does_not_go_on_as_if_one_that_has_left_had_saved(tmp_path: Path, backend: str) -> None:
    told = run_processes(saves_when_one_has_left, 2, str(tmp_path), backend, 0)[1]
    # With torch's backend it may be the store that is missed: it is in rank 0's process here.
    waited_for = "rank 0" if told.startswith("save_state on") else "the others"
    assert f"rank 1 waited for {waited_for}, but a rank has left the group: " in told


def test_one_that_has_left_is_not_missed_where_the_main_process_saves(tmp_path: Path) -> None:
    assert run_processes(saves_when_one_has_left, 3, str(tmp_path), "cpu:shm", 2) == ["went on", "went on", "left"]
    assert run_processes(reads, 1, str(tmp_path / "checkpoint")) == [True]


@BACKENDS
def test_an_error_of_another_process_is_told_where_it_is_missed(tmp_path: Path, backend: str) -> None:
    outcomes = start_processes(dies_before_a_checkpoint_of_all, 2, str(tmp_path), backend, "saved", "error")
    assert outcomes[1].exit_code == 1
    told, before = outcomes[0].value
    assert "rank 1 failed: its program ended with ValueError: no such batch" in told
    assert before == ["checkpoint_0"]


def test_the_last_statement_in_a_notebook_may_be_it_after_checkpoints_of_all(tmp_path: Path) -> None:
    (tmp_path / "cell.py").write_text(
        "import torch\n"
        "from accelerate_cpp import Accelerator, notebook_launcher\n"
        "def train():\n"
        "    accelerator = Accelerator(cpu=True)\n"
        "    accelerator.prepare(torch.nn.Linear(2, 2))\n"
        "    accelerator.save_state('all')\n"
        "    if accelerator.is_main_process:\n"
        "        accelerator.save_state('alone')\n"
        "notebook_launcher(train, num_processes=3)\n"
    )
    done = subprocess.run([sys.executable, "cell.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert set(os.listdir(tmp_path / "alone")) == FILES - {"optimizer.bin"}


def reads(path: str) -> bool:
    accelerator, _, _ = started(path)
    accelerator.load_state(path)
    return True


@pytest.mark.parametrize("backend", ["cpu:shm", pytest.param("gloo", marks=pytest.mark.long)])
def test_the_last_statement_of_a_script_may_be_it(tmp_path: Path, backend: str) -> None:
    """The other processes end meanwhile."""
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "from accelerate_cpp import Accelerator\n"
        "from accelerate_cpp.utils import InitProcessGroupKwargs\n"
        f"group = InitProcessGroupKwargs(backend={backend!r})\n"
        "accelerator = Accelerator(cpu=True, kwargs_handlers=[group])\n"
        "model = accelerator.prepare(torch.nn.Linear(2, 2))\n"
        "accelerator.backward(model(torch.ones(1, 2)).sum())\n"
        "if accelerator.is_main_process:\n"
        "    accelerator.save_state('checkpoint')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "accelerate_cpp.commands.launch", "--cpu", "--num_processes", "3", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, "rank 0" in done.stderr) == (0, False), done.stderr
    assert set(os.listdir(tmp_path / "checkpoint")) == FILES - {"optimizer.bin"}


def saves_on_hosts(hosts: tuple[Host, Host] | None, folder: str) -> tuple[list[str], list[str]]:
    """On two hosts of two ranks, or, without, on four that take each other for ranks of other hosts."""
    from accelerate_cpp.comm import hosts as own_hosts

    if hosts is None:
        own_hosts.find_hosts = lambda store, rank, size, numbers: list(range(size))
    else:
        hosts[int(os.environ["RANK"]) // 2].enter()
    accelerator, model, optimizer = started(folder)
    train(accelerator, model, optimizer)
    alone = []
    if accelerator.is_main_process:
        accelerator.save_state(os.path.join(folder, "alone"))
        alone = sorted(os.listdir(os.path.join(folder, "alone")))
    train(accelerator, model, optimizer)
    accelerator.save_state(os.path.join(folder, "all"))
    return alone, sorted(os.listdir(os.path.join(folder, "all")))


def check_hosts(hosts: tuple[Host, Host] | None, folder: Path, **options: Any) -> None:
    outcomes = run_processes(saves_on_hosts, 4, hosts, str(folder), **options)
    assert outcomes[0][0] == sorted(FILES)
    assert outcomes[0][1] == sorted(FILES | {f"random_states_{rank}.pkl" for rank in range(4)})


def test_the_main_process_may_save_alone_where_ranks_talk_over_a_network(tmp_path: Path) -> None:
    check_hosts(None, tmp_path)


@pytest.mark.long
def test_the_main_process_may_save_alone_on_two_hosts(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    check_hosts(hosts, tmp_path, environment={"MASTER_ADDR": ADDRESSES[0]})


def does_on_one_process(folder: str, who: int) -> list[str]:
    """What else programs do on one process alone; what came of it there."""
    import torch

    accelerator, model, optimizer = started(folder)
    train(accelerator, model, optimizer)
    if accelerator.process_index == who:
        accelerator.init_trackers("project", config={"lr": 0.1})
        accelerator.log({"loss": 1.0}, step=1)
        state = accelerator.get_state_dict(model)
        accelerator.save(state, os.path.join(folder, "state.bin"))
        accelerator.save_model(model, os.path.join(folder, "model"), safe_serialization=False)
        own = accelerator.unwrap_model(model)
        assert type(own) is torch.nn.Linear
        loader = accelerator.prepare(torch.utils.data.DataLoader(list(range(8)), batch_size=2))
        batches = [batch.tolist() for batch in loader]
        assert len(batches) == 2, batches
        accelerator.free_memory()
    accelerator.wait_for_everyone()
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("who", [0, 1])
def test_what_else_may_be_done_on_one_process_alone(tmp_path: Path, who: int) -> None:
    outcomes = run_processes(does_on_one_process, 2, str(tmp_path), who)
    assert outcomes[0] == outcomes[1] == (["model", "state.bin"] if who == 0 else [])
