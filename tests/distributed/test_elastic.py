"""``launch --num_machines 1:3``: the run goes on with fewer processes, and with more when they come back."""

from __future__ import annotations

import copy
import inspect
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from accelerate_cpp.launch.workers.supervisor import GRACE_SECONDS  # noqa: E402
from elastic_run import PATIENCE_SECONDS, ElasticRun, seen_by_one_process  # noqa: E402
from network_namespaces import ADDRESSES, Host, find_nft  # noqa: E402
from processes import run_processes  # noqa: E402

SIZE = 480


def assert_seen_as_by_one_process(run: ElasticRun, folder: Path) -> None:
    """Each sample of each epoch that the run has taken, exactly once and in the same order."""
    epochs = len(run.seen()) // SIZE
    assert run.seen() == seen_by_one_process(folder / "alone", [str(epochs), str(SIZE)])


def test_a_machine_is_lost_and_comes_back_and_each_sample_is_seen_once(tmp_path: Path) -> None:
    with ElasticRun(tmp_path, ["1000", str(SIZE)], most=2) as run:
        run.start(), run.start()
        run.until_steps_of(2)
        run.launchers.pop().kill()
        run.until_steps_of(1)
        run.start()
        run.until_steps_of(2)
        run.is_enough()
        assert run.end() == [0, 0], "\n".join(run.lines)
        assert any("is gone" in line for line in run.lines)
        assert any("has come" in line for line in run.lines)
    assert_seen_as_by_one_process(run, tmp_path)


@pytest.mark.long
def test_a_machine_that_is_told_to_end_saves_and_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    with ElasticRun(tmp_path, ["1", str(SIZE)], most=2) as run:
        run.start(), run.start()
        run.until_steps_of(2)
        leaving = run.launchers.pop()
        leaving.send_signal(signal.SIGTERM)
        assert leaving.wait(PATIENCE_SECONDS) == 75, "\n".join(run.lines)
        run.until_steps_of(1)
        assert run.end() == [0], "\n".join(run.lines)
    assert run.seen() == seen_by_one_process(tmp_path / "alone", ["1", str(SIZE)])


@pytest.mark.long
def test_a_machine_that_is_lost_twice_waits_before_it_returns(tmp_path: Path) -> None:
    options = "last_call_timeout=600,return_delay=500"
    with ElasticRun(tmp_path, ["1000", "48"], most=2, options=options) as run:
        run.start(), run.start()
        for _ in range(2):
            run.until_steps_of(2)
            run.launchers.pop().kill()
            run.until_steps_of(1)
            run.start()
        run.until("was lost 2 times soon after it had begun to take part, so it takes part again in ")
        run.until_steps_of(1)
        run.is_enough()
        assert run.end() == [0, 0], "\n".join(run.lines)


@pytest.mark.long
def test_a_leader_that_was_stopped_for_a_while_goes_on(tmp_path: Path) -> None:
    """For longer than a launcher may say nothing: it could hear nobody, and nobody could hear it."""
    options = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2"
    with ElasticRun(tmp_path, ["1000", "48"], most=2, options=options) as run:
        leader = run.start()
        run.until_steps_of(1)
        leader.send_signal(signal.SIGSTOP)
        time.sleep(6)
        leader.send_signal(signal.SIGCONT)
        run.until_steps_of(1)
        run.is_enough()
        assert run.end() == [0], "\n".join(run.lines)
        assert not any("has said nothing" in line for line in run.lines), "\n".join(run.lines)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(find_nft() is None, reason="no command nft")
