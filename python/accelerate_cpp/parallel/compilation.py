"""The wrappers of ``torch.compile`` around a model, and functions that it leaves to the interpreter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from accelerate_cpp.devices.table import kind_of

F = TypeVar("F", bound=Callable[..., Any])


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Whether ``module`` is the result of ``torch.compile`` for a module."""
    # Loading the compiler takes longer than loading the rest of torch; before it is loaded, nothing is compiled.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def inside_compiler(module: torch.nn.Module) -> torch.nn.Module:
    """The module that ``torch.compile`` compiled to ``module``; ``module`` itself if it is not compiled."""
    return cast(torch.nn.Module, module._orig_mod) if is_compiled_module(module) else module


def original_of_regions(module: torch.nn.Module) -> torch.nn.Module:
    """The module from which ``compile_regions`` created ``module``; otherwise ``module`` itself."""
    return cast(torch.nn.Module, module.__dict__.get("_orig_mod", module))


def without_compiler(module: torch.nn.Module) -> torch.nn.Module:
    """``module`` as it was before it was compiled, as a whole or by regions."""
    return original_of_regions(inside_compiler(module))


def is_repeated_blocks(module: torch.nn.Module) -> bool:
    """Whether ``module`` is a ``ModuleList`` of blocks of one class, at least one."""
    return (
        isinstance(module, torch.nn.ModuleList)
        and len(module) > 0
        and all(isinstance(block, type(module[0])) for block in module)
    )


def has_repeated_blocks(module: torch.nn.Module) -> bool:
    """Whether ``module`` is or contains a ``ModuleList`` of blocks of one class."""
    return any(map(is_repeated_blocks, module.modules()))


def interpreted(recursive: bool) -> Callable[[F], F]:
    """A decorator: the compiler skips the function and, if ``recursive``, everything that it calls.

    That is what ``torch.compiler.disable(recursive=...)`` is for, which would load the compiler.
    """

    def decorate(function: F) -> F:
        frames: Any = torch._C._dynamo.eval_frame
        action = frames._FrameAction
        strategy = frames._FrameExecStrategy(action.SKIP, action.SKIP if recursive else action.DEFAULT)
        frames.set_code_exec_strategy(function.__code__, strategy)  # where the interpreter calls it
        function._torchdynamo_disable = True  # type: ignore[attr-defined]  # where it is called in what is compiled
        return function

    return decorate


def allow_tf32(device_type: str) -> None:
    """Allows TF32 for fp32 matrix products on GPUs that support it; otherwise it has no effect."""
    kind_of(device_type).allow_tf32()
