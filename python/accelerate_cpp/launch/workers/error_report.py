"""The exception that ended a worker, as the worker itself tells its launcher, in a memory file or a pipe.

So the launcher can show it once, whole and in one piece, after all that the workers have printed. A worker that cannot
tell it, because it is no Python program or was killed, leaves the end of its standard error
(:class:`accelerate_cpp.launch.workers.worker_output.Tail`).
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any

from accelerate_cpp.comm.joining import announce_error
from accelerate_cpp.config import env_table
from accelerate_cpp.launch.workers.worker_output import blamed_by, blamed_ranks, last_error_line, last_traceback

MOST_BYTES = 16 << 20
"""What a launcher reads of a report at most."""


@dataclass(frozen=True)
class ErrorReport:
    """The exception that ended a worker, as text: it crosses to the parent without pickling.

    Attributes:
        summary: its type and message as they close the traceback, with notes; of a SyntaxError also the line of code.
        traceback: the text for the user.
        blames: the ranks that it, or what led to it, names as its cause; ``None`` if it is the worker's own.
    """

    summary: str
    traceback: str
    blames: tuple[int, ...] | None

    @classmethod
    def of(cls, error: BaseException, frames: TracebackType | None = None) -> ErrorReport:
        """The report of ``error``, whose traceback begins at ``frames``; the mode of ``--debug`` leaves nothing out."""
        from accelerate_cpp.launch.workers.folded_traceback import folded_traceback

        text = folded_traceback(error, frames, whole=env_table.DEBUG_MODE.get())
        summaries = [_summary(one) for one in _chain(error)]
        blamed = (blamed_by(_headline(summary)) for summary in summaries)
        return cls(summaries[0], text, next((ranks for ranks in blamed if ranks is not None), None))

    @property
    def headline(self) -> str:
        """The line ``module.Type: message``. A SyntaxError has its place and its code before it, indented."""
        return _headline(self.summary)

    def render(self) -> bytes:
        """The report as bytes; of texts that are too long for a launcher, the middle is left out."""
        import json

        rendered = json.dumps(asdict(self)).encode()
        if len(rendered) <= MOST_BYTES:
            return rendered
        return json.dumps(asdict(replace(self, summary=_ends(self.summary), traceback=_ends(self.traceback)))).encode()

    @classmethod
    def parse(cls, data: bytes) -> ErrorReport | None:
        """The report in ``data``; ``None`` when the worker sent none, or died before it had sent all of it."""
        if not data:
            return None
        import json  # here, as most launches get no report

        try:
            known = json.loads(data)
        except (ValueError, RecursionError):
            return None
        return cls._of_values(known)

    @classmethod
    def _of_values(cls, known: Any) -> ErrorReport | None:
        """The report of what :meth:`render` wrote; ``None`` for anything else that is there."""
        if not isinstance(known, dict) or known.keys() != {"summary", "traceback", "blames"}:
            return None
        texts, blames = (known["summary"], known["traceback"]), known["blames"]
        ranks = [] if blames is None else blames
        if not all(isinstance(text, str) for text in texts) or not isinstance(ranks, list):
            return None
        if not all(type(rank) is int for rank in ranks):
            return None
        # Names of files may have halves of characters, which no stream takes.
        summary, traceback = (text.encode(errors="backslashreplace").decode() for text in texts)
        return cls(summary, traceback, None if blames is None else tuple(ranks))


def _summary(error: BaseException) -> str:
    import traceback  # here, as the launcher only parses reports

    return "".join(traceback.format_exception_only(error)).strip("\n")


def _headline(summary: str) -> str:
    return next((line for line in summary.splitlines() if line and not line[0].isspace()), "")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error``, and what was raised before it, from which it was raised or in whose handling it occurred."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        yield one
        seen.add(id(one))
        one = one.__cause__ or one.__context__


def _ends(text: str) -> str:
    """Its beginning and its end, short enough for a report whatever its characters are."""
    most = MOST_BYTES // 32  # of two texts, in which a character may take 12 bytes
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}\n... {len(text) - most} characters are left out ...\n{text[-most // 2 :]}"


def load_modules_of_reports() -> None:
    """Loads what a report needs, for forks of this process, which may have no descriptor left when they fail."""
    import json  # noqa: F401
    import traceback  # noqa: F401

    import accelerate_cpp.launch.workers.folded_traceback  # noqa: F401


def report_uncaught(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    """The ``sys.excepthook`` of a worker: leaves its report where the launcher looks, and prints nothing.

    Where that is impossible, in processes that the worker has started, and where the program itself calls it and goes
    on, as ``code.interact`` does, Python shows the exception as always.
    """
    place = env_table.ERROR_REPORT.get()
    if place is None or os.getppid() != place[1] or _program_runs():
        sys.__excepthook__(kind, error, frames)
        return
    try:
        os.pwrite(place[0], ErrorReport.of(error, frames).render(), 0)
    except OSError:  # no memory, or the program has closed the descriptor
        sys.__excepthook__(kind, error, frames)
    announce_error()
    if kind is KeyboardInterrupt:
        _end_by_interrupt()


def _program_runs() -> bool:
    """Whether a thread, or code below the program's outermost, has called this; at its end, only hooks have."""
    outermost = sys._getframe()
    while outermost.f_back is not None:
        outermost = outermost.f_back
    in_thread = threading.current_thread() is not threading.main_thread()
    return in_thread or outermost.f_code.co_name in ("<module>", "_run_module_as_main")


def _end_by_interrupt() -> None:
    """Lets the interpreter end by SIGINT, as it does after a KeyboardInterrupt that nobody caught.

    It knows that from the last text that it has executed: modules that were imported for the report executed others,
    and so does the summary of compilations that torch prints at the end.
    """
    compilation = sys.modules.get("torch._dynamo.utils")
    if compilation is not None:
        atexit.unregister(compilation.dump_compile_times)
    with suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")


@dataclass(frozen=True)
class LastOutput:
    """What a worker has left of the error that ended it.

    Attributes:
        tail: the end of its standard error.
        report: its own report, if it has left one.
    """

    tail: str
    report: ErrorReport | None = None

    @property
    def traceback(self) -> str:
        """The traceback; else the last lines of its standard error."""
        return last_traceback(self.tail) if self.report is None else self.report.traceback

    @property
    def error(self) -> str:
        """The line with type and message; empty if it has left none."""
        return last_error_line(self.tail) if self.report is None else self.report.headline

    @property
    def reported(self) -> str:
        """The same of its report only, as what it wrote last may have ended nothing."""
        return "" if self.report is None else self.report.headline

    @property
    def blames(self) -> tuple[int, ...] | None:
        """The ranks that the error names as its cause; ``None`` if it is the worker's own."""
        return blamed_ranks(self.tail) if self.report is None else self.report.blames
