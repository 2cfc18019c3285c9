"""The state of gradient accumulation: a view of an :class:`Accumulation`, the current one or that of an Accelerator."""

from __future__ import annotations

import copyreg
from collections.abc import Iterable
from typing import Any, ClassVar

from accelerate_cpp.config import env_table
from accelerate_cpp.config.compile import compile_accumulation
from accelerate_cpp.config.session_config import AccumulationConfig
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.configurations import GradientAccumulationPlugin
from accelerate_cpp.runtime import current
from accelerate_cpp.runtime.accumulation import Accumulation

_SETTINGS = ("num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")


def begin_accumulation(config: AccumulationConfig) -> Accumulation:
    """Gives an ``Accelerator`` its own count of micro-batches, which becomes the current one."""
    current.accumulation = Accumulation(
        config.num_steps,
        config.adjust_scheduler,
        config.sync_with_dataloader,
        config.sync_each_batch,
        reading=current.accumulation.reading,
    )
    return current.accumulation


def _current_accumulation() -> Accumulation:
    return current.accumulation


# What was prepared and then pickled follows the Accelerator used last where it is loaded.
copyreg.pickle(Accumulation, lambda _: (_current_accumulation, ()))


def accumulation_of(wrapper: Any) -> Accumulation:
    """The accumulation of the ``Accelerator`` that prepared ``wrapper``; the current one if none did."""
    own: Accumulation | None = wrapper.__dict__.get("_accumulation")
    return current.accumulation if own is None else own


class AccumulationSettings(dict[str, Any]):
    """A live view of the settings of an accumulation. Setting one changes the accumulation, after the same check as for
    a plugin.

    Raises:
        InvalidArgument: there is no such setting, or its value is invalid.
    """

    def __init__(self, accumulation: Accumulation) -> None:
        super().__init__({name: getattr(accumulation, name) for name in _SETTINGS})
        self._accumulation = accumulation

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in _SETTINGS:
            raise InvalidArgument(
                f"plugin_kwargs: there is no setting {name!r} of gradient accumulation; expected one of "
                f"{', '.join(_SETTINGS)}"
            )
        checked = getattr(compile_accumulation(plugin={name: value}), name)
        setattr(self._accumulation, name, checked)
        super().__setitem__(name, checked)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Changes several settings, as ``dict.update`` does."""
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is a plain ``dict``, which sets nothing."""
        return dict, (dict(self),)


def set_accumulation(config: AccumulationConfig) -> None:
    """Applies ``config`` to the current accumulation, which keeps the loaders it is reading, and counts from 0."""
    accumulation = current.accumulation
    accumulation.num_steps = config.num_steps
    accumulation.adjust_scheduler = config.adjust_scheduler
    accumulation.sync_with_dataloader = config.sync_with_dataloader
    accumulation.sync_each_batch = config.sync_each_batch
    accumulation.step = 0


class GradientState:
    """The position of a run between two optimizer steps, and the prepared loader that it is reading.

    With several Accelerators, it shows the one that was used last, that is, created or called with ``accumulate`` or
    ``backward``. ``accelerator.gradient_state`` always shows that of ``accelerator``.

    Args:
        gradient_accumulation_plugin: settings for the accumulation from here on; ``None`` changes nothing.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        self.__dict__ = self._shared_state
        self._shared_state["accumulation"] = current.accumulation
        if gradient_accumulation_plugin is not None:
            set_accumulation(compile_accumulation(plugin=gradient_accumulation_plugin.to_kwargs()))

    @property
    def _accumulation(self) -> Accumulation:
        return current.accumulation

    @staticmethod
    def _reset_state() -> None:
        """Starts over with no loader and accumulation off."""
        current.accumulation = Accumulation()
        GradientState._shared_state.clear()

    @property
    def initialized(self) -> bool:
        """Whether a ``GradientState`` was created since the last reset."""
        return bool(self._shared_state)

    @property
    def sync_gradients(self) -> bool:
        """Whether gradients are synchronised, and the optimizer steps, in the micro-batch in hand."""
        return self._accumulation.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._accumulation.sync_gradients = value

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    @property
    def num_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self._accumulation.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """Whether the scheduler's count of steps follows the micro-batches."""
        return self._accumulation.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether a loader's last batch always synchronises."""
        return self._accumulation.sync_with_dataloader

    @property
    def plugin_kwargs(self) -> AccumulationSettings:
        """The settings of the accumulation under the names of ``GradientAccumulationPlugin``; what is set counts."""
        return AccumulationSettings(self._accumulation)

    @property
    def active_dataloader(self) -> Any | None:
        """The prepared loader that is being read, the innermost one of several; else ``None``."""
        return self._accumulation.reading.active_loader

    @property
    def dataloader_references(self) -> list[Any | None]:
        """A list of ``None``, which represents the time outside all loaders, and the prepared loaders that are being
        read, innermost last.

        Setting it replaces them; they are held weakly, and ``None`` is left out of what is set.
        """
        return [None, *self._accumulation.reading.loaders]

    @dataloader_references.setter
    def dataloader_references(self, references: Iterable[Any | None]) -> None:
        self._accumulation.reading.loaders = [loader for loader in references if loader is not None]

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Whether gradients on devices of torch_xla have been averaged before the step that needs it, or the value that
        was set last.

        Elsewhere they are averaged by the end of the backward pass. With ``ACCELERATE_USE_FSDP`` it is always ``True``,
        as in the original.
        """
        averaged = current.session is not None and current.session.strategy.gradients_are_averaged
        return averaged or env_table.USE_FSDP.get() or bool(self._shared_state.get("_is_xla_gradients_synced", False))

    @is_xla_gradients_synced.setter
    def is_xla_gradients_synced(self, is_synced: bool) -> None:
        self._shared_state["_is_xla_gradients_synced"] = is_synced

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being read."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch in hand is the last one of the active loader."""
        return self._accumulation.reading.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Real samples in the active loader's last global batch; 0 when it is full, -1 when unknown."""
        return self._accumulation.reading.remainder

    def _add_dataloader(self, dataloader: Any) -> None:
        self._accumulation.reading.push_loader(dataloader)

    def _remove_dataloader(self, dataloader: Any) -> None:
        self._accumulation.reading.remove_loader(dataloader)

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation steps: {self.num_steps}\n"
        )


class GradientStateOf(GradientState):
    """The state of one ``Accelerator``, whichever was used last."""

    __slots__ = ("_own",)  # not in the dict that all states share

    def __init__(self, accumulation: Accumulation) -> None:
        super().__init__()
        self._own = accumulation

    @property
    def _accumulation(self) -> Accumulation:
        return self._own
