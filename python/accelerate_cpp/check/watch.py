"""Puts the watchers of a check between a script and the methods of this package and of torch that it calls.

It is not loaded outside of a check, so that it costs training nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from accelerate_cpp.accelerator import Accelerator
from accelerate_cpp.check.configuration import judge_arguments
from accelerate_cpp.check.loading import Loading
from accelerate_cpp.check.meshes import write_down_mesh
from accelerate_cpp.check.observed import Observed
from accelerate_cpp.check.saving import Saving
from accelerate_cpp.check.schedules import Schedules
from accelerate_cpp.check.source import here
from accelerate_cpp.check.training import Training
from accelerate_cpp.checkpoint import finding
from accelerate_cpp.checkpoint.writing import Checkpoint
from accelerate_cpp.local_sgd import LocalSGD
from accelerate_cpp.prepare.tracked_loader import TrackedLoader
from accelerate_cpp.runtime import session
from accelerate_cpp.trackers.active import ActiveTrackers
from accelerate_cpp.trackers.general import AbsentTracker

_COLLECTIVES = (
    "prepare",
    "wait_for_everyone",
    "gather",
    "gather_for_metrics",
    "reduce",
    "pad_across_processes",
    "check_trigger",
    "save_state",
    "load_state",
)
_GATHERS = frozenset({"gather", "gather_for_metrics"})
_OWN = ("accelerate_cpp", "deepspeed", "torch")

Around = Callable[..., Any]


def wrap(owner: Any, name: str, around: Around) -> None:
    """Redirects calls of ``owner.name`` to ``around(original, is_the_users, *args, **kwargs)``.

    ``is_the_users`` is false for calls that come from this package, or from torch.
    """
    original = getattr(owner, name)

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        return around(original, caller.partition(".")[0] not in _OWN, *args, **kwargs)

    setattr(owner, name, call)


def silence_trackers() -> None:
    """Lets experiment trackers do nothing: the first steps of a check are no run that anyone wants to keep."""

    def start(original: Around, _: bool, trackers: ActiveTrackers, *args: Any, **kwargs: Any) -> None:
        trackers.requested = []
        original(trackers, *args, **kwargs)

    def find(_: Around, __: bool, trackers: ActiveTrackers, name: str, unwrap: bool = False) -> Any:
        return AbsentTracker(name)

    wrap(ActiveTrackers, "start", start)
    wrap(ActiveTrackers, "find", find)


class Watch:
    """All watchers of one process, in place from the time that it is made."""

    def __init__(self, observed: Observed, folder: Path) -> None:
        self._observed = observed
        self._loading, self._training = Loading(observed), Training(observed)
        self._schedules, self._saving = Schedules(observed), Saving(observed, folder)
        self._watch_accelerator()
        self._watch_loaders()
        self._watch_optimizers()
        self._watch_schedulers()
        self._watch_files()
        silence_trackers()
        for name in _COLLECTIVES:  # last, as a wrapper takes the calls of one around it for this package's own
            wrap(Accelerator, name, partial(self._collective, name))
        wrap(session, "connect", self._connect)
        wrap(LocalSGD, "__enter__", self._enter_local_sgd)

    def conclude(self, has_ended: bool) -> None:
        """Writes down what shows only in the whole; ``has_ended`` if the script came to its end by itself."""
        self._loading.conclude()
        self._training.conclude()
        self._schedules.conclude()
        self._saving.conclude(has_ended)
        write_down_mesh(self._observed)

    def _connect(self, original: Around, _: bool, **kwargs: Any) -> Any:
        """Ranks wait for each other as long as the check allows, not as long as a run would."""
        return original(**kwargs | {"timeout": timedelta(seconds=self._observed.task.wait_seconds)})

    def _enter_local_sgd(self, original: Around, _: bool, *args: Any) -> Any:
        self._observed.averages_weights = True
        return original(*args)

    def _watch_accelerator(self) -> None:
        wrap(Accelerator, "__init__", self._make_accelerator)
        for name in ("prepare", "prepare_model"):
            wrap(Accelerator, name, self._prepare)
        wrap(Accelerator, "prepare_data_loader", self._prepare_data_loader)
        wrap(Accelerator, "backward", self._backward)
        wrap(Accelerator, "train_batch", self._train_batch)
        for name in ("accumulate", "no_sync"):
            wrap(Accelerator, name, self._accumulate)
        wrap(torch.Tensor, "backward", self._plain_backward)

    def _make_accelerator(self, original: Around, _: bool, accelerator: Any, *args: Any, **kwargs: Any) -> None:
        judge_arguments(self._observed, original, args, kwargs)
        original(accelerator, *args, **kwargs)
        self._observed.accelerators.append(accelerator)

    def _collective(self, name: str, original: Around, is_the_users: bool, *args: Any, **kwargs: Any) -> Any:
        if is_the_users:
            self._observed.journal.write("call", name=name, where=here())
            if name in _GATHERS:
                self._loading.gathers(name)
        return original(*args, **kwargs)

    def _prepare(self, original: Around, _: bool, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(accelerator, *args, **kwargs)
        self._training.watch_models(accelerator._models)
        return result

    def _prepare_data_loader(
        self, original: Around, _: bool, accelerator: Any, loader: Any, *args: Any, **kw: Any
    ) -> Any:
        self._loading.prepares(loader)
        return original(accelerator, loader, *args, **kw)

    def _backward(self, original: Around, _: bool, accelerator: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        self._training.backward(loss)
        return original(accelerator, loss, *args, **kwargs)

    def _train_batch(self, original: Around, _: bool, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        before = self._observed.backwards
        loss = original(accelerator, *args, **kwargs)
        if self._observed.backwards == before:  # stages compute backwards by themselves
            self._training.backward(loss)
        return loss

    def _plain_backward(self, original: Around, is_the_users: bool, loss: Any, *args: Any, **kwargs: Any) -> Any:
        if is_the_users:
            self._training.backward(loss, is_plain=True)
        return original(loss, *args, **kwargs)

    def _accumulate(self, original: Around, is_the_users: bool, *args: Any, **kwargs: Any) -> Any:
        self._observed.accumulates |= is_the_users
        return original(*args, **kwargs)

    def _watch_loaders(self) -> None:
        wrap(TrackedLoader, "__iter__", self._iterate_prepared)
        wrap(DataLoader, "__iter__", self._iterate)

    def _iterate_prepared(self, original: Around, _: bool, loader: Any) -> Iterator[Any]:
        return self._loading.watched(loader, original(loader), is_prepared=True)

    def _iterate(self, original: Around, is_the_users: bool, loader: Any) -> Iterator[Any]:
        batches: Iterator[Any] = original(loader)
        return self._loading.watched(loader, batches, is_prepared=False) if is_the_users else batches

    def _watch_optimizers(self) -> None:
        register_optimizer_step_pre_hook(self._begin_step)
        register_optimizer_step_post_hook(lambda optimizer, *_: self._training.after_step(optimizer))
        wrap(torch.optim.Optimizer, "zero_grad", self._zero_grad)
        wrap(torch.nn.Module, "zero_grad", self._zero_grad_of_model)

    def _begin_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        has_closure = any(callable(argument) for argument in (*args[1:], kwargs.get("closure")))
        self._training.before_step(optimizer, has_closure)

    def _zero_grad(self, original: Around, _: bool, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self._training.zero_grad(optimizer)
        return original(optimizer, *args, **kwargs)

    def _zero_grad_of_model(self, original: Around, _: bool, *args: Any, **kwargs: Any) -> Any:
        self._training.zero_grad_of_model()
        return original(*args, **kwargs)

    def _watch_schedulers(self) -> None:
        kinds = [lr_scheduler.LRScheduler, *lr_scheduler.LRScheduler.__subclasses__()]
        for kind in kinds:
            if "step" in vars(kind):
                wrap(kind, "step", self._step_scheduler)

    def _step_scheduler(self, original: Around, is_the_users: bool, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        caller = str(sys._getframe(2).f_globals.get("__name__", ""))
        by_prepared = caller == "accelerate_cpp.scheduler"
        if is_the_users or by_prepared:
            self._schedules.step(scheduler, by_prepared)
        return original(scheduler, *args, **kwargs)

    def _watch_files(self) -> None:
        saving = self._saving

        def read(original: Around, _: bool, path: Any, *args: Any, **kwargs: Any) -> Any:
            return original(saving.written(path), *args, **kwargs)

        wrap(Accelerator, "save_state", self._save_state)
        wrap(Accelerator, "save", self._save_anything)
        wrap(Accelerator, "save_model", self._save_model)
        wrap(Accelerator, "load_state", self._load_state)
        wrap(torch, "save", self._save_object)
        wrap(safetensors.torch, "save_file", self._save_tensors)
        # Programs in JAX, TensorFlow and Keras write checkpoints without an Accelerator.
        wrap(Checkpoint, "__init__", self._place_checkpoint)
        wrap(torch, "load", read)
        wrap(safetensors, "safe_open", read)
        wrap(safetensors.torch, "safe_open", read)  # by which load_file reads
        wrap(finding, "given", read)

    def _save_state(
        self, original: Around, _: bool, accelerator: Any, output_dir: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        return self._saving.save_state(accelerator, original, output_dir, *args, **kwargs)

    def _save_anything(
        self, original: Around, _: bool, accelerator: Any, obj: Any, f: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._saving.saves("save")
        return original(accelerator, obj, self._saving.elsewhere(f), *args, **kwargs)

    def _save_model(
        self, original: Around, _: bool, accelerator: Any, model: Any, save_directory: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._saving.saves("save_model")
        return original(accelerator, model, self._saving.elsewhere(save_directory), *args, **kwargs)

    def _load_state(
        self, original: Around, _: bool, accelerator: Any, input_dir: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        return self._saving.load_state(accelerator, original, input_dir, *args, **kwargs)

    def _place_checkpoint(
        self, original: Around, _: bool, checkpoint: Any, target: Path, *args: Any, **kwargs: Any
    ) -> None:
        original(checkpoint, Path(self._saving.elsewhere(target)), *args, **kwargs)

    def _save_object(self, original: Around, _: bool, obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        self._saving.saves("torch.save")
        return original(obj, self._saving.elsewhere(f), *args, **kwargs)

    def _save_tensors(self, original: Around, _: bool, tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        self._saving.saves("save_file")
        return original(tensors, self._saving.elsewhere(filename), *args, **kwargs)
