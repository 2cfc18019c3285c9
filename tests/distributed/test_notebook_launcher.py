"""``notebook_launcher`` in a fresh process, as a kernel is one: torch in use, interrupts, deaths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

KERNEL = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from accelerate_cpp.launchers import debug_launcher, notebook_launcher

def no_child_is_left():
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return True
    return False
"""

USES_TORCH = """
import torch
def work():
    torch.set_num_threads(2)
    a = torch.ones(512, 512, requires_grad=True)
    (a @ a).sum().backward()
    torch.nn.functional.conv2d(torch.ones(8, 16, 32, 32), torch.ones(16, 16, 3, 3))
    torch.linalg.svd(torch.ones(64, 64))
    return a.grad[0, 0].item()
"""
PATIENCE_SECONDS = 120.0


def _run(code: str, cwd: Path) -> tuple[int, str, str]:
    result = subprocess.run(
        [sys.executable, "-c", KERNEL + code],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    return result.returncode, result.stdout, result.stderr


def _lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat[stat.rindex(")") + 2] not in "ZX"


def test_workers_compute_with_two_threads_after_the_kernel_did(tmp_path: Path) -> None:
    code = USES_TORCH + (
        "work()\n"
        "os.environ['OMP_NUM_THREADS'] = '2'\n"
        "for _ in range(3): notebook_launcher(lambda: print(work(), torch.get_num_threads()), num_processes=2)\n"
        "print(no_child_is_left(), work())\n"
    )
    assert _run(code, tmp_path) == (0, "1024.0 2\n" * 6 + "True 1024.0\n", "")


def test_worker_may_use_loader_processes(tmp_path: Path) -> None:
    code = USES_TORCH + (
        "from torch.utils.data import DataLoader\n"
        "work()\n"
        "notebook_launcher(lambda: print(len(list(DataLoader(range(10), num_workers=1)))), num_processes=2)\n"
        "print(no_child_is_left())\n"
    )
    assert _run(code, tmp_path)[:2] == (0, "10\n10\nTrue\n")


def test_workers_meet_in_a_process_group(tmp_path: Path) -> None:
    code = USES_TORCH + (
        "import torch.distributed as dist\n"
        "def meet():\n"
        "    from accelerate_cpp.comm.process_group import connect\n"
        "    assert connect(device_type='cpu', backend='gloo')\n"
        "    total = torch.tensor([float(dist.get_rank() + 1)])\n"
        "    dist.all_reduce(total)\n"
        "    print(total.item())\n"
        "    dist.destroy_process_group()\n"
        "work()\n"
        "notebook_launcher(meet, num_processes=2)\n"
    )
    status, out, err = _run(code, tmp_path)
    assert (status, out) == (0, "3.0\n3.0\n"), err


def test_closures_need_no_pickling_and_the_error_is_theirs(tmp_path: Path) -> None:
    code = (
        "lock = threading.Lock()\n"
        "def outer(limit):\n"
        "    def train(x):\n"
        "        with lock:\n"
        "            if os.environ['RANK'] == '1': raise ValueError(f'over {limit}: {x}')\n"
        "        time.sleep(600)\n"
        "    return train\n"
        "try:\n"
        "    notebook_launcher(outer(3), ('five',), num_processes=2)\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
        "print(no_child_is_left())\n"
    )
    status, out, err = _run(code, tmp_path)
    assert (status, err) == (0, "")
    assert out.startswith("rank 1 failed: ValueError: over 3: five\n\nTraceback (most recent call last):\n")
    assert out.endswith("in train\nValueError: over 3: five\nTrue\n")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("os._exit(7)", "rank 1 failed: exit code 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 failed: killed by SIGKILL (signal 9)"),
    ],
)
def test_death_of_a_worker_leaves_the_kernel_alive(tmp_path: Path, fault: str, words: str) -> None:
    code = (
        "def train():\n"
        f"    if os.environ['RANK'] == '1': {fault}\n"
        "    time.sleep(600)\n"
        "for _ in range(2):\n"
        "    try: debug_launcher(train)\n"
        "    except RuntimeError as error: print(error)\n"
        "print(no_child_is_left())\n"
    )
    assert _run(code, tmp_path) == (0, f"{words}\n{words}\nTrue\n", "")


def test_interrupt_of_the_kernel_ends_the_workers_and_not_the_kernel(tmp_path: Path) -> None:
    code = (
        "def train():\n"
        "    print('running', flush=True)\n"
        "    time.sleep(600)\n"
        "try: notebook_launcher(train, num_processes=2)\n"
        "except KeyboardInterrupt: print('interrupted', no_child_is_left())\n"
        "notebook_launcher(lambda: print('again'), num_processes=2)\n"
    )
    kernel = subprocess.Popen([sys.executable, "-u", "-c", KERNEL + code], stdout=subprocess.PIPE, text=True)
    assert kernel.stdout is not None
    assert [kernel.stdout.readline() for _ in range(2)] == ["running\n"] * 2
    kernel.send_signal(signal.SIGINT)
    out, _ = kernel.communicate(timeout=PATIENCE_SECONDS)
    assert (kernel.returncode, out) == (0, "interrupted True\nagain\nagain\n")


def test_killed_kernel_takes_its_workers_along(tmp_path: Path) -> None:
    code = "notebook_launcher(lambda: (print(os.getpid(), flush=True), time.sleep(600)), num_processes=2)\n"
    kernel = subprocess.Popen([sys.executable, "-u", "-c", KERNEL + code], stdout=subprocess.PIPE, text=True)
    assert kernel.stdout is not None
    workers = [int(kernel.stdout.readline()) for _ in range(2)]
    os.kill(kernel.pid, signal.SIGKILL)
    kernel.communicate(timeout=PATIENCE_SECONDS)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(map(_lives, workers)):
        assert time.monotonic() < deadline, "workers outlived the kernel"
        time.sleep(0.01)


def test_exit_handlers_of_the_kernel_run_once(tmp_path: Path) -> None:
    code = (
        "import atexit\n"
        "atexit.register(print, 'handler')\n"
        "sys.stdout.write('buffered ')\n"
        "notebook_launcher(lambda: print('worker'), num_processes=2)\n"
    )
    assert _run(code, tmp_path)[1] == "buffered worker\nworker\nhandler\n"
