"""``GeneralTracker``, the base class of all trackers, and the tracker for processes that do not log."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from accelerate_cpp.errors import InvalidArgument

_REQUIRED = ("name", "requires_logging_directory", "tracker")
_MISSING = object()


class GeneralTracker:
    """Base class of all trackers. A subclass has to have three attributes, in the class or as properties:

    - ``name`` (``str``): what ``Accelerator.get_tracker`` and ``log_kwargs`` call it;
    - ``requires_logging_directory`` (``bool``): whether it is created with a folder as its second argument;
    - ``tracker``: the object of the library that it stands for, such as a run or a writer.

    The methods, all of which do nothing here, are called by ``Accelerator``: :meth:`start` and
    :meth:`store_init_configuration` by ``init_trackers``, :meth:`log` by ``log``, :meth:`finish` by ``end_training``.

    Args:
        _blank: make a tracker that does nothing, and needs none of the attributes.

    Raises:
        NotImplementedError: the class has not all of the three attributes; the message names those that are missing.
    """

    main_process_only: bool = True
    """Whether only the main process logs. With ``False`` every process has a tracker of its own."""

    name: str
    requires_logging_directory: bool

    def __init__(self, _blank: bool = False) -> None:
        if not _blank:
            require_attributes(self)

    def start(self) -> None:
        """Begins the run. Whatever needs to know the rank or costs time belongs here, not into ``__init__``."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Stores the hyperparameters of the run: names with numbers, flags, texts or ``None``."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs ``values`` by name.

        Args:
            values: names with numbers or texts.
            step: the step that they belong to.
            kwargs: options of the library, which ``Accelerator.log`` gets as ``log_kwargs``.
        """

    def finish(self) -> None:
        """Ends the run: everything that was logged is stored."""


def require_attributes(tracker: GeneralTracker) -> None:
    """Raises ``NotImplementedError`` with the names of all required attributes that ``tracker`` lacks."""
    missing = [name for name in _REQUIRED if inspect.getattr_static(tracker, name, _MISSING) is _MISSING]
    if missing:
        raise NotImplementedError(
            f"{type(tracker).__qualname__} is not a complete tracker: it lacks "
            f"{', '.join(f'`{name}`' for name in missing)}; define them as attributes or properties of the class"
        )


class LibraryTracker(GeneralTracker):
    """A tracker whose ``tracker`` is ``None`` until it has been started."""

    @property
    def tracker(self) -> Any:
        """The object of the library; ``None`` before :meth:`start`, and on other processes than the main one."""
        raise NotImplementedError(f"{type(self).__qualname__} defines no `tracker`")

    def _opened(self) -> Any:
        """``tracker``; ``InvalidArgument`` before it has been started."""
        if self.tracker is None:
            raise InvalidArgument(
                f"{type(self).__qualname__} has not been started: call Accelerator.init_trackers, or its start(), first"
            )
        return self.tracker


class AbsentTracker(GeneralTracker):
    """The replacement for a tracker on processes that do not log.

    Every attribute exists, every call and assignment does nothing, and all of it gives this object again: a script may
    call any method of a tracker, or of the library's own object, without asking which process it is on.
    """

    requires_logging_directory = False

    def __init__(self, name: str) -> None:
        super().__init__(_blank=True)
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> AbsentTracker:
        return self

    def __getitem__(self, key: Any) -> AbsentTracker:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> AbsentTracker:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass


def options_of(name: str, options: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Any]:
    """The part of ``init_kwargs`` or ``log_kwargs`` that is for the tracker ``name``."""
    return dict((options or {}).get(name, {}))
