"""One launcher on each machine of a file, started over ssh: ``accelerate-cpp launch --hostfile``."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.plan import host_resources
from accelerate_cpp.launch.plan.machines import DEFAULT_PORT
from accelerate_cpp.launch.plan.own_program import module_program
from accelerate_cpp.launch.workers.child import ChildSetup
from accelerate_cpp.launch.workers.failure import account, failed_status, first_failure, shell_status
from accelerate_cpp.launch.workers.program import STDERR, start_program
from accelerate_cpp.launch.workers.signals import INTERRUPTS, caught_signals
from accelerate_cpp.launch.workers.supervisor import Supervisor
from accelerate_cpp.launch.workers.worker import Worker
from accelerate_cpp.launch.workers.worker_output import Descriptor, Tail, blamed_ranks, last_traceback, say, to_all

# The variables that programs elsewhere need from this environment; ssh itself does not pass them on.
_CARRIED = re.compile(
    "(ACCELERATE|CUDA|DS|FSDP|GLOO|HF|KMP|MKL|NCCL|OMP|PARALLELISM_CONFIG|TORCH|TOKENIZERS|TRANSFORMERS)_|PYTHON"
)
# A word of a name, such as of HF_TOKEN or HF_TOKENS_2, but not of TOKENIZERS_PARALLELISM.
_SECRET = re.compile(
    "(TOKENS?|KEYS?(ID)?|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASES?|CREDENTIALS?|AUTH|AUTHORIZATION|AUTHENTICATION|COOKIES?)"
    "([^A-Z]|V[0-9]|$)",
    re.IGNORECASE,
)
# A whole word, such as of DB_PASS, but not of BYPASS; PWD by itself is a folder.
_SECRET_WORD = re.compile(
    "(_PWD|(^|[^A-Z])(PASS|PAT|DSN|CREDS?|JWT|WEBHOOKS?|CONNECTION_STRINGS?))([^A-Z]|$)", re.IGNORECASE
)
# The name of a file, or a partition of InfiniBand.
_NO_SECRET = re.compile("_(PATH|FILE|DIR|IB_PKEY)$", re.IGNORECASE)
# In some addresses, an @ stands behind a version, a container or the user git. A quote may end a text in JSON.
_SECRET_IN_ADDRESS = re.compile(
    r"""
    (?<!\bhf)(?<!\babfs)(?<!\babfss)(?<!\bwasb)(?<!\bwasbs)://(?!git@)
    (
        ((?!"[],}:])[^\s/@])+  # a token, or a user and a password
        | [^\s/@:"[]*:(?!\d{1,5}[/?#])((?!"[],}:])\S)*  # a user and a password with slashes; a number is a port
    )
    @(?!sha(256|512):)
    """,
    re.VERBOSE,
)
_HERE = {"localhost", "127.0.0.1", "::1"}


def is_carried(name: str, text: str = "") -> bool:
    """Whether launchers elsewhere need the environment variable ``name`` of this one; never one with a secret.

    All users of a machine can see the command lines on which variables travel.
    """
    return _CARRIED.match(name) is not None and not is_secret(name, text)


def is_secret(name: str, text: str = "") -> bool:
    """Whether the environment variable ``name`` holds what other users of a machine must not see.

    Args:
        text: its value, which may have an address with a password or a token in it.
    """
    has_word = _SECRET.search(name) is not None or _SECRET_WORD.search(name) is not None
    by_name = has_word and _NO_SECRET.search(name) is None
    return by_name or _SECRET_IN_ADDRESS.search(text) is not None


@dataclass(frozen=True)
class Machine:
    """One line of the file: the name of a machine, and how many workers it gets; ``None`` if the line does not say."""

    name: str
    slots: int | None = None

    @property
    def is_here(self) -> bool:
        """Whether the name means this machine."""
        return self.name in _HERE | {socket.gethostname(), socket.getfqdn()}


def host_lines(path: Path, flag: str) -> Iterator[tuple[int, list[str], str]]:
    """The lines of a file of machines that are not empty: number, words without a comment, and all of it.

    Args:
        flag: by which the file was given, for the message.

    Raises:
        InvalidArgument: the file cannot be read, or has a name that no machine has.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{flag} {path}: cannot be read: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if words[0].startswith("-") or not words[0].isprintable():  # ssh and others would take it for an option
            raise InvalidArgument(
                f"{flag} {path}: line {number}: {line.strip()[:200]!r}: expected the name of a machine"
            )
        yield number, words, line


