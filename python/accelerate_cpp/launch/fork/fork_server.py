"""A clean process to fork workers from, for a kernel whose own forks could not use the GPU."""

from __future__ import annotations

import atexit
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress

from accelerate_cpp.errors import AccelerateError
from accelerate_cpp.launch.fork.fork_server_main import (
    DESCRIPTORS_OF_A_MESSAGE,
    DONE,
    READY,
    RESULTS,
    RUN,
    STDERR,
    STDOUT,
    VIEW,
    Request,
    receive,
)
from accelerate_cpp.launch.fork.forked import Supervision
from accelerate_cpp.launch.fork.pickle_files import packed, read
from accelerate_cpp.launch.fork.pickled_function import Surroundings, TaskPickler, refusal
from accelerate_cpp.launch.plan import host_resources
from accelerate_cpp.launch.plan.environment import WorkerGroup
from accelerate_cpp.launch.plan.own_program import WITHOUT_CURRENT_FOLDER
from accelerate_cpp.launch.workers.child import ChildSetup
from accelerate_cpp.launch.workers.failure import describe
from accelerate_cpp.launch.workers.signals import blocked_signals, caught_signals

_PROGRAM = (
    # The current folder, which is in the path of a kernel, is for the modules of its functions alone.
    f"{WITHOUT_CURRENT_FOLDER}import json; paths = json.loads(sys.argv.pop()); sys.path[:] = filter(None, paths); "
    "from accelerate_cpp.launch.fork.fork_server_main import main; main(paths)"
)
_SECONDS_TO_DIE = 5.0
"""A server whose socket has ended gets this long to report the reason before it is killed."""
_servers: dict[int, ForkServer] = {}
"""The server of this process, by process id: forks inherit the table, but not the server."""
_one_run = threading.Lock()
Display = Callable[[str, str], object]


def run_in_fork_server(
    task: Callable[[], object],
    used: tuple[Callable[..., object], Sequence[object]],
    group: WorkerGroup,
    results: Sequence[int],
    preload: Sequence[str],
    display: Display | None = None,
    supervision: Supervision | None = None,
) -> None:
    """Like :func:`accelerate_cpp.launch.fork.forked.run_forked`, but workers are forks of this process's fork server.

    It is started at the first call and serves all later ones; one that has died is replaced.

    Args:
        used: the user's function and its arguments, which ``task`` is made of; an error names their variables.
        preload: modules that the server imports.
        display: shows how far the workers are, as text and as HTML.

    Raises, besides the above:
        InvalidArgument: ``task`` cannot be shipped.
        AccelerateError: the server died.
    """
    host_resources.require_supervision(group.num_processes)
    with ExitStack() as stack:
        stack.enter_context(_one_run)
        asked = Request(group, Surroundings.here(), display is not None, supervision or Supervision())
        pickler = TaskPickler()
        try:
            shipped = stack.enter_context(packed(task, pickler))
        except Exception as error:
            raise refusal(*used, error) from error
        request = stack.enter_context(packed(asked))
        signals = None
        if threading.current_thread() is threading.main_thread():
            signals = stack.enter_context(caught_signals((signal.SIGINT,)))
        _server(preload).run(request, shipped, results, signals, display)


def _server(preload: Sequence[str]) -> ForkServer:
    """The living server of this process."""
    server = _servers.get(os.getpid())
    if server is not None and not server.lives:
        server.end()
        server = None
    if server is None:
        server = _servers[os.getpid()] = ForkServer(preload)
    return server


