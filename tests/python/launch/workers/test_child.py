from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

from accelerate_cpp.launch.workers.child import ChildSetup
from accelerate_cpp.launch.workers.signals import blocked_signals

REPORT_SIGNALS = """
import signal
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, signal.pthread_sigmask(signal.SIG_BLOCK, []) == set())
"""

PARENT = """
import os, subprocess, sys
from accelerate_cpp.launch.workers.child import ChildSetup
child = subprocess.Popen(["sleep", "600"], preexec_fn=ChildSetup(), start_new_session=True, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_child_has_default_actions_and_nothing_blocked() -> None:
    with blocked_signals():
        child = subprocess.Popen(
            [sys.executable, "-c", REPORT_SIGNALS], preexec_fn=ChildSetup(), stdout=subprocess.PIPE, text=True
        )
    assert child.communicate()[0].split() == ["True", "True"]


def test_child_dies_with_its_parent() -> None:
    parent = subprocess.run([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, check=False)
    assert parent.returncode == -signal.SIGKILL
    try:
        pidfd = os.pidfd_open(int(parent.stdout))
    except ProcessLookupError:
        return
    # Readable once the process has ended; the suite's time limit bounds the wait.
    select.select([pidfd], [], [])
    os.close(pidfd)


def test_child_whose_parent_has_already_died_ends_itself() -> None:
    setup = ChildSetup()
    setup._parent = -1  # no process has this pid: as if the parent had died and another had adopted the child
    child = os.fork()
    if child == 0:
        try:
            setup()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
