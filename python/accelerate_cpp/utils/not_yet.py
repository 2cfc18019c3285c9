"""Names that other programs import and that cannot work yet: calling one raises the sentence of its row in a table.

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
def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Any,
    output_dir: Any,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Would save the shards of a model, or the whole of it."""


@refusing
def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Any,
    input_dir: Any,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Would load what ``save_fsdp_model`` saved."""


@refusing
def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    output_dir: Any,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Would save the states of the optimizer of a sharded model."""


@refusing
def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    input_dir: Any,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Would load what ``save_fsdp_optimizer`` saved."""


@refusing
def fsdp2_prepare_model(accelerator: Any, model: torch.nn.Module) -> torch.nn.Module:  # type: ignore[empty-body]
    """Would shard a model by torch's ``fully_shard``."""


@refusing
def fsdp2_load_full_state_dict(
    accelerator: Any, model: torch.nn.Module, full_sd: dict[str, Any], cpu_offload: bool = False
) -> None:
    """Would give each process its shard of a whole state dict that rank 0 has."""


@refusing
def fsdp2_switch_optimizer_parameters(optimizer: torch.optim.Optimizer, mapping: dict[Any, Any]) -> None:
    """Would have an optimizer step the shards of its parameters."""


@refusing
def fsdp2_apply_ac(accelerator: Any, model: torch.nn.Module) -> torch.nn.Module:  # type: ignore[empty-body]
    """Would compute the activations of layers again in the backward pass."""


@refusing
def get_fsdp2_grad_scaler(**kwargs: Any) -> Any:
    """Would scale the loss of a sharded model."""


@refusing
def compile_regions_fsdp2(module: torch.nn.Module, **compile_kwargs: Any) -> Any:
    """Would compile the blocks of a sharded model."""


@refusing
def compile_regions_deepspeed(module: torch.nn.Module, **compile_kwargs: Any) -> None:
    """Would compile the blocks of a model that DeepSpeed trains."""


@refusing
def map_pytorch_optim_to_deepspeed(optimizer: torch.optim.Optimizer) -> Any:
    """Would give DeepSpeed's optimizer with the options of torch's."""


@refusing
def prepare_deepspeed_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:  # type: ignore[empty-body]
    """Would give command and environment of DeepSpeed's launcher."""


@refusing
def prepare_sagemager_args_inputs(sagemaker_config: Any, args: argparse.Namespace) -> Any:
    """Would give what a job on Amazon SageMaker is started with."""


@refusing
def prepare_tpu(args: argparse.Namespace, current_env: dict[str, str], pod: bool = False) -> Any:
    """Would give arguments and environment of a launch on TPUs."""


@refusing
def avg_losses_across_data_parallel_group(losses: list[torch.Tensor]) -> Any:
    """Would average losses over the copies of a model that Megatron-LM trains."""


@refusing
def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """Would gather tensors from the copies of a model that Megatron-LM trains."""


class MegatronEngine(torch.nn.Module):
    """Would train a model through Megatron-LM."""

    @refusing
    def __init__(self, accelerator: Any, model: Any, optimizer: Any, scheduler: Any) -> None: ...

    @refusing
    def train(self) -> None:  # type: ignore[override]
        """Would put the model in training mode."""

    @refusing
    def eval(self) -> None:  # type: ignore[override]
        """Would put the model in evaluation mode."""

    @refusing
    def get_batch_data_iterator(self, batch_data: Any) -> Any:
        """Would cut a batch into micro-batches."""

    @refusing
    def train_step(self, **batch_data: Any) -> Any:
        """Would train on a batch."""

    @refusing
    def eval_step(self, **batch_data: Any) -> Any:
        """Would evaluate a batch."""

    @refusing
    def forward(self, **batch_data: Any) -> Any:
        """Would train on a batch, or evaluate it."""

    @refusing
    def get_module_config(self) -> Any:
        """Would give the options of the model."""

    @refusing
    def log_eval_results(self) -> None:
        """Would log the losses of the evaluation."""

    @refusing
    def save_checkpoint(self, output_dir: Any) -> None:
        """Would save the model and its optimizer."""

    @refusing
    def load_checkpoint(self, input_dir: Any) -> None:
        """Would load what ``save_checkpoint`` saved."""


class MegatronLMDummyDataLoader:
    """Would read data in Megatron-LM's own format."""

    @refusing
    def __init__(self, **dataset_kwargs: Any) -> None: ...

    @refusing
    def set_megatron_data_args(self) -> None:
        """Would write the options of the data into the arguments of Megatron-LM."""

    @refusing
    def get_train_valid_test_datasets_provider(self, accelerator: Any) -> Any:
        """Would give the function that makes the data sets."""

    @refusing
    def build_train_valid_test_data_iterators(self, accelerator: Any) -> Any:
        """Would make the loaders."""


class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """Would be an optimizer of Megatron-LM."""

    @refusing
    def __init__(self, optimizer: Any) -> None: ...


class MegatronLMSchedulerWrapper(AcceleratedScheduler):
    """Would be a schedule of Megatron-LM."""

    @refusing
    def __init__(self, scheduler: Any, optimizers: Any) -> None: ...
