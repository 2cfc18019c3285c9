"""Logging that knows the ranks: once by default, everywhere or rank by rank on request."""

from __future__ import annotations

import functools
import logging
from collections.abc import MutableMapping
from typing import Any

from accelerate_cpp.config.env_table import Variable
from accelerate_cpp.runtime import current
from accelerate_cpp.state import PartialState

__all__ = ["MultiProcessAdapter", "get_logger"]

LOG_LEVEL: Variable[str | None] = Variable(
    "ACCELERATE_LOG_LEVEL", str, str, None, "level of the loggers from get_logger, for example DEBUG"
)


class MultiProcessAdapter(logging.LoggerAdapter):  # type: ignore[type-arg]
    """A logger whose methods take ``main_process_only`` (default ``True``) and ``in_order`` (default ``False``).

    Every message starts with ``[RANK i]``. With ``in_order=True`` the ranks log one after another, so that all of them
    have to make the call. A message logged before any state exists raises ``RuntimeError``.
    """

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Adds the prefix, and points the record at the caller's line."""
        msg, kwargs = super().process(msg, kwargs)
        kwargs.setdefault("stacklevel", 2)
        return f"[RANK {PartialState().process_index}] {msg}", kwargs

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Logs on the ranks that ``main_process_only`` or ``in_order`` name."""
        if current.session is None:
            raise RuntimeError("logging needs to know its rank: create PartialState() or Accelerator() before logging")
        main_process_only, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        msg, kwargs = self.process(msg, kwargs)  # type: ignore[assignment]
        state = PartialState()
        if not in_order:
            if state.is_main_process or not main_process_only:
                self.logger.log(level, msg, *args, **kwargs)
            return
        for rank in range(state.num_processes):
            if rank == state.process_index:
                self.logger.log(level, msg, *args, **kwargs)
            state.wait_for_everyone()

    @functools.lru_cache(None)  # noqa: B019 - adapters live as long as the module that made them
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """``warning``, but only the first time it is called with these arguments."""
        self.warning(*args, **{"stacklevel": 3, **kwargs})


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """The logger ``name``, with methods that know the ranks.

    Args:
        name: as for ``logging.getLogger``, usually ``__name__``.
        log_level: for this logger and the root; ``None`` takes ``ACCELERATE_LOG_LEVEL``, or leaves both as they are.
    """
    level = LOG_LEVEL.get() if log_level is None else log_level
    logger = logging.getLogger(name)
    if level is not None:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})
