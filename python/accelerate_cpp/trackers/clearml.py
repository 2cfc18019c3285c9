"""ClearML."""

from __future__ import annotations

from typing import Any

from accelerate_cpp.config.env_table import Variable
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.trackers import libraries
from accelerate_cpp.trackers.general import LibraryTracker
from accelerate_cpp.trackers.main_process import on_main_process
from accelerate_cpp.trackers.values import as_number, flat, leave_out

PROJECT: Variable[str | None] = Variable("CLEARML_PROJECT", str, str, None, "project of ClearML that a task belongs to")
TASK: Variable[str | None] = Variable("CLEARML_TASK", str, str, None, "name of ClearML's task")

_SERIES = ("eval", "test", "train")


class ClearMLTracker(LibraryTracker):
    """Logs to ClearML: into the current task if the script has begun one, else into a new one.

    Args:
        run_name: project and task; the variables ``CLEARML_PROJECT`` and ``CLEARML_TASK`` win over it.
        kwargs: options of ``clearml.Task.init``; ``project_name`` and ``task_name`` win over all of these.

    Attributes:
        task: the ``clearml.Task``; ``None`` before :meth:`start`.
    """

    name = "clearml"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.user_provided_run_name, self.init_kwargs = run_name, kwargs
        self.task: Any = None
        self._is_ours = True

    @property
    def tracker(self) -> Any:
        """The ``clearml.Task``."""
        return self.task

    @on_main_process
    def start(self) -> None:
        """Takes the current task, or begins one.

        Raises:
            MissingLibrary: ClearML is not installed.
        """
        tasks = libraries.load(self.name).Task
        current = tasks.current_task()
        self._is_ours = current is None
        names = {
            "project_name": PROJECT.get() or self.user_provided_run_name,
            "task_name": TASK.get() or self.user_provided_run_name,
        }
        self.task = tasks.init(**{**names, **self.init_kwargs}) if self._is_ours else current

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> Any:
        """Connects ``values`` to the task as its configuration, and returns ClearML's version of them."""
        return self._opened().connect_configuration(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs ``values``.

        Args:
            values: numbers, and dictionaries of numbers (as ``name/inner``). A name that begins with ``eval_``,
                ``test_`` or ``train_`` becomes a curve ``eval``, ``test`` or ``train`` of the rest of the name; others
                become a curve ``train``. What is not a number is skipped with a warning.
            step: of all values; with ``None`` they are reported as single values under their full names.
            kwargs: options of ClearML's ``report_scalar``, or ``report_single_value``.
        """
        logger = self._opened().get_logger()
        for name, value in flat(values):
            number = as_number(value)
            if number is None:
                leave_out(self.name, name, value, "numbers and dictionaries of numbers")
            elif step is None:
                logger.report_single_value(name=name, value=number, **kwargs)
            else:
                title, series = _title_and_series(name)
                logger.report_scalar(title=title, series=series, value=number, iteration=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs images.

        Args:
            values: names, as for :meth:`log`, with images (arrays or PIL images), or lists of them, which become the
                series ``train``, ``train_1``, ``train_2``, …
            step: of all images.
            kwargs: options of ClearML's ``report_image``.
        """
        logger = self._opened().get_logger()
        for name, images in values.items():
            title, series = _title_and_series(name)
            for number, image in enumerate(images if isinstance(images, list | tuple) else [images]):
                place = f"{series}_{number}" if number else series
                logger.report_image(title=title, series=place, iteration=step, image=image, **kwargs)

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
        """Logs a table.

        Args:
            table_name: its name, as for :meth:`log`.
            columns: the names of the columns; ``None``: they are the first row of ``data``.
            data: the rows.
            dataframe: a ``pandas.DataFrame`` instead of ``columns`` and ``data``.
            step: the iteration that it belongs to.
            kwargs: options of ClearML's ``report_table``.

        Raises:
            InvalidArgument: neither ``data`` nor ``dataframe`` is given.
        """
        if dataframe is None and data is None:
            raise InvalidArgument(
                f"ClearMLTracker.log_table({table_name!r}): neither data nor dataframe is given; give one of them"
            )
        table = dataframe if dataframe is not None else data if columns is None else [columns, *(data or [])]
        title, series = _title_and_series(table_name)
        self._opened().get_logger().report_table(title=title, series=series, table_plot=table, iteration=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Closes the task, unless the script had begun it itself."""
        if self._is_ours:
            self._opened().close()


def _title_and_series(name: str) -> tuple[str, str]:
    prefix, underscore, rest = name.partition("_")
    return (rest, prefix) if underscore and prefix in _SERIES else (name, "train")
