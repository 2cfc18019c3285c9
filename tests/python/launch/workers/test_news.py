"""What is told of a run that has not ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Collection

import pytest

from accelerate_cpp.comm.joining import MESSAGE, RAISED
from accelerate_cpp.launch.workers import news as news_module
from accelerate_cpp.launch.workers import supervisor as supervisor_module
from accelerate_cpp.launch.workers.attendance import Absence, attendance
from accelerate_cpp.launch.workers.failure import RunEnd, WorkerEnd
from accelerate_cpp.launch.workers.news import LOOK_SECONDS, NEWS_SECONDS, News, Voice
from accelerate_cpp.launch.workers.supervisor import Supervisor
from accelerate_cpp.launch.workers.worker import Worker


class Seen:
    """A run with a clock of its own, and what was told of it."""

    def __init__(self, errors: dict[int, str] | None = None, blamed: dict[int, Collection[int]] | None = None) -> None:
        self.now = 100.0
        self.end: RunEnd | None = None
        self.running = {0: False, 1: False}
        self.told: list[str] = []
        voice = Voice(self.told.append, lambda rank: f"rank {rank}", (errors or {}).get)  # type: ignore[arg-type]
        self.news = News(voice, lambda: self.end, lambda: self.running, (blamed or {}).get, clock=lambda: self.now)

    def after(self, seconds: float) -> list[str]:
        """What is told when the launcher waits for this long at most, as often as it must."""
        until, before = self.now + seconds, len(self.told)
        while True:
            left = self.news.seconds_left()
            if self.now + left > until:
                self.now = until
                return self.told[before:]
            self.now += left
            self.news.show_due()


def _ended(*ends: WorkerEnd, absence: Absence | None = None) -> RunEnd:
    return RunEnd(ends, None, absence)


def test_the_cause_is_told_once_and_only_when_the_run_takes_its_time_to_end() -> None:
    run = Seen({1: "ValueError: boom"})
    assert run.after(100) == []
    run.end = _ended(WorkerEnd(1, 1, False))
    assert run.after(NEWS_SECONDS * 0.9) == []
    assert run.after(NEWS_SECONDS * 0.2) == ["rank 1 failed: ValueError: boom; the processes are ending"]
    assert run.after(100) == []


@pytest.mark.parametrize(
    ("run", "end", "sentence"),
    [
        (Seen(), _ended(WorkerEnd(2, -9, False)), "rank 2 was killed by SIGKILL (signal 9); the processes are ending"),
        (Seen(), _ended(WorkerEnd(2, 3, False)), "rank 2 failed: exit code 3; the processes are ending"),
        (
            Seen(),
            _ended(WorkerEnd(0, 0, False), absence=Absence(0, [1])),
            "rank 0 left first: it ended with exit code 0 before it joined the process group, where rank 1 waited for "
            "it; the processes are ending",
        ),
        (
            Seen({0: "PeerLost: rank 1 has ended", 1: "KeyError: 7"}, {0: (1,)}),
            _ended(WorkerEnd(0, 1, False), WorkerEnd(1, 1, False)),
            "rank 1 failed: KeyError: 7; the processes are ending",
        ),
        (
            Seen({0: "PeerLost: rank 1 withdrew"}, {0: (1,)}),
            _ended(WorkerEnd(0, 1, False)),
            "rank 0 failed: PeerLost: rank 1 withdrew; the processes are ending",
        ),
    ],
)
def test_what_is_told_is_the_cause_as_far_as_it_is_known(run: Seen, end: RunEnd, sentence: str) -> None:
    run.end = end
    assert run.after(100) == [sentence]


def test_a_stop_and_its_end_are_told() -> None:
    run = Seen()
    run.running = {0: False, 1: True}
    assert run.after(LOOK_SECONDS) == ["rank 1 is stopped by a signal; it goes on when it gets SIGCONT"]
    assert run.after(100) == []
    run.running = {0: True, 1: False}
    assert run.after(LOOK_SECONDS) == [
        "rank 0 is stopped by a signal; it goes on when it gets SIGCONT",
        "rank 1 is not stopped any more",
    ]


def test_a_stopped_worker_that_is_killed_does_not_go_on() -> None:
    run = Seen()
    run.running = {0: False, 1: True}
    assert len(run.after(LOOK_SECONDS)) == 1
    run.running = {0: False}
    assert run.after(100) == []


def test_a_sign_of_a_failure_that_was_none_leaves_the_cause_to_be_told() -> None:
    run = Seen()
    run.end = _ended(WorkerEnd(0, 0, False))
    assert run.after(100) == []
    run.end = _ended(WorkerEnd(0, 0, False), WorkerEnd(1, 3, False))
    assert run.after(2 * NEWS_SECONDS) == ["rank 1 failed: exit code 3; the processes are ending"]


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told is told at once, and the run then has all the time that a slow machine needs."""
    monkeypatch.setattr(supervisor_module, "REPORT_SECONDS", 600.0)
    monkeypatch.setattr(news_module, "NEWS_SECONDS", 0.0)
    monkeypatch.setattr(news_module, "LOOK_SECONDS", 0.01)


