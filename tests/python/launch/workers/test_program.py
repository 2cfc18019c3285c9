from __future__ import annotations

import os
import sys

import pytest

from accelerate_cpp.launch.workers.child import ChildSetup
from accelerate_cpp.launch.workers.program import STDERR, STDOUT, start_program
from accelerate_cpp.launch.workers.supervisor import Supervisor
from accelerate_cpp.launch.workers.worker import Worker
from accelerate_cpp.launch.workers.worker_output import Tail


def _end(worker: Worker) -> int:
    with Supervisor() as supervisor:
        supervisor.add(worker)
        (end,) = supervisor.run().workers
    assert end.rank == worker.rank
    return end.exit_code


def test_output_goes_to_the_sinks_of_its_streams() -> None:
    out, err = Tail(), Tail()
    command = [sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"]
    assert _end(start_program(command, 7, ChildSetup(), {STDOUT: out, STDERR: err})) == 3
    assert (out.text, err.text) == ("out\n", "err\n")


def test_stream_without_a_sink_is_that_of_this_process(capfd: pytest.CaptureFixture[str]) -> None:
    assert _end(start_program([sys.executable, "-c", "print('out')"], 0, ChildSetup(), {STDERR: Tail()})) == 0
    assert capfd.readouterr().out == "out\n"


def test_program_has_its_environment_its_input_and_what_it_inherits() -> None:
    out = Tail()
    code = "import os, sys; print(dict(os.environ), sys.stdin.read(), os.read(int(sys.argv[1]), 9))"
    (input_end, to_input), (own_end, to_own) = os.pipe(), os.pipe()
    for end, text in ((to_input, b"typed"), (to_own, b"own")):
        os.write(end, text)
        os.close(end)
    worker = start_program(
        [sys.executable, "-I", "-c", code, str(own_end)],
        0,
        ChildSetup(),
        {STDOUT: out},
        environment={"LC_ALL": "C.UTF-8"},
        stdin=input_end,
        inherited=[own_end],
    )
    os.close(input_end)
    os.close(own_end)
    assert _end(worker) == 0
    assert out.text == "{'LC_ALL': 'C.UTF-8'} typed b'own'\n"


def test_nothing_is_left_open_where_a_program_cannot_be_started() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        start_program(["no-such-program"], 0, ChildSetup(), {STDOUT: Tail(), STDERR: Tail()})
    assert set(os.listdir("/proc/self/fd")) == before
