"""Names that other programs import but that do not work yet: calling one raises the message in its row of a table.

The table is :data:`accelerate_cpp.config.unsupported.FUNCTIONS`; docs/refusals.md shows it.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from accelerate_cpp.config import unsupported

F = TypeVar("F", bound=Callable[..., Any])


def refusing(function: F) -> F:
    """``function`` with its signature and docstring, refused by its row; of a method, by the row of its class."""
    name = function.__qualname__.partition(".")[0]

    @functools.wraps(function)
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        unsupported.refuse(name, f"{name}(...)")

    return cast(F, refuse)


@refusing
def fsdp2_load_full_state_dict(
    accelerator: Any, model: torch.nn.Module, full_sd: dict[str, Any], cpu_offload: bool = False
) -> None:
    """Not supported (``InvalidArgument``). In the original, it distributes rank 0's full state dict in shards."""


@refusing
def fsdp2_switch_optimizer_parameters(optimizer: torch.optim.Optimizer, mapping: dict[Any, Any]) -> None:
    """Not supported (``InvalidArgument``). In the original, it makes an optimizer step the shards of its parameters."""


@refusing
def compile_regions_fsdp2(module: torch.nn.Module, **compile_kwargs: Any) -> Any:
    """Not supported (``InvalidArgument``). In the original, it compiles the blocks of a sharded model."""


@refusing
def prepare_sagemager_args_inputs(sagemaker_config: Any, args: argparse.Namespace) -> Any:
    """Not supported (``InvalidArgument``). In the original, it returns the arguments for a job on Amazon SageMaker."""
