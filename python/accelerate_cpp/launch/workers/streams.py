"""Where the output of each worker goes: to the terminal, to files, and what is left of an error into the report."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate_cpp.comm.memory_file import memory_file
from accelerate_cpp.config import env_table
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.view.console import Console
from accelerate_cpp.launch.workers.error_report import MOST_BYTES, ErrorReport, LastOutput
from accelerate_cpp.launch.workers.program import STDERR, STDOUT
from accelerate_cpp.launch.workers.worker import Sink
from accelerate_cpp.launch.workers.worker_output import Descriptor, LogFile, Tail, to_all, unwritable

if TYPE_CHECKING:
    from accelerate_cpp.launch.view.live_view import Show
    from accelerate_cpp.launch.view.screen import Screen

_NAMES = {STDOUT: "stdout.log", STDERR: "stderr.log"}
_BOTH = STDOUT | STDERR


def parse_tee(text: str, num_workers: int) -> tuple[int, ...]:
    """Which streams of each worker ``--tee`` names: 1 for standard output, 2 for standard error, 3 for both.

    ``text`` is one number for all workers, or pairs such as ``0:3,1:2`` of local rank and number.

    Raises:
        InvalidArgument: anything else.
    """
    streams = [0] * num_workers
    try:
        if ":" not in text:
            streams = [int(text)] * num_workers
        for pair in text.split(",") if ":" in text else ():
            worker, _, number = pair.partition(":")
            if not 0 <= int(worker) < num_workers:
                raise ValueError
            streams[int(worker)] = int(number)
        if not all(0 <= number <= _BOTH for number in streams):
            raise ValueError
    except ValueError:
        raise InvalidArgument(
            f"--tee {text!r}: expected 0 (none), 1 (standard output), 2 (standard error) or 3 (both) for all workers, "
            f"or pairs of local rank and number, such as 0:3,1:2, with ranks from 0 to {num_workers - 1}"
        ) from None
    return tuple(streams)


@dataclass(frozen=True)
class Logs:
    """Which output is shown with ranks and written to files.

    Attributes:
        folder: of this run; ``None`` without files.
        streams: of each worker, by local rank; empty for none.
    """

    folder: Path | None = None
    streams: Sequence[int] = ()

    def make_folder(self) -> None:
        """Makes the folder, in which nobody else has put anything then, not even links at the places of the files.

        Raises:
            SystemFailure: it cannot be made, or somebody has made it.
        """
        if self.folder is None:
            return
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir()
        except OSError as error:
            raise unwritable(error, self.folder) from error


class Streams:
    """The sinks of one attempt at a run. Leaving the context closes the files, to which reports of errors are added.

    Standard error always passes through the launcher; standard output only where it goes to a file, as a worker that
    has the terminal itself prints without delay, or where a table stands at the bottom of the same terminal.

    Args:
        monitor: the progress of the workers is shown on standard error, on a terminal as a table.
    """

    def __init__(self, logs: Logs, attempt: int, ranks: Sequence[int], monitor: bool = False) -> None:
        self._logs = logs
        self._attempt = attempt
        self._ranks = ranks
        self._files: list[LogFile] = []
        self._tails = {rank: Tail() for rank in ranks}
        self._reports = {rank: memory_file("accelerate-cpp-error") for rank in ranks}
        self._error_logs: dict[int, LogFile] = {}
        self._screen = _screen() if monitor and os.isatty(STDERR) else None
        self._above_table = _streams_of_one_terminal() if self._screen is not None else ()
        plain = None if any(logs.streams) else 0
        several = (STDOUT, STDERR) if len(ranks) > 1 else ()
        self._consoles = {stream: Console(stream, ranks, plain, write=self._writer(stream)) for stream in several}
        self.has_lost_output = False

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *error: object) -> None:
        if self._screen is not None:
            self._screen.close()
        for rank, log in self._error_logs.items():
            report = self._report(rank)
            if report is not None:
                log(f"{report.traceback}\n".encode())
        for file in self._files:
            file.close()
        for descriptor in self._reports.values():
            os.close(descriptor)

    @property
    def consoles(self) -> list[Console]:
        """The consoles that hold lines back for a while."""
        return list(self._consoles.values())

    @property
    def inherited(self) -> list[int]:
        """The descriptors that workers need besides."""
        return list(self._reports.values())

    def environment(self, worker: int) -> dict[str, str]:
        """What the worker with this local rank is told besides."""
        told = env_table.render({env_table.ERROR_REPORT: (self._reports[self._ranks[worker]], os.getpid())})
        if STDOUT in self._above_table and "PYTHONUNBUFFERED" not in os.environ:
            told["PYTHONUNBUFFERED"] = "1"  # a standard output that has become a pipe comes without delay
        return told

    def progress(self) -> Show:
        """The display of the workers' progress."""
        from accelerate_cpp.launch.view.live_view import Log, on_screen  # here, as few launches show it

        if self._screen is not None:
            return on_screen(self._screen)
        return Log(self.announce)

    def last_output(self, rank: int) -> LastOutput:
        """What the worker has left so far: the report of its error, and the end of its standard error."""
        return LastOutput(self._tails[rank].text, self._report(rank))

    def _report(self, rank: int) -> ErrorReport | None:
        file = self._reports[rank]
        return ErrorReport.parse(os.pread(file, min(os.fstat(file).st_size, MOST_BYTES), 0))

    def of(self, worker: int) -> dict[int, Sink]:
        """The sinks of the worker with this local rank, by stream; a stream without one is the launcher's own."""
        rank, asked = self._ranks[worker], self._logs.streams[worker] if self._logs.streams else 0
        passing = {STDERR, *self._above_table}
        sinks: dict[int, list[Sink]] = {stream: [] for stream in _NAMES if asked & stream or stream in passing}
        for stream, parts in sinks.items():
            parts.append(self._consoles[stream].sink(rank) if self._consoles else self._writer(stream))
            if asked & stream and self._logs.folder is not None:
                file = self._file(self._logs.folder / f"attempt_{self._attempt}" / str(rank) / _NAMES[stream])
                parts.append(file)
                if stream == STDERR:
                    self._error_logs[rank] = file
        sinks[STDERR].append(self._tails[rank])
        return {stream: to_all(*parts) for stream, parts in sinks.items()}

    def _file(self, path: Path) -> LogFile:
        file = LogFile(path, self._complain)
        self._files.append(file)
        return file

    def _writer(self, stream: int) -> Sink:
        if self._screen is not None and stream in self._above_table:
            return self._screen.stream(stream)
        return Descriptor(stream)

    def _complain(self, sentence: str) -> None:
        self.has_lost_output = True
        self._announce(f"accelerate-cpp launch on {socket.gethostname()}: {sentence}")

    def announce(self, sentence: str) -> None:
        """Shows a sentence of the launcher's own on standard error, between the lines of the workers."""
        self._announce(f"accelerate-cpp: {sentence}")

    def _announce(self, sentence: str) -> None:
        if self._consoles:
            self._consoles[STDERR].announce(sentence)
        else:
            self._writer(STDERR)(f"{sentence}\n".encode())


def _screen() -> Screen:
    from accelerate_cpp.launch.view.screen import Screen  # here, as few launches have one

    return Screen(STDERR)


def _streams_of_one_terminal() -> tuple[int, ...]:
    """The output streams that are on the terminal of standard error."""
    out, err = os.fstat(STDOUT), os.fstat(STDERR)  # a terminal from outside a container has no name there
    if os.isatty(STDOUT) and (out.st_dev, out.st_rdev) == (err.st_dev, err.st_rdev):
        return (STDOUT, STDERR)
    return (STDERR,)