def read_hostfile(path: Path) -> list[Machine]:
    """The machines in a file of lines such as ``gpu1`` or ``gpu1 slots=4``, as MPI and DeepSpeed have them.

    Raises:
        InvalidArgument: the file cannot be read, names no machine or one twice, has a line of another form, or gives
            machines different numbers of workers.
    """
    machines = []
    for number, words, line in host_lines(path, "--hostfile"):
        match = re.fullmatch(r"(?:slots=([1-9]\d{0,8}))?", " ".join(words[1:]))
        if match is None:
            raise InvalidArgument(f"{path}: line {number}: {line.strip()!r}: expected a name, and slots=N or nothing")
        machines.append(Machine(words[0], int(match[1]) if match[1] else None))
    if not machines or len({machine.name for machine in machines}) < len(machines):
        raise InvalidArgument(f"{path}: expected at least one machine, each listed once")
    if len({machine.slots for machine in machines}) > 1:
        raise InvalidArgument(
            f"{path}: expected the same slots=N for all machines, or none at all: all machines get the same number of "
            "workers"
        )
    return machines


def launcher_commands(
    machines: Sequence[Machine],
    flags: Sequence[str],
    script: Sequence[str],
    ssh: str,
    environ: Mapping[str, str] | None = None,
) -> list[list[str]]:
    """The command that starts the launcher of each machine, here or over ssh.

    Args:
        flags: of this launch; those added here come first, so that given ones count.
        script: with its arguments.
        environ: ``os.environ`` when ``None``.

    Raises:
        InvalidArgument: rank 0 would be at an address that other machines do not have.
    """
    first = machines[0]
    if first.name in _HERE and len(machines) > 1 and not {"--main_process_ip", "--main-process-ip"} & _names(flags):
        raise InvalidArgument(
            f"the first machine is called {first.name}, and the other machines cannot resolve that name: use a name "
            "that they know, or pass --main_process_ip"
        )
    told = [
        "--num_machines",
        str(len(machines)),
        "--main_process_ip",
        first.name,
        "--main_process_port",
        str(DEFAULT_PORT),
    ]
    if first.slots is not None:
        told += ["--num_processes", str(first.slots * len(machines))]
    environ = os.environ if environ is None else environ
    commands = []
    for rank, machine in enumerate(machines):
        launcher = [*module_program("accelerate_cpp.commands.launch"), *told, *flags]
        launcher += ["--machine_rank", str(rank), "--ends_with_stdin", *script]
        commands.append(
            launcher if machine.is_here else [*shlex.split(ssh), machine.name, _elsewhere(launcher, environ)]
        )
    return commands


def _names(flags: Sequence[str]) -> set[str]:
    return {flag.partition("=")[0] for flag in flags}


def _elsewhere(launcher: Sequence[str], environ: Mapping[str, str]) -> str:
    """What a shell on another machine has to do: the folder and the Python are the same there."""
    carried = [f"{name}={value}" for name, value in sorted(environ.items()) if is_carried(name, value)]
    return f"cd {shlex.quote(os.getcwd())} && exec env {shlex.join([*carried, *launcher])}"


def left_out(machines: Sequence[Machine], environ: Mapping[str, str]) -> Iterator[str]:
    """Says which variables of ``environ`` launchers on other machines do not get as they are secrets."""
    names = [name for name, text in sorted(environ.items()) if _CARRIED.match(name) and is_secret(name, text)]
    if names and not all(machine.is_here for machine in machines):
        yield (
            f"launchers on other machines do not get {', '.join(names)}, as command lines would show it to all users; "
            "log in on these machines, or set it there"
        )


def run_launchers(machines: Sequence[Machine], commands: Sequence[Sequence[str]], quiet: bool = False) -> int:
    """Runs a launcher on each machine until all have ended, and returns the exit status of the first that failed.

    Each ends when the connection to this process does.
    """
    host_resources.require_supervision(len(machines))
    for sentence in () if quiet else left_out(machines, os.environ):
        say(f"accelerate-cpp launch: {sentence}")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    tails = [Tail() for _ in machines]
    with ExitStack() as lifelines, caught_signals(INTERRUPTS) as signals, Supervisor(signals) as supervisor:
        setup = ChildSetup()
        for rank, command in enumerate(commands):
            read_end, write_end = os.pipe()
            lifelines.callback(os.close, write_end)
            supervisor.add(_start(command, rank, read_end, setup, tails[rank]))
        end = supervisor.run()
    if end.interrupted_by is not None:
        return shell_status(-end.interrupted_by)
    # A launcher has several ranks, and reports which one failed.
    failure = first_failure(end, lambda rank: None if blamed_ranks(tails[rank].text) is None else ())
    if failure is None:
        return 0
    if not quiet:
        name = machines[failure.rank].name
        say(f"\nthe launcher on {name} {account(failure, end)}")
        say(last_traceback(tails[failure.rank].text))
    return failed_status(failure)


def _start(command: Sequence[str], rank: int, lifeline: int, setup: ChildSetup, tail: Tail) -> Worker:
    try:
        return start_program(command, rank, setup, {STDERR: to_all(Descriptor(STDERR), tail)}, stdin=lifeline)
    except OSError as error:
        raise InvalidArgument(
            f"{command[0]}: cannot be started: {error.strerror}; pass another program with --ssh"
        ) from error
    finally:
        os.close(lifeline)
