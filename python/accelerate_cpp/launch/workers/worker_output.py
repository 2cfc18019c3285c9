"""The output of workers: where it is written, and its end, which is kept for the report."""

from __future__ import annotations

import codecs
import os
import re
import select
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from accelerate_cpp.errors import SystemFailure
from accelerate_cpp.launch.workers.program import STDERR
from accelerate_cpp.launch.workers.signals import signalled
from accelerate_cpp.launch.workers.worker import Sink

TAIL_BYTES = 64 * 1024
LONGEST_LINE_BYTES = 64 * 1024
"""Longer text without a line end is treated as a line."""
_LOOK_MS = 200
_PATIENCE_SECONDS = 1.0
"""How long a reader that is slow gets to take what is written after a signal."""
_TRACEBACK = "Traceback (most recent call last)"
_LAST_LINES = 20
# Errors that are caused by another rank, and name it.
_CONSEQUENCES = tuple(
    f"accelerate_cpp.errors.{name}" for name in ("PeerLost", "OtherRankFailed", "Timeout", "MismatchedCollective")
)
# The messages of torch's own backends and its store in that case, without a name.
_CLOSED_CONNECTION = re.compile(r"^(RuntimeError|torch\.distributed\.Dist\w*Error): .*(by (remote )?peer|Broken pipe)")
# A collective inside a program of JAX, which passes on its error as text.
_INSIDE_JAX = re.compile(r"^jax\S*RuntimeError: \w+: (PeerLost|Timeout|MismatchedCollective): ")
_RANK = re.compile(r"\brank (\d+)")
# The ranks of other hosts that take part in an operation between them.
_BETWEEN = re.compile(r": between the hosts, with (rank \d+(?:, rank \d+)*): ")
_ON = re.compile(r" on rank \d+\b")
_WAITED_FOR = re.compile(r" waited for (?=rank )")
# What torch.distributed puts before each line of an uncaught exception.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)


class Descriptor:
    """Writes to a descriptor that others may share, until its reader leaves.

    What cannot be written, as the disk is full or the terminal has gone, is lost: no run ends because of that. While
    nobody reads (a pager, a terminal that is held), this waits. Once a signal has come to the launch, nothing is
    written until somebody reads again, as it has to be acted on.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        self._given_up = False

    def __call__(self, chunk: bytes) -> None:
        while chunk and self._descriptor is not None:
            try:
                if not self._can_write(self._descriptor):
                    return
                # So much fits into a pipe that can be written to.
                chunk = chunk[os.write(self._descriptor, chunk[: select.PIPE_BUF]) :]
            except BlockingIOError:  # another program has filled the shared descriptor, and made it non-blocking
                continue
            except BrokenPipeError:  # the reader of our output has ended; the run itself continues
                self._descriptor = None
            except OSError:
                return

    def _can_write(self, descriptor: int) -> bool:
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        deadline: float | None = None
        while not poll.poll(0 if self._given_up else _LOOK_MS):
            if signalled() and deadline is None:
                deadline = time.monotonic() + _PATIENCE_SECONDS
            self._given_up = self._given_up or (deadline is not None and time.monotonic() >= deadline)
            if self._given_up:
                return False
        self._given_up = False
        return True


def say(text: str) -> None:
    """Shows a line on standard error, if there is one, after what Python holds back of others."""
    if sys.stderr is None:
        return
    with suppress(OSError):  # where it cannot be written, nor can this
        sys.stderr.flush()
    Descriptor(STDERR)(f"{text}\n".encode(errors="backslashreplace"))


class Tail:
    """Keeps the last :data:`TAIL_BYTES` of what comes."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def __call__(self, chunk: bytes) -> None:
        self._bytes += chunk
        del self._bytes[:-TAIL_BYTES]

    @property
    def text(self) -> str:
        """The last text that came."""
        return self._bytes.decode(errors="replace")


def unwritable(error: OSError, path: Path) -> SystemFailure:
    """The refusal of a file or folder for the output of workers."""
    what = "the output of the workers cannot be written there: choose another --log_dir, or leave it out"
    return SystemFailure(error.errno, f"{error.strerror}: {what}", str(path))