class Told(list[str]):
    """Collects what is told; until then, processes that read from ``waits`` wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self._end = os.pipe()

    def say(self, sentence: str) -> None:
        self.append(sentence)
        if len(self) == 1:
            os.close(self._end)

    def voice(self, error: str = "") -> Voice:
        return Voice(self.say, lambda rank: f"rank {rank}", lambda rank: error)


def _start(rank: int, code: str, *inherited: int) -> Worker:
    command = [sys.executable, "-c", f"import os, signal, time\n{code}"]
    process = subprocess.Popen(command, start_new_session=True, pass_fds=inherited)
    return Worker(rank, process.pid, {}, process.wait)


@pytest.mark.usefixtures("impatience")
def test_an_error_is_told_while_its_worker_still_ends() -> None:
    """Both workers end only when it has been told."""
    told = Told()
    with attendance() as present, Supervisor(attendance=present, voice=told.voice("ValueError: boom")) as supervisor:
        for rank in (0, 1):
            present.variables(rank)
            supervisor.add(_start(rank, f"os.read({told.waits}, 1)\nos._exit({rank})", told.waits))
        os.write(present.descriptor, MESSAGE.pack(1, RAISED))
        end = supervisor.run()
    assert told == ["rank 1 failed: ValueError: boom; the processes are ending"]
    assert {(one.rank, one.exit_code) for one in end.workers} == {(0, 0), (1, 1)}


@pytest.mark.usefixtures("impatience")
def test_a_death_is_told_while_the_others_still_end() -> None:
    told = Told()
    with Supervisor(voice=told.voice()) as supervisor:
        supervisor.add(_start(0, f"os.read({told.waits}, 1)\nos._exit(1)", told.waits))
        supervisor.add(_start(1, "os.kill(os.getpid(), signal.SIGKILL)"))
        supervisor.run()
    assert told == ["rank 1 was killed by SIGKILL (signal 9); the processes are ending"]


@pytest.mark.usefixtures("impatience")
def test_a_stopped_worker_is_told_and_can_be_continued() -> None:
    told: list[str] = []
    stopped = _start(0, "os.kill(os.getpid(), signal.SIGSTOP)")

    def say(sentence: str) -> None:
        told.append(sentence)
        os.kill(stopped.pid, signal.SIGCONT)

    with Supervisor(voice=Voice(say, lambda rank: f"rank {rank}", lambda rank: "")) as supervisor:
        supervisor.add(stopped)
        end = supervisor.run()
    assert told[0] == "rank 0 is stopped by a signal; it goes on when it gets SIGCONT"
    assert end.workers == (WorkerEnd(0, 0, False),)


@pytest.mark.usefixtures("impatience")
def test_nothing_is_told_of_a_run_that_was_interrupted() -> None:
    told: list[str] = []
    with attendance() as present:
        lifeline, other = os.pipe()
        os.close(other)
        voice = Voice(told.append, lambda rank: f"rank {rank}", lambda rank: "")
        with Supervisor(lifeline=lifeline, attendance=present, voice=voice) as supervisor:
            for rank in (0, 1):
                present.variables(rank)
                supervisor.add(_start(rank, "time.sleep(600)"))
            os.write(present.descriptor, MESSAGE.pack(1, RAISED))
            end = supervisor.run()
        os.close(lifeline)
    assert end.interrupted_by == signal.SIGTERM
    assert told == []
