"""What workers print: forwarded as it comes, and the end of it kept for the report."""

from __future__ import annotations

import codecs
import os
import re
import select
from collections.abc import Callable

TAIL_BYTES = 64 * 1024
_TRACEBACK = "Traceback (most recent call last)"
_LAST_LINES = 20
# What torch.distributed puts before each line of an uncaught exception.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)


class ForwardedBytes:
    """Writes each chunk unchanged to a descriptor at once and keeps the last :data:`TAIL_BYTES`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        self._tail = bytearray()

    def __call__(self, chunk: bytes) -> None:
        self._tail += chunk
        del self._tail[:-TAIL_BYTES]
        while chunk and self._descriptor is not None:
            try:
                chunk = chunk[os.write(self._descriptor, chunk) :]
            except BlockingIOError:  # someone else made the shared descriptor non-blocking, and it is full
                select.select((), (self._descriptor,), ())
            except BrokenPipeError:  # the reader of our output left; the run itself goes on
                self._descriptor = None

    @property
    def tail(self) -> str:
        """The last text that came, at most :data:`TAIL_BYTES` of it."""
        return self._tail.decode(errors="replace")


class ForwardedText:
    """Decodes UTF-8 chunks, whose borders may fall inside a character, and hands the text to ``write`` at once."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def __call__(self, chunk: bytes) -> None:
        text = self._decoder.decode(chunk, final=not chunk)
        if text:
            self._write(text)


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
