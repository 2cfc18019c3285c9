"""Collectives over nested data, and functions that walk over it. With one process, collectives have no effect.

"Nested data" are tensors in any nesting of lists, tuples, namedtuples and mappings; container types are kept.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import update_wrapper, wraps
from pickle import PicklingError
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.comm.gather import all_gather, all_gather_object
from accelerate_cpp.comm.topology import process_index as process_index
from accelerate_cpp.comm.topology import world_size as world_size
from accelerate_cpp.config import env_table
from accelerate_cpp.devices import transfer
from accelerate_cpp.devices.table import kind_of
from accelerate_cpp.devices.tree import apply_to_all, rebuild_mapping
from accelerate_cpp.devices.tree import find_batch_size as find_batch_size
from accelerate_cpp.devices.tree import find_device as find_device
from accelerate_cpp.devices.tree import honor_type as honor_type
from accelerate_cpp.devices.tree import ignorant_find_batch_size as ignorant_find_batch_size
from accelerate_cpp.devices.tree import is_namedtuple as is_namedtuple
from accelerate_cpp.devices.tree import is_torch_tensor as is_torch_tensor
from accelerate_cpp.devices.tree import recursively_apply as recursively_apply
from accelerate_cpp.devices.xla import XlaDevice
from accelerate_cpp.errors import AccelerateError, InvalidArgument
from accelerate_cpp.runtime import current

__getattr__ = lending("utils.operations")

P = ParamSpec("P")
R = TypeVar("R")


class DistributedOperationException(AccelerateError):
    """Ranks called a collective with tensors of different shapes."""


class CannotPadNestedTensorWarning(UserWarning):
    """``pad_across_processes`` did not change a nested tensor."""


@dataclass
class TensorInformation:
    """What a rank must know to receive a tensor."""

    shape: torch.Size
    dtype: torch.dtype


def collective_device() -> torch.device:
    """The device of tensors in collectives: as a rule the session's device; the CPU without a session."""
    return torch.device("cpu") if current.session is None else current.session.collective_device


def exchanged_on(device: torch.device) -> torch.device:
    """Where tensors for ``device`` are while processes send them to each other: there, or on the CPU."""
    return device if _own_collectives() is None else collective_device()


def is_tensor_information(tensor_info: Any) -> bool:
    """Whether ``tensor_info`` is a :class:`TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def send_to_device(
    tensor: Any, device: torch.device | str | int, non_blocking: bool = False, skip_keys: str | list[str] | None = None
) -> Any:
    """Returns nested data with every tensor, and every object that has ``.to``, on ``device``.

    Args:
        non_blocking: do not wait for copies from pinned memory.
        skip_keys: keys of mappings whose values are not moved.
    """
    return transfer.send_to_device(tensor, device, non_blocking=non_blocking, skip_keys=skip_keys)


def get_data_structure(data: Any) -> Any:
    """Returns nested ``data`` with a :class:`TensorInformation` in place of every tensor."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """Returns nested ``data`` with its shape, a list, in place of every tensor."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Inverse of :func:`get_data_structure`, with uninitialised values, on the CPU."""
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information
    )


def listify(data: Any) -> Any:
    """Returns nested ``data`` with a nested list of numbers in place of every tensor; a number for a 0-dim one."""
    return recursively_apply(lambda tensor: tensor.detach().cpu().tolist(), data)


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Returns nested ``data`` with ``tensor[tensor_slice]`` in place of every tensor.

    ``process_index`` and ``num_processes`` exist because custom ``slice_fn`` functions receive them; they are not used
    here.
    """
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Any, dim: int = 0) -> Any:
    """Joins equally nested batches tensor by tensor along ``dim``; ``TypeError`` for leaves that are not tensors.

    A single batch keeps leaves that are not tensors.
    """
    first = data[0]
    if isinstance(first, (tuple, list)):
        return honor_type(first, (concatenate([batch[i] for batch in data], dim=dim) for i in range(len(first))))
    if isinstance(first, Mapping):
        return rebuild_mapping(first, {key: concatenate([batch[key] for batch in data], dim=dim) for key in first})
    if isinstance(first, torch.Tensor):
        return torch.cat(data, dim=dim)
    if len(data) == 1:
        return first
    raise TypeError(f"only tensors can be concatenated; found a {type(first).__name__}")


def convert_to_fp32(tensor: Any) -> Any:
    """Returns nested data with every float16 and bfloat16 tensor as float32."""

    def is_half(leaf: Any) -> bool:
        return getattr(leaf, "dtype", None) in (torch.float16, torch.bfloat16)

    return recursively_apply(lambda leaf: leaf.float(), tensor, test_type=is_half)


class ConvertOutputsToFp32:
    """A function, called like ``model_forward``, whose results have float32 for every float16 and bfloat16 tensor.

    It cannot be pickled: unwrap the model first (``Accelerator.unwrap_model``).
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> NoReturn:
        raise PicklingError(
            "a prepared model whose outputs are converted to fp32 cannot be pickled; unwrap it with "
            "Accelerator.unwrap_model(model) first"
        )


