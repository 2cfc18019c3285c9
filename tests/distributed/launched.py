"""What tests of launches share."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

STARTED: list[subprocess.Popen[str]] = []
"""The launchers of a test, which ``no_launcher_is_left`` ends after it."""


def patient_launch(**seconds: float) -> list[str]:
    """The command of a launch whose launcher waits for so long, however slow the machine.

    Args:
        seconds: by the name of a constant, as ``notices_HELD_SECONDS`` for the one of ``launch.workers.notices``.
    """
    lines = ["import sys", "from accelerate_cpp.commands.launch import main"]
    for name, value in seconds.items():
        module, _, constant = name.partition("_")
        lines += [f"from accelerate_cpp.launch.workers import {module}", f"{module}.{constant}  # fails without it"]
        lines.append(f"{module}.{constant} = {value}")
    return [sys.executable, "-X", "faulthandler", "-c", "\n".join([*lines, "sys.exit(main())"])]


def without_news(err: str) -> str:
    """What was printed, but for what is told of a run that takes its time to end."""
    return re.sub(r"^rank 1 (failed: .*|was killed by .*); the processes are ending\n", "", err, flags=re.MULTILINE)


def lives(pid: int) -> bool:
    """Whether process ``pid`` has not ended; one that nobody has reaped yet has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat[stat.rindex(")") + 2] not in "ZX"


def outputs_of(process: subprocess.Popen[bytes], patience_seconds: float) -> tuple[bytes, bytes]:
    """Standard output and standard error of ``process``, after its end.

    Raises:
        AssertionError: it has not ended in time, or others hold its pipes open. The message says which processes live,
            and where it was, if it is a Python with ``-X faulthandler``.
    """
    try:
        return process.communicate(timeout=patience_seconds)
    except subprocess.TimeoutExpired:
        status, living = process.poll(), _living()
        process.send_signal(signal.SIGABRT)
        try:
            _, err = process.communicate(timeout=patience_seconds)
        except subprocess.TimeoutExpired as late:
            err = late.stderr or b""
        raise AssertionError(
            f"process {process.pid} (exit status {status}) has not ended, or others hold its pipes, after "
            f"{patience_seconds:g} s; these live:\n{living}\n{err.decode(errors='replace')}"
        ) from None


def _living() -> str:
    """A line for each process: pid, name, state, parent and process group, and its command."""
    lines = []
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda folder: int(folder.name)):
        try:
            stat, command = (folder / "stat").read_text(), (folder / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        lines.append(f"{' '.join(stat.split()[:5])} {command.replace(chr(0), ' ')[:200]}")
    return "\n".join(lines)
