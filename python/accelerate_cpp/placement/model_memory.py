"""How much memory a model takes: computed on tensors without data, so that any model fits.

Parameters are on torch's meta device; a forward pass runs on fake tensors, which have shapes, dtypes and storages but
no memory, and autograd saves what it would save of real ones. Tensors that several modules share are counted once.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BITS: Mapping[str, int] = {"float32": 32, "float16": 16, "int8": 8, "int4": 4}
"""The dtypes that weights are stored in, and their width."""

OPTIMIZERS: Mapping[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "sgd_momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
}

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class ModelSize:
    """Bytes of parameters and buffers: of all, and of the largest layer, which must fit at once when layers move."""

    total: int
    largest_layer: int


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one process in training; ``activations`` is ``None`` where they could not be computed."""

    weights: int
    gradients: int
    optimizer: int
    activations: int | None

    def parts(self) -> dict[str, int | None]:
        """Each part by its name, as tables show it."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer states": self.optimizer,
            "activations": self.activations,
        }


def model_size(model: nn.Module, dtype: str) -> ModelSize:
    """Bytes of ``model`` if its floating-point parameters and buffers were stored in ``dtype``, a key of ``BITS``."""
    layers = (_bytes(tensors, BITS[dtype]) for tensors in _layers(model))
    return ModelSize(_bytes(_tensors(model), BITS[dtype]), max(layers, default=0))


def _tensors(module: nn.Module, recurse: bool = True) -> list[Tensor]:
    return [*module.parameters(recurse), *module.buffers(recurse)]


def _layers(module: nn.Module, whole: Iterable[str] | None = None) -> Iterator[list[Tensor]]:
    """Modules without modules in them, those that a model calls indivisible, and tensors of the modules between."""
    if whole is None:
        whole = set(getattr(module, "_no_split_modules", None) or ())
    children = list(module.children())
    if not children or type(module).__name__ in whole:
        yield _tensors(module)
        return
    yield from ([tensor] for tensor in _tensors(module, recurse=False))
    for child in children:
        yield from _layers(child, whole)


def _bytes(tensors: Iterable[Tensor], bits: int | None = None) -> int:
    """Bytes of different ``tensors``; those of floating-point numbers with ``bits`` bits a number, if given."""
    different = {id(tensor): tensor for tensor in tensors}.values()
    return sum(
        -(-tensor.numel() * bits // 8) if bits and tensor.is_floating_point() else tensor.nbytes for tensor in different
    )


def optimizer_bytes(model: nn.Module, optimizer: str) -> int:
    """Bytes of the states of ``optimizer``, a key of ``OPTIMIZERS``: found by a step on tensors without data."""
    parameters = [
        nn.Parameter(torch.empty_like(parameter, device="meta"))
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    if not parameters:
        return 0
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    stepped = OPTIMIZERS[optimizer](parameters)
    stepped.step()
    return _bytes(value for state in stepped.state.values() for value in state.values() if isinstance(value, Tensor))


def activation_bytes(
    model: nn.Module,
    make_inputs: Callable[[], Inputs],
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    weights: torch.dtype | None = None,
) -> int:
    """Bytes that autograd saves for the backward pass in one forward pass, parameters and buffers left out.

    Args:
        model: on any device, the meta device too; it stays as it is.
        make_inputs: called once, to make positional and named arguments of the forward pass on ``device``.
        dtype: that of autocast, as mixed precision uses it; ``None`` for none.
        device: whose kernels; ``cuda`` needs a GPU to be there, as torch asks it which kernels it has.
        weights: as :func:`activation_bytes_by_module` takes it.

    Raises:
        Exception: whatever the forward pass raises, for example where it looks at values.
    """
    with _without_data(model, make_inputs, weights, device) as (forward, own):
        return saved_bytes(forward, own, dtype, device)


def activation_bytes_by_module(
    model: nn.Module, make_inputs: Callable[[], Inputs], weights: torch.dtype | None = None
) -> dict[str, int]:
    """Like :func:`activation_bytes`, for each module: what autograd saves in it, but not in the modules within it.

    Args:
        weights: what parameters and buffers of floating-point numbers are converted to; ``None`` leaves them.

    Returns:
        Bytes by the name of the module, of modules that have any.
    """
    running: list[str] = [""]
    with _without_data(model, make_inputs, weights) as (forward, own), _noting(model, running):
        return _saved(forward, own, lambda: running[-1])


def peak_activation_bytes(
    model: nn.Module, make_inputs: Callable[[], Inputs], weights: torch.dtype | None = None
) -> int:
    """The most bytes that are alive at a time in a forward pass without gradients, parameters and buffers left out.

    Args:
        weights: as :func:`activation_bytes_by_module` takes it.

    Raises:
        Exception: whatever the forward pass raises.
    """
    with _without_data(model, make_inputs, weights) as (forward, own), torch.no_grad():
        alive = Alive(own)
        with alive:
            forward()
    return alive.peak


class Alive(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, as long as these are alive.

    Args:
        own: tensors whose storages do not count.

    Attributes:
        peak: the most bytes there were at a time.
    """

    def __init__(self, own: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._bytes = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in own}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self._bytes += size
            self.peak = max(self.peak, self._bytes)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._bytes -= size


