"""Compiling a model region by region: blocks that are alike share one compilation."""

from __future__ import annotations

import inspect
import sys
from types import MethodType
from typing import Any, cast

import torch


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile`` made of a module."""
    # Loading the compiler takes longer than loading the rest of torch; before it is loaded, nothing is compiled.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


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


def has_compiled_regions(module: torch.nn.Module) -> bool:
    """Whether ``module`` has submodules that ``torch.compile`` made, or is such a module itself."""
    return any(map(is_compiled_module, module.modules()))


def compile_regions(module: torch.nn.Module, **compile_kwargs: Any) -> torch.nn.Module:
    """A model like ``module`` that is compiled block by block, which takes less time than compiling it as a whole.

    The blocks of each ``ModuleList`` whose blocks are of one class are compiled one by one, so that the compiler
    recognises the second one; what has no such list in it is compiled as a whole. Parameters and buffers are those of
    ``module``, which itself stays as it is; ``extract_model_from_parallel(…, keep_torch_compile=False)`` gives it back.

    Args:
        compile_kwargs: arguments of ``torch.compile``.
    """
    compiled = _compiled(module, compile_kwargs)
    if not is_compiled_module(compiled):
        compiled.__dict__["_orig_mod"] = module  # no submodule: its parameters would count twice
    return compiled


def original_of_regions(module: torch.nn.Module) -> torch.nn.Module:
    """What :func:`compile_regions` made ``module`` of; ``module`` itself if it did not, or compiled it as a whole."""
    return cast(torch.nn.Module, module.__dict__.get("_orig_mod", module))


def _compiled(module: torch.nn.Module, options: dict[str, Any]) -> torch.nn.Module:
    if is_repeated_blocks(module):
        return torch.nn.ModuleList(_whole(block, options) for block in cast(torch.nn.ModuleList, module))
    if not has_repeated_blocks(module):
        return _whole(module, options)
    copied = _without_children(module)
    compiled: dict[int, torch.nn.Module] = {}  # a child with two names stays one module
    for name, child in module._modules.items():
        if child is not None and id(child) not in compiled:
            compiled[id(child)] = _compiled(child, options)
        copied._modules[name] = None if child is None else compiled[id(child)]
    return copied


def _whole(module: torch.nn.Module, options: dict[str, Any]) -> torch.nn.Module:
    return cast(torch.nn.Module, torch.compile(module, **options))


def _without_children(module: torch.nn.Module) -> torch.nn.Module:
    """A shallow copy; methods that were bound to ``module`` and stored on it are bound to the copy."""
    copied = module.__class__.__new__(module.__class__)
    copied.__dict__.update(module.__dict__)
    copied.__dict__["_modules"] = {}
    for name, value in module.__dict__.items():
        if inspect.ismethod(value) and value.__self__ is module:
            copied.__dict__[name] = MethodType(value.__func__, copied)
    return copied
