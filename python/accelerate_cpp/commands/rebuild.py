"""``accelerate-cpp rebuild``: builds the C++ module of this installation for the torch that is installed."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from accelerate_cpp.commands.installed_module import InstalledModule, find_installed_module
from accelerate_cpp.commands.utils import CustomArgumentParser, command_parser, integer_from
from accelerate_cpp.config import env_table
from accelerate_cpp.errors import AccelerateError
from accelerate_cpp.installation import (
    OLDEST_TORCH,
    built_for,
    installed_torch,
    is_too_old,
    minor_of,
    torch_folder,
)
from accelerate_cpp.launch.plan.host_resources import usable_cores

_BYTES_OF_A_JOB = 2**31  # what the compiler needs at most for a file that includes torch's headers
_CPU_MINUTES = 3  # what compiling everything takes, on one core of a server of 2021
_OLDEST_CMAKE = (3, 25)
_COMPILERS = ("c++", "g++", "clang++")
# As little as tells a compiler for C++20 from older ones.
_CXX20 = "#include <bit>\n#include <concepts>\n#include <span>\nstatic_assert(std::integral<int>);\n"
_LOADS_TORCH = "import torch"
_LOADS_MODULE = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("accelerate_cpp._C", sys.argv[1])
spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""


def rebuild_command_parser(
    subparsers: argparse._SubParsersAction[CustomArgumentParser] | None = None,
) -> CustomArgumentParser:
    """The parser of the command, by itself or as one of ``subparsers``."""
    description = (
        "Build the C++ module of this installation for the torch that is installed, for example after another package "
        "has moved torch to another version. Until the new module has been built and loads, the old one stays."
    )
    parser = command_parser(subparsers, "rebuild", description)
    parser.add_argument(
        "--jobs", type=integer_from(1), metavar="N", help="files compiled at once; default: as cores and memory allow"
    )
    parser.add_argument("--force", action="store_true", help="build even if the module fits the installed torch")
    parser.set_defaults(func=rebuild_command)
    return parser


def rebuild_command(args: argparse.Namespace) -> int:
    """Rebuilds the module as ``args`` says, and returns 0.

    Raises:
        AccelerateError: it cannot be built, with what is missing or failed; the installation is as it was.
    """
    module, torch = find_installed_module(), _usable_torch()
    built = built_for()
    if built is not None and minor_of(built) == minor_of(torch) and not args.force:
        _say(f"nothing to do: the C++ module was built for torch {built}, and torch {torch} is installed")
        return 0
    tools = _find_tools()
    jobs = args.jobs or _usable_jobs()
    minutes = -(-_CPU_MINUTES // min(jobs, usable_cores()))
    about = "about a minute" if minutes == 1 else f"about {minutes} minutes"
    _say(f"building the C++ module for torch {torch}, {jobs} files at once; this takes {about}")
    began = time.monotonic()
    with module.locked(), _ended_by_signals(), tempfile.TemporaryDirectory(prefix="accelerate-cpp-rebuild-") as name:
        work = Path(name)
        _require_loading(_LOADS_TORCH, (), f"torch {torch} does not load, so nothing can be built for it", work)
        with _kept_on_failure(work / "log", torch):
            files = _build(module, tools, jobs, work)
            _require_loading(_LOADS_MODULE, [next(files.glob("_C.*"))], "the new module does not load", work)
        module.replace(files, torch)
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    _say(f"done in {minutes} min {seconds} s: accelerate_cpp works with torch {minor_of(torch)} now")
    return 0


def _usable_torch() -> str:
    torch = installed_torch()
    advice = f'run `pip install "torch>={OLDEST_TORCH}"` first'
    if torch is None:
        raise AccelerateError(f"{sys.executable} finds no torch that the C++ module could be built for; {advice}")
    if is_too_old(torch):
        raise AccelerateError(f"the C++ module needs torch {OLDEST_TORCH} or newer, but {torch} is installed; {advice}")
    return torch


@dataclass(frozen=True)
class _Tools:
    cmake: str
    ninja: str
    compiler: tuple[str, ...]


def _find_tools() -> _Tools:
    """The programs of the build; raises an :class:`AccelerateError` that names all that is missing, with commands."""
    cmake, ninja = _program("cmake"), _program("ninja")
    compiler = _compiler()
    missing = []
    if cmake is None or ninja is None or _version_of(cmake) < _OLDEST_CMAKE:
        oldest = ".".join(map(str, _OLDEST_CMAKE))
        missing.append(f"cmake {oldest} or newer and ninja (`{sys.executable} -m pip install cmake ninja`)")
    if compiler is None:
        how = "xcode-select --install" if sys.platform == "darwin" else "apt install g++"
        missing.append(f"a compiler for C++20, such as GCC 11 (`{how}`; the variable CXX names another one)")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        missing.append(f"Python's header Python.h (`apt install {package}`)")
    if cmake is None or ninja is None or compiler is None or missing:
        raise AccelerateError(f"the C++ module cannot be built without {'; without '.join(missing)}")
    return _Tools(cmake, ninja, compiler)


def _program(name: str) -> str | None:
    """Where pip puts programs of this environment, which may not be active, or in PATH."""
    return shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)


def _version_of(cmake: str) -> tuple[int, ...]:
    said = subprocess.run([cmake, "--version"], capture_output=True, text=True, check=False).stdout
    numbers = re.search(r"(\d+)\.(\d+)", said)
    return tuple(map(int, numbers.groups())) if numbers else ()


def _compiler() -> tuple[str, ...] | None:
    """The command of a compiler that knows C++20, or ``None``."""
    named = env_table.CXX.get()
    candidates = [tuple(shlex.split(named))] if named else [(name,) for name in _COMPILERS]
    for command in candidates:
        if command and shutil.which(command[0]) is not None:
            probe = [*command, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
            if subprocess.run(probe, input=_CXX20, capture_output=True, text=True, check=False).returncode == 0:
                return command
    return None


def _usable_jobs() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(usable_cores(), memory // _BYTES_OF_A_JOB))


def _build(module: InstalledModule, tools: _Tools, jobs: int, work: Path) -> Path:
    """Builds in folder ``work``, with ``log`` in it, and returns the folder with the module and ``_build_info.py``."""
    build, prefix = work / "build", work / "installed"
    settings = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_MAKE_PROGRAM": tools.ninja,
        "ACCELERATE_TORCH_DIR": torch_folder(),
        "ACCELERATE_WARNINGS_AS_ERRORS": "OFF",
        "Python_EXECUTABLE": sys.executable,
    }
    if not env_table.CXX.is_set():  # CMake reads the variable itself, with the flags in it
        settings["CMAKE_CXX_COMPILER"] = tools.compiler[0]
    defined = [f"-D{name}={value}" for name, value in settings.items()]
    with (work / "log").open("w") as log:
        _run([tools.cmake, "-S", module.sources, "-B", build, "-G", "Ninja", *defined], log)
        with _progress() as show:
            _run([tools.ninja, "-C", build, "-j", jobs], log, show)
        _run([tools.cmake, "--install", build, "--prefix", prefix, "--component", "module", "--strip"], log)
    return prefix / "accelerate_cpp"


def _run(command: Sequence[object], log: IO[str], show: Callable[[str], None] | None = None) -> None:
    """Runs ``command``; each line that it prints goes to ``log``, and to ``show``.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    words = [str(word) for word in command]
    # In a session of its own, it does not hear the Ctrl-C of this terminal, but is ended here, with all it has started.
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            for line in process.stdout or ():
                log.write(line)
                if show is not None:
                    show(line)
            process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, words)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A function to which the lines of Ninja are shown: one moving line on a terminal, else four lines in all."""
    moves = sys.stdout.isatty()
    quarter = 0

    def show(line: str) -> None:
        nonlocal quarter
        counted = re.match(r"\[(\d+)/(\d+)\]", line)
        if counted is None:
            return
        done, total = map(int, counted.groups())
        text = f"step {done} of {total}"
        if moves:
            sys.stdout.write(f"\r\033[Kaccelerate-cpp rebuild: {text}")
            sys.stdout.flush()
        elif 4 * done // total > quarter:
            quarter = 4 * done // total
            _say(text)

    try:
        yield show
    finally:
        if moves:
            sys.stdout.write("\r\033[K")
            sys.stdout.flush()


@contextmanager
def _kept_on_failure(log: Path, torch: str) -> Iterator[None]:
    """Turns a failure of the build into a message that quotes and names ``log``, which is moved to where it stays."""
    try:
        yield
    except subprocess.CalledProcessError:
        descriptor, kept = tempfile.mkstemp(prefix="accelerate-cpp-rebuild-", suffix=".log")
        os.close(descriptor)
        shutil.copyfile(log, kept)
        raise AccelerateError(
            f"the C++ module could not be built for torch {torch}, and is as it was: {_first_error(log)} (log: {kept})"
        ) from None


def _first_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if line.startswith("CMake Error"):
            return " ".join(lines[number : number + 2])
        if re.search(r"\berror:", line):
            return line
    return lines[-1] if lines else "nothing was printed"


def _require_loading(program: str, arguments: Sequence[object], otherwise: str, folder: Path) -> None:
    """Runs ``program`` in a new Python; raises an error that says ``otherwise``, and why, if that fails."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, cwd=folder)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise AccelerateError(f"{otherwise}: {last}")


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Makes the signals of a closed terminal and of ``kill`` end this process as cleanly as Ctrl-C does."""
    signals = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def _say(sentence: str) -> None:
    print(f"accelerate-cpp rebuild: {sentence}", flush=True)
