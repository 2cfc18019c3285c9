"""The trackers of one ``Accelerator``: their requests, start, logging and end."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.trackers import registry
from accelerate_cpp.trackers.general import AbsentTracker, GeneralTracker, options_of
from accelerate_cpp.trackers.main_process import is_main_process

Options = Mapping[str, Mapping[str, Any]]


class ActiveTrackers:
    """The trackers in ``log_with``, and those that log on this process.

    A tracker acts on the main process only, unless its ``main_process_only`` is ``False``; then every process that
    starts it has its own. No method communicates, so that they may also be called on the main process alone. What a
    tracker raises is raised.

    Args:
        requested: names and trackers, as :func:`accelerate_cpp.trackers.registry.choose` gives them; a name may be a
            member of an enum, whose text it is.

    Attributes:
        requested: the same.
        active: the trackers that log on this process; a list of the caller's own may take its place.
    """

    def __init__(self, requested: Sequence[Any]) -> None:
        self.requested: list[Any] = list(requested)
        self.active: list[GeneralTracker] = []
        self._finished: list[GeneralTracker] = []
        self._is_running = False

    def start(
        self,
        logging_dir: str | os.PathLike[str] | None,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: Options | None = None,
    ) -> None:
        """Creates and starts what was requested, and gives every tracker the hyperparameters.

        Args:
            logging_dir: the folder of trackers that require one.
            project_name: the first argument of trackers that are requested by name.
            config: hyperparameters; ``None`` stores none.
            init_kwargs: options by name of the tracker, for those that are requested by name.

        Raises:
            InvalidArgument: the trackers are running already.
            MissingLibrary: a library is not installed.
        """
        if self._is_running:
            raise InvalidArgument(
                "init_trackers: the trackers of this Accelerator are running already, since an earlier call; call "
                "end_training before starting others"
            )
        self._judge_options("init_kwargs", init_kwargs)
        self.active, self._finished = [], []
        created = [self._created(item, project_name, logging_dir, init_kwargs) for item in self.requested]
        for tracker in created:
            if tracker is not None:
                tracker.start()
                self.active.append(tracker)
                self._is_running = True
        self._is_running = True
        if config is not None:
            for tracker in self.active:
                tracker.store_init_configuration(config)

    def find(self, name: str, unwrap: bool = False) -> Any:
        """The tracker ``name``, or with ``unwrap`` the library's object that it stands for.

        Returns:
            Where it does not log, something that does nothing: on other processes than the main one an
            :class:`AbsentTracker`, of which anything can be called; before :meth:`start`, and if no tracker was
            requested, a blank :class:`GeneralTracker`.

        Raises:
            InvalidArgument: there are trackers, but none of this name.
        """
        for tracker in self.active:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker  # type: ignore[attr-defined]
        known = self._known_names()
        if (self.active or self._is_running) and known and name not in known:
            raise InvalidArgument(f"get_tracker({name!r}): there is no such tracker; expected {', '.join(known)}")
        if not is_main_process():
            return AbsentTracker(name)
        self._warn_before_start(f"get_tracker({name!r})")
        return GeneralTracker(_blank=True)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: Options | None = None) -> None:
        """Logs ``values`` with every tracker, each with its own part of ``log_kwargs``."""
        self._judge_options("log_kwargs", log_kwargs)
        if not self.active and is_main_process():
            self._warn_before_start("log")
        for tracker in self.active:
            tracker.log(values, step=step, **options_of(tracker.name, log_kwargs))

    def finish(self) -> None:
        """Finishes every tracker once, even if one of them fails; then raises the first error."""
        errors: list[Exception] = []
        for tracker in self.active:
            if any(tracker is done for done in self._finished):
                continue
            self._finished.append(tracker)
            try:
                tracker.finish()
            except Exception as error:
                errors.append(error)
                if len(errors) > 1:
                    warnings.warn(f"tracker {tracker.name!r} could not be finished, either: {error!r}", stacklevel=2)
        self._is_running = False
        if errors:
            raise errors[0]

    def _created(
        self,
        item: Any,
        project_name: str,
        logging_dir: str | os.PathLike[str] | None,
        init_kwargs: Options | None,
    ) -> GeneralTracker | None:
        """The tracker of one request; ``None`` if it does not act on this process."""
        kind = item if isinstance(item, GeneralTracker) else registry.LOGGER_TYPE_TO_CLASS[str(item)]
        if kind.main_process_only and not is_main_process():
            return None
        if isinstance(item, GeneralTracker):
            return item
        return registry.create(str(item), project_name, logging_dir, options_of(str(item), init_kwargs))

    def _known_names(self) -> list[str]:
        asked = [item.name if isinstance(item, GeneralTracker) else str(item) for item in self.requested]
        return list(dict.fromkeys([*asked, *(tracker.name for tracker in self.active)]))

    def _judge_options(self, argument: str, options: Options | None) -> None:
        """Warns of options for names that no tracker has; those of trackers that are not used this time are fine."""
        if not options:
            return
        known = self._known_names()
        strangers = [name for name in options if name not in known and name not in registry.LOGGER_TYPE_TO_CLASS]
        if known and strangers and is_main_process():
            warnings.warn(
                f"{argument} has options for {', '.join(map(repr, strangers))}, and no tracker has that name; the "
                f"trackers are {', '.join(known)}",
                stacklevel=4,
            )

    def _warn_before_start(self, call: str) -> None:
        if self.requested and not self._is_running and not self._finished:
            warnings.warn(
                f"{call}: nothing is logged, as no tracker has been started; call init_trackers first", stacklevel=4
            )
