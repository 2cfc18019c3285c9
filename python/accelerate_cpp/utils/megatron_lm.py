"""What programs that train through Megatron-LM import."""

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
    """Stands for the schedule of Megatron-LM.

    Args:
        optimizer: the optimizer.
        total_num_steps: the length of the schedule, in steps of all copies of the model together.
        warmup_num_steps: that of its beginning.
        kwargs: kept as they are.
    """

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer, self.total_num_steps, self.warmup_num_steps = optimizer, total_num_steps, warmup_num_steps
        self.kwargs = kwargs


class AbstractTrainStep(ABC):  # noqa: B024 - an ABC, as the original's, whose methods may be left out
    """How a kind of model is trained by Megatron-LM; subclasses give the functions that it calls.

    Args:
        name: of the kind.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def _missing(self, method: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} has no {method}; a subclass of AbstractTrainStep gives it")

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
    """Would train models of BERT's kind."""

    @refusing
    def __init__(self, accelerator: Any, args: Any) -> None: ...

    @refusing
    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """Would give the function that gets a batch."""

    @refusing
    def get_loss_func(self, accelerator: Any, pretraining_flag: bool, num_labels: int) -> Any:  # type: ignore[override]
        """Would give the function that computes the loss."""

    @refusing
    def get_forward_step_func(self, pretraining_flag: bool, bert_binary_head: bool) -> Any:  # type: ignore[override]
        """Would give the function that runs the forward pass."""


class GPTTrainStep(AbstractTrainStep):
    """Would train models of GPT's kind."""

    @refusing
    def __init__(self, accelerator: Any, args: Any) -> None: ...

    @refusing
    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """Would give the function that gets a batch."""

    @refusing
    def get_loss_func(self, accelerator: Any) -> Any:
        """Would give the function that computes the loss."""

    @refusing
    def get_forward_step_func(self) -> Any:
        """Would give the function that runs the forward pass."""


class T5TrainStep(AbstractTrainStep):
    """Would train models of T5's kind."""

    @refusing
    def __init__(self, accelerator: Any, args: Any) -> None: ...

    @staticmethod
    @refusing
    def attn_mask_postprocess(attention_mask: torch.Tensor) -> Any:
        """Would turn a mask of attention into Megatron-LM's form."""

    @staticmethod
    @refusing
    def get_decoder_mask(seq_length: int, device: torch.device) -> Any:
        """Would give the mask of the decoder."""

    @staticmethod
    @refusing
    def get_enc_dec_mask(attention_mask: torch.Tensor, dec_seq_length: int, device: torch.device) -> Any:
        """Would give the mask between encoder and decoder."""

    @refusing
    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """Would give the function that gets a batch."""

    @refusing
    def get_loss_func(self, accelerator: Any) -> Any:
        """Would give the function that computes the loss."""

    @refusing
    def get_forward_step_func(self) -> Any:
        """Would give the function that runs the forward pass."""
