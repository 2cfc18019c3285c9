"""TensorBoard: event files in a folder, written by torch's ``SummaryWriter``, or by tensorboardX."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.trackers import libraries
from accelerate_cpp.trackers.general import LibraryTracker
from accelerate_cpp.trackers.main_process import on_main_process
from accelerate_cpp.trackers.values import as_number, flat, leave_out, plain

_COLOURS = (1, 3)


class TensorBoardTracker(LibraryTracker):
    """Logs to TensorBoard: ``tensorboard --logdir <logging_dir>`` shows the run.

    Args:
        run_name: the folder of the run in ``logging_dir``.
        logging_dir: the folder of all runs.
        kwargs: options of ``SummaryWriter``.

    Attributes:
        writer: the ``SummaryWriter``; ``None`` before :meth:`start`.
        logging_dir: the folder of this run.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name, self.init_kwargs = run_name, kwargs
        self.logging_dir = os.path.join(logging_dir, run_name)
        self.writer: Any = None

    @property
    def tracker(self) -> Any:
        """The ``SummaryWriter``."""
        return self.writer

    @on_main_process
    def start(self) -> None:
        """Opens the event file.

        Raises:
            MissingLibrary: neither tensorboard nor tensorboardX is installed.
        """
        module = libraries.load(self.name)
        if module.__name__ == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(self.logging_dir, **self.init_kwargs)
        else:
            self.writer = module.SummaryWriter(self.logging_dir, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Stores ``values`` for the tab of hyperparameters, and in ``<logging_dir>/<time>/hparams.yml``.

        TensorBoard knows numbers, flags and texts; ``None``, lists and other objects are stored as texts.
        """
        import yaml

        writer = self._opened()
        writer.add_hparams({name: _hyperparameter(value) for name, value in flat(values)}, metric_dict={})
        writer.flush()
        folder = Path(self.logging_dir, str(time.time()))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hparams.yml").write_text(yaml.safe_dump(plain(values), allow_unicode=True), encoding="utf-8")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs ``values`` and writes them to the disk.

        Args:
            values: numbers become scalars, texts become text, and dictionaries of numbers become several curves in one
                diagram. What is neither is skipped with a warning.
            step: of all values; TensorBoard takes ``None`` for 0.
            kwargs: options of ``add_scalar``, ``add_text`` and ``add_scalars``.
        """
        writer = self._opened()
        for name, value in values.items():
            number = as_number(value)
            if number is not None:
                writer.add_scalar(name, number, global_step=step, **kwargs)
            elif isinstance(value, str):
                writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, Mapping):
                writer.add_scalars(name, self._numbers(name, value), global_step=step, **kwargs)
            else:
                leave_out(self.name, name, value, "numbers, texts and dictionaries of numbers")
        writer.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs batches of images.

        Args:
            values: names with arrays or tensors of shape (N, 3, H, W), or of another shape that ``dataformats`` names;
                or with lists of images: PIL's, or arrays or tensors of shape (H, W, C), (C, H, W) or (H, W).
            step: of all images.
            kwargs: options of ``SummaryWriter.add_images``.
        """
        writer = self._opened()
        for name, images in values.items():
            batch, shape = _batch(name, images) if isinstance(images, list | tuple) else (images, {})
            writer.add_images(name, batch, global_step=step, **{**shape, **kwargs})
        writer.flush()

    @on_main_process
    def finish(self) -> None:
        """Closes the event file."""
        self._opened().close()

    def _numbers(self, name: str, values: Mapping[str, Any]) -> dict[str, int | float]:
        found = {inner: as_number(value) for inner, value in flat(values)}
        for inner, value in flat(values):
            if found[inner] is None:
                leave_out(self.name, f"{name}/{inner}", value, "numbers in dictionaries")
        return {inner: number for inner, number in found.items() if number is not None}


def _hyperparameter(value: Any) -> int | float | str:
    number = as_number(value)
    return str(value) if number is None else number


def _batch(name: str, images: list[Any] | tuple[Any, ...]) -> tuple[Any, dict[str, str]]:
    """The images as one array of three colours, and how its axes are ordered."""
    import numpy as np

    arrays = [np.asarray(image.detach().cpu() if hasattr(image, "detach") else image) for image in images]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) != 1 or len(shapes[0]) not in (2, 3):
        raise InvalidArgument(
            f"TensorBoardTracker.log_images: {name!r} holds images of the shapes {shapes}; expected at least one, "
            "all of the same shape, (H, W), (H, W, C) or (C, H, W); log those of other shapes under names of their own"
        )
    batch = np.stack(arrays)
    if batch.ndim == 3:
        batch = batch[..., None]
    first = batch.shape[1] in _COLOURS and batch.shape[-1] not in (*_COLOURS, 4)
    colours = 1 if first else 3
    if batch.shape[colours] == 1:
        batch = np.repeat(batch, 3, axis=colours)
    if not first and batch.shape[-1] == 4:
        batch = batch[..., :3]  # TensorBoard's batches have no transparency
    return batch, {"dataformats": "NCHW" if first else "NHWC"}
