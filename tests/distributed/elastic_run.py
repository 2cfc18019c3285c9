"""Launchers of an elastic run on this machine, each in the place of a machine, which tests end and start again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

from accelerate_cpp.launch.plan.host_resources import free_port
from accelerate_cpp.launch.workers.supervisor import GRACE_SECONDS
from launched import patient_launch
from network_namespaces import Host

PATIENCE_SECONDS = 240.0
_THREADS_OF_LEADER = 4  # of the program, of the coordinator, and two of the connection with it
TRAINS = """
import collections, os, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from accelerate_cpp import Accelerator, DataLoaderConfiguration
from accelerate_cpp.utils import ProjectConfiguration, gather_object, set_seed

epochs, size = int(sys.argv[1]), int(sys.argv[2])
set_seed(5)
accelerator = Accelerator(
    cpu=True,
    dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True),
    project_config=ProjectConfiguration(project_dir=".", automatic_checkpoint_naming=True, total_limit=2),
)
features = torch.linspace(-1, 1, size * 4).reshape(size, 4)
model = torch.nn.Linear(4, 1)
loader = DataLoader(TensorDataset(features, torch.arange(size)), batch_size=2, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


class Seen:
    samples = []

    def state_dict(self):
        return {"samples": list(self.samples)}

    def load_state_dict(self, state):
        self.samples = state["samples"]


seen = Seen()
accelerator.register_for_checkpointing(seen)
accelerator.resume()
for epoch in range(loader.iteration, epochs):
    for batch, samples in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        seen.samples += accelerator.gather_for_metrics(samples).tolist()
        accelerator.save_state()
        accelerator.leave_if_preempted()
        if accelerator.is_main_process:
            print(f"step {accelerator.num_processes} {len(seen.samples)}", flush=True)
    if any(gather_object([os.path.exists("enough")])):
        break
if accelerator.is_main_process:
    with open("seen", "w") as file:
        file.write(" ".join(map(str, seen.samples)))
"""


def first_of_two() -> tuple[str, ...]:
    """Flags of the launcher of one machine of two, with two processes, which does not wait for the other."""
    flags = ("--num_machines", "1:2", "--num_processes", "4", "--main_process_ip", "127.0.0.1")
    return (*flags, "--main_process_port", str(free_port()), "--rdzv_conf", "last_call_timeout=1")


class ElasticRun:
    """Launchers that run ``train.py`` in ``folder``; ``lines`` are what all of them have printed so far,
    ``command`` is what the next one is started with.

    Args:
        workers: of each launcher.
        address: of the launcher that leads, as the others see it.
        options: the value of ``--rdzv_conf``.
        grace_seconds: what workers get to end, if more than usual.
    """

    def __init__(
        self,
        folder: Path,
        arguments: list[str],
        most: int = 3,
        max_restarts: int = 0,
        workers: int = 1,
        address: str = "127.0.0.1",
        options: str = "last_call_timeout=600",
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self.folder = folder
        (folder / "train.py").write_text(TRAINS)
        self._log = folder / "log"
        self._log.touch()
        launch = patient_launch(supervisor_GRACE_SECONDS=grace_seconds)
        self.command = [*launch, "--cpu", "--num_machines", f"1:{most}"]
        self.command += ["--num_processes", str(most * workers), "--max_restarts", str(max_restarts)]
        self.command += ["--main_process_ip", address, "--main_process_port", str(free_port())]
        self.command += ["--rdzv_conf", options, "train.py", *arguments]
        self.launchers: list[subprocess.Popen[str]] = []
        self._file: TextIO = self._log.open("a")

    def __enter__(self) -> ElasticRun:
        return self

    def __exit__(self, *error: object) -> None:
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait()
        self._file.close()

    @property
    def lines(self) -> list[str]:
        return self._log.read_text().splitlines()

    def start(self, host: Host | None = None, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        """A launcher more, on ``host`` if given; the first one leads the run when this returns."""
        entered = [] if host is None else ["nsenter", "--net", "--target", str(host.pid)]
        launcher = subprocess.Popen(
            [*entered, *self.command],
            cwd=self.folder,
            stdin=stdin,
            stdout=self._file,
            stderr=self._file,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.launchers.append(launcher)
        threads = Path(f"/proc/{launcher.pid}/task")
        while self.launchers == [launcher] and len(list(threads.iterdir())) < _THREADS_OF_LEADER:
            assert launcher.poll() is None, "\n".join(self.lines)
            time.sleep(0.02)
        return launcher

    def until_steps_of(self, processes: int) -> None:
        """Returns when the run has taken one more step, and with so many processes."""
        before, deadline = len(self.lines), time.monotonic() + PATIENCE_SECONDS
        while not any(line.startswith(f"step {processes} ") for line in self.lines[before:]):
            assert time.monotonic() < deadline, "\n".join(self.lines)
            assert self.launchers[0].poll() is None, "\n".join(self.lines)
            time.sleep(0.02)

    def until(self, text: str) -> None:
        """Returns when something has been printed that contains ``text``."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not any(text in line for line in self.lines):
            assert time.monotonic() < deadline, "\n".join(self.lines)
            time.sleep(0.02)

    def kill_a_worker(self, launcher: subprocess.Popen[str]) -> None:
        """One of the processes that train is gone, while its launcher lives."""
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        workers = [pid for pid in map(int, children) if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(workers[-1], signal.SIGKILL)

    def is_enough(self) -> None:
        """The run ends with this epoch or the next."""
        (self.folder / "enough").touch()

    def end(self) -> list[int]:
        """The exit statuses of the launchers that are left."""
        return [launcher.wait(PATIENCE_SECONDS) for launcher in self.launchers]

    def shrink(self, chance: random.Random) -> None:
        """A launcher other than the first, which leads, is lost, or told to end."""
        lost = self.launchers.pop(chance.randrange(1, len(self.launchers)))
        lost.send_signal(chance.choice([signal.SIGKILL, signal.SIGTERM]))
        lost.wait(PATIENCE_SECONDS)

    def seen(self) -> list[int]:
        return [int(sample) for sample in (self.folder / "seen").read_text().split()]


def seen_by_one_process(folder: Path, arguments: list[str]) -> list[int]:
    """The samples in the order in which a run of one process, which nothing disturbs, sees them."""
    folder.mkdir()
    (folder / "train.py").write_text(TRAINS)
    subprocess.run([sys.executable, "train.py", *arguments], cwd=folder, check=True, timeout=PATIENCE_SECONDS)
    return [int(sample) for sample in (folder / "seen").read_text().split()]
