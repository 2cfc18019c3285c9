"""Commands of tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate.test_utils.testing as original
import pytest

import accelerate_cpp
from accelerate_cpp.commands.launch import launch_command_parser
from accelerate_cpp.test_utils import processes
from accelerate_cpp.test_utils.processes import SubprocessCallException, execute_subprocess_async, run_command

PYTHON = sys.executable
FAILING = "import sys; print('out'); print('broken', file=sys.stderr); sys.exit(3)"


@pytest.mark.parametrize(
    "flags", [{}, {"num_processes": 2, "cpu": True}, {"config_file": "c.yaml", "main_process_port": 0, "gpu_ids": None}]
)
def test_flags_of_a_launch_are_written_as_in_the_original(flags: dict[str, Any]) -> None:
    command = processes.get_launch_command(**flags)
    assert command[0] == "accelerate-cpp"
    assert command[1:] == original.get_launch_command(**flags)[1:]
    launch_command_parser().parse_args([*command[2:], "script.py"])


def test_a_flag_that_is_false_is_left_out() -> None:
    assert processes.get_launch_command(cpu=False) == ["accelerate-cpp", "launch"]


def test_the_usual_command_launches_a_process_for_each_device() -> None:
    script = processes.path_in_accelerate_package("test_utils", "scripts", "test_script.py")
    folder = Path(PYTHON).parent  # where the command is installed
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    command = [*processes.DEFAULT_LAUNCH_COMMAND, "--dry_run", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert str(script) in done.stdout


def test_paths_in_the_package_are_found() -> None:
    assert processes.path_in_accelerate_package() == Path(accelerate_cpp.__file__).parent
    assert processes.path_in_accelerate_package("test_utils", "scripts").is_dir()


@pytest.mark.parametrize(("worker", "number"), [("", 0), ("gw0", 0), ("gw3", 3)])
def test_processes_of_xdist_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch, worker: str, number: int) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    assert processes.pytest_xdist_worker_id() == number
    assert processes.get_torch_dist_unique_port() == 29500 + number
    if worker:
        assert original.get_torch_dist_unique_port() == 29500 + number


def test_a_command_returns_its_output_when_asked() -> None:
    script = "import os, sys; print(os.environ['WORD'], flush=True); print('told', file=sys.stderr)"
    assert run_command([PYTHON, "-c", script], return_stdout=True, env={"WORD": "hello"}) == "hello\ntold\n"
    assert run_command([PYTHON, "-c", "print(1)"]) is None


def test_a_failed_command_is_an_error_with_its_output() -> None:
    with pytest.raises(SubprocessCallException, match=r"failed with exit status 3.*out\n?") as caught:
        run_command([PYTHON, "-c", FAILING])
    assert "broken" in str(caught.value)


def test_lines_are_shown_and_returned(capfd: pytest.CaptureFixture[str]) -> None:
    script = (
        "import os, sys; print(sys.stdin.read(), os.environ['WORD']); "
        "print('told\\r\\nwithout end', end='', file=sys.stderr)"
    )
    read_end, write_end = os.pipe()
    os.write(write_end, b"typed")
    os.close(write_end)
    with os.fdopen(read_end) as stdin:
        result = execute_subprocess_async([PYTHON, "-c", script], env={"WORD": "hello"}, stdin=stdin)
    assert (result.returncode, result.stdout, result.stderr) == (0, ["typed hello"], ["told", "without end"])
    shown = capfd.readouterr()
    assert "Running:" in shown.out
    assert "stdout: typed hello\n" in shown.out
    assert "stderr: told\nstderr: without end\n" in shown.err


@pytest.mark.parametrize(("quiet", "echo"), [(True, False), (True, True), (False, False)])
def test_what_is_shown_can_be_chosen(capfd: pytest.CaptureFixture[str], quiet: bool, echo: bool) -> None:
    execute_subprocess_async([PYTHON, "-c", "print('x' + 'y')"], quiet=quiet, echo=echo)
    shown = capfd.readouterr().out
    assert ("Running:" in shown, "stdout: xy" in shown) == (echo, not quiet)


def test_output_larger_than_a_pipe_is_read_while_the_program_runs() -> None:
    script = "import sys\nfor _ in range(3000):\n    print('o' * 99); print('e' * 99, file=sys.stderr)"
    result = execute_subprocess_async([PYTHON, "-c", script], quiet=True)
    assert (len(result.stdout), len(result.stderr), set(map(len, result.stdout))) == (3000, 3000, {99})


def test_a_failed_program_is_an_error_with_its_words() -> None:
    with pytest.raises(RuntimeError, match=r"failed with returncode 3\n\nIts standard error:\nbroken"):
        execute_subprocess_async([PYTHON, "-c", FAILING])


@pytest.mark.parametrize("streams", ["", ">&- 2>&-"])
def test_a_program_that_takes_too_long_is_killed(tmp_path: Path, streams: str) -> None:
    with pytest.raises(RuntimeError, match="was killed after 3 seconds"):
        execute_subprocess_async(
            ["sh", "-c", f'echo $$ > "$0"; exec sleep 1000 {streams}', tmp_path / "pid"], timeout=3
        )
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
