"""Options of tensor, context and sequence parallelism, as a ``ParallelismConfig`` holds them.

Fields left at ``None`` are read from ``PARALLELISM_CONFIG_*``.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accelerate_cpp.config import plugin_variables
from accelerate_cpp.config.libraries import compare_versions, is_installed
from accelerate_cpp.errors import InvalidArgument

__all__ = [
    "DeepSpeedSequenceParallelConfig",
    "PipelineParallelConfig",
    "TorchContextParallelConfig",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
]

BETA_TP_AVAILABLE_TRANSFORMERS_VERSION = "4.52.0"

_STRATEGIES = ("allgather", "alltoall", "ulysses")
_ATTENTIONS = ("flash_attention_2", "flash_attention_3", "sdpa")
_KERNEL_OF_HUB = re.compile(r"[^/]+/[^/]*flash-attn.*")


@dataclass
class TorchContextParallelConfig:
    """How attention accesses the parts of a sequence on other processes.

    Attributes:
        cp_comm_strategy: ``"allgather"`` (keys and values are gathered), ``"alltoall"`` (they are passed around) or,
            not in the original, ``"ulysses"`` (each process computes some of the heads for all tokens).

    Raises:
        InvalidArgument: another strategy.
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        plugin_variables.fill(self, plugin_variables.CONTEXT_PARALLEL)
        if self.cp_comm_strategy not in _STRATEGIES:
            raise InvalidArgument(
                f"Invalid cp_comm_strategy: {self.cp_comm_strategy}, of TorchContextParallelConfig; expected one of "
                f"{', '.join(_STRATEGIES)}"
            )


@dataclass
class DeepSpeedSequenceParallelConfig:
    """How DeepSpeed's attention handles sequences that are split over processes.

    Attributes:
        sp_seq_length: the length of all sequences, in tokens; needed if it is the same for all.
        sp_seq_length_is_variable: whether sequences differ in length.
        sp_attn_implementation: ``"sdpa"``, ``"flash_attention_2"``, ``"flash_attention_3"`` or a kernel of the Hub such
            as ``"kernels-community/flash-attn2"``; ``None`` uses that of the model.

    Raises:
        InvalidArgument: the length is missing, or the attention is another one.
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        plugin_variables.fill(self, plugin_variables.SEQUENCE_PARALLEL)
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise InvalidArgument(
                "DeepSpeedSequenceParallelConfig: sequences of one length (sp_seq_length_is_variable=False) need a "
                "length; pass sp_seq_length, or set PARALLELISM_CONFIG_SP_SEQ_LENGTH"
            )
        attention = self.sp_attn_implementation
        if attention is not None and attention not in _ATTENTIONS and not _KERNEL_OF_HUB.fullmatch(attention):
            raise InvalidArgument(
                f"DeepSpeedSequenceParallelConfig: sp_attn_implementation={attention!r}; expected one of "
                f"{', '.join(_ATTENTIONS)}, or a kernel of the Hub such as 'kernels-community/flash-attn2' (neither "
                "eager nor flex_attention can work on parts of sequences)"
            )


@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallelism.

    Attributes:
        enable_async_tp: without effect; a warning says so.
        plan: how layers are split: by the names of modules, in which ``*`` stands for a number, ``"colwise"``
            (``nn.Linear`` by its outputs), ``"rowwise"`` (by its inputs), ``"colwise_gather_output"``,
            ``"embedding_rowwise"`` (``nn.Embedding`` by its entries) or a ``ParallelStyle`` of torch. ``None`` takes
            the plan of a model of Transformers, and splits attention and feed-forward layers of other models. Not in
            the original.
        sequence_parallel: each process computes norms, residuals and dropout for its part of the tokens, and keeps only
            these for the backward pass. Not in the original.
        loss_parallel: a head that is split by its outputs, ``"colwise_gather_output"``, gives logits that stay split
            until something needs the whole; ``cross_entropy`` does not. Not in the original.

    Raises:
        InvalidArgument: the installed transformers is older than 4.52, whose models cannot be split.
    """

    enable_async_tp: bool = False
    plan: Mapping[str, Any] | None = field(default=None, repr=False)
    sequence_parallel: bool = field(default=False, repr=False)
    loss_parallel: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        oldest = BETA_TP_AVAILABLE_TRANSFORMERS_VERSION
        if is_installed("transformers") and compare_versions("transformers", "<", oldest):
            raise InvalidArgument(f"tensor parallelism needs transformers {oldest} or newer; upgrade it")
        if self.enable_async_tp:
            warnings.warn(
                "enable_async_tp=True has no effect: asynchronous tensor parallelism does not exist", stacklevel=3
            )


@dataclass
class PipelineParallelConfig:
    """How models are cut into stages, and in which order these compute. Not in the original.

    It may be changed until models are prepared.

    Attributes:
        schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved"`` (several stages in each process) or ``"zero_bubble"``
            (two in each; backward passes for weights fill the time in which processes would wait).
        micro_batches: the parts of a batch that are under way in turns; ``None`` means two for each stage of one in
            each process.
        split_points: names of the modules with which the second to the last stage begin; ``None`` makes stages that are
            about equally expensive.
        stages_per_process: with ``"interleaved"``, the number of stages in each process; ``None`` means 2.
    """

    schedule: str | None = None
    micro_batches: int | None = None
    split_points: Sequence[str] | None = None
    stages_per_process: int | None = None

    def __post_init__(self) -> None:
        plugin_variables.fill(self, plugin_variables.PIPELINE)


@dataclass
class TorchTensorParallelPlugin:
    """The old way to request tensor parallelism; ``ParallelismConfig(tp_size=...)`` is the new one.

    Attributes:
        tp_size: the number of processes over which layers are split.
        torch_device_mesh: a mesh with a dimension ``"tp"``.
    """

    tp_size: int = 1
    torch_device_mesh: Any = None
