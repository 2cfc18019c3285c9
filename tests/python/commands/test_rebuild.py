"""accelerate-cpp rebuild, with tools that only pretend to build; tests/packaging/test_rebuild.py builds for real."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from accelerate_cpp import _build_info
from accelerate_cpp.commands import installed_module, rebuild
from accelerate_cpp.commands.installed_module import InstalledModule, find_installed_module, torch_requirement
from accelerate_cpp.errors import AccelerateError, BuildMismatch

REPOSITORY = Path(__file__).resolve().parents[3]
MODULE = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"

# The command, for an installation and with tools in a folder.
COMMAND = """
import sys
from pathlib import Path
from accelerate_cpp.commands import accelerate_cli, rebuild
from accelerate_cpp.commands.installed_module import InstalledModule
place = Path(sys.argv.pop(1))
package = place / "site/accelerate_cpp"
rebuild.find_installed_module = lambda: InstalledModule(package, place / "sources", place / "site/a.dist-info")
rebuild._program = lambda name: str(place / "bin" / name)
sys.argv[0] = "accelerate-cpp"
sys.exit(accelerate_cli.main())
"""
CMAKE = """#!{python}
import pathlib, shutil, sys
if "--version" in sys.argv:
    print("cmake version 3.25.1")
if "--install" in sys.argv:
    folder = pathlib.Path(sys.argv[sys.argv.index("--prefix") + 1], "accelerate_cpp")
    folder.mkdir(parents=True)
    shutil.copy({built!r}, folder / {module!r})
    folder.joinpath("_build_info.py").write_text("TORCH_VERSION = 'new'\\n")
"""
NINJA = '#!/bin/sh\nfor step in 1 2 3 4; do echo "[$step/4] core/base/error.cpp"; done\n'
METADATA = """Metadata-Version: 2.4
Name: accelerate-cpp
Requires-Dist: torch<2.10,>=2.9
Requires-Dist: torchdata<1,>=0.11
Requires-Dist: torch-geometric>=2.9; extra == "x"

