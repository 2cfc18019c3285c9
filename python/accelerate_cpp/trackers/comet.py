"""Comet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_cpp.trackers import libraries
from accelerate_cpp.trackers.general import LibraryTracker
from accelerate_cpp.trackers.main_process import on_main_process
from accelerate_cpp.trackers.values import as_number, leave_out


class CometMLTracker(LibraryTracker):
    """Logs to Comet, whose key has to be in its configuration file or in ``COMET_API_KEY``.

    Args:
        run_name: the project.
        kwargs: options of ``comet_ml.start``, or of ``comet_ml.Experiment`` in versions before 3.41; ``project_name``
            takes precedence over ``run_name``.

    Attributes:
        writer: the experiment; ``None`` before :meth:`start`.
    """

    name = "comet_ml"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name, self.init_kwargs = run_name, kwargs
        self.writer: Any = None

    @property
    def tracker(self) -> Any:
        """The experiment."""
        return self.writer

    @on_main_process
    def start(self) -> None:
        """Begins the experiment.

        Raises:
            MissingLibrary: comet_ml is not installed.
        """
        comet = libraries.load(self.name)
        begin = comet.start if hasattr(comet, "start") else comet.Experiment
        self.writer = begin(**{"project_name": self.run_name, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Stores ``values`` as the parameters of the experiment."""
        self._opened().log_parameters(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs ``values``.

        Args:
            values: numbers and dictionaries of numbers become metrics, texts are stored beside them. What is neither
                is skipped with a warning.
            step: of all values; from then on it is the experiment's own step, too.
            kwargs: options of ``log_metric``, ``log_metrics`` and ``log_other``.
        """
        experiment = self._opened()
        if step is not None:
            experiment.set_step(step)
        for name, value in values.items():
            number = as_number(value)
            if number is not None:
                experiment.log_metric(name, number, step=step, **kwargs)
            elif isinstance(value, str):
                experiment.log_other(name, value, **kwargs)
            elif isinstance(value, Mapping):
                experiment.log_metrics(value, step=step, **kwargs)
            else:
                leave_out(self.name, name, value, "numbers, texts and dictionaries of numbers")

    @on_main_process
    def finish(self) -> None:
        """Ends the experiment, and waits until everything has been sent."""
        self._opened().end()
