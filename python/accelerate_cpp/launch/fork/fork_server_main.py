"""The fork server: a program that has imported what workers need, and forks them for the kernel that started it.

It never touches a GPU, so its forks can, whatever the kernel has done. It communicates with the kernel over a socket
that keeps message boundaries. A message is a kind, one byte, and a few others; data of unlimited size is sent as the
descriptor of a file. The kernel asks for one run at a time:

``RUN``, with descriptors of a :class:`Request`, of the task, and of a socket that brings a byte per interrupt; then
``RESULTS`` with the files for what the ranks return, until there is one for each.

The answers are ``READY`` once, and for a run ``STDOUT`` and ``STDERR`` with text, ``VIEW`` with a text and HTML as JSON
where the kernel shows how far the workers are, and at last ``DONE``, with the descriptor of the exception that ended
it, or of ``None``. When the socket ends, so does the program.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from accelerate_cpp.launch.fork.forked import Parent, Supervision, run_forked
from accelerate_cpp.launch.fork.pickle_files import packed, read
from accelerate_cpp.launch.fork.pickled_function import ShippedTask, Surroundings
from accelerate_cpp.launch.plan.environment import WorkerGroup

RUN, RESULTS, READY, STDOUT, STDERR, VIEW, DONE = b"R", b"r", b"y", b"o", b"e", b"v", b"d"
DESCRIPTORS_OF_A_MESSAGE = 200  # the system takes 253
MESSAGE_BYTES = 64 * 1024
_TEXT_CHARACTERS = MESSAGE_BYTES // 8  # up to 4 bytes each


@dataclass(frozen=True)
class Request:
    """The facts about a run that the fork server needs; only the workers open the task."""

    group: WorkerGroup
    surroundings: Surroundings
    wants_view: bool = False
    supervision: Supervision = field(default_factory=Supervision)


def main(paths: Sequence[str] | None = None) -> None:
    """The program. Its arguments are the descriptor of the socket and the modules to import, as JSON.

    Args:
        paths: where functions find their modules; ``None``: where this program does.
    """
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        for name in json.loads(sys.argv[2]):
            importlib.import_module(name)
        if paths is not None:
            sys.path[:] = paths
        gc.collect()
        gc.freeze()  # memory that forks share stays shared
        channel.send(READY)
        while _serve(channel):
            pass


def _serve(channel: socket.socket) -> bool:
    """Answers one request; ``False`` when no more come."""
    kind, descriptors = receive(channel)
    if kind != RUN:
        return False
    request, task, interrupts = descriptors
    results: list[int] = []
    try:
        with socket.socket(fileno=interrupts) as signals:
            signals.setblocking(False)
            asked: Request = read(request)
            while len(results) < asked.group.num_processes:
                results += receive(channel)[1]
            outcome = _run(asked, task, results, channel, signals)
    finally:
        for descriptor in (request, task, *results):
            os.close(descriptor)
    with packed(outcome) as file:
        socket.send_fds(channel, [DONE], [file])
    return True


def _run(
    asked: Request, task: int, results: list[int], channel: socket.socket, signals: socket.socket
) -> BaseException | None:
    """Runs the request, and returns how it failed."""
    parent = Parent(
        environment=asked.surroundings.environment,
        signals=signals,
        print_stdout=partial(_send_text, channel, STDOUT),
        print_stderr=partial(_send_text, channel, STDERR),
        private=(channel.fileno(), signals.fileno()),
        display=partial(_send_view, channel) if asked.wants_view else None,
    )
    try:
        run_forked(ShippedTask(task, asked.surroundings), asked.group, results, parent, asked.supervision)
    except (Exception, KeyboardInterrupt) as error:
        return error
    return None


def receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """The next message and its descriptors; nothing at the end."""
    message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, DESCRIPTORS_OF_A_MESSAGE)
    return message, descriptors


def _send_text(channel: socket.socket, kind: bytes, text: str) -> None:
    for start in range(0, len(text), _TEXT_CHARACTERS):
        channel.send(kind + text[start : start + _TEXT_CHARACTERS].encode(errors="replace"))


def _send_view(channel: socket.socket, text: str, page: str) -> None:
    channel.send(VIEW + json.dumps([text, page]).encode())


if __name__ == "__main__":
    main()