def convert_outputs_to_fp32(model_forward: Callable[P, Any]) -> Callable[P, Any]:
    """``model_forward`` with every float16 and bfloat16 tensor of its results as float32."""
    converted = ConvertOutputsToFp32(model_forward)

    @wraps(model_forward)
    def forward(*args: P.args, **kwargs: P.kwargs) -> Any:
        return converted(*args, **kwargs)

    forward.__wrapped__ = converted
    return forward


def _compares_shapes() -> bool:
    """The ``debug`` of the state, or the value of ``ACCELERATE_DEBUG_MODE`` if there is no state."""
    return env_table.DEBUG_MODE.get() if current.session is None else current.session.config.debug


def _check_shapes(operation: Callable[P, R]) -> Callable[P, R]:
    """With ``state.debug``, ranks compare shapes before ``operation``; a difference raises on all of them."""

    @wraps(operation)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if world_size() > 1 and _compares_shapes():
            shapes = gather_object([get_shape(kwargs["tensor"] if "tensor" in kwargs else args[0])])
            if any(shape != shapes[0] for shape in shapes):
                table = "".join(f"\n  rank {rank}: {shape}" for rank, shape in enumerate(shapes))
                raise DistributedOperationException(
                    f"{operation.__name__} needs tensors of the same shapes on all ranks, but got:{table}\n"
                    "pad_across_processes makes them equal."
                )
        return operation(*args, **kwargs)

    return checked


@_check_shapes
def gather(tensor: Any) -> Any:
    """Returns nested data with every tensor concatenated over the ranks along dimension 0, on every rank.

    A 0-dim tensor counts as one of shape ``(1,)``. Shapes and dtypes must be the same on all ranks; the inputs are not
    changed. A leaf that is not a tensor raises ``TypeError``.
    """
    if world_size() == 1:
        return tensor
    kind = _own_collectives()
    if kind is not None:
        return recursively_apply(lambda leaf: _gathered(kind, leaf), tensor, error_on_other_type=True)
    return apply_to_all(all_gather, tensor, "gather")


def _own_collectives() -> XlaDevice | None:
    """The devices of the run, if their package exchanges tensors on them by itself."""
    kind = None if current.session is None else kind_of(current.session.device)
    return kind if isinstance(kind, XlaDevice) else None


def _gathered(kind: XlaDevice, leaf: torch.Tensor) -> torch.Tensor:
    assert current.session is not None
    there = leaf.reshape(1) if leaf.ndim == 0 else leaf
    return kind.all_gather(there.to(current.session.device)).to(leaf.device)


def gather_object(object: Any) -> Any:
    """Returns the items of all ranks' lists of picklable objects as one list, in rank order, on every rank."""
    if world_size() == 1:
        return object
    return [item for items in all_gather_object(object) for item in items]


