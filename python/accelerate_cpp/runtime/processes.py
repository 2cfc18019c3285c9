"""The operations of a state on the processes of a run: waiting, taking turns, dividing work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from accelerate_cpp.devices.table import kind_of
from accelerate_cpp.runtime.partition import part_of

if TYPE_CHECKING:
    import torch

__all__ = ["Processes"]


class Processes:
    """The methods of state classes that concern processes. Subclasses provide the properties declared here."""

    if TYPE_CHECKING:

        @property
        def device(self) -> torch.device: ...
        @property
        def num_processes(self) -> int: ...
        @property
        def process_index(self) -> int: ...
        @property
        def local_process_index(self) -> int: ...
        @property
        def use_distributed(self) -> bool: ...
        @property
        def is_main_process(self) -> bool: ...
        @property
        def is_local_main_process(self) -> bool: ...
        @property
        def is_last_process(self) -> bool: ...
        @property
        def fork_launched(self) -> bool: ...

    def wait_for_everyone(self) -> None:
        """Returns when every process has called it."""
        kind = kind_of(self.device)
        kind.sync()
        if not self.use_distributed:
            return
        if kind.init_method is not None:
            dist.barrier()
            return
        dist.barrier(device_ids=None if self.device.index is None else [self.device.index])

    @contextmanager
    def _goes_first(self, is_main: bool) -> Iterator[None]:
        if not is_main:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if is_main:
                self.wait_for_everyone()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Rank 0 runs the block before the other ranks do. They continue even if rank 0 raises in it."""
        with self._goes_first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Rank 0 of each host runs the block before the others do."""
        with self._goes_first(self.is_local_main_process):
            yield

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Gives each process its consecutive part of ``inputs``; the first ranks get the remaining items.

        Args:
            inputs: a list, tuple, tensor (cut along its first dimension) or ``datasets.Dataset``; or a dict of them
                with equal lengths, whose values are replaced in place. One process gets ``inputs`` itself.
            apply_padding: repeat the last item until all parts are equally long, so that they can be gathered.

        If there are fewer items than ranks, the other ranks get the last item.

        Raises:
            ValueError: the values of a dict have different lengths.
            TypeError: a tuple would have to be padded.
        """
        if self.num_processes == 1:
            yield inputs
            return
        yield part_of(inputs, self.num_processes, self.process_index, pad_to=self.device if apply_padding else None)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """``function`` on rank 0; on other ranks, a function that returns ``None``."""
        return self.on_process(function, process_index=0)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """``function`` on rank 0 of each host; on other ranks, a function that returns ``None``."""
        return self.on_local_process(function, local_process_index=0)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` on the highest rank; on other ranks, a function that returns ``None``."""
        return function if self.is_last_process else _nothing

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """``function`` on rank ``process_index``; on other ranks, a function that returns ``None``."""
        if function is None:
            return partial(self.on_process, process_index=process_index)
        return function if not self.use_distributed or self.process_index == process_index else _nothing

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """``function`` on rank ``local_process_index`` of each host; else a function that returns ``None``."""
        if function is None:
            return partial(self.on_local_process, local_process_index=local_process_index)
        return function if not self.use_distributed or self.local_process_index == local_process_index else _nothing

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on rank 0 of each host."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    def destroy_process_group(self, group: dist.ProcessGroup | None = None) -> None:
        """Destroys ``group``, or the default one. In a process that a notebook forked, the default group is kept."""
        if self.fork_launched and group is None:
            return
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group(group)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """The replacement for a function that is decorated for another process."""
