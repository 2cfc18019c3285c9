"""Names that programs import which train through Megatron-LM."""

from __future__ import annotations

from abc import ABC
from typing import Any

import torch

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.utils.not_yet import (
    MegatronEngine,
    MegatronLMDummyDataLoader,
    MegatronLMOptimizerWrapper,
    MegatronLMSchedulerWrapper,
    avg_losses_across_data_parallel_group,
    gather_across_data_parallel_groups,
    refusing,
)

__all__ = [
    "AbstractTrainStep",
    "BertTrainStep",
    "GPTTrainStep",
    "MegatronEngine",
    "MegatronLMDummyDataLoader",
    "MegatronLMDummyScheduler",
    "MegatronLMOptimizerWrapper",
    "MegatronLMSchedulerWrapper",
    "T5TrainStep",
    "avg_losses_across_data_parallel_group",
    "gather_across_data_parallel_groups",
]

__getattr__ = lending("utils.megatron_lm")


class MegatronLMDummyScheduler:
    """A placeholder for the schedule of Megatron-LM.

    Args:
        optimizer: the optimizer.
        total_num_steps: the length of the schedule, in steps of all copies of the model together.
        warmup_num_steps: the length of its warm-up.
        kwargs: kept as they are.
    """

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer, self.total_num_steps, self.warmup_num_steps = optimizer, total_num_steps, warmup_num_steps
        self.kwargs = kwargs


class AbstractTrainStep(ABC):  # noqa: B024 - an ABC, as the original's, whose methods may be left out
    """How Megatron-LM trains a kind of model; subclasses provide the functions that it calls.

    Args:
        name: the name of the kind.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def _missing(self, method: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} has no {method}; a subclass of AbstractTrainStep defines it")

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """The function that gets a batch from a loader."""
        raise self._missing("get_batch_func")

    def get_forward_step_func(self) -> Any:
        """The function that runs the forward pass."""
        raise self._missing("get_forward_step_func")

    def get_loss_func(self, accelerator: Any) -> Any:
        """The function that computes the loss."""
        raise self._missing("get_loss_func")


class BertTrainStep(AbstractTrainStep):
    """Not supported (``InvalidArgument``). In the original, it trains models of BERT's kind."""

    @refusing
    def __init__(self, accelerator: Any, args: Any) -> None: ...

    @refusing
    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """Not supported (``InvalidArgument``). In the original, it returns the function that gets a batch."""

    @refusing
    def get_loss_func(self, accelerator: Any, pretraining_flag: bool, num_labels: int) -> Any:  # type: ignore[override]
        """Not supported (``InvalidArgument``). In the original, it returns the function that computes the loss."""

    @refusing
    def get_forward_step_func(self, pretraining_flag: bool, bert_binary_head: bool) -> Any:  # type: ignore[override]
        """Not supported (``InvalidArgument``). In the original, it returns the function that runs the forward pass."""


class GPTTrainStep(AbstractTrainStep):
    """Not supported (``InvalidArgument``). In the original, it trains models of GPT's kind."""

    @refusing
    def __init__(self, accelerator: Any, args: Any) -> None: ...

    @refusing
    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """Not supported (``InvalidArgument``). In the original, it returns the function that gets a batch."""

    @refusing
    def get_loss_func(self, accelerator: Any) -> Any:
        """Not supported (``InvalidArgument``). In the original, it returns the function that computes the loss."""

    @refusing
    def get_forward_step_func(self) -> Any:
        """Not supported (``InvalidArgument``). In the original, it returns the function that runs the forward pass."""


class T5TrainStep(AbstractTrainStep):
    """Not supported (``InvalidArgument``). In the original, it trains models of T5's kind."""

    @refusing
    def __init__(self, accelerator: Any, args: Any) -> None: ...

    @staticmethod
    @refusing
    def attn_mask_postprocess(attention_mask: torch.Tensor) -> Any:
        """Not supported (``InvalidArgument``). In the original, it converts an attention mask to Megatron-LM's form."""

    @staticmethod
    @refusing
    def get_decoder_mask(seq_length: int, device: torch.device) -> Any:
        """Not supported (``InvalidArgument``). In the original, it returns the mask of the decoder."""

    @staticmethod
    @refusing
    def get_enc_dec_mask(attention_mask: torch.Tensor, dec_seq_length: int, device: torch.device) -> Any:
        """Not supported (``InvalidArgument``). In the original, it returns the mask between encoder and decoder."""

    @refusing
    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """Not supported (``InvalidArgument``). In the original, it returns the function that gets a batch."""

    @refusing
    def get_loss_func(self, accelerator: Any) -> Any:
        """Not supported (``InvalidArgument``). In the original, it returns the function that computes the loss."""

    @refusing
    def get_forward_step_func(self) -> Any:
        """Not supported (``InvalidArgument``). In the original, it returns the function that runs the forward pass."""
