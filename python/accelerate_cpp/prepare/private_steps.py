"""Private steps and lists of the original's ``Accelerator`` that programs call, replace and set."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accelerate_cpp.config import unsupported

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Self

    from accelerate_cpp.checkpoint.checkpoints_of_run import Checkpoints
    from accelerate_cpp.parallel.bundle import Bundle
    from accelerate_cpp.plugins.configurations import ProjectConfiguration
    from accelerate_cpp.plugins.handlers import AutocastKwargs
    from accelerate_cpp.runtime.accumulation import Accumulation
    from accelerate_cpp.runtime.session import Session

__all__ = ["PreparationSteps"]


class PreparationSteps:
    """The original's private methods and lists of ``Accelerator``; those of unsupported features raise an error."""

    # The attributes of ``Accelerator`` that preparing and checkpoints use.
    _accumulation: Accumulation
    _checkpoints: Checkpoints
    _prepared: Bundle
    _scheduler_types: tuple[type, ...] = (LRScheduler,)
    _session: Session
    autocast_handler: AutocastKwargs | None
    device_placement: bool
    project_configuration: ProjectConfiguration
    scaler: Any
    state: Any
    get_state_dict: Callable[..., dict[str, torch.Tensor]]
    load_state: Callable[..., None]
    prepare: Callable[..., Any]
    prepare_data_loader: Callable[..., DataLoader[Any]]
    prepare_model: Callable[..., torch.nn.Module]
    prepare_optimizer: Callable[..., torch.optim.Optimizer]
    prepare_scheduler: Callable[..., Any]
    verify_device_map: Callable[[torch.nn.Module], bool]
    if TYPE_CHECKING:

        @property
        def device(self) -> torch.device: ...
        @property
        def mixed_precision(self) -> str: ...
        @property
        def num_processes(self) -> int: ...
        @property
        def torch_device_mesh(self) -> DeviceMesh | None: ...
        @property
        def use_distributed(self) -> bool: ...
        @property
        def step(self) -> int: ...
        @step.setter
        def step(self, step: int) -> None: ...
        @property
        def split_batches(self) -> bool: ...
        @property
        def gradient_accumulation_steps(self) -> int: ...
        @gradient_accumulation_steps.setter
        def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None: ...
        def _bitsandbytes_computes_on_cpu(self) -> bool: ...

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The same object: a run has one of its processes and of what they prepared."""
        return self

    @property
    def _models(self) -> list[torch.nn.Module]:
        return self._prepared.models

    @_models.setter
    def _models(self, models: list[torch.nn.Module]) -> None:
        self._prepared.models = models

    @property
    def _optimizers(self) -> list[Any]:
        return self._prepared.optimizers

    @_optimizers.setter
    def _optimizers(self, optimizers: list[Any]) -> None:
        self._prepared.optimizers = optimizers

    @property
    def _dataloaders(self) -> list[Any]:
        return self._prepared.dataloaders

    @_dataloaders.setter
    def _dataloaders(self, dataloaders: list[Any]) -> None:
        self._prepared.dataloaders = dataloaders

    @property
    def _schedulers(self) -> list[Any]:
        return self._prepared.schedulers

    @_schedulers.setter
    def _schedulers(self, schedulers: list[Any]) -> None:
        self._prepared.schedulers = schedulers

    @property
    def _custom_objects(self) -> list[Any]:
        return self._checkpoints.custom_objects

    @_custom_objects.setter
    def _custom_objects(self, objects: list[Any]) -> None:
        self._checkpoints.custom_objects = objects

    @property
    def _save_model_state_pre_hook(self) -> dict[int, Callable[..., None]]:
        return self._checkpoints.save_hooks

    @property
    def _load_model_state_pre_hook(self) -> dict[int, Callable[..., None]]:
        return self._checkpoints.load_hooks

    def _do_sync(self) -> None:
        """Counts one micro-batch, and decides whether gradients are synchronised in it."""
        self._accumulation.advance()

    def _prepare_one(self, obj: Any, first_pass: bool = False, device_placement: bool | None = None) -> Any:
        """``obj`` prepared by itself: in the first pass a loader, a model or an optimizer, else a scheduler."""
        if not first_pass:
            return self.prepare_scheduler(obj) if isinstance(obj, LRScheduler) else obj
        if isinstance(obj, DataLoader):
            return self.prepare_data_loader(obj, device_placement=device_placement)
        if isinstance(obj, torch.nn.Module):
            return self.prepare_model(obj, device_placement=device_placement)
        if isinstance(obj, torch.optim.Optimizer):
            return self.prepare_optimizer(obj, device_placement=device_placement)
        return obj

    def _prepare_device_mesh(self) -> DeviceMesh | None:
        """The mesh by which loaders are shared out."""
        return self.torch_device_mesh

    def _prepare_cp(self, *args: Any) -> NoReturn:
        """Not supported: raises ``InvalidArgument``. In the original, it splits sequences for torch's attention."""
        unsupported.refuse("_prepare_cp", "Accelerator._prepare_cp(...)")

    def _prepare_tp(self, *args: Any) -> NoReturn:
        """Not supported: raises ``InvalidArgument``. In the original, it splits layers."""
        unsupported.refuse("_prepare_tp", "Accelerator._prepare_tp(...)")

    def _prepare_fsdp2(self, *args: Any) -> NoReturn:
        """Not supported: raises ``InvalidArgument``. In the original, it shards a model with ``fully_shard``."""
        unsupported.refuse("_prepare_fsdp2", "Accelerator._prepare_fsdp2(...)")

    def _prepare_deepspeed(self, *args: Any) -> tuple[Any, ...]:
        """``args`` prepared, their model and optimizer as an engine of DeepSpeed; the same as ``prepare``."""
        prepared = self.prepare(*args)
        return (prepared,) if len(args) == 1 else prepared

    def _prepare_megatron_lm(self, *args: Any) -> tuple[Any, ...]:
        """``args`` prepared, their model and optimizer as an engine; the same as ``prepare``."""
        return self._prepare_deepspeed(*args)
