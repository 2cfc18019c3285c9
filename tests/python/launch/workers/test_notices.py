from __future__ import annotations

import signal
import subprocess
import sys

from accelerate_cpp.launch.workers.notices import HELD_SECONDS, Notices

WORKER = """
import os, signal, sys
print("begun", flush=True)
sys.stdin.readline()
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"heard\\n"))
print("ready", flush=True)
sys.stdin.readline()
sys.stdin.readline()
"""


def test_a_worker_gets_a_notice_when_it_is_ready_for_it() -> None:
    notices = Notices()
    with subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"begun\n"
        notices.add(signal.SIGUSR1, [worker.pid])
        notices.show_due()
        assert notices.seconds_left() is not None
        worker.stdin.write(b"\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == b"ready\n"  # it lives
        notices.show_due()
        assert notices.seconds_left() is None
        worker.stdin.write(b"\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == b"heard\n"
        worker.stdin.write(b"\n")
    assert worker.returncode == 0


def test_a_worker_that_is_never_ready_gets_it_in_the_end() -> None:
    now = 0.0
    notices = Notices(lambda: now)
    with subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"begun\n"
        notices.add(signal.SIGUSR1, [worker.pid])
        now = HELD_SECONDS - 1
        notices.show_due()
        assert worker.poll() is None
        now = HELD_SECONDS
        notices.show_due()
    assert worker.returncode == -signal.SIGUSR1


def test_what_nobody_has_heard_is_for_the_workers_of_the_next_attempt() -> None:
    notices = Notices()
    first, second = (subprocess.Popen([sys.executable, "-c", WORKER], stdin=-1, stdout=-1) for _ in range(2))
    with first, second:
        for worker in (first, second):
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"begun\n"
        notices.add(signal.SIGUSR1, [first.pid])
        first.kill()
        first.wait()
        notices.renew([second.pid])
        assert second.stdin is not None
        assert second.stdout is not None
        second.stdin.write(b"\n")
        second.stdin.flush()
        assert second.stdout.readline() == b"ready\n"
        notices.show_due()
        assert second.stdout.readline() == b"heard\n"
        second.stdin.write(b"\n\n")
    assert second.returncode == 0


def test_what_was_heard_is_for_the_workers_of_the_next_attempt_and_what_ended_one_is_not() -> None:
    now = 0.0
    notices = Notices(lambda: now)
    workers = [subprocess.Popen([sys.executable, "-c", WORKER], stdin=-1, stdout=-1) for _ in range(4)]
    ready, next_one, unready, unready_too = workers
    with ready, next_one, unready, unready_too:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"begun\n"
        for worker in (ready, next_one):
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write(b"\n")
            worker.stdin.flush()
            assert worker.stdout.readline() == b"ready\n"
        notices.add(signal.SIGUSR1, [ready.pid])
        assert ready.stdout is not None
        assert ready.stdout.readline() == b"heard\n"
        notices.renew([next_one.pid])
        assert next_one.stdout is not None
        assert next_one.stdout.readline() == b"heard\n"
        others = Notices(lambda: now)
        others.add(signal.SIGUSR1, [unready.pid])
        now = HELD_SECONDS
        others.show_due()
        assert unready.wait() == -signal.SIGUSR1
        others.renew([unready_too.pid])
        assert others.seconds_left() is None
        unready_too.kill()
        for worker in (ready, next_one):
            assert worker.stdin is not None
            worker.stdin.write(b"\n\n")
    assert (ready.returncode, next_one.returncode) == (0, 0)
