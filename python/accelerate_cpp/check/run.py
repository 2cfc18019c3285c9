"""A worker of a check: ``accelerate_cpp.check.run FOLDER`` runs and watches the script of a task.

It exits with 0 whatever the script does, so that no rank is ended before it has recorded its observations; the parent
reads what happened from the journals.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType

from accelerate_cpp.check.journal import Journal
from accelerate_cpp.check.observed import CheckFinished, Observed
from accelerate_cpp.check.source import is_the_users, place, place_of_error
from accelerate_cpp.check.task import Task
from accelerate_cpp.check.watch import Watch
from accelerate_cpp.config import env_table
from accelerate_cpp.errors import MismatchedCollective, PeerLost, Timeout

_NO_GPU = ("Torch not compiled with CUDA", "Found no NVIDIA driver", "No CUDA GPUs are available", "CUDA driver")


def main() -> int:
    """Runs the script of the task in the folder that the first argument names."""
    folder = Path(sys.argv[1])
    task = Task.load(folder)
    rank = int(env_table.RANK.get() or 0)
    observed = Observed(task, Journal(folder, rank), rank)
    watch = Watch(observed, folder / "saved")
    alarm = threading.Timer(task.time_limit_seconds, _give_up, (observed,))
    alarm.daemon = True
    alarm.start()
    how = run(task, observed)
    if how in ("end", "enough"):
        watch.conclude(has_ended=how == "end")
    observed.end(how)
    observed.has_ended = True
    return 0


def run(task: Task, observed: Observed) -> str:
    """Runs the script, and records what stopped it: ``end``, ``enough``, ``failed``, or ``peer``."""
    sys.argv = [task.script, *task.arguments]
    try:
        _run_script(task)
    except CheckFinished:
        return "enough"
    except SystemExit as leaving:
        return _left(leaving, observed)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _failed(error, observed)
    return "end"


def _run_script(task: Task) -> None:
    if task.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(task.script, run_name="__main__", alter_sys=True)
        return
    path = os.path.abspath(task.script)
    sys.path.insert(0, os.path.dirname(path))
    main_module = ModuleType("__main__")
    main_module.__dict__.update(__file__=path, __builtins__=__builtins__)
    sys.modules["__main__"] = main_module
    exec(compile(Path(path).read_bytes(), path, "exec"), main_module.__dict__)


def _left(leaving: SystemExit, observed: Observed) -> str:
    if leaving.code in (None, 0):
        return "end"
    observed.find(
        "error", "script-failed", f"the script exits with {leaving.code!r}", "", place_of_error(leaving.__traceback__)
    )
    return "failed"


def _failed(error: BaseException, observed: Observed) -> str:
    """Records what an exception reveals about the script."""
    where, text = place_of_error(error.__traceback__), f"{type(error).__name__}: {error}"
    if isinstance(error, StopIteration) and any(one.was_cut for one in observed.passes):
        return "enough"
    if isinstance(error, MismatchedCollective):
        observed.find(
            "error",
            "mismatched-collective",
            str(error),
            "have all processes call the same, in the same order; "
            "look for `if accelerator.is_main_process` around it, and for data-dependent branches",
            where,
        )
        return "failed"
    if isinstance(error, PeerLost):
        observed.find("error", "lost-peer", text, "", where)
        return "peer"
    if isinstance(error, Timeout):
        observed.find(
            "error", "ranks-diverge", f"{error}", "have all processes call the same, in the same order", where
        )
        return "peer"
    traceback.print_exception(error)
    if any(sign in str(error) for sign in _NO_GPU):
        observed.find(
            "error",
            "hard-coded-device",
            f"the script asks for CUDA by name: {text}",
            "use accelerator.device, and let prepare move what is prepared",
            where,
        )
    else:
        observed.find("error", "script-failed", text, "", where)
    return "failed"


def _give_up(observed: Observed) -> None:
    """Reports the position of the script at the time limit, and ends the process, even if only its threads are left."""
    if observed.has_ended:
        os._exit(0)
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not is_the_users(frame.f_code):
        frame = frame.f_back
    where = "" if frame is None else place(frame.f_code.co_filename, frame.f_lineno)
    observed.find(
        "error",
        "too-slow",
        f"not done after {observed.task.time_limit_seconds:g} s, with {observed.steps} optimizer steps",
        "give the check less data or a smaller model, or more time with --time_limit",
        where,
    )
    observed.end("slow")
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
