"""The program is run as a program, and spoken to as the kernel does."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from accelerate_cpp.launch.fork.fork_server_main import DONE, READY, RESULTS, RUN, STDERR, STDOUT, Request, receive
from accelerate_cpp.launch.fork.forked_plan import function_group
from accelerate_cpp.launch.fork.pickle_files import packed, read
from accelerate_cpp.launch.fork.pickled_function import Surroundings, TaskPickler
from accelerate_cpp.launch.fork.results import result_files, values_of


class _Server:
    def __init__(self, *preload: str) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = "import sys; sys.path[:0] = sys.argv.pop().split(':'); "
        program += "from accelerate_cpp.launch.fork.fork_server_main import main; main()"
        arguments = [str(theirs.fileno()), json.dumps(preload), ":".join(sys.path)]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program, *arguments],
                pass_fds=(theirs.fileno(),),
                stderr=subprocess.PIPE,
                start_new_session=True,
            )

    def ask(self, task: Callable[[], Any], interrupted: bool = False, num_processes: int = 2) -> tuple[Any, ...]:
        """What the workers print, complain and return, and how the run failed."""
        group = function_group(num_processes, cpu=True)
        texts = {STDOUT: b"", STDERR: b""}
        interrupts, theirs = socket.socketpair()
        with packed(task, TaskPickler()) as file, packed(Request(group, Surroundings.here())) as request:
            socket.send_fds(self.channel, [RUN], [request, file, theirs.fileno()])
        with interrupts, theirs, result_files(num_processes) as results:
            socket.send_fds(self.channel, [RESULTS], results)
            if interrupted:
                interrupts.send(bytes([signal.SIGINT]))
            while True:
                message, descriptors = receive(self.channel)
                if message == DONE:
                    outcome = read(descriptors[0])
                    os.close(descriptors[0])
                    return texts[STDOUT].decode(), texts[STDERR].decode(), values_of(results), outcome
                assert message, "the server ended"
                texts[message[:1]] += message[1:]


@pytest.fixture
def server() -> Iterator[_Server]:
    server = _Server()
    assert receive(server.channel) == (READY, [])
    with server.channel:
        yield server
    assert server.process.wait() == 0, server.process.stderr.read()  # the end of the socket is its end


def test_runs_are_answered_one_after_another(server: _Server) -> None:
    for number in range(3):
        out, err, values, outcome = server.ask(lambda number=number: (print("hello"), os.environ["RANK"], number)[1:])
        assert (out, err, values, outcome) == ("hello\n" * 2, "", [("0", number), ("1", number)], None)


def test_long_output_comes_whole(server: _Server) -> None:
    out, err, _, _ = server.ask(lambda: (print("é" * 300_000), print("x" * 300_000, file=sys.stderr)), num_processes=1)
    assert (out, err) == ("é" * 300_000 + "\n", "x" * 300_000 + "\n")


def test_workers_do_not_see_what_earlier_ones_did(server: _Server) -> None:
    def task() -> bool:
        was_there = hasattr(sys, "trace_of_a_worker")
        sys.trace_of_a_worker = True  # type: ignore[attr-defined]
        return was_there

    assert [server.ask(task)[2] for _ in range(2)] == [[False, False]] * 2


def test_failure_comes_as_the_exception(server: _Server) -> None:
    outcome = server.ask(lambda: 1 // 0, num_processes=1)[3]
    assert str(outcome).startswith("rank 0 failed: ZeroDivisionError: integer division or modulo by zero\n\nTraceback")
    assert outcome.rank == 0


def test_interrupt_comes_back_as_keyboard_interrupt(server: _Server) -> None:
    assert type(server.ask(lambda: time.sleep(600), interrupted=True)[3]) is KeyboardInterrupt
    assert server.ask(lambda: 3)[2] == [3, 3]


def test_modules_are_imported_before_the_first_run() -> None:
    server = _Server("wave")
    with server.channel:
        assert receive(server.channel) == (READY, [])
        assert server.ask(lambda: "wave" in sys.modules)[2] == [True, True]
    server.process.wait()


def test_module_that_cannot_be_imported_ends_it_with_the_reason() -> None:
    server = _Server("no_such_module")
    with server.channel:
        assert receive(server.channel) == (b"", [])
    assert b"No module named 'no_such_module'" in server.process.communicate()[1]
    assert server.process.returncode == 1
