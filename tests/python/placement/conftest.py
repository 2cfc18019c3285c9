"""Programs with a double of a device."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

DOUBLE = Path(__file__).parents[3] / "build" / "editable" / "tests" / "cpp" / "libdevice_double.so"

PRELUDE = """
import types, torch
from torch import nn
torch.ops.load_library({double!r})
torch.utils.rename_privateuse1_backend("standin")
torch._register_device_module("standin", types.SimpleNamespace(
    is_available=lambda: True, device_count=lambda: 1, current_device=lambda: 0, _is_in_bad_fork=lambda: False,
    manual_seed_all=lambda seed: None))
double = torch.ops.device_double
from accelerate_cpp import cpu_offload, disk_offload, dispatch_model
from accelerate_cpp.placement.offloaded_modules import offload_hook
torch.set_num_threads(1)
torch.set_grad_enabled(False)
LAYER = 64 * 64 * 4
def layers(count=6):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(count)))
def engine_of(model):
    return offload_hook(model[0])._unit.engine
row = torch.arange(64.0)[None] / 64
expected = layers()(row)
def calm_pass(model):
    "A pass in which the copier has time to finish before each layer."
    value = row.to("standin:0")
    for layer in model:
        value = layer(value)
        engine_of(model).await_idle()
    return value.cpu()
"""


@pytest.fixture
def on_the_double(tmp_path: Path) -> Callable[..., None]:
    """Call it with a program: it runs in a process whose ``standin:0`` is the device double of the core's tests, an
    accelerator whose memory is the host's, with ``ACCELERATE_CPP_OFFLOAD_WINDOW`` at two of its layers.
    """
    if not DOUBLE.is_file():
        pytest.skip("the device double of the core's tests is not built")

    def run(source: str, **variables: str) -> None:
        program = PRELUDE.format(double=str(DOUBLE)) + textwrap.dedent(source)
        environment = {**os.environ, "ACCELERATE_CPP_OFFLOAD_WINDOW": str(2 * 64 * 64 * 4), **variables}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr

    return run
