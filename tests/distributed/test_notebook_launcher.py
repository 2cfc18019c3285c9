"""``notebook_launcher`` in a fresh process, as a kernel is one: torch in use, interrupts, deaths.

Kernels of kind "helper" say that they have initialised CUDA, so that their workers are forks of a helper process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accelerate_cpp.launch.plan.host_resources import free_port
from launched import lives, without_news
from processes import start_processes

pytest.importorskip("torch")

KERNEL = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from accelerate_cpp.launchers import debug_launcher, notebook_launcher
KERNEL = os.getpid()

def no_child_is_left():
    import psutil
    return psutil.Process().children(recursive=True) == HELPERS()
"""
KINDS = {
    "forks": "HELPERS = list\n",
    "helper": """
import torch, warnings, psutil
warnings.simplefilter("ignore")
torch.cuda.is_initialized = lambda: True
def HELPERS():
    from accelerate_cpp.launch.fork import fork_server
    return [psutil.Process(server.pid) for server in fork_server._servers.values() if server.lives]
""",
}

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


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _be_a_kernel(code: str, folder: str) -> None:
    """Runs ``code`` as what is typed into a kernel, which has no place among processes yet."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    os.chdir(folder)
    exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))


def _run(code: str, cwd: Path, kind: str) -> tuple[int, str, str]:
    code = KERNEL + KINDS[kind] + code
    [kernel] = start_processes(_be_a_kernel, 1, code, str(cwd), timeout=PATIENCE_SECONDS, finalize=True)
    return kernel.exit_code, kernel.stdout, kernel.stderr


def test_workers_compute_with_two_threads_after_the_kernel_did(tmp_path: Path, kind: str) -> None:
    code = USES_TORCH + (
        "work()\n"
        "os.environ['OMP_NUM_THREADS'] = '2'\n"
        "for _ in range(3): notebook_launcher(lambda: print(work(), torch.get_num_threads()), num_processes=2)\n"
        "print(no_child_is_left(), work())\n"
    )
    assert _run(code, tmp_path, kind) == (0, "1024.0 2\n" * 6 + "True 1024.0\n", "")


def test_worker_may_use_loader_processes(tmp_path: Path, kind: str) -> None:
    code = USES_TORCH + (
        "from torch.utils.data import DataLoader\n"
        "work()\n"
        "notebook_launcher(lambda: print(len(list(DataLoader(range(10), num_workers=1)))), num_processes=2)\n"
        "print(no_child_is_left())\n"
    )
    assert _run(code, tmp_path, kind)[:2] == (0, "10\n10\nTrue\n")


def test_workers_meet_in_a_process_group(tmp_path: Path, kind: str) -> None:
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
    status, out, err = _run(code, tmp_path, kind)
    assert (status, out) == (0, "3.0\n3.0\n"), err


def test_closures_need_no_pickling_and_the_error_is_theirs(tmp_path: Path, kind: str) -> None:
    code = (
        "def outer(limit):\n"
        "    def train(x):\n"
        "        if os.environ['RANK'] == '1': raise ValueError(f'over {limit}: {x}')\n"
        "        time.sleep(600)\n"
        "    return train\n"
        "try:\n"
        "    notebook_launcher(outer(3), ('five',), num_processes=2)\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
        "print(no_child_is_left())\n"
    )
    status, out, err = _run(code, tmp_path, kind)
    assert (status, without_news(err)) == (0, "")
    assert out.startswith("rank 1 failed: ValueError: over 3: five\n\nTraceback (most recent call last):\n")
    assert out.endswith("in train\nValueError: over 3: five\nTrue\n")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("os._exit(7)", "rank 1 failed: exit code 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 failed: killed by SIGKILL (signal 9)"),
    ],
)
def test_death_of_a_worker_leaves_the_kernel_alive(tmp_path: Path, kind: str, fault: str, words: str) -> None:
    code = (
        "def train():\n"
        f"    if os.environ['RANK'] == '1': {fault}\n"
        "    time.sleep(600)\n"
        "for _ in range(2):\n"
        "    try: debug_launcher(train)\n"
        "    except RuntimeError as error: print(error)\n"
        "print(no_child_is_left())\n"
    )
    status, out, err = _run(code, tmp_path, kind)
    assert (status, out, without_news(err)) == (0, f"{words}\n{words}\nTrue\n", "")


def test_a_worker_without_a_descriptor_left_tells_its_error(tmp_path: Path, kind: str) -> None:
    code = (
        "def train():\n"
        "    import resource\n"
        "    if os.environ['RANK'] != '1': time.sleep(600)\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "    while True: os.open(os.devnull, os.O_RDONLY)\n"
        "try: notebook_launcher(train, (), num_processes=2)\n"
        "except RuntimeError as error: print(str(error).splitlines()[0])\n"
        "print(no_child_is_left())\n"
    )
    status, out, err = _run(code, tmp_path, kind)
    assert (status, without_news(err)) == (0, "")
    assert out == "rank 1 failed: OSError: [Errno 24] Too many open files: '/dev/null'\nTrue\n"


def test_interrupt_of_the_kernel_ends_the_workers_and_not_the_kernel(tmp_path: Path, kind: str) -> None:
    code = (
        "def train():\n"
        "    print('running', flush=True)\n"
        "    time.sleep(600)\n"
        "try: notebook_launcher(train, num_processes=2)\n"
        "except KeyboardInterrupt: print('interrupted', no_child_is_left())\n"
        "notebook_launcher(lambda: print('again'), num_processes=2)\n"
    )
    kernel = subprocess.Popen(
        [sys.executable, "-u", "-c", KERNEL + KINDS[kind] + code], stdout=subprocess.PIPE, text=True
    )
    assert kernel.stdout is not None
    assert [kernel.stdout.readline() for _ in range(2)] == ["running\n"] * 2
    kernel.send_signal(signal.SIGINT)
    out, _ = kernel.communicate(timeout=PATIENCE_SECONDS)
    assert (kernel.returncode, out) == (0, "interrupted True\nagain\nagain\n")


def test_killed_kernel_takes_its_workers_along(tmp_path: Path, kind: str) -> None:
    code = (
        "notebook_launcher(lambda: (print(os.getpid(), os.getppid(), flush=True), time.sleep(600)), num_processes=2)\n"
    )
    kernel = subprocess.Popen(
        [sys.executable, "-u", "-c", KERNEL + KINDS[kind] + code], stdout=subprocess.PIPE, text=True
    )
    assert kernel.stdout is not None
    workers = [int(pid) for _ in range(2) for pid in kernel.stdout.readline().split()]
    os.kill(kernel.pid, signal.SIGKILL)
    kernel.communicate(timeout=PATIENCE_SECONDS)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(map(lives, {*workers} - {kernel.pid})):
        assert time.monotonic() < deadline, "workers outlived the kernel"
        time.sleep(0.01)


def test_exit_handlers_of_the_kernel_run_once(tmp_path: Path, kind: str) -> None:
    code = (
        "import atexit\n"
        "atexit.register(print, 'handler')\n"
        "sys.stdout.write('buffered ')\n"
        "notebook_launcher(lambda: print('worker'), num_processes=2)\n"
    )
    assert _run(code, tmp_path, kind)[1] == "buffered worker\nworker\nhandler\n"


def test_failed_workers_are_started_again(tmp_path: Path, kind: str) -> None:
    code = (
        "def train():\n"
        "    if os.environ['TORCHELASTIC_RESTART_COUNT'] != '2' and os.environ['RANK'] == '1':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    if os.environ['TORCHELASTIC_RESTART_COUNT'] != '2': threading.Event().wait()\n"
        "    return int(os.environ['RANK'])\n"
        "print(notebook_launcher(train, num_processes=2, max_restarts=2), no_child_is_left())\n"
    )
    status, out, err = _run(code, tmp_path, kind)
    assert (status, out) == (0, "[0, 1] True\n"), err
    assert err.count("rank 1 failed: killed by SIGKILL") == 2


def test_kernels_of_two_machines_make_one_run(tmp_path: Path) -> None:
    code = (
        "def train():\n"
        "    import torch\n"
        "    from accelerate_cpp import Accelerator\n"
        "    accelerator = Accelerator(cpu=True)\n"
        "    total = accelerator.reduce(torch.tensor(float(accelerator.process_index))).item()\n"
        "    accelerator.end_training()\n"
        "    return total\n"
        "place = dict(num_nodes=2, node_rank=int(sys.argv[1]))\n"
        f"print(notebook_launcher(train, num_processes=1, use_port='{free_port()}', **place))\n"
    )
    command = [sys.executable, "-c", KERNEL + code]
    kernels = [
        subprocess.Popen([*command, rank], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    ends = [(*kernel.communicate(timeout=PATIENCE_SECONDS), kernel.returncode) for kernel in kernels]
    assert [(out, status) for out, _, status in ends] == [("[1.0]\n", 0)] * 2, ends


def test_workers_are_forks_of_the_kernel_or_of_one_helper(tmp_path: Path, kind: str) -> None:
    code = (
        "parents = [notebook_launcher(os.getppid, num_processes=2) for _ in range(2)]\n"
        "print(parents[0] == parents[1], {KERNEL} == {*parents[0]}, len({*parents[0]}), no_child_is_left())\n"
    )
    assert _run(code, tmp_path, kind) == (0, f"True {kind == 'forks'} 1 True\n", "")


def test_values_come_back_also_of_classes_of_the_kernel_and_large_tensors(tmp_path: Path, kind: str) -> None:
    code = (
        "import torch\n"
        "class Net(torch.nn.Module): pass\n"
        "net, large = Net(), torch.arange(25_000_000.0)\n"
        "first, second = notebook_launcher(lambda: (net, Net, large * 2, os.environ['RANK']), num_processes=2)\n"
        "print(type(first[0]) is Net, first[1] is Net, first[2].equal(large * 2), second[3])\n"
    )
    assert _run(code, tmp_path, kind) == (0, "True True True 1\n", "")


def test_function_finds_what_the_kernel_has_at_the_call(tmp_path: Path, kind: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "library.py").write_text("def value(): return 'of the library'\n")
    code = (
        "def train(): return version\n"
        "version = 1; first = notebook_launcher(train, num_processes=2)\n"
        "version = 2\n"
        "def train(): return 'edited', version\n"
        "print(first, notebook_launcher(train, num_processes=2))\n"
        "os.chdir('folder'); os.environ['NEW'] = 'set'; sys.path.append(os.getcwd())\n"
        "import library\n"
        "seen = lambda: (os.path.basename(os.getcwd()), os.environ['NEW'], library.value())\n"
        "print(notebook_launcher(seen, num_processes=2)[1])\n"
    )
    expected = "[1, 1] [('edited', 2), ('edited', 2)]\n('folder', 'set', 'of the library')\n"
    assert _run(code, tmp_path, kind) == (0, expected, "")


def test_calls_do_not_see_each_other(tmp_path: Path, kind: str) -> None:
    code = (
        "import torch\n"
        "weights, seen = torch.zeros(1_000_000), []\n"
        "def train():\n"
        "    seen.append(1); weights.add_(1); os.environ['TRACE'] = 'left'\n"
        "    return len(seen), weights[-1].item()\n"
        "for _ in range(2): print(notebook_launcher(train, num_processes=2), 'TRACE' in os.environ)\n"
        "print(seen, weights[-1].item())\n"
    )
    assert _run(code, tmp_path, kind) == (0, "[(1, 1.0), (1, 1.0)] False\n" * 2 + "[] 0.0\n", "")


def test_workers_draw_the_random_numbers_that_follow_in_the_kernel(tmp_path: Path, kind: str) -> None:
    code = (
        "import torch\n"
        "torch.manual_seed(3)\n"
        "drawn = notebook_launcher(lambda: torch.rand(1).item(), num_processes=2)\n"
        "print({*drawn} == {torch.rand(1).item()})\n"
    )
    assert _run(code, tmp_path, kind) == (0, "True\n", "")


def test_accelerator_of_the_kernel_is_no_obstacle(tmp_path: Path, kind: str) -> None:
    code = (
        "from accelerate_cpp import Accelerator\n"
        "import torch\n"
        "kernels = Accelerator(cpu=True, mixed_precision='bf16')\n"
        "model = torch.nn.Linear(1, 1)\n"
        "def train():\n"
        "    accelerator = Accelerator(cpu=True, mixed_precision='no')\n"
        "    prepared = accelerator.prepare(model)\n"
        "    accelerator.backward(prepared(torch.full((1, 1), float(accelerator.process_index))).sum())\n"
        "    return accelerator.num_processes, model.weight.grad.item()\n"
        "print(notebook_launcher(train, num_processes=2), kernels.mixed_precision, model.weight.grad)\n"
    )
    assert _run(code, tmp_path, kind) == (0, "[(2, 0.5), (2, 0.5)] bf16 None\n", "")


@pytest.mark.long
def test_workers_compile_after_the_kernel_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "kernel.py").write_text(
        KERNEL + "import torch\n"
        "compiled = torch.compile(lambda x: x.sin() * 2)\n"
        "compiled(torch.ones(10))\n"
        "def train():\n"
        "    new = torch.compile(lambda x: x.cos() + 1)\n"
        "    return compiled(torch.zeros(10)).sum().item(), new(torch.zeros(10)).sum().item()\n"
        "print(notebook_launcher(train, num_processes=2))\n"
    )
    result = subprocess.run(
        [sys.executable, "kernel.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert (result.returncode, result.stdout) == (0, "[(0.0, 20.0), (0.0, 20.0)]\n"), result.stderr


def test_warning_names_the_call_that_initialised_cuda(tmp_path: Path) -> None:
    code = (
        "warnings.simplefilter('default')\n"
        "def use_the_gpu():\n"
        "    for call, _ in torch.cuda._queued_calls: call()\n"
        "use_the_gpu()\n"
        "for _ in range(2): notebook_launcher(print, num_processes=2)\n"
    )
    status, _, err = _run(code, tmp_path, "helper")
    assert status == 0
    assert err.count("UserWarning: CUDA is already initialised in this process, by `") == 1


def test_program_without_standard_streams_gets_its_results(tmp_path: Path) -> None:
    code = (
        "def work():\n    print('to nobody')\n    return int(os.environ['RANK'])\n"
        "results = notebook_launcher(work, num_processes=2)\n"
        "open('results', 'w').write(str(results))\n"
    )
    (tmp_path / "program.py").write_text(KERNEL + code)
    command = f"exec {sys.executable} program.py <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, timeout=240, check=False).returncode == 0
    assert (tmp_path / "results").read_text() == "[0, 1]"
