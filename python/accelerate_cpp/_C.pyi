"""The C++ core of accelerate_cpp, as Python sees it. tests/python/test_stubs.py compares this file with the module."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

class Communicator:
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def broadcast_tensors(self, tensors: list[torch.Tensor], root: int, timeout: timedelta) -> None: ...
    def abort(self, reason: str) -> None: ...

class C10dBackend(dist.Backend):
    @property
    def communicator(self) -> Communicator: ...
    @property
    def timeout(self) -> timedelta: ...

class GradientReducer:
    def __init__(
        self,
        communicator: Communicator,
        parameters: list[torch.Tensor],
        first_bucket_cap_bytes: int,
        bucket_cap_bytes: int,
        timeout: timedelta,
    ) -> None: ...
    synchronizing: bool
    @property
    def bucket_sizes_bytes(self) -> list[int]: ...
    def abort(self, reason: str) -> None: ...

def create_backend(
    store: dist.Store, rank: int, size: int, timeout: timedelta, warn_after: timedelta = timedelta(seconds=30)
) -> C10dBackend: ...
def create_hierarchical_backend(
    store: dist.Store,
    rank: int,
    size: int,
    hosts: list[int],
    timeout: timedelta,
    connect: Callable[[dist.Store, int, int], dist.Backend],
    warn_after: timedelta = timedelta(seconds=30),
) -> C10dBackend: ...
def shared_empty(size: list[int], dtype: torch.dtype) -> torch.Tensor: ...
def is_shared_tensor(tensor: torch.Tensor) -> bool: ...
def reduce_instruction_set() -> str: ...
def choose_device(*, force_cpu: bool, forced: str, local_rank: int, accelerators: list[tuple[str, int]]) -> str: ...
def move_tree(tree: Any, device: torch.device, non_blocking: bool, skip_keys: tuple[Any, ...]) -> Any: ...