class ForkServer:
    """The kernel's side of the fork server: starts it, requests runs, and ends it, at the latest with the kernel."""

    def __init__(self, preload: Sequence[str]) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._owner = os.getpid()
        self._is_ready = False
        started: Future[subprocess.Popen[bytes]] = Future()
        # The system kills the server when the thread that started it ends: this one does so with the kernel.
        self._thread = threading.Thread(
            target=_start_and_wait, args=(theirs, preload, started), name="accelerate-cpp-fork-server", daemon=True
        )
        self._thread.start()
        try:
            self._process = started.result()
        except BaseException:
            self._channel.close()
            raise
        self._pidfd = os.pidfd_open(self._process.pid)
        atexit.register(self.end)

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self._process.pid

    @property
    def lives(self) -> bool:
        """Whether it can accept a run."""
        return self._thread.is_alive() and self._channel.fileno() >= 0

    def end(self) -> None:
        """Kills the server, and with it its workers."""
        if os.getpid() != self._owner or self._channel.fileno() < 0:
            return
        self._channel.close()
        os.close(self._pidfd)
        self._process.kill()
        self._thread.join()
        atexit.unregister(self.end)

    def run(
        self,
        request: int,
        task: int,
        results: Sequence[int],
        signals: socket.socket | None,
        display: Display | None = None,
    ) -> None:
        """One run. A server that has not answered when this returns or raises is ended."""
        interrupts, theirs = socket.socketpair()
        try:
            with interrupts:
                with theirs:
                    socket.send_fds(self._channel, [RUN], [request, task, theirs.fileno()])
                for start in range(0, len(results), DESCRIPTORS_OF_A_MESSAGE):
                    socket.send_fds(self._channel, [RESULTS], results[start : start + DESCRIPTORS_OF_A_MESSAGE])
                outcome = self._answer(interrupts, signals, display)
        except (BrokenPipeError, ConnectionResetError, EOFError):
            self._thread.join(_SECONDS_TO_DIE)
            self.end()
            raise AccelerateError(
                f"the helper process {self.pid}, which had forked the workers, died: "
                f"{describe(self._process.returncode)}; its workers ended with it. The next call of notebook_launcher "
                "starts a new one"
            ) from None
        except BaseException:
            self.end()
            raise
        if outcome is not None:
            raise outcome

    def _answer(
        self, interrupts: socket.socket, signals: socket.socket | None, display: Display | None
    ) -> BaseException | None:
        """Passes on text and interrupts until the run is over, and returns how it failed. EOFError: the server died."""
        with _selector(self._channel, signals, self._pidfd) as ready:
            while True:
                files = ready()
                if signals is not None and signals in files:
                    numbers = signals.recv(4096)
                    if not self._is_ready:  # it is still importing, and would only listen later
                        raise KeyboardInterrupt
                    with suppress(BrokenPipeError):  # the run has just ended
                        interrupts.send(numbers)
                if self._channel in files:
                    message, descriptors = receive(self._channel)
                    if message[:1] == DONE:
                        outcome: BaseException | None = read(descriptors[0])
                        os.close(descriptors[0])
                        return outcome
                    self._take(message, display)
                elif self._pidfd in files:
                    raise EOFError

    def _take(self, message: bytes, display: Display | None) -> None:
        kind = message[:1]
        if not kind:
            raise EOFError
        if kind == READY:
            self._is_ready = True
        if kind == VIEW and display is not None:
            display(*json.loads(message[1:]))
        for printed, stream in ((STDOUT, sys.stdout), (STDERR, sys.stderr)):
            if kind == printed:
                stream.write(message[1:].decode())
                stream.flush()


@contextmanager
def _selector(*files: object) -> Iterator[Callable[[], list[object]]]:
    with selectors.DefaultSelector() as selector:
        for file in files:
            if file is not None:
                selector.register(file, selectors.EVENT_READ)  # type: ignore[arg-type]
        yield lambda: [key.fileobj for key, _ in selector.select()]


def _start_and_wait(theirs: socket.socket, preload: Sequence[str], started: Future[subprocess.Popen[bytes]]) -> None:
    command = [
        sys.executable,
        "-c",
        _PROGRAM,
        str(theirs.fileno()),
        json.dumps(preload),
        json.dumps([*map(str, sys.path)]),
    ]
    try:
        with theirs, blocked_signals(), warnings.catch_warnings():
            # JAX warns of every fork; this one becomes another program at once.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                preexec_fn=ChildSetup(),
            )
    except BaseException as error:
        started.set_exception(error)
        return
    started.set_result(process)
    process.wait()