class LogFile:
    """Writes the output to a file. If that fails, ``complain`` is called once with the reason; the run continues."""

    def __init__(self, path: Path, complain: Callable[[str], object]) -> None:
        self._path = path
        self._complain = complain
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise unwritable(error, path) from error

    def __call__(self, chunk: bytes) -> None:
        if self._descriptor is None:
            return
        try:
            while chunk:
                chunk = chunk[os.write(self._descriptor, chunk) :]
        except OSError as error:
            self._complain(f"{self._path}: {error.strerror}: later output of the workers is not in this file")
            self.close()

    def close(self) -> None:
        """Closes the file, after which nothing more is written."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class ForwardedText:
    """Decodes UTF-8 chunks, whose borders may fall inside a character, and hands the text to ``write`` at once."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def __call__(self, chunk: bytes) -> None:
        text = self._decoder.decode(chunk, final=not chunk)
        if text:
            self._write(text)


class PrefixedText:
    """Puts ``prefix`` before each line and hands it to ``write`` when it has ended; a carriage return ends one too."""

    _LINE_END = re.compile(r"\r\n|\n|\r(?=[^\n])")

    def __init__(self, prefix: str, write: Callable[[str], object]) -> None:
        self._prefix = prefix
        self._write = write
        self._text = ForwardedText(self._take)
        self._unfinished = ""

    def __call__(self, chunk: bytes) -> None:
        self._text(chunk)
        if not chunk and self._unfinished:
            self._write(f"{self._prefix}{self._unfinished}\n")
            self._unfinished = ""

    def _take(self, text: str) -> None:
        known = max(0, len(self._unfinished) - 1)  # its last character may be the first of an end
        self._unfinished += text
        lines, begin = [], 0
        for end in self._LINE_END.finditer(self._unfinished, known):
            lines.append(self._unfinished[begin : end.end()])
            begin = end.end()
        self._unfinished = self._unfinished[begin:]
        if len(self._unfinished) > LONGEST_LINE_BYTES:
            lines.append(f"{self._unfinished}\n")
            self._unfinished = ""
        if lines:
            self._write("".join(f"{self._prefix}{line}" for line in lines))


def to_all(*sinks: Sink) -> Sink:
    """A sink that hands each chunk to each of ``sinks``."""

    def hand_on(chunk: bytes) -> None:
        for sink in sinks:
            sink(chunk)

    return hand_on


def visible(unfinished: bytes) -> bytes:
    """What is to be seen of a line that has not ended: not what a carriage return has replaced."""
    return unfinished[max(0, unfinished.rstrip(b"\r").rfind(b"\r")) :][-LONGEST_LINE_BYTES:]


def last_traceback(tail: str) -> str:
    """The last traceback in ``tail`` to its end, without torch's rank prefixes; without one, the last lines."""
    tail = _RANK_PREFIX.sub("", tail)
    start = tail.rfind(_TRACEBACK)
    if start >= 0:
        return tail[start:].rstrip("\n")
    return "\n".join(tail.rstrip("\n").splitlines()[-_LAST_LINES:])


def last_error_line(tail: str) -> str:
    """The line ``module.Type: message`` that closes the last traceback in ``tail``; empty without a traceback."""
    tail = _RANK_PREFIX.sub("", tail)
    start = tail.rfind(_TRACEBACK)
    if start < 0:
        return ""
    return next((line for line in tail[start:].splitlines()[1:] if line and not line[0].isspace()), "")


def blamed_ranks(tail: str) -> tuple[int, ...] | None:
    """:func:`blamed_by` for the last error in ``tail``."""
    return blamed_by(last_error_line(tail))


def blamed_by(error: str) -> tuple[int, ...] | None:
    """The ranks that ``error``, a line ``module.Type: message``, names as its cause; ``None`` if it is one of its own.

    Empty for an error that only says that another rank is the cause. The rank that raised it may be among them.
    """
    if error.startswith(_CONSEQUENCES) or _INSIDE_JAX.match(error):
        return _ranks_in(error)
    return () if _CLOSED_CONNECTION.match(error) else None


def _ranks_in(error: str) -> tuple[int, ...]:
    """The ranks that a consequence names. Between hosts, all that take part may be the cause, unless it says more.

    What a rank says may hold what another one has said: the last is nearest to the cause.
    """
    between = [*_BETWEEN.finditer(error)]
    if not between:
        return tuple(map(int, _RANK.findall(error)))
    said = error[between[-1].end() :]
    named = _WAITED_FOR.split(said)[-1] if _WAITED_FOR.search(said) else _ON.split(said, 1)[-1]
    return tuple(map(int, _RANK.findall(named) or _RANK.findall(between[-1][1])))
