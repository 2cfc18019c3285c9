"""A wheel, built as a user builds it, works in an environment that holds nothing of this checkout."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
REPOSITORY = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "ACCELERATE"))}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in isolation from a source distribution's worth of files."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, REPOSITORY)
    (built,) = folder.glob("*.whl")
    return built


def environment(folder: Path) -> Path:
    """The Python of a new environment; a path file lends it torch, and starts no editable install."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    script = "import sysconfig; print(sysconfig.get_path('platlib'))"
    own = Path(run(python, "-c", script).stdout.strip())
    lent = Path(torch.__file__).parents[1]
    (own / "lent.pth").write_text(f"{lent}\n")
    return python


def install(python: Path, wheel: Path) -> None:
    # What is lent counts as installed, our package with it, which pip would try to replace.
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", "--ignore-installed", wheel)


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel in it."""
    python = environment(tmp_path_factory.mktemp("clean"))
    install(python, wheel)
    return python


def metadata(wheel: Path) -> dict[str, list[str]]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        message = Parser().parsestr(archive.read(name).decode())
    return {key: message.get_all(key) or [] for key in message}


def test_alias_reaches_every_python_of_the_environment(clean_python: Path, tmp_path: Path) -> None:
    code = "import os, subprocess, sys; os.environ['ACCELERATE_CPP_ALIAS'] = '1'; "
    asked = "import accelerate, importlib.metadata as m; "
    asked += "print(accelerate.__file__, m.metadata('accelerate')['Home-page'])"
    code += f"subprocess.run([sys.executable, '-c', {asked!r}], check=True)"
    file, home_page = run(clean_python, "-c", code, cwd=tmp_path).stdout.split()
    assert "accelerate_cpp" in file
    assert "huggingface" in home_page


def test_its_metadata_pins_the_minor_version_of_torch(wheel: Path) -> None:
    major, minor = torch.__version__.split(".")[:2]
    (pin,) = [row for row in metadata(wheel)["Requires-Dist"] if row.split(">")[0].split("<")[0].strip() == "torch"]
    assert set(pin.removeprefix("torch").split(",")) == {f">={major}.{minor}", f"<{major}.{int(minor) + 1}"}


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert top == {"accelerate_cpp", "accelerate_cpp_start.pth"}
    assert sum(name.endswith(".so") for name in names) == 1
    assert {f"accelerate_cpp/{name}" for name in ("_build_info.py", "_C.pyi", "__init__.pyi", "py.typed")} <= {*names}
    shown = "accelerate_cpp/alias/distribution/accelerate-1.15.0.egg-info"
    assert {f"{shown}/{name}" for name in ("PKG-INFO", "RECORD", "entry_points.txt", "requires.txt")} <= {*names}


def test_it_carries_the_sources_of_its_module(wheel: Path) -> None:
    prefix = "accelerate_cpp/_sources/"
    with zipfile.ZipFile(wheel) as archive:
        carried = {name.removeprefix(prefix) for name in archive.namelist() if name.startswith(prefix)}
    here = [path for folder in ("csrc", "cmake") for path in (REPOSITORY / folder).rglob("*") if path.is_file()]
    assert carried == {"CMakeLists.txt", *(str(path.relative_to(REPOSITORY)) for path in here)}


def test_type_checkers_find_its_types(clean_python: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "from accelerate_cpp import Accelerator\n"
        "from accelerate_cpp.utils import set_seed\n"
        "processes: str = Accelerator().num_processes\n"
        "set_seed('one')\n"
    )
    done = run(sys.executable, "-m", "mypy", "--python-executable", clean_python, "train.py", cwd=tmp_path, check=False)
    errors = [line.split(": error: ")[1].rpartition("  ")[0] for line in done.stdout.splitlines()[:-1]]
    assert errors == [
        'Incompatible types in assignment (expression has type "int", variable has type "str")',
        'Argument 1 to "set_seed" has incompatible type "str"; expected "int"',
    ], done.stdout + done.stderr


def test_it_is_what_the_clean_environment_imports(clean_python: Path, tmp_path: Path) -> None:
    script = "import torch, accelerate_cpp._C as core; print(core.__file__)"
    file = Path(run(clean_python, "-c", script, cwd=tmp_path).stdout.strip())
    assert file.is_relative_to(clean_python.parents[1])


def test_it_trains_on_two_processes_there(clean_python: Path, tmp_path: Path) -> None:
    launcher = clean_python.parent / "accelerate-cpp"
    script = REPOSITORY / "examples" / "digits.py"
    metrics = tmp_path / "digits.json"
    run(
        *(launcher, "launch", "--cpu", "--num_processes", "2", script),
        *("--epochs", "2", "--metrics", metrics),
        cwd=tmp_path,
    )
    assert json.loads(metrics.read_text())["processes"] == 2


# A program for the original, and what it prints on each of two processes.
FOR_THE_ORIGINAL = """
import accelerate, torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
accelerator.backward(model(torch.full((1, 1), float(accelerator.process_index))).sum())
ranks = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
print(accelerate.__file__, ranks, accelerator.unwrap_model(model).weight.grad.item(), flush=True)
"""


@pytest.mark.parametrize("how", [("--alias",), ("ACCELERATE_CPP_ALIAS=1",)], ids=["flag", "variable"])
def test_a_program_for_the_original_runs_on_two_processes_there(
    clean_python: Path, tmp_path: Path, how: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").write_text(FOR_THE_ORIGINAL)
    variables = [word for word in how if "=" in word]
    flags = [word for word in how if "=" not in word]
    launcher = clean_python.parent / "accelerate-cpp"
    options = ("--cpu", "--num_processes", "2", *flags)
    done = run("env", *variables, launcher, "launch", *options, "train.py", cwd=tmp_path)
    where = clean_python.parents[1]
    lines = [line.split(" ", 1) for line in done.stdout.splitlines() if "accelerate_cpp" in line]
    assert [text for _, text in lines] == ["[0, 1] 0.5"] * 2
    assert all(Path(file).is_relative_to(where) for file, _ in lines)


def torch_requirement(about: Path) -> SpecifierSet:
    rows = map(Requirement, Parser().parsestr(about.read_text()).get_all("Requires-Dist") or [])
    (specifier,) = [row.specifier for row in rows if row.name == "torch"]
    return specifier


def test_a_rebuild_makes_a_module_for_another_torch_fit_the_one_installed(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "environment")
    install(python, wheel)
    script = "import accelerate_cpp; print(accelerate_cpp.__path__[0])"
    package = Path(run(python, "-c", script, cwd=tmp_path).stdout.strip())
    (about,) = package.parent.glob("accelerate_cpp-*.dist-info/METADATA")
    required, info = torch_requirement(about), package / "_build_info.py"
    pin = re.compile(r"^Requires-Dist: torch[<>=].*", re.MULTILINE)
    about.write_text(pin.sub("Requires-Dist: torch<1.1,>=1.0", about.read_text()))
    info.write_text('TORCH_VERSION = "1.0.0"\n')
    launcher = python.parent / "accelerate-cpp"
    launch = (
        launcher,
        "launch",
        "--cpu",
        "--num_processes",
        "2",
        REPOSITORY / "examples" / "digits.py",
        "--epochs",
        "1",
    )

    refused = run(*launch, cwd=tmp_path, check=False)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert (
        f"built for torch 1.0.0, but torch {torch.__version__} is installed: run `accelerate-cpp rebuild`"
        in refused.stderr
    )

    tools = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
    assert "done in" in run("env", tools, launcher, "rebuild", cwd=tmp_path).stdout
    run(*launch, cwd=tmp_path)
    assert f'"{torch.__version__.partition("+")[0]}"' in info.read_text()
    assert torch_requirement(about) == required
    for path, digest, size in csv.reader((about.parent / "RECORD").read_text().splitlines()):
        content = (package.parent / path).read_bytes()
        right = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        assert not digest or (digest, size) == (f"sha256={right}", str(len(content))), path
    run(python, "-m", "pip", "uninstall", "--yes", "accelerate-cpp", cwd=tmp_path)
    assert not package.exists()


def test_uninstalling_leaves_nothing(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "environment")

    def files() -> set[Path]:
        found = (tmp_path / "environment").rglob("*")
        return {path for path in found if "pip" not in path.parts and path.name != "__pycache__"}

    before = files()
    install(python, wheel)
    run(python.parent / "accelerate-cpp", "env", cwd=tmp_path)
    run(python, "-c", "from accelerate_cpp import Accelerator; Accelerator(cpu=True)", cwd=tmp_path)
    assert files() > before
    run(python, "-m", "pip", "uninstall", "--yes", "accelerate-cpp", cwd=tmp_path)
    assert files() == before


def test_without_torch_installing_is_one_clear_error(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=True)
    done = run(tmp_path / "bare" / "bin" / "python", "-m", "pip", "install", REPOSITORY, cwd=tmp_path, check=False)
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert output.count("pip install torch") == 1
    assert "Traceback" not in output
