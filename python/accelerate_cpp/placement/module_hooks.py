"""Giving modules hooks: what is called before and after a forward pass, and what replaces methods of the module.

All of it can be copied and pickled with the module.
"""

from __future__ import annotations

import logging
from typing import Any, TypeVar

import torch
from torch import nn

from accelerate_cpp.devices.table import accelerators
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.placement.module_tensors import is_meta, walk

__all__ = [
    "HookedForward",
    "ModelHook",
    "MoveGuard",
    "SequentialHook",
    "add_hook_to_module",
    "guard_moves",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]

_logger = logging.getLogger(__name__)

AnyModule = TypeVar("AnyModule", bound=nn.Module)
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ModelHook:
    """The base class of actions around the forward pass of a module; it does nothing.

    Attributes:
        no_grad: run the forward pass without gradients.
    """

    no_grad = False

    def init_hook(self, module: AnyModule) -> AnyModule:
        """Called when the hook is added to ``module``; returns it."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Called before the forward pass; returns the arguments that it gets."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after the forward pass; returns what the caller gets."""
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Called instead of :meth:`post_forward` when the forward pass has raised an exception."""

    def detach_hook(self, module: AnyModule) -> AnyModule:
        """Called when the hook is removed from ``module``; returns it."""
        return module


class SequentialHook(ModelHook):
    """Several hooks of one module, each of whose methods are called one after the other."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks
        self.no_grad = any(hook.no_grad for hook in hooks)

    def init_hook(self, module: AnyModule) -> AnyModule:
        """Adds each hook to what the one before has returned."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Gives each hook the arguments that the one before has returned."""
        for number, hook in enumerate(self.hooks):
            try:
                args, kwargs = hook.pre_forward(module, *args, **kwargs)
            except BaseException:
                for earlier in self.hooks[:number]:
                    earlier.forward_failed(module)
                raise
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Gives each hook the output that the one before has returned."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Tells each hook."""
        for hook in self.hooks:
            hook.forward_failed(module)

    def detach_hook(self, module: AnyModule) -> AnyModule:
        """Removes each hook."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


class HookedForward:
    """Stands in for the ``forward`` of a module: the hook's ``pre_forward``, the own forward, ``post_forward``.

    Args:
        module: with ``_hf_hook`` and ``_old_forward``.
        is_stored: whether the own forward was stored on the module, as a patched one is, and not its class's.
    """

    __name__ = "forward"

    def __init__(self, module: nn.Module, is_stored: bool) -> None:
        self.is_stored = is_stored
        self.inner = module._old_forward
        self._module = module

    @property
    def __wrapped__(self) -> Any:
        """The module's own forward: what tools that look for signatures read."""
        return self._module.__dict__.get("_old_forward", self.inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        attributes = module.__dict__
        inner: Any = attributes.get("_old_forward", self.inner)
        hook: ModelHook | None = attributes.get("_hf_hook")
        if hook is None:  # it was removed where something else stands in for this
            return inner(*args, **kwargs)
        args, kwargs = hook.pre_forward(module, *args, **kwargs)
        try:
            if hook.no_grad:
                with torch.no_grad():
                    output = inner(*args, **kwargs)
            else:
                output = inner(*args, **kwargs)
        except BaseException:
            hook.forward_failed(module)
            raise
        return hook.post_forward(module, output)


def add_hook_to_module(module: AnyModule, hook: ModelHook, append: bool = False) -> AnyModule:
    """Gives ``module`` a hook and returns it, or what the hook makes of it.

    Args:
        append: keep a hook that it has already, which is then called first; else that is removed.
    """
    before: ModelHook | None = module.__dict__.get("_hf_hook")
    if before is not None:
        _take_off(module)
        hook = SequentialHook(before, hook) if append else hook
    module = hook.init_hook(module)
    is_stored = "forward" in module.__dict__
    module.__dict__["_old_forward"] = module.forward
    module.__dict__["_hf_hook"] = hook
    module.__dict__["forward"] = HookedForward(module, is_stored)
    return module


def remove_hook_from_module(module: AnyModule, recurse: bool = False) -> AnyModule:
    """Takes the hook of ``module`` away, if it has one, and returns it: with its own forward, and loaded weights.

    Args:
        recurse: those of all modules in it, too.
    """
    for found in list(module.modules()) if recurse else [module]:
        _take_off(found)
        for method in _moves():
            if isinstance(found.__dict__.get(method), MoveGuard):
                del found.__dict__[method]
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Takes the hooks of ``module`` and of all modules in it away."""
    remove_hook_from_module(module, recurse=True)


def _take_off(module: nn.Module) -> None:
    hook: ModelHook | None = module.__dict__.get("_hf_hook")
    if hook is not None:
        hook.detach_hook(module)
        del module.__dict__["_hf_hook"]
    inner = module.__dict__.pop("_old_forward", None)
    hooked = module.__dict__.get("forward")
    if inner is not None and isinstance(hooked, HookedForward):
        del module.__dict__["forward"]
        if hooked.is_stored or inner != hooked.inner:
            module.__dict__["forward"] = inner


class MoveGuard:
    """Stands in for a method that moves a whole model, whose parts are where a device map has put them.

    Moving it is refused if some of it is offloaded, and else logs a warning.
    """

    def __init__(self, model: nn.Module, method: str) -> None:
        self._model, self._method = model, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model, name = self._model, type(self._model).__name__
        for prefix, module in walk(model):
            away = [label for label, tensor in module._parameters.items() if tensor is not None and is_meta(tensor)]
            if away:
                raise InvalidArgument(
                    f"{name}.{self._method}: {prefix + away[0]!r} is offloaded, so the model cannot be moved; "
                    "remove_hook_from_submodules(model) loads what is offloaded, and lets it be moved"
                )
        _logger.warning("%s.%s: a device map has put the parts of this model where they are", name, self._method)
        return getattr(type(model), self._method)(model, *args, **kwargs)


def _moves() -> list[str]:
    """The methods that move a whole model. Packages of devices give modules one with the name of the type."""
    return ["to", "cpu", *(kind.type for kind in accelerators())]


def guard_moves(model: nn.Module) -> None:
    """Lets the methods that move ``model`` check first whether it can be moved, until its hook is removed."""
    for method in _moves():
        if hasattr(type(model), method):
            model.__dict__[method] = MoveGuard(model, method)