@contextmanager
def _without_data(
    model: nn.Module, make_inputs: Callable[[], Inputs], weights: torch.dtype | None = None, device: str = "cpu"
) -> Iterator[tuple[Callable[[], Any], list[Tensor]]]:
    """A forward pass of ``model`` on tensors without data, and the parameters and buffers that it uses."""

    def empty(old: Tensor) -> Tensor:
        dtype = weights if weights is not None and old.is_floating_point() else old.dtype
        return torch.empty(old.shape, dtype=dtype)

    with _quiet(), FakeTensorMode(allow_non_fake_inputs=True), torch.device(device):
        tensors: dict[str, Tensor] = {
            name: nn.Parameter(empty(old), requires_grad=old.requires_grad) for name, old in model.named_parameters()
        }
        tensors |= {name: empty(old) for name, old in model.named_buffers()}

        def forward() -> Any:
            args, kwargs = make_inputs()
            return torch.func.functional_call(model, tensors, args, kwargs)

        yield forward, list(tensors.values())


@contextmanager
def _noting(model: nn.Module, running: list[str]) -> Iterator[None]:
    """Keeps in ``running`` the names of the modules whose forward passes are running, the innermost last."""

    def leave(*_: object) -> None:
        running.pop()

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name), prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def saved_bytes(
    forward: Callable[[], Any], own: Iterable[Tensor], dtype: torch.dtype | None = None, device: str = "cpu"
) -> int:
    """Bytes of the storages that autograd saves while ``forward`` runs, those of the tensors ``own`` left out.

    A storage counts once and whole, as it stays alive whole, however many tensors within it are saved.
    """
    with torch.autocast(device, dtype, enabled=dtype is not None):
        return sum(_saved(forward, own, lambda: "").values())


def _saved(forward: Callable[[], Any], own: Iterable[Tensor], owner: Callable[[], str]) -> dict[str, int]:
    """The bytes of :func:`saved_bytes` by what ``owner`` says when a storage is saved for the first time."""
    left_out = {tensor.untyped_storage()._cdata for tensor in own}
    saved: dict[int, torch.UntypedStorage] = {}  # kept, so that no other storage gets the same address
    sizes: dict[str, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in left_out and storage._cdata not in saved:
            saved[storage._cdata] = storage
            sizes[owner()] = sizes.get(owner(), 0) + storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sizes


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch from logging a traceback where a forward pass cannot run on fake tensors; it is raised anyway."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def training_memory(model: nn.Module, optimizer: str, activations: int | None) -> TrainingMemory:
    """What training takes, with or without mixed precision.

    Mixed precision keeps weights, gradients and optimizer states as they are; its copies of weights in 16 bits are
    among the activations, as autograd saves them.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return TrainingMemory(_bytes(_tensors(model)), _bytes(trained), optimizer_bytes(model, optimizer), activations)
