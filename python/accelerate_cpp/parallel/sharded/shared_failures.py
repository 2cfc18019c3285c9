"""Backward passes that raise on one process raise on all that share out the parameters, so that all can go on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from accelerate_cpp._native import C10dBackend
from accelerate_cpp.devices.shards import is_sharded_tensor
from accelerate_cpp.errors import AccelerateError


def groups_of(model: torch.nn.Module) -> set[dist.ProcessGroup]:
    """The groups of the meshes over which parameters of ``model`` are in shards or have replicas."""
    meshes = {parameter.device_mesh for parameter in model.parameters() if is_sharded_tensor(parameter)}  # type: ignore[attr-defined]
    return {mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)}


@contextmanager
def raised_on_all(groups: Iterable[dist.ProcessGroup]) -> Iterator[None]:
    """If this block raises, so does the collective of ``groups`` that the other processes are in or call next.

    Unless they have raised already; afterwards all go on together. Only among processes of a host, over our backend:
    between hosts, nothing but the end of the group could make the others raise.
    """
    backends: list[Any] = [group._get_backend(torch.device("cpu")) for group in groups if _has_cpu(group)]
    before = {
        backend: backend.communicator.interruptions
        for backend in backends
        if isinstance(backend, C10dBackend) and backend.communicator.can_withdraw
    }
    try:
        yield
    except BaseException as error:
        reason = f"its backward pass raised {type(error).__name__}: {error}"
        for backend, interruptions in before.items():
            if backend.communicator.interruptions == interruptions:
                _withdraw(backend, reason)
        raise


def _has_cpu(group: dist.ProcessGroup) -> bool:
    return any(device.type == "cpu" for device in group._device_types)


def _withdraw(backend: C10dBackend, reason: str) -> None:
    try:
        backend.communicator.withdraw(reason, backend.timeout)
    except AccelerateError:
        backend.communicator.abort(reason)  # others cannot go on either
