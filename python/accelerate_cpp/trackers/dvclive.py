"""DVCLive: metrics and parameters as files that DVC versions."""

from __future__ import annotations

from typing import Any

from accelerate_cpp.trackers import libraries
from accelerate_cpp.trackers.general import LibraryTracker
from accelerate_cpp.trackers.main_process import on_main_process
from accelerate_cpp.trackers.values import as_number, flat, leave_out, plain


class DVCLiveTracker(LibraryTracker):
    """Logs to DVCLive.

    Args:
        run_name: without effect, as DVCLive names its experiments itself; ``dir`` and ``exp_name`` go into ``kwargs``.
        live: a ``dvclive.Live`` to use instead of a new one.
        kwargs: options of ``dvclive.Live``.

    Attributes:
        live: the ``dvclive.Live``; ``None`` before :meth:`start`, unless one was given.
    """

    name = "dvclive"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.live, self.init_kwargs = live, kwargs

    @property
    def tracker(self) -> Any:
        """The ``dvclive.Live``."""
        return self.live

    @on_main_process
    def start(self) -> None:
        """Makes the ``dvclive.Live``, unless one was given.

        Raises:
            MissingLibrary: DVCLive is not installed.
        """
        if self.live is None:
            self.live = libraries.load(self.name).Live(**self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Stores ``values`` as parameters, in ``params.yaml``; objects that YAML does not know as texts."""
        self._opened().log_params(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs ``values`` and moves DVCLive's own step on by one.

        Args:
            values: numbers, texts, and dictionaries of these (as ``name/inner``). What is neither is skipped with a
                warning.
            step: of all values; ``None`` is DVCLive's own.
            kwargs: options of ``dvclive.Live.log_metric``.
        """
        live = self._opened()
        if step is not None:
            live.step = step
        for name, value in flat(values):
            number = as_number(value)
            if number is not None or isinstance(value, str):
                live.log_metric(name, value if number is None else number, **kwargs)
            else:
                leave_out(self.name, name, value, "numbers and texts")
        live.next_step()

    @on_main_process
    def finish(self) -> None:
        """Writes the summary and ends the experiment."""
        self._opened().end()