Text that says
Requires-Dist: nothing
"""


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


class Installation:
    """A folder with an installed module, its sources, and tools that pretend to build ``built``."""

    def __init__(self, place: Path, built: Path) -> None:
        self.place = place
        self.site, self.temporary = place / "site", place / "tmp"
        for folder in ("site/accelerate_cpp", "site/a.dist-info", "sources", "bin", "tmp"):
            (place / folder).mkdir(parents=True)
        self.module = self.site / "accelerate_cpp" / MODULE
        self.module.write_text("old")
        (self.site / "accelerate_cpp/_build_info.py").write_text("TORCH_VERSION = 'old'\n")
        (self.site / "accelerate_cpp/__init__.py").touch()
        (self.site / "a.dist-info/METADATA").write_text(METADATA)
        paths = sorted(path.relative_to(self.site) for path in self.site.rglob("*") if path.is_file())
        rows = [*(f"{path},sha256=x,1" for path in paths), "a.dist-info/RECORD,,"]
        (self.site / "a.dist-info/RECORD").write_text("\n".join(rows) + "\n")
        (place / "sources/CMakeLists.txt").touch()
        write_program(place / "bin/cmake", CMAKE.format(python=sys.executable, built=str(built), module=MODULE))
        write_program(place / "bin/ninja", NINJA)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND, self.place, "rebuild", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(self.temporary)},
        )

    def run(self, *arguments: str) -> tuple[int, str, str]:
        process = self.start(*arguments)
        output, errors = process.communicate()
        return process.returncode, output, errors

    def files(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.site.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def real_module() -> Path:
    (module,) = find_installed_module().folder.glob("_C.*")
    return module


@pytest.fixture
def installation(tmp_path: Path, real_module: Path) -> Installation:
    return Installation(tmp_path / "place", real_module)


def test_a_module_that_loads_takes_the_place_of_the_old_one(installation: Installation, real_module: Path) -> None:
    status, output, errors = installation.run("--force", "--jobs", "3")
    assert (status, errors) == (0, "")
    first, *steps, last = output.splitlines()
    assert re.search(r"building the C\+\+ module for torch \S+, 3 files at once; this takes about .* minutes?$", first)
    assert steps == [f"accelerate-cpp rebuild: step {step} of 4" for step in (1, 2, 3, 4)]
    assert "done in 0 min" in last
    assert installation.module.read_bytes() == real_module.read_bytes()
    assert "new" in (installation.site / "accelerate_cpp/_build_info.py").read_text()
    assert list(installation.temporary.iterdir()) == []
    assert {path.name for path in installation.module.parent.iterdir()} == {"__init__.py", "_build_info.py", MODULE}


def test_pips_records_agree_with_the_files_afterwards(installation: Installation) -> None:
    assert installation.run("--force")[0] == 0
    pin = torch_requirement(_build_info.TORCH_VERSION)
    about = (installation.site / "a.dist-info/METADATA").read_text()
    assert about == METADATA.replace("torch<2.10,>=2.9", pin)
    rows = list(csv.reader((installation.site / "a.dist-info/RECORD").read_text().splitlines()))
    paths = [row[0] for row in rows]
    assert paths == [*sorted({*paths} - {"a.dist-info/RECORD"}), "a.dist-info/RECORD"]
    for path, digest, size in rows:
        content = (installation.site / path).read_bytes()
        right = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        if path == "a.dist-info/RECORD":
            assert (digest, size) == ("", "")
        elif path.endswith("__init__.py"):
            assert (digest, size) == ("sha256=x", "1")  # not replaced, so not touched
        else:
            assert (digest, size) == (f"sha256={right}", str(len(content)))


def test_a_module_that_fits_is_left_alone(installation: Installation) -> None:
    before = installation.files()
    status, output, _ = installation.run()
    assert status == 0
    assert "nothing to do: the C++ module was built for torch" in output
    assert installation.files() == before


FAILURES = {
    "cmake": (
        "cmake",
        "#!/bin/sh\n[ $1 != --version ] || exec echo 3.31\necho 'CMake Error at a:1 (message):'\necho '  no'\nexit 1\n",
        "CMake Error at a:1 (message): no",
    ),
    "compiler": (
        "ninja",
        "#!/bin/sh\necho '[1/2] error.cpp'\necho 'x.cpp:1:2: error: broken'\nexit 1\n",
        "x.cpp:1:2: error: broken",
    ),
    "silent": ("ninja", "#!/bin/sh\nexit 1\n", "nothing was printed"),
}


@pytest.mark.parametrize(
    ("tool", "program", "cause"),
    [pytest.param(*said, id=name, marks=[pytest.mark.long] * (name == "silent")) for name, said in FAILURES.items()],
)
def test_a_failed_build_changes_nothing_and_names_the_cause_and_the_log(
    installation: Installation, tool: str, program: str, cause: str
) -> None:
    write_program(installation.place / "bin" / tool, program)
    before = installation.files()
    status, _, errors = installation.run("--force")
    assert status == 2
    assert errors.count("\n") == 1
    assert f"could not be built for torch {_build_info.TORCH_VERSION}" in errors
    assert f"and is as it was: {cause} (log: " in errors
    (log,) = installation.temporary.iterdir()
    assert str(log) in errors
    assert cause.rpartition(" ")[2] in log.read_text() or cause == "nothing was printed"
    assert installation.files() == before


def test_a_module_that_does_not_load_is_not_installed(tmp_path: Path) -> None:
    built = tmp_path / "built"
    built.write_text("not a library")
    installation = Installation(tmp_path / "place", built)
    before = installation.files()
    status, _, errors = installation.run("--force")
    assert status == 2
    assert "the new module does not load: ImportError: " in errors
    assert installation.files() == before
    assert list(installation.temporary.iterdir()) == []


@pytest.fixture
def stuck(installation: Installation) -> Iterator[tuple[Installation, subprocess.Popen[str], int]]:
    """A rebuild whose Ninja goes on until it is ended, and the id of that."""
    os.mkfifo(installation.place / "never")
    program = (
        f"#!/bin/sh\necho $$ >{installation.place}/pid\necho '[4/4] x'\nread forever <{installation.place}/never\n"
    )
    write_program(installation.place / "bin/ninja", program)
    process = installation.start("--force")
    assert process.stdout is not None
    assert "building" in process.stdout.readline()
    assert "step 4 of 4" in process.stdout.readline()
    ninja = int((installation.place / "pid").read_text())
    yield installation, process, ninja
    process.kill()
    process.communicate()
    with suppress(ProcessLookupError):
        os.killpg(ninja, signal.SIGKILL)


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(one, marks=pytest.mark.long) for one in (signal.SIGTERM, signal.SIGHUP))],
    ids=lambda number: number.name,
)
def test_an_interrupted_rebuild_leaves_nothing_behind(
    stuck: tuple[Installation, subprocess.Popen[str], int], number: signal.Signals
) -> None:
    installation, process, ninja = stuck
    before = installation.files()
    process.send_signal(number)
    assert process.communicate() == ("", "")
    assert process.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(ninja, 0)
    assert installation.files() == before
    assert list(installation.temporary.iterdir()) == []


def test_a_second_rebuild_is_refused_while_one_is_at_work(
    stuck: tuple[Installation, subprocess.Popen[str], int],
) -> None:
    installation, _, _ = stuck
    status, _, errors = installation.run("--force")
    assert status == 2
    assert f"another rebuild is at work in {installation.module.parent}" in errors


def test_a_terminal_shows_one_moving_line(installation: Installation, terminal) -> None:
    program = terminal("-c", COMMAND, installation.place, "rebuild", "--force", TMPDIR=str(installation.temporary))
    assert program.ended() == 0
    shown = program.seen.replace("\r\n", "\n")
    assert shown.count("\n") == 2
    assert "\r\033[Kaccelerate-cpp rebuild: step 3 of 4\r\033[Kaccelerate-cpp rebuild: step 4 of 4\r\033[K" in shown


@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only one in which programs are found; Python has no headers."""
    paths = {"scripts": str(tmp_path), "include": str(tmp_path)}
    monkeypatch.setattr(rebuild.sysconfig, "get_path", paths.get)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


