"""Compiling models: as a whole, or region by region, where blocks that are alike share one compilation."""

from __future__ import annotations

import copy
import inspect
from types import MethodType
from typing import Any, cast

import torch

from accelerate_cpp.config.session_config import DynamoConfig
from accelerate_cpp.parallel.compilation import has_repeated_blocks as has_repeated_blocks
from accelerate_cpp.parallel.compilation import inside_compiler, without_compiler
from accelerate_cpp.parallel.compilation import is_compiled_module as is_compiled_module
from accelerate_cpp.parallel.compilation import is_repeated_blocks as is_repeated_blocks
from accelerate_cpp.parallel.compilation import original_of_regions as original_of_regions
from accelerate_cpp.parallel.wrappers import without_wrapper
from accelerate_cpp.precision.forward import MixedPrecisionForward

# Frames that all prepared models share must not use up the limit of recompilations together. Torch 2.11 has no such
# option.
_APART = {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}


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


def compile_prepared_regions(module: torch.nn.Module, dynamo: DynamoConfig | None) -> torch.nn.Module:
    """``module``, not distributed yet, with its repeated blocks compiled if ``dynamo`` asks for regions.

    Without repeated blocks, and if it is compiled already, it is returned as it is.
    """
    if dynamo is None or not dynamo.by_region or not has_repeated_blocks(module) or _is_compiled(module):
        return module
    return compile_regions(module, **dynamo.options)


def compile_prepared(module: torch.nn.Module, dynamo: DynamoConfig | None) -> torch.nn.Module:
    """``module``, in the wrapper that distributes it, compiled as a whole; as it is if it is compiled already."""
    if dynamo is None or _is_compiled(without_wrapper(module)):
        return module
    return _whole(module, {**_APART, **dynamo.options})


def taken_out(module: torch.nn.Module, keep_torch_compile: bool) -> torch.nn.Module:
    """A prepared ``module`` without the wrapper that distributes it, compiled as it is or as it was before.

    ``module`` stays as it is, because it is trained further: code compiled inside its wrapper is compiled again without
    it.
    """
    inner = without_wrapper(inside_compiler(module))
    if not keep_torch_compile:
        return without_compiler(inner)
    if not is_compiled_module(module):
        return inner
    return module if inner is module._orig_mod else type(module)(inner, module.dynamo_ctx)


def _is_compiled(module: torch.nn.Module) -> bool:
    return without_compiler(module) is not module


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
    """A shallow copy; what was bound to ``module`` and stored on it, a method or a forward, is bound to the copy."""
    copied = module.__class__.__new__(module.__class__)
    copied.__dict__.update(module.__dict__)
    copied.__dict__["_modules"] = {}
    for name, value in module.__dict__.items():
        if inspect.ismethod(value) and value.__self__ is module:
            copied.__dict__[name] = MethodType(value.__func__, copied)
        elif isinstance(value, MixedPrecisionForward):
            copied.__dict__[name] = copy.deepcopy(value, {id(module): copied})
    return copied
