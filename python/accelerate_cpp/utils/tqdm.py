"""Progress bars that only one process of each machine shows."""

from __future__ import annotations

import importlib
from typing import Any

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.config import env_table
from accelerate_cpp.errors import InvalidArgument, MissingLibrary

__all__ = ["tqdm"]

__getattr__ = lending("utils.tqdm")


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """A progress bar of the library tqdm, which only the main process of each machine shows.

    Args:
        args: arguments of ``tqdm.auto.tqdm``, the iterable first.
        main_process_only: other processes get the same bar, but do not show it; ``False`` lets every process show its
            own.
        kwargs: keyword arguments of ``tqdm.auto.tqdm``. ``disable=True`` applies to every process.

    Raises:
        InvalidArgument: the first argument is ``True`` or ``False``, as it was in early versions of the original.
        MissingLibrary: tqdm is not installed.
    """
    if args and isinstance(args[0], bool):
        raise InvalidArgument(
            f"tqdm({args[0]}, …): expected the iterable as first argument; pass main_process_only={args[0]} by keyword"
        )
    try:
        bar = importlib.import_module("tqdm.auto").tqdm
    except ImportError as error:
        raise MissingLibrary(f"tqdm(…) needs the library tqdm ({error}); install it: pip install tqdm") from error
    if main_process_only and not kwargs.get("disable"):
        kwargs["disable"] = _local_rank() != 0
    return bar(*args, **kwargs)


def _local_rank() -> int:
    """The local rank of this process; before there is a session, from the variable that its launcher set."""
    from accelerate_cpp.runtime import current  # imported here, because it loads torch

    session = current.session
    return (env_table.LOCAL_RANK.get() or 0) if session is None else session.topology.local_rank
