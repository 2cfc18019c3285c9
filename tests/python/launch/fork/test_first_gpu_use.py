from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")

# What torch does when something needs CUDA first: it runs the calls that were queued until then.
INITIALISE = """
def model_to_gpu():
    for call, _ in torch.cuda._queued_calls:
        call()
    torch.cuda.is_initialized = lambda: True
"""
TELL = "from accelerate_cpp.launch.fork.first_gpu_use import first_use\n"
TELL += "print(first_use('CUDA')); print(first_use('XPU'))\n"


def _tells(*code: str, cwd: str | None = None) -> list[str]:
    script = "\n".join(code)
    return subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120, cwd=cwd
    ).stdout.splitlines()


@pytest.mark.parametrize(
    "imports",
    ["import torch, accelerate_cpp.launchers", "import accelerate_cpp.launchers; import torch"],
    ids=["torch first", "torch later"],
)
def test_the_call_that_initialised_cuda_is_known(imports: str) -> None:
    called, xpu = _tells(imports, INITIALISE, "model_to_gpu()", TELL)
    assert called.endswith('(File "<string>", line 5)')
    assert xpu == "None"


def test_call_inside_a_library_is_told_with_the_line_that_led_there(tmp_path: object) -> None:
    with open(f"{tmp_path}/library.py", "w") as file:
        file.write("import torch\n" + INITIALISE)
    with open(f"{tmp_path}/notebook.py", "w") as file:
        file.write(f"import torch, accelerate_cpp.launchers\nimport library\nlibrary.model_to_gpu()\n{TELL}")
    code = "import runpy; runpy.run_path('notebook.py', run_name='__main__')"
    called = _tells(f"import sys; sys.path.insert(0, {str(tmp_path)!r})", code, cwd=str(tmp_path))[0]
    assert called == (
        f'`call()` (File "{tmp_path}/library.py", line 5), called from '
        '`library.model_to_gpu()` (File "notebook.py", line 3)'
    )


def test_call_before_the_watch_is_not_known() -> None:
    assert _tells("import torch", INITIALISE, "model_to_gpu()", "import accelerate_cpp.launchers", TELL)[0] == "None"


def test_nothing_is_left_in_the_import_system_once_torch_is_there() -> None:
    finders = "print([type(finder).__name__ for finder in sys.meta_path].count('_Later'))"
    code = ("import sys, accelerate_cpp.launchers", finders, "import torch", finders)
    assert _tells(*code) == ["2", "0"]