def test_all_that_is_missing_is_named_at_once_with_commands(bare_machine: Path) -> None:
    with pytest.raises(AccelerateError) as raised:
        rebuild._find_tools()
    for words in ("cmake 3.25 or newer and ninja", "-m pip install cmake ninja`", "`apt install g++`", "python3."):
        assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_tools_that_are_too_old_count_as_missing(bare_machine: Path) -> None:
    write_program(bare_machine / "cmake", "#!/bin/sh\necho cmake version 3.24.9\n")
    write_program(bare_machine / "ninja", "#!/bin/sh\n")
    write_program(bare_machine / "c++", "#!/bin/sh\nexit 1\n")
    (bare_machine / "Python.h").touch()
    with pytest.raises(
        AccelerateError, match=r"without cmake 3\.25 or newer and ninja .*; without a compiler for C\+\+20"
    ):
        rebuild._find_tools()
    write_program(bare_machine / "cmake", "#!/bin/sh\necho cmake version 3.25.0\n")
    write_program(bare_machine / "g++", "#!/bin/sh\nexit 0\n")
    assert rebuild._find_tools().compiler == ("g++",)


def test_the_variable_names_the_compiler(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(bare_machine / "c++", "#!/bin/sh\nexit 0\n")
    write_program(bare_machine / "mine", '#!/bin/sh\ntest "$1" = --flag\n')
    monkeypatch.setenv("CXX", f"{bare_machine / 'mine'} --flag")
    assert rebuild._compiler() == (str(bare_machine / "mine"), "--flag")


def test_a_compiler_is_asked_for_the_language_of_the_sources() -> None:
    compiler = shutil.which("c++")
    assert compiler is not None
    probe = [compiler, "-fsyntax-only", "-x", "c++", "-"]
    for standard, status in (("-std=c++20", 0), ("-std=c++17", 1)):
        done = subprocess.run([*probe, standard], input=rebuild._CXX20, capture_output=True, text=True, check=False)
        assert done.returncode == status


@pytest.mark.parametrize(("installed", "words"), [(None, "finds no torch"), ("2.8.0", "needs torch 2.9 or newer")])
def test_a_torch_that_it_cannot_be_built_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, words: str
) -> None:
    monkeypatch.setattr(rebuild, "installed_torch", lambda: installed)
    with pytest.raises(AccelerateError, match=f'{words}.*run `pip install "torch>=2.9"` first'):
        rebuild._usable_torch()


def test_this_installation_is_built_from_this_clone() -> None:
    found = find_installed_module()
    assert found.sources == REPOSITORY
    assert Path(_build_info.__file__).parent == found.folder
    assert found.records is not None
    assert "\nName: accelerate-cpp\n" in (found.records / "METADATA").read_text()


def test_a_package_that_was_not_built_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed_module, "find_spec", lambda name: None)
    with pytest.raises(BuildMismatch, match="was not built"):
        find_installed_module()


def test_a_folder_that_cannot_be_written_to_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed_module.os, "access", lambda path, mode: False)
    with pytest.raises(
        AccelerateError, match="cannot be written to; run this as the user who installed accelerate-cpp"
    ):
        find_installed_module()


def test_nothing_is_replaced_when_the_records_cannot_be_read(installation: Installation, tmp_path: Path) -> None:
    (installation.site / "a.dist-info/METADATA").unlink()
    before = installation.files()
    built = tmp_path / "built"
    built.mkdir()
    (built / MODULE).write_text("new")
    module = InstalledModule(installation.module.parent, tmp_path, installation.site / "a.dist-info")
    with pytest.raises(FileNotFoundError):
        module.replace(built, "2.13.0")
    assert installation.files() == before
    assert {path.name for path in installation.module.parent.iterdir()} == {"__init__.py", "_build_info.py", MODULE}


def test_the_module_is_replaced_before_the_file_that_says_what_it_is_for(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = tmp_path / "built"
    built.mkdir()
    for name in ("_build_info.py", MODULE):
        (built / name).write_text("new")
    moved = []
    monkeypatch.setattr(Path, "replace", lambda staged, place: moved.append(place.name))
    records = installation.site / "a.dist-info"
    InstalledModule(installation.module.parent, tmp_path, records).replace(built, "2.13.0")
    assert moved == [MODULE, "_build_info.py", "METADATA", "RECORD"]
