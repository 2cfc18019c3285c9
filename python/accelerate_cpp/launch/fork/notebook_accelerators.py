"""The accelerators of a notebook, and what its process has already started of them, and of libraries with threads.

None of these questions initialises an accelerator or imports a library.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate_cpp.launch.plan import host_resources

_TPU_VARIABLES = ("COLAB_TPU_ADDR", "TPU_NAME", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE", "XRT_TPU_CONFIG")
# CUDA and ROCm open these when they initialise, whichever library asks for it; NVML, which only counts, does not.
_OPENED = {"/dev/nvidia-uvm": "CUDA", "/dev/kfd": "ROCm"}


def gpu_count(environ: Mapping[str, str]) -> int:
    """The number of GPUs that workers will see: 0 if the torch that is loaded here is built without GPU support."""
    torch = sys.modules.get("torch")
    if torch is None or torch.version.cuda:
        return host_resources.gpu_count(environ)
    if getattr(torch.version, "xpu", None):
        return _ask(torch.xpu)
    return _ask(torch.cuda) if torch.version.hip else 0


def _ask(devices: Any) -> int:
    """The result of ``device_count()``. A fork calls it, because the call may initialise the driver."""
    if devices.is_initialized():
        return int(devices.device_count())
    pid = os.fork()
    if pid == 0:
        count = 0
        try:
            count = devices.device_count()
        finally:
            os._exit(count)
    return max(0, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def has_tpu(environ: Mapping[str, str], devices: Path = Path("/dev")) -> bool:
    """Whether this host has a TPU, and torch_xla to use it with."""
    if not any(environ.get(name) for name in _TPU_VARIABLES) and environ.get("PJRT_DEVICE") != "TPU":
        nodes = (*devices.glob("accel*"), *devices.glob("vfio/*"))
        if not any(re.fullmatch(r"(accel)?\d+", node.name) for node in nodes):
            return False
    return importlib.util.find_spec("torch_xla") is not None


def initialised(descriptors: Path = Path("/proc/self/fd")) -> str | None:
    """The kind of GPU that this process has initialised, and that its forks therefore cannot use."""
    torch = sys.modules.get("torch")
    if torch is not None:
        from accelerate_cpp.devices.table import accelerators  # loads torch

        kind = next((kind.type for kind in accelerators() if kind.is_initialized()), None)
        if kind is not None:
            return "ROCm" if kind == "cuda" and torch.version.hip else kind.upper()
    for descriptor in descriptors.iterdir():
        try:
            kind = _OPENED.get(os.readlink(descriptor))
        except FileNotFoundError:  # the descriptor of this listing, or one that was closed since
            continue
        if kind is not None:
            return kind
    return None


def started_library() -> str | None:
    """The library of this process whose threads run, so that calls of its forks would wait for them for ever.

    JAX starts them with its first array or its first question for devices, TensorFlow with its first operation. Where
    either has only been imported, forks can use it.
    """
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is not None and getattr(bridge, "_backends", None):
        return "JAX"
    eager = sys.modules.get("tensorflow.python.eager.context")
    context = getattr(eager, "_context", None)
    if context is not None and getattr(context, "_context_handle", None) is not None:
        return "TensorFlow"
    return None
