"""All that tests of programs use: kinds of devices, decorators, test cases, commands, and the few helpers below."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.test_utils.backend import *  # noqa: F403
from accelerate_cpp.test_utils.cases import *  # noqa: F403
from accelerate_cpp.test_utils.processes import *  # noqa: F403
from accelerate_cpp.test_utils.requirements import *  # noqa: F403
from accelerate_cpp.utils.imports import is_hpu_available as is_hpu_available
from accelerate_cpp.utils.imports import is_xpu_available as is_xpu_available
from accelerate_cpp.utils.operations import gather

__getattr__ = lending("test_utils.testing")


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has the same values on all processes, which all have to ask; a process alone agrees."""
    rows = gather(tensor[None].clone())
    return bool((rows == rows[0]).all())


def capture_call_output(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What ``func(*args, **kwargs)`` prints."""
    screen = io.StringIO()
    with redirect_stdout(screen):
        func(*args, **kwargs)
    return screen.getvalue()


@contextmanager
def assert_exception(exception_class: type[BaseException], msg: str | None = None) -> Iterator[None]:
    """Fails with ``AssertionError`` unless the block raises ``exception_class``, with ``msg`` in its message."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, exception_class):
            raise AssertionError(f"expected {exception_class.__name__}, but found {error!r}") from error
        if msg is not None and msg not in str(error):
            raise AssertionError(f"expected {msg!r} in the message, but found {str(error)!r}") from error
    else:
        raise AssertionError(f"expected {exception_class.__name__}, but nothing was raised")
