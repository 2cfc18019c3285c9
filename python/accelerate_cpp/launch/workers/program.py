"""Workers that are new programs: each is tied to the launcher, in a session of its own, with its output in pipes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from accelerate_cpp.launch.workers.child import ChildSetup
from accelerate_cpp.launch.workers.signals import blocked_signals
from accelerate_cpp.launch.workers.worker import Sink, Worker

STDIN, STDOUT, STDERR = 0, 1, 2


def open_standard_streams() -> None:
    """Opens those that this process was started without, on nothing: what it opens next would take their places."""
    for descriptor in (STDIN, STDOUT, STDERR):
        try:
            os.fstat(descriptor)
        except OSError:
            # Takes the lowest number that is free. Programs that this process starts get it, as any standard stream.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def start_program(
    command: Sequence[str],
    rank: int,
    setup: ChildSetup,
    sinks: Mapping[int, Sink],
    *,
    environment: Mapping[str, str] | None = None,
    stdin: int | None = None,
    inherited: Sequence[int] = (),
) -> Worker:
    """Starts ``command`` as the worker ``rank``.

    Args:
        sinks: what takes the bytes of its standard output and error; a stream without one is this process's own.
        environment: the whole of it; that of this process when ``None``.
        stdin: descriptor of its standard input; this process's own when ``None``.
        inherited: descriptors that it gets besides.

    Raises:
        OSError: the system refuses. Nothing is left open then.
    """
    read_ends: dict[int, int] = {}
    with ExitStack() as write_ends, ExitStack() as unless_started:
        passed = {}
        for stream in sinks:
            read_ends[stream], passed[stream] = os.pipe()
            write_ends.callback(os.close, passed[stream])
            unless_started.callback(os.close, read_ends[stream])
        with blocked_signals():
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=stdin,
                stdout=passed.get(STDOUT),
                stderr=passed.get(STDERR),
                pass_fds=inherited,
                start_new_session=True,
                preexec_fn=setup,
            )
        unless_started.pop_all()
    return Worker(rank, process.pid, {read_ends[stream]: sink for stream, sink in sinks.items()}, process.wait)
