"""Aim: runs in a repository of its own in a folder."""

from __future__ import annotations

import os
from typing import Any

from accelerate_cpp.trackers import libraries
from accelerate_cpp.trackers.general import LibraryTracker
from accelerate_cpp.trackers.main_process import on_main_process
from accelerate_cpp.trackers.values import as_number, flat, leave_out


class AimTracker(LibraryTracker):
    """Logs to Aim.

    Args:
        run_name: the name of the run.
        logging_dir: the folder of the repository.
        kwargs: options of ``aim.Run``; ``repo`` takes precedence over ``logging_dir``.

    Attributes:
        writer: the ``aim.Run``; ``None`` before :meth:`start`.
    """

    name = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__()
        self.run_name, self.aim_repo_path, self.init_kwargs = run_name, logging_dir, kwargs
        self.writer: Any = None

    @property
    def tracker(self) -> Any:
        """The ``aim.Run``."""
        return self.writer

    @on_main_process
    def start(self) -> None:
        """Begins the run.

        Raises:
            MissingLibrary: Aim is not installed.
        """
        self.writer = libraries.load(self.name).Run(**{"repo": self.aim_repo_path, **self.init_kwargs})
        self.writer.name = self.run_name

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Stores ``values`` as ``hparams`` of the run."""
        self._opened()["hparams"] = values

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs ``values``.

        Args:
            values: numbers, texts (as ``aim.Text``), dictionaries of these (as ``name/inner``), or objects of Aim.
                ``None`` is skipped with a warning.
            step: of all values; ``None`` lets Aim count.
            kwargs: options of ``aim.Run.track``.
        """
        run = self._opened()
        for name, value in flat(values):
            if value is None:
                leave_out(self.name, name, value, "numbers, texts and objects of Aim")
                continue
            number = as_number(value)
            if number is not None:
                value = number
            elif isinstance(value, str):
                value = libraries.load(self.name).Text(value)
            run.track(value, name=name, step=step, **kwargs)

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Logs images.

        Args:
            values: names with images (arrays, tensors, PIL images), or with tuples of an image and its caption.
            step: of all images.
            kwargs: options of ``aim.Image`` under ``"aim_image"``, and of ``aim.Run.track`` under ``"track"``.
        """
        run, image_of, options = self._opened(), libraries.load(self.name).Image, kwargs or {}
        for name, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            made = image_of(image, **{"caption": caption, **options.get("aim_image", {})})
            run.track(made, name=name, step=step, **options.get("track", {}))

    @on_main_process
    def finish(self) -> None:
        """Closes the run."""
        self._opened().close()