def test_a_worker_is_killed_and_a_network_is_cut(tmp_path: Path, hosts: tuple[Host, Host]) -> None:
    """The first takes a restart, with as many processes; the second takes none, and the run goes on with fewer."""
    arguments = ["1000", str(SIZE)]
    with ElasticRun(tmp_path, arguments, most=2, max_restarts=1, workers=2, address=ADDRESSES[0]) as run:
        run.start(hosts[0])
        other = run.start(hosts[1])
        run.until_steps_of(4)
        run.kill_a_worker(other)
        run.until("round 2: 2 machines, 4 processes")
        assert any("killed by SIGKILL" in line for line in run.lines), "\n".join(run.lines)
        run.until_steps_of(4)
        hosts[1].cut()
        try:
            run.until("round 3: 1 machine, 2 processes")
            run.until_steps_of(2)
            assert run.launchers.pop().wait(PATIENCE_SECONDS) == 1, "\n".join(run.lines)
        finally:
            hosts[1].mend()
        run.is_enough()
        assert run.end() == [0], "\n".join(run.lines)
        for who in ("the launcher on", f"the launcher at {ADDRESSES[0]}"):
            told = [line for line in run.lines if who in line and "has said nothing for 15 s" in line]
            assert told, "\n".join(run.lines)
    assert_seen_as_by_one_process(run, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_twenty_shrinks_and_grows_change_no_sample(tmp_path: Path) -> None:
    chance = random.Random(7)
    with ElasticRun(tmp_path, ["1000", str(SIZE)], options="last_call_timeout=600,return_delay=0.1") as run:
        for _ in range(3):
            run.start()
        run.until_steps_of(3)
        for _ in range(20):
            present = len(run.launchers)
            if present == 3 or (present == 2 and chance.random() < 0.5):
                run.shrink(chance)
            else:
                run.start()
            run.until_steps_of(len(run.launchers))
        run.is_enough()
        assert set(run.end()) == {0}, "\n".join(run.lines)
    assert_seen_as_by_one_process(run, tmp_path)


def test_the_end_of_the_launcher_that_leads_ends_the_others_with_a_sentence(tmp_path: Path) -> None:
    with ElasticRun(tmp_path, ["100", str(SIZE)], most=2) as run:
        leader, other = run.start(), run.start()
        run.until_steps_of(2)
        leader.kill()
        assert other.wait(PATIENCE_SECONDS) == 1, "\n".join(run.lines)
        assert any(
            "which leads the run, has gone; make sure that it has ended, and start the run again" in line
            for line in run.lines
        )


def test_all_save_when_the_launcher_that_leads_is_told_to_end(tmp_path: Path) -> None:
    with ElasticRun(tmp_path, ["100", str(SIZE)], most=2, grace_seconds=PATIENCE_SECONDS) as run:
        leader, other = run.start(), run.start()
        run.until_steps_of(2)
        leader.send_signal(signal.SIGTERM)
        assert (leader.wait(PATIENCE_SECONDS), other.wait(PATIENCE_SECONDS)) == (75, 75), "\n".join(run.lines)


def test_a_failure_ends_the_run_on_all_machines_with_its_status(tmp_path: Path) -> None:
    with ElasticRun(tmp_path, [], most=2) as run:
        (tmp_path / "train.py").write_text(
            "import os, sys\nfrom accelerate_cpp import Accelerator\n"
            "accelerator = Accelerator(cpu=True)\nif accelerator.process_index == 1: sys.exit(9)\n"
            "accelerator.wait_for_everyone()\n"
        )
        run.start(), run.start()
        assert run.end() == [9, 9], "\n".join(run.lines)


# What a shrunken run computes is compared with real runs of the full number of processes, and with torch's own.


def _data(count: int) -> Any:
    return torch.linspace(-1, 1, count * 3).reshape(count, 3) ** 2


def _trained(steps_of_full: int) -> tuple[list[float], list[float]]:
    """The weights after an epoch over 48 samples, and the learning rates of the schedule."""
    from accelerate_cpp import Accelerator

    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps_of_full)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    loader = torch.utils.data.DataLoader(_data(48), batch_size=2)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), schedule.get_last_lr()


@pytest.mark.parametrize(
    ("steps", "present"), [(1, 2), (2, 2), *(pytest.param(*one, marks=pytest.mark.long) for one in [(1, 1), (3, 3)])]
)
def test_fewer_processes_train_as_the_full_number_does(steps: int, present: int) -> None:
    expected = run_processes(_trained, 4, steps)[0]
    found = run_processes(_trained, present, steps, environment={"ACCELERATE_CPP_FULL_WORLD_SIZE": "4"})[0]
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=1e-5, atol=1e-6)
    assert found[1] == pytest.approx(expected[1])


def test_a_machine_alone_takes_the_steps_of_two(tmp_path: Path) -> None:
    """By a launch, which has to say how many processes there can be."""
    program = f"import torch\n{inspect.getsource(_data)}{inspect.getsource(_trained)}print(*_trained(1)[0])\n"
    with ElasticRun(tmp_path, [], most=2, options="last_call_timeout=0.1") as run:
        (tmp_path / "train.py").write_text("from __future__ import annotations\nfrom typing import Any\n" + program)
        run.start()
        assert run.end() == [0], "\n".join(run.lines)
    found = [float(number) for number in run.lines[-1].split()]
    expected = run_processes(_trained, 2, 1)[0][0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)


