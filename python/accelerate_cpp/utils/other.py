"""Waiting for all processes, and models without their wrappers."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.parallel import DataParallel, DistributedDataParallel

from accelerate_cpp.precision import forward
from accelerate_cpp.utils.operations import world_size


def wait_for_everyone() -> None:
    """Returns when every process has called it."""
    if world_size() > 1:
        dist.barrier()


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile`` made of a module."""
    return isinstance(module, OptimizedModule)


def _without_wrappers(module: torch.nn.Module) -> torch.nn.Module:
    while isinstance(module, (DistributedDataParallel, DataParallel)):
        module = module.module
    return module


def extract_model_from_parallel(
    model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> torch.nn.Module:
    """Returns the module inside the wrappers that distribute it.

    Args:
        keep_fp32_wrapper: leave the module its forward in mixed precision instead of giving it its own one back.
        keep_torch_compile: put the module back into a compiled outermost wrapper instead of taking it out of that too.
        recursive: take submodules out of their wrappers too, in place.
    """
    compiled = model if is_compiled_module(model) else None
    inner = _without_wrappers(model if compiled is None else cast(torch.nn.Module, compiled._orig_mod))
    if not keep_fp32_wrapper:
        for module in (model, inner):
            forward.remove(module)
    if recursive:
        for parent in list(inner.modules()):
            for name, child in parent.named_children():
                setattr(parent, name, _without_wrappers(child))
    if compiled is None or not keep_torch_compile:
        return inner
    compiled._orig_mod = inner
    return compiled
