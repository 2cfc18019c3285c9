"""The values with which sharded parameters start: those of rank 0, also where the others have none."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist

from accelerate_cpp.errors import InvalidArgument


class FirstValues:
    """Brings the parameters and buffers of one model from rank 0 to all ranks, unit by unit. A collective.

    Args:
        model: the same module on all ranks; its tensors may be on the meta device.
        device: where tensors are made that a rank does not have.
        only: the tensors that are brought, and have to be equal in form; ``None`` means all.

    Raises:
        InvalidArgument: the ranks have other names or shapes, or a tensor is on the meta device on rank 0 alone.
    """

    def __init__(
        self, model: torch.nn.Module, device: torch.device, only: Collection[torch.Tensor] | None = None
    ) -> None:
        self._device = device
        self._holders = _holders_of(model)
        chosen = None if only is None else set(map(id, only))
        tensors = [(name, one) for name, one in _named_tensors(model) if chosen is None or id(one) in chosen]
        names = {name: (tuple(one.shape), one.is_meta) for name, one in tensors}
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, names)
        for rank, theirs in enumerate(everywhere):
            _require_equal(type(model).__name__, rank, theirs, everywhere[0])
        self._without_values = {
            id(one) for name, one in tensors if everywhere[0][name][1]
        }  # nowhere: a checkpoint brings them

    def has_no_values(self, tensor: torch.Tensor) -> bool:
        """Whether no rank has any for ``tensor``, so that a checkpoint has to bring them."""
        return id(tensor) in self._without_values

    def holders_of(self, tensor: torch.Tensor) -> list[tuple[dict[str, Any], str]]:
        """The dictionaries of modules that held ``tensor`` at the beginning, with its names there."""
        return self._holders[id(tensor)]

    def bring(self, tensors: Iterable[torch.Tensor], dtype_of: Any) -> None:
        """Gives ``tensors`` the values of rank 0; those on the meta device are replaced in the modules that hold them.

        Args:
            dtype_of: called with each tensor, the dtype that it is to have.
        """
        for tensor in tensors:
            has_none = self.has_no_values(tensor)
            if tensor.is_meta and not has_none:
                tensor = self._made(tensor, dtype_of(tensor))
            elif tensor.dtype != dtype_of(tensor):
                tensor.data = tensor.data.to(dtype_of(tensor))
            if not has_none:
                if tensor.device != self._device:
                    tensor.data = tensor.data.to(self._device)
                values = tensor.data.contiguous()
                dist.broadcast(values, src=0)
                if values.data_ptr() != tensor.data.data_ptr():
                    tensor.data.copy_(values)

    def bring_to(self, parts: Iterable[torch.nn.Module], tensors: Iterable[torch.Tensor]) -> None:
        """Gives those of ``tensors`` that are in ``parts`` the values of rank 0, on the device, and leaves others.

        Each tensor is sent once, and a rank whose parts do not have it keeps none of it. So a rank has the tensors of
        its parts on the device, and one more at a time.

        Args:
            parts: the modules of this rank; tensors on the meta device are replaced in them.
            tensors: of the model, the same in the same order on all ranks.
        """
        holders: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for part in parts:
            for key, found in _holders_of(part).items():
                holders.setdefault(key, []).extend(found)
        self._holders = holders
        sent = [tensor for tensor in dict.fromkeys(tensors) if not self.has_no_values(tensor)]
        largest = max((tensor.nbytes for tensor in sent if id(tensor) not in holders), default=0)
        # One memory for all that is not kept: a broadcast may hold on to its tensor when the next one is made.
        passing = torch.empty(0 if dist.get_rank() == 0 else largest, dtype=torch.uint8, device=self._device)
        for tensor in sent:
            if id(tensor) in holders:
                self.bring([tensor], lambda one: one.dtype)
            elif dist.get_rank() == 0:
                dist.broadcast(tensor.detach().to(self._device).contiguous(), src=0)
            else:
                dist.broadcast(passing[: tensor.nbytes].view(tensor.dtype).view(tensor.shape), src=0)

    def _made(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        values = torch.empty_like(tensor, device=self._device, dtype=dtype)
        if isinstance(tensor, torch.nn.Parameter):
            values = torch.nn.Parameter(values, requires_grad=tensor.requires_grad)
            values.__dict__.update(tensor.__dict__)
        for holder, name in self._holders[id(tensor)]:
            holder[name] = values
        return values


class KnownValues(FirstValues):
    """For a part of a model whose tensors have been brought already.

    Args:
        without_values: the tensors that a checkpoint has to bring.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device, without_values: Collection[int]) -> None:
        self._device = device
        self._holders = _holders_of(model)
        self._without_values = set(without_values)

    def bring(self, tensors: Iterable[torch.Tensor], dtype_of: Any) -> None:
        for tensor in tensors:
            if tensor.dtype != dtype_of(tensor):
                tensor.data = tensor.data.to(dtype_of(tensor))


def _named_tensors(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _holders_of(model: torch.nn.Module) -> dict[int, list[tuple[dict[str, Any], str]]]:
    """By the ``id`` of each tensor, the dictionaries of the modules that hold it, and its names there."""
    holders: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for dictionary in (module._parameters, module._buffers):
            for name, tensor in dictionary.items():
                if tensor is not None:
                    holders.setdefault(id(tensor), []).append((dictionary, name))
    return holders


def _require_equal(kind: str, rank: int, theirs: dict[str, Any], first: dict[str, Any]) -> None:
    if theirs.keys() != first.keys():
        odd = sorted(theirs.keys() ^ first.keys())[0]
        raise InvalidArgument(
            f"prepare: {kind} is another model on rank {rank} than on rank 0: only one of them has {odd!r}. Build the "
            "same model on all ranks; where their configurations differ, broadcast it first"
        )
    for name, (shape, is_meta) in theirs.items():
        expected, meta_there = first[name]
        if shape != expected:
            raise InvalidArgument(
                f"prepare: {name!r} of {kind} has shape {shape} on rank {rank} and {expected} on rank 0; build the "
                "same model on all ranks"
            )
        if meta_there and not is_meta:
            raise InvalidArgument(
                f"prepare: {name!r} of {kind} is on the meta device on rank 0, from which all ranks start, and has "
                f"values on rank {rank}; load the weights on rank 0"
            )
