"""Workers that DeepSpeed's own launcher starts on the machines of a file: ``--deepspeed_hostfile``."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from accelerate_cpp.comm.memory_file import memory_file
from accelerate_cpp.launch.plan import host_resources
from accelerate_cpp.launch.plan.deepspeed_launcher import (
    DEFAULT_WAY,
    ON_EACH_MACHINE,
    THROUGH_SLURM,
    DeepSpeedLauncher,
)
from accelerate_cpp.launch.plan.launch_plan import LaunchPlan
from accelerate_cpp.launch.plan.own_program import module_program
from accelerate_cpp.launch.workers.child import ChildSetup
from accelerate_cpp.launch.workers.failure import describe, shell_status
from accelerate_cpp.launch.workers.over_ssh import host_lines, is_secret
from accelerate_cpp.launch.workers.program import STDIN, start_program
from accelerate_cpp.launch.workers.signals import INTERRUPTS, caught_signals
from accelerate_cpp.launch.workers.supervisor import Supervisor
from accelerate_cpp.launch.workers.worker_output import say

_ENVIRONMENT_FILE = "DS_ENV_FILE"
_DEFAULT_FILE = ".deepspeed_env"
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_AS_IT_IS = re.compile(r"[\w@%+=:,./-]*")  # what DeepSpeed puts no quotes around
# What is true of this machine and this session only.
_OF_THIS_MACHINE = re.compile(
    "_|PWD|OLDPWD|SHLVL|HOME|USER|LOGNAME|SHELL|MAIL|HOST|HOSTNAME|TERM|COLUMNS|LINES|DISPLAY|LS_COLORS|"
    "(SSH|XDG|DBUS|PDSH)_.*|DS_ENV_FILE"
)
# What DeepSpeed's launcher passes on without being told, for all kinds of devices that it knows.
_EXPORTED = re.compile(
    "MLFLOW|PYTHON|MV2|UCX|NCCL|LD_LIBRARY|PATH|ASCEND|HCCL|NEUWARE_HOME|CNCL|BKCL|XPU|XMLIR|BCCL|BIREN|SUPA"
)


@dataclass(frozen=True)
class Passed:
    """The variables for workers elsewhere.

    Attributes:
        lines: of DeepSpeed's file.
        secret: names that are left out, as all users of a machine can see command lines.
        unfit: names that are left out, as their texts would not arrive as they are.
    """

    lines: tuple[str, ...]
    secret: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()

    def sentences(self) -> Iterator[str]:
        """Says what is left out."""
        if self.secret:
            yield (
                f"workers on the machines of the file do not get {', '.join(self.secret)}, as command lines would show "
                f"it to all users; a line in ~/{_DEFAULT_FILE} passes it nevertheless"
            )
        if self.unfit:
            yield (
                f"workers on the machines of the file do not get {', '.join(self.unfit)}, as DeepSpeed's launcher "
                "would change the text"
            )


def passed_variables(environment: Mapping[str, str], way: str, by_user: Sequence[str] = ()) -> Passed:
    """What of ``environment`` DeepSpeed's launcher has to be told to pass on, if it starts workers in this ``way``.

    Args:
        by_user: lines of the same form, which come before those of the result.
    """
    if way == ON_EACH_MACHINE:  # it starts workers of its own machine only, which have the whole environment
        return Passed(tuple(by_user))
    lines, secret, unfit = [], [], []
    for name, text in sorted(environment.items()):
        if text == "" or _OF_THIS_MACHINE.fullmatch(name):
            continue
        if way == THROUGH_SLURM:  # Slurm passes on the whole environment, and the launcher needs no file for it
            secret += [name] if _is_exported_secret(name, text) else []
            continue
        written = _written(text, way)
        if is_secret(name, text):
            secret.append(name)
        elif written is None or not _NAME.fullmatch(name):
            unfit.append(name)
        else:
            lines.append(f"{name}={written}\n")
    said = {line.partition("=")[0].strip() for line in by_user}
    left_out = [tuple(name for name in names if name not in said) for names in (secret, unfit)]
    return Passed((*by_user, *lines), *left_out)


def environment_of_runner(environment: Mapping[str, str], way: str) -> dict[str, str]:
    """``environment`` without the secrets that DeepSpeed's launcher would put on a command line, and into its log."""
    if way == ON_EACH_MACHINE:
        return dict(environment)
    return {name: text for name, text in environment.items() if not _is_exported_secret(name, text)}