@_check_shapes
def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Overwrites every tensor of nested data with that of rank ``from_process`` and returns the data."""
    if world_size() == 1:
        return tensor

    kind = _own_collectives()

    def broadcast_one(leaf: torch.Tensor) -> torch.Tensor:
        if kind is not None and kind.has(leaf):
            kind.broadcast_([leaf], from_process)
            return leaf
        dense = leaf.detach().contiguous()
        dist.broadcast(dense, src=from_process)
        if dense.data_ptr() != leaf.data_ptr():
            leaf.detach().copy_(dense)
        return leaf

    return recursively_apply(broadcast_one, tensor, error_on_other_type=True)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Overwrites the items of a list with those of rank ``from_process`` and returns it. Lengths must be the same."""
    if world_size() > 1:
        dist.broadcast_object_list(object_list, src=from_process)
    return object_list


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Returns, on every rank, the tensor of the one rank that has one; the others pass ``None``.

    Raises:
        InvalidArgument: on every rank: not exactly one has a tensor.
    """
    own = None if tensor is None else TensorInformation(tensor.shape, tensor.dtype)
    everyones = all_gather_object(own, "copy_tensor_to_devices") if world_size() > 1 else [own]
    owners = [rank for rank, information in enumerate(everyones) if information is not None]
    if len(owners) != 1:
        raise InvalidArgument(f"copy_tensor_to_devices: one rank must have a tensor; found one on ranks {owners}")
    here = torch.device("cpu") if current.session is None else current.session.device
    copied = initialize_tensors(everyones[owners[0]]).to(here) if tensor is None else tensor.clone()
    received: torch.Tensor = broadcast(copied, from_process=owners[0])
    return received


@_check_shapes
def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Returns nested data with every tensor reduced over the ranks, on every rank; the inputs are not changed.

    Args:
        reduction: ``"mean"``, ``"sum"``, ``"max"``, or ``"none"``, which also sums. The mean of integers is floating
            point.
        scale: accepted for compatibility; it has no effect.
    """
    if reduction not in ("mean", "sum", "max", "none"):
        raise InvalidArgument(f"reduction={reduction!r}: expected 'mean', 'sum', 'max' or 'none'")
    size, kind = world_size(), _own_collectives()

    def reduce_one(leaf: torch.Tensor) -> torch.Tensor:
        reduced = leaf.detach().clone(memory_format=torch.contiguous_format) if size > 1 else leaf.clone()
        if size > 1:
            if kind is not None and kind.has(leaf):
                kind.all_reduce_(reduced, "max" if reduction == "max" else "sum")
            else:
                dist.all_reduce(reduced, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM)
            if reduction == "mean":
                reduced = reduced.div_(size) if reduced.is_floating_point() or reduced.is_complex() else reduced / size
        return reduced

    return recursively_apply(reduce_one, tensor, error_on_other_type=True)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Returns nested data whose tensors are as long along ``dim`` as the longest rank's.

    Args:
        dim: may be negative; tensors without this dimension are left as they are.
        pad_index: value of the added rows.
        pad_first: add them at the front instead of the end.
    """
    if world_size() == 1:
        recursively_apply(_has_dimension, tensor, dim)  # which warns
        return tensor

    def pad_all(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        padded = [_has_dimension(leaf, dim) for leaf in leaves]
        lengths = [leaf.shape[dim] if pads else 0 for leaf, pads in zip(leaves, padded, strict=True)]
        place = leaves[0].device if leaves and _own_collectives() is None else None
        everyones = torch.tensor([lengths], dtype=torch.int64, device=place)
        longest = all_gather([everyones], "pad_across_processes")[0].amax(0).tolist()
        return [
            _pad(leaf, dim, length, pad_index, pad_first) if pads else leaf
            for leaf, pads, length in zip(leaves, padded, longest, strict=True)
        ]

    return apply_to_all(pad_all, tensor, "pad_across_processes")


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Returns nested data whose tensors are padded with zeros at the end, so that dimension ``dim`` can be cut into
    equal parts.

    Args:
        tensor: tensors of any dtype that have at most ``batch_size`` rows along ``dim``.
        batch_size: rows of the batch; tensors get as many as the next multiple of ``num_processes``.
        num_processes: the number of parts.

    Raises:
        InvalidArgument: ``num_processes`` is not positive, or a tensor has more rows, or no dimension ``dim``.
        TypeError: a leaf is not a tensor.
    """
    if num_processes < 1:
        raise InvalidArgument(f"pad_input_tensors: num_processes={num_processes}: expected at least 1")
    rows = -(-batch_size // num_processes) * num_processes

    def pad_one(leaf: torch.Tensor) -> torch.Tensor:
        if not -leaf.ndim <= dim < leaf.ndim or leaf.shape[dim] > batch_size:
            raise InvalidArgument(
                f"pad_input_tensors: expected tensors of at most batch_size={batch_size} rows in dimension {dim}; "
                f"found one of shape {tuple(leaf.shape)}; pass the batch size that find_batch_size gives"
            )
        return _pad(leaf, dim, rows, pad_index=0, pad_first=False)

    return recursively_apply(pad_one, tensor, error_on_other_type=True)


@contextmanager
def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: torch.nn.Module | None = None, enabled: bool = True
) -> Iterator[None]:
    """Inside this block, parameters that DeepSpeed has sharded in stage 3 of ZeRO are complete; it needs all processes.

    Otherwise it has no effect: every process has the complete parameters.

    Args:
        params: one or several.
        modifier_rank: the rank whose changes to ``params`` inside the block count for all; ``None`` forgets changes.
        fwd_module: the module in whose forward pass they are used, if its hooks do not know them.
        enabled: whether they are gathered.
    """
    tensors = [params] if isinstance(params, torch.Tensor) else list(params)
    if not any(hasattr(one, "ds_id") for one in tensors):
        yield
        return
    gathered = importlib.import_module("deepspeed").zero.GatheredParameters
    with gathered(tensors, modifier_rank=modifier_rank, fwd_module=fwd_module, enabled=enabled):
        yield


def _has_dimension(tensor: torch.Tensor, dim: int) -> bool:
    if tensor.is_nested:
        warnings.warn(
            "pad_across_processes leaves nested tensors as they are", CannotPadNestedTensorWarning, stacklevel=4
        )
        return False
    return -tensor.ndim <= dim < tensor.ndim


def _pad(tensor: torch.Tensor, dim: int, longest: int, pad_index: int, pad_first: bool) -> torch.Tensor:
    length = tensor.shape[dim]
    if length == longest:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = longest
    padded = tensor.new_full(shape, pad_index)
    padded.narrow(dim, longest - length if pad_first else 0, length).copy_(tensor)
    return padded
