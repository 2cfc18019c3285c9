"""``LocalSGD``: processes train independently for some steps, and then average their parameters."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

import torch

from accelerate_cpp.accelerator import Accelerator
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.averaging import ParameterAverage
from accelerate_cpp.parallel.sharded_models import is_sharded
from accelerate_cpp.parallel.wrappers import wrappers_in
from accelerate_cpp.utils.dataclasses import DistributedType

__all__ = ["LocalSGD"]

# Kinds of runs in which every process holds the whole model.
_SERVED = (
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_XPU,
    DistributedType.MULTI_NPU,
    DistributedType.MULTI_MLU,
    DistributedType.MULTI_SDAA,
    DistributedType.MULTI_MUSA,
    DistributedType.MULTI_HPU,
    DistributedType.MULTI_NEURON,
)


class LocalSGD:
    """A block in which gradients stay local, and parameters are averaged over the processes every few steps.

    ``with LocalSGD(accelerator, model, 8) as local_sgd:`` around the training loop, and ``local_sgd.step()`` after each
    step of the optimizer. Parameters are averaged by every ``local_sgd_steps``-th call of :meth:`step`, and once more
    when the block ends; every process has to call :meth:`step` equally often. If an exception leaves the block, nothing
    is averaged, because the other processes may be in another place of the program.

    Only trained parameters are averaged, in place. Buffers, such as the statistics of batch normalisation, and the
    state of the optimizer stay separate on each process.

    With one process there is nothing to average, and ``enabled`` is ``False``.

    Args:
        accelerator: the one that prepared ``model``.
        model: the model that is trained, as :meth:`Accelerator.prepare` returned it.
        local_sgd_steps: calls of :meth:`step` from one average to the next, at least 1.
        enabled: if ``False``, the block has no effect, and :meth:`step` only counts.

    Raises:
        InvalidArgument: ``local_sgd_steps`` is not an integer of at least 1, or the processes do not each have the
            whole model.

    The method is that of Stich, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767.
    """

    def __init__(
        self, accelerator: Accelerator, model: torch.nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if enabled:
            _require_steps(local_sgd_steps)
        self.enabled = bool(enabled) and accelerator.use_distributed
        self.num_steps = 0
        self.accelerator, self.model, self.local_sgd_steps = accelerator, model, local_sgd_steps
        self._without_sync = ExitStack()
        if self.enabled:
            _require_whole_models(accelerator.distributed_type)
            _require_whole(model)
            self._average = ParameterAverage(model)

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            for wrapper in _wrappers(self.accelerator, self.model):
                self._without_sync.enter_context(self.accelerator.no_sync(wrapper))
        return self

    def __exit__(self, type: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._without_sync.close()
        if self.enabled and type is None:
            self._average()

    def step(self) -> None:
        """Counts one step of the optimizer; every ``local_sgd_steps``-th one averages the parameters."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()


def _require_steps(steps: object) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InvalidArgument(
            f"LocalSGD: local_sgd_steps={steps!r}: expected an integer of at least 1; pass enabled=False to train "
            "without it"
        )


def _require_whole_models(distributed_type: DistributedType) -> None:
    if distributed_type not in _SERVED:
        raise InvalidArgument(
            f"LocalSGD: this run is of the type {distributed_type.value}; expected one in which every process holds "
            f"the whole model, which are {', '.join(kind.value for kind in _SERVED)}. Pass enabled=False to train "
            "without it"
        )


def _require_whole(model: torch.nn.Module) -> None:
    if is_sharded(model):
        raise InvalidArgument(
            f"LocalSGD: {type(model).__name__} is shared out among the processes, so they have no copies to average; "
            "pass enabled=False to train without it"
        )


def _wrappers(accelerator: Accelerator, model: torch.nn.Module) -> list[torch.nn.Module]:
    """Everything that would synchronise gradients of ``model``: wrappers in it, and prepared models that wrap a part of
    it.

    The former are found below ``torch.compile``, the latter around a model that was taken out of its wrapper.
    """
    parts = {id(module) for module in model.modules()}
    unwrap = accelerator._session.strategy.unwrap
    return wrappers_in(model) + [prepared for prepared in accelerator._models if id(unwrap(prepared)) in parts]
