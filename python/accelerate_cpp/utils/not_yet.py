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
from accelerate_cpp.optimizer import AcceleratedOptimizer
from accelerate_cpp.scheduler import AcceleratedScheduler

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


@refusing
def prepare_tpu(args: argparse.Namespace, current_env: dict[str, str], pod: bool = False) -> Any:
    """Not supported (``InvalidArgument``). In the original, it returns the environment of a launch on TPUs."""


@refusing
def avg_losses_across_data_parallel_group(losses: list[torch.Tensor]) -> Any:
    """Not supported (``InvalidArgument``). In the original, it averages losses over copies of a Megatron-LM model."""


@refusing
def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """Not supported (``InvalidArgument``). In the original, it gathers tensors from copies of a Megatron-LM model."""


class MegatronEngine(torch.nn.Module):
    """Not supported (``InvalidArgument``). In the original, it trains a model through Megatron-LM."""

    @refusing
    def __init__(self, accelerator: Any, model: Any, optimizer: Any, scheduler: Any) -> None: ...

    @refusing
    def train(self) -> None:  # type: ignore[override]
        """Not supported (``InvalidArgument``). In the original, it puts the model in training mode."""

    @refusing
    def eval(self) -> None:  # type: ignore[override]
        """Not supported (``InvalidArgument``). In the original, it puts the model in evaluation mode."""

    @refusing
    def get_batch_data_iterator(self, batch_data: Any) -> Any:
        """Not supported (``InvalidArgument``). In the original, it splits a batch into micro-batches."""

    @refusing
    def train_step(self, **batch_data: Any) -> Any:
        """Not supported (``InvalidArgument``). In the original, it trains on a batch."""

    @refusing
    def eval_step(self, **batch_data: Any) -> Any:
        """Not supported (``InvalidArgument``). In the original, it evaluates a batch."""

    @refusing
    def forward(self, **batch_data: Any) -> Any:
        """Not supported (``InvalidArgument``). In the original, it trains on a batch, or evaluate it."""

    @refusing
    def get_module_config(self) -> Any:
        """Not supported (``InvalidArgument``). In the original, it returns the options of the model."""

    @refusing
    def log_eval_results(self) -> None:
        """Not supported (``InvalidArgument``). In the original, it logs the losses of the evaluation."""

    @refusing
    def save_checkpoint(self, output_dir: Any) -> None:
        """Not supported (``InvalidArgument``). In the original, it saves the model and its optimizer."""

    @refusing
    def load_checkpoint(self, input_dir: Any) -> None:
        """Not supported (``InvalidArgument``). In the original, it loads the files of ``save_checkpoint``."""


class MegatronLMDummyDataLoader:
    """Not supported (``InvalidArgument``). In the original, it reads data in Megatron-LM's own format."""

    @refusing
    def __init__(self, **dataset_kwargs: Any) -> None: ...

    @refusing
    def set_megatron_data_args(self) -> None:
        """Not supported (``InvalidArgument``). In the original, it writes data options into Megatron-LM's arguments."""

    @refusing
    def get_train_valid_test_datasets_provider(self, accelerator: Any) -> Any:
        """Not supported (``InvalidArgument``). In the original, it returns the function that creates the datasets."""

    @refusing
    def build_train_valid_test_data_iterators(self, accelerator: Any) -> Any:
        """Not supported (``InvalidArgument``). In the original, it creates the loaders."""


class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """Not supported (``InvalidArgument``). In the original, it is an optimizer of Megatron-LM."""

    @refusing
    def __init__(self, optimizer: Any) -> None: ...


class MegatronLMSchedulerWrapper(AcceleratedScheduler):
    """Not supported (``InvalidArgument``). In the original, it is a schedule of Megatron-LM."""

    @refusing
    def __init__(self, scheduler: Any, optimizers: Any) -> None: ...
