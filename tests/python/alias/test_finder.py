"""The alias, in processes of its own: it changes what the whole process imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from accelerate_cpp import alias
from accelerate_cpp.alias import INTERFACE_VERSION
from accelerate_cpp.errors import AccelerateError

# Stands for an installed original, which imports would find without the alias.
ORIGINAL = '__version__ = "1.0.0"\n'


@pytest.fixture(params=["as it is", "another"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where programs run, with the original installed as it is here, if it is, or another one before it."""
    if request.param == "another":
        (tmp_path / "accelerate").mkdir()
        (tmp_path / "accelerate" / "__init__.py").write_text(ORIGINAL)
        (tmp_path / "accelerate" / "only_there.py").touch()
    return tmp_path


def _run(code: str, folder: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, *(["-c", code] if code else [])]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder), **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def _output(code: str, folder: Path, *flags: str, **variables: str) -> str:
    result = _run(code, folder, *flags, **variables)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_everything_is_the_same_under_both_names(folder: Path) -> None:
    code = (
        "import accelerate_cpp.compat, accelerate_cpp.compat\n"
        "import accelerate, accelerate.utils.dataclasses as d, accelerate_cpp.utils.dataclasses as own\n"
        "from accelerate import Accelerator\n"
        "from accelerate.utils import set_seed\n"
        "print(Accelerator is accelerate_cpp.Accelerator, d is own, set_seed is accelerate_cpp.utils.set_seed)\n"
        "print(accelerate.__version__, 'Accelerator' in dir(accelerate), accelerate.utils is accelerate_cpp.utils)\n"
        "print(own.__spec__.name, own.__name__)\n"
    )
    own = "accelerate_cpp.utils.dataclasses"
    assert _output(code, folder) == f"True True True\n{INTERFACE_VERSION} True True\n{own} {own}\n"


def test_distribution_is_that_of_the_interface(folder: Path) -> None:
    code = (
        "import accelerate_cpp.compat, importlib.metadata as m, importlib.util\n"
        "print(m.version('accelerate'), m.metadata('accelerate')['Name'], m.packages_distributions()['accelerate'][0])"
        "\n"
        "print(importlib.util.find_spec('accelerate') is not None, importlib.util.find_spec('accelerate.absent'))\n"
        "print(m.version('accelerate_cpp') != m.version('accelerate'))\n"
    )
    assert _output(code, folder) == f"{INTERFACE_VERSION} accelerate accelerate\nTrue None\nTrue\n"


def test_what_is_absent_here_is_absent_also_where_the_original_has_it(folder: Path) -> None:
    result = _run("import accelerate_cpp.compat, accelerate.only_there", folder)
    assert result.returncode == 1
    assert "No module named 'accelerate.only_there'" in result.stderr
    result = _run("import accelerate_cpp.compat; from accelerate import absent", folder)
    assert "cannot import name 'absent' from 'accelerate'" in result.stderr


def test_variable_installs_it_at_the_start(folder: Path) -> None:
    code = "import accelerate; print(accelerate.__file__)"
    assert "accelerate_cpp" in _output(code, folder, ACCELERATE_CPP_ALIAS="1")
    for variables in ({"ACCELERATE_CPP_ALIAS": "0"}, {}):
        assert "accelerate_cpp" not in _run(code, folder, **variables).stdout


def test_processes_that_a_program_starts_have_it_too(tmp_path: Path) -> None:
    code = (
        "import accelerate_cpp.compat, subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import accelerate; print(accelerate.__file__)'], check=True)\n"
    )
    assert "accelerate_cpp" in _output(code, tmp_path)


def test_modules_run_as_programs(tmp_path: Path) -> None:
    out = _output("", tmp_path, "-m", "accelerate.commands.accelerate_cli", "--help", ACCELERATE_CPP_ALIAS="1")
    assert "launch" in out


def test_nothing_heavy_is_loaded(tmp_path: Path) -> None:
    code = "import accelerate, sys; print(sorted({'torch', 'numpy', 'yaml'} & {*sys.modules}))"
    assert _output(code, tmp_path, ACCELERATE_CPP_ALIAS="1") == "[]\n"


def test_original_that_was_imported_first_is_refused(tmp_path: Path) -> None:
    (tmp_path / "accelerate.py").write_text(ORIGINAL)
    result = _run("import accelerate\nimport accelerate_cpp.compat", tmp_path)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert f"the original accelerate has already been imported, from {tmp_path}/accelerate.py" in last
    assert "import accelerate_cpp.compat" in last


def test_this_process_has_no_alias() -> None:
    assert not alias.is_installed()
    alias.install_if_asked()
    assert not alias.is_installed()


def test_alias_is_refused_beside_the_original_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", alias)
    with pytest.raises(AccelerateError, match="already been imported"):
        alias.install()
