"""Whole programs on a GPU, each in a process of its own: launched ones, notebooks, and those of other libraries."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
LAUNCH = [sys.executable, "-m", "accelerate_cpp.commands.launch"]
PATIENCE_SECONDS = 240.0


def run(folder: Path, command: list[str], **variables: str) -> str:
    """What the program prints."""
    result = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    return result.stdout


def test_the_module_is_loaded_beside_a_build_of_torch_for_cuda() -> None:
    assert torch.version.cuda is not None
    assert importlib.util.find_spec("accelerate_cpp._C") is not None
    from accelerate_cpp import _C

    assert "/nvidia/" not in str(_C.__file__)


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
def test_a_launched_program_trains_the_digits(tmp_path: Path, precision: str) -> None:
    pytest.importorskip("sklearn")
    metrics = tmp_path / "metrics.json"
    flags = ["--num_processes", "1", "--mixed_precision", precision]
    run(tmp_path, [*LAUNCH, *flags, str(HERE.parents[1] / "examples" / "digits.py"), "--metrics", str(metrics)])
    assert json.loads(metrics.read_text())["epochs"][-1]["accuracy"] >= 0.97


NOTEBOOK = """
import warnings
import torch
if {uses}:
    torch.ones(1, device="cuda")
from accelerate_cpp import notebook_launcher

def work():
    import os
    from accelerate_cpp import Accelerator
    accelerator = Accelerator()
    return accelerator.process_index, str(accelerator.device), torch.ones(4, device=accelerator.device).sum().item()

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found = notebook_launcher(work, num_processes=2)
print(len([warning for warning in caught if "helper process" in str(warning.message)]), sorted(found))
"""


@pytest.mark.parametrize("uses", [False, True], ids=["unused", "used"])
def test_workers_of_a_notebook_use_the_gpu_whether_or_not_its_kernel_has(tmp_path: Path, uses: bool) -> None:
    program = NOTEBOOK.format(uses=uses)
    variables = {"ACCELERATE_TORCH_DEVICE": "cuda:0"}
    printed = run(tmp_path, [sys.executable, "-c", program], **variables)
    assert printed.splitlines()[-1] == f"{int(uses)} [(0, 'cuda:0', 4.0), (1, 'cuda:0', 4.0)]"


SEES_CORES = "import os; from accelerate_cpp import Accelerator; Accelerator(); print(sorted(os.sched_getaffinity(0)))"


def test_a_launched_worker_is_pinned_to_cores_near_its_gpu(tmp_path: Path) -> None:
    properties: Any = torch.cuda.get_device_properties(0)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    listed = Path("/sys/bus/pci/devices", address, "local_cpulist")
    (tmp_path / "sees.py").write_text(SEES_CORES)
    printed = run(tmp_path, [*LAUNCH, "--num_processes", "1", "--enable_cpu_affinity", "sees.py"])
    pinned = set(json.loads(printed.splitlines()[-1]))
    near = set(os.sched_getaffinity(0))
    if listed.exists() and listed.read_text().strip():
        parts = (part.split("-") for part in listed.read_text().strip().split(","))
        near &= {core for part in parts for core in range(int(part[0]), int(part[-1]) + 1)}
    assert pinned
    assert pinned <= near


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_the_trainer_of_transformers_trains_as_on_the_original(tmp_path: Path, precision: str) -> None:
    for library in ("transformers", "accelerate"):
        pytest.importorskip(library)
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    variables = offline | {"HF_HOME": str(tmp_path), "PYTHONPATH": str(HERE.parent / "third_party")}
    script = [str(HERE / "train_with_transformers.py"), "12", precision]
    found = []
    for command in ([*LAUNCH, "--alias", "--num_processes", "1", *script], [sys.executable, *script]):
        printed = run(tmp_path, command, **variables)
        found.append(json.loads(next(line[6:] for line in printed.splitlines() if line.startswith("FOUND "))))
    own, original = found
    assert "accelerate_cpp" in own["file"]
    assert "accelerate_cpp" not in original["file"]
    assert own["device"] == original["device"] == "cuda:0"
    assert own["losses"] == pytest.approx(original["losses"], rel=1e-5)
    assert own["losses"][-2] < 0.7 * own["losses"][0]