FINISHES = """
import os, time
from accelerate_cpp import Accelerator
from accelerate_cpp.runtime import preemption

accelerator = Accelerator(cpu=True, project_dir=".")
accelerator.leave_if_preempted("state")
accelerator.wait_for_everyone()
with open("begun", "a") as file:
    file.write("once\\n")
print("finishing", flush=True)
is_told = lambda: preemption._noticed is not None if accelerator.process_index else os.path.exists("enough")
while not is_told():  # as rank 0 writes the last files, and rank 1 ends
    time.sleep(0.05)
print(f"rank {accelerator.process_index} is done", flush=True)
"""


def test_a_run_that_is_finishing_when_a_machine_comes_is_over_when_it_is_done(tmp_path: Path) -> None:
    with ElasticRun(tmp_path, [], most=3, options="last_call_timeout=0.1") as run:
        (tmp_path / "train.py").write_text(FINISHES)
        run.command[run.command.index("1:3")] = "2:3"
        run.start(), run.start()
        while not (tmp_path / "begun").exists() or (tmp_path / "begun").read_text().split() != ["once", "once"]:
            time.sleep(0.05)
        run.start()
        run.until("rank 1 is done")
        time.sleep(2 * GRACE_SECONDS)  # longer than those get that save nothing
        run.is_enough()
        assert run.end()[:2] == [0, 0], "\n".join(run.lines)
        assert sum("rank 0 is done" in line for line in run.lines) == 1, "\n".join(run.lines)
    assert (tmp_path / "begun").read_text().split() == ["once", "once"]


def test_a_launcher_with_another_number_of_processes_is_told_so(tmp_path: Path) -> None:
    with ElasticRun(tmp_path, ["1000", str(SIZE)], most=2) as run:
        run.start()
        run.command[run.command.index("--num_processes") + 1] = "4"
        other = run.start()
        assert other.wait(PATIENCE_SECONDS) == 1, "\n".join(run.lines)
        run.until("cannot take part: it starts 2 processes as one of at most 2, those of this run start 1")


def test_an_elastic_run_ends_with_its_standard_input(tmp_path: Path) -> None:
    with ElasticRun(tmp_path, ["1000", str(SIZE)], most=2, options="last_call_timeout=0.1") as run:
        run.command.insert(run.command.index("--cpu"), "--ends_with_stdin")
        launcher = run.start(stdin=subprocess.PIPE)
        run.until_steps_of(1)
        assert launcher.stdin is not None
        launcher.stdin.close()
        assert launcher.wait(PATIENCE_SECONDS) == 75, "\n".join(run.lines)


def test_steps_with_fewer_samples_have_a_smaller_rate() -> None:
    environment = {"ACCELERATE_CPP_FULL_WORLD_SIZE": "4"}
    (found, _) = run_processes(_trained, 3, 1, environment=environment)[0]
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * 3 / 4, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99 ** (3 * step))
    for batch in copy.copy(_data(48)).split(6):
        model(batch).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--num_machines", "3:1"], "MIN:MAX with 1 ≤ MIN ≤ MAX and MAX ≥ 2, got '3:1'"),
        (["--num_machines", "1:x"], "an integer of at least 1, or MIN:MAX, got '1:x'"),
        (["--num_machines", "0"], "expected an integer of at least 1"),
        (["--num_machines", "1:2", "--use_deepspeed"], "engines of DeepSpeed fix the samples of a step"),
        (["--num_machines", "1:2", "--rdzv_conf", "timeout=3"], "expected last_call_timeout, join_timeout"),
        (["--num_machines", "1:2", "--hostfile", "hosts"], "ends all machines when one is lost"),
    ],
)
def test_refusals(tmp_path: Path, flags: list[str], sentence: str) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    (tmp_path / "train.py").touch()
    command = [sys.executable, "-m", "accelerate_cpp.commands.launch", "--cpu", "--main_process_ip", "127.0.0.1"]
    result = subprocess.run(
        [*command, "--num_processes", "2", *flags, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 2
    assert sentence in result.stderr


def test_ctrl_c_while_waiting_for_machines(tmp_path: Path) -> None:
    with ElasticRun(tmp_path, ["1", "8"]) as run:
        launcher = run.start()
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(PATIENCE_SECONDS) == 130