def _is_exported_secret(name: str, text: str) -> bool:
    return _EXPORTED.match(name) is not None and is_secret(name, text)


def _written(text: str, way: str) -> str | None:
    """``text`` in the form that arrives as ``text``; ``None`` if none does.

    DeepSpeed puts quotes around all that has other characters than names and paths have. pdsh gives that to a shell,
    after it has replaced what begins with a percent sign; the others take the quotes for a part of the text.
    """
    if way != DEFAULT_WAY:
        return text if _AS_IT_IS.fullmatch(text) else None
    if "\n" in text or text != text.strip():
        return None
    return re.sub(r'(["$`\\])', r"\\\1", text).replace("%", "%%")


def users_lines(environ: Mapping[str, str], places: Sequence[Path] | None = None) -> Iterator[str]:
    """The lines of the files that DeepSpeed would read if it were not told another one."""
    name = environ.get(_ENVIRONMENT_FILE, _DEFAULT_FILE)
    for place in (Path.home(), Path.cwd()) if places is None else places:
        if (place / name).is_file():
            yield from (f"{line}\n" for line in (place / name).read_text().splitlines() if "=" in line)


def _uses_one_machine(launcher: DeepSpeedLauncher) -> bool:
    """Whether the filter leaves one machine of the file.

    DeepSpeed then starts the workers here, with its own environment and without command lines for others.
    """
    listed = {words[0] for _, words, _ in host_lines(Path(launcher.hostfile), "--deepspeed_hostfile")}
    if launcher.inclusion:
        included = {words.partition(":")[0] for words in launcher.inclusion.split("@")}
        return len(included) == 1 and included <= listed
    exclusion = launcher.exclusion or ""
    return ":" not in exclusion and len(listed - set(exclusion.split("@"))) == 1  # a machine may keep some processes


def run_deepspeed(plan: LaunchPlan, launcher: DeepSpeedLauncher, *, quiet: bool = False) -> int:
    """Runs DeepSpeed's launcher until it has ended, and returns its exit status; 128 + n for signal n.

    Its file of variables is in memory, and vanishes with it. ``quiet``: no sentences on standard error.

    Raises:
        InvalidArgument: processes cannot be watched here.
    """
    host_resources.require_supervision(plan.group.world_size)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    environment = launcher.environment(plan.group)
    way = ON_EACH_MACHINE if _uses_one_machine(launcher) else launcher.way
    passed = passed_variables(environment, way, [*users_lines(os.environ)])
    for sentence in () if quiet else passed.sentences():
        say(f"accelerate-cpp launch: {sentence}")
    command = (*module_program("deepspeed.launcher.runner"), *plan.deepspeed_command[1:])
    lifeline = STDIN if plan.ends_with_stdin else None
    with (
        _memory_file("".join(passed.lines)) as variables,
        caught_signals(INTERRUPTS) as signals,
        Supervisor(signals, lifeline=lifeline) as supervisor,
    ):
        worker = start_program(
            command,
            0,
            ChildSetup(),
            {},
            environment=environment_of_runner(environment, way) | {_ENVIRONMENT_FILE: f"/proc/self/fd/{variables}"},
            stdin=None if lifeline is None else subprocess.DEVNULL,
            inherited=[variables],
        )
        supervisor.add(worker)
        end = supervisor.run()
    if end.interrupted_by is not None:
        return shell_status(-end.interrupted_by)
    code = end.workers[0].exit_code
    if code != 0 and not quiet:
        say(f"DeepSpeed's launcher failed: {describe(code)}")
    return shell_status(code)


@contextmanager
def _memory_file(text: str) -> Iterator[int]:
    """Yields the descriptor of a file that has ``text`` and no name."""
    descriptor = memory_file("accelerate-cpp-variables")
    try:
        os.write(descriptor, text.encode())
        yield descriptor
    finally:
        os.close(descriptor)
