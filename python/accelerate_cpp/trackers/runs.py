"""Libraries with one run object that takes whole dictionaries: Weights & Biases, Trackio, SwanLab."""

from __future__ import annotations

from typing import Any

from accelerate_cpp.trackers import libraries
from accelerate_cpp.trackers.general import LibraryTracker
from accelerate_cpp.trackers.main_process import on_main_process
from accelerate_cpp.trackers.values import with_numbers


class RunTracker(LibraryTracker):
    """A tracker whose library has ``init(project=…)``, and whose runs have ``config``, ``log`` and ``finish``.

    One process has one run. Set ``main_process_only`` to ``False`` in a subclass for a run of each process; in Hugging
    Face Accelerate it is ``False``, which counts there only for trackers that are used without an ``Accelerator``.

    Args:
        run_name: the project.
        kwargs: options of the library's ``init``; ``project`` takes precedence over ``run_name``.

    Attributes:
        run: the library's run; ``None`` before :meth:`start`.
    """

    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name, self.init_kwargs = run_name, kwargs
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    @on_main_process
    def start(self) -> None:
        """Begins the run.

        Raises:
            MissingLibrary: the library is not installed.
        """
        self.run = libraries.load(self.name).init(**{"project": self.run_name, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Adds ``values`` to the run's configuration."""
        self._opened().config.update(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs ``values``, which may be all that the library stores.

        Args:
            values: names with numbers, texts, dictionaries of these, or the library's own objects.
            step: of all values; ``None`` lets the library count.
            kwargs: options of the run's ``log``.
        """
        self._opened().log(with_numbers(values), step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Ends the run."""
        self._opened().finish()

    def _log_images(self, values: dict[str, Any], step: int | None, kwargs: dict[str, Any]) -> None:
        run, image_of = self._opened(), libraries.load(self.name).Image
        run.log({name: [image_of(image) for image in images] for name, images in values.items()}, step=step, **kwargs)


class WandBTracker(RunTracker):
    """Logs to Weights & Biases.

    Args:
        run_name: the project.
        kwargs: options of ``wandb.init``; ``project`` takes precedence over ``run_name``.

    Attributes:
        run: the ``wandb.Run``; ``None`` before :meth:`start`.
    """

    name = "wandb"

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Adds ``values`` to the run's configuration; they replace older values of the same name."""
        self._opened().config.update(values, allow_val_change=True)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs lists of images.

        Args:
            values: names with lists of whatever ``wandb.Image`` takes: arrays, tensors, PIL images.
            step: of all images.
            kwargs: options of ``wandb.Run.log``.
        """
        self._log_images(values, step, kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Logs a table, given as ``columns`` and rows (``data``), or as a ``dataframe`` of pandas.

        Cells may hold whatever wandb stores; ``kwargs`` are options of ``wandb.Run.log``.
        """
        table = libraries.load(self.name).Table(columns=columns, data=data, dataframe=dataframe)
        self._opened().log({table_name: table}, step=step, **kwargs)


class TrackioTracker(RunTracker):
    """Logs to Trackio.

    Args:
        run_name: the project.
        kwargs: options of ``trackio.init``; ``project`` takes precedence over ``run_name``.

    Attributes:
        run: the ``trackio.Run``; ``None`` before :meth:`start`.
    """

    name = "trackio"


class SwanLabTracker(RunTracker):
    """Logs to SwanLab.

    Args:
        run_name: the project.
        kwargs: options of ``swanlab.init``; ``project`` takes precedence over ``run_name``.

    Attributes:
        run: the SwanLab run; ``None`` before :meth:`start`.
    """

    name = "swanlab"

    @on_main_process
    def start(self) -> None:
        """Begins the run, which says in its configuration which program made it.

        Raises:
            MissingLibrary: SwanLab is not installed.
        """
        super().start()
        self._opened().config.update({"FRAMEWORK": "accelerate_cpp"})

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs lists of images.

        Args:
            values: names with lists of whatever ``swanlab.Image`` takes: arrays, tensors, PIL images.
            step: of all images.
            kwargs: options of the run's ``log``.
        """
        self._log_images(values, step, kwargs)
