"""Sequences that are split over processes: DeepSpeed's Ulysses, whose attention exchanges heads for positions.

Jacobs et al. 2023, "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models" (arXiv:2309.14509).
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.parallelism import DeepSpeedSequenceParallelConfig

__all__ = ["average_over_parts", "sequence_groups", "split_loader"]

_MODULE = "deepspeed.runtime.sequence_parallel.ulysses_sp"
_GROUPS = "deepspeed.runtime.sequence_parallel.parallel_state_sp"
# Of transformers: layers that carry a state from one position to the next, which a part of a sequence does not have.
_RECURRENT = ("mamba", "rwkv", "recurrent", "linear_attention", "gateddeltanet", "retnet", "xlstm")
_whole_attention: dict[str, Any] = {}  # of transformers, by the names under which DeepSpeed puts its own


def sequence_groups(
    model: torch.nn.Module, size: int, options: DeepSpeedSequenceParallelConfig, micro_batch: int
) -> Any:
    """Gives ``model`` the attention for split sequences; returns the groups of processes, as engines take them.

    Raises:
        InvalidArgument: ``model`` is none of transformers, or has layers that need whole sequences.
    """
    own: Any = getattr(model, "config", None)
    if own is None:
        raise InvalidArgument(
            f"prepare: sequences are split (sp_size={size}) by the attention of transformers' models, but "
            f"{type(model).__name__} has no config; use a model of transformers, or sp_size=1"
        )
    names = {type(part).__name__ for part in model.modules()}
    recurrent = sorted(name for name in names if any(kind in name.lower() for kind in _RECURRENT))
    if recurrent:
        raise InvalidArgument(
            f"prepare: sequences are split (sp_size={size}), but {', '.join(recurrent)} of {type(model).__name__} "
            "needs all positions before its own; use sp_size=1"
        )
    kind = options.sp_attn_implementation or own._attn_implementation
    _undo(kind)
    attention = importlib.import_module(_MODULE).UlyssesSPAttentionHF
    given: dict[str, Any] = {
        "model_name_or_path": model,
        "core_attn_implementation": kind,
        "sequence_parallel_size": size,
        "micro_batch_size": micro_batch,
        "seq_length": options.sp_seq_length,
        "seq_length_is_variable": options.sp_seq_length_is_variable,
    }
    if "disable_in_eval" in inspect.signature(attention.register_with_transformers).parameters:
        given["disable_in_eval"] = True
    return attention.register_with_transformers(**given)


def _undo(kind: str) -> None:
    """Undoes what was done for an earlier model: DeepSpeed would not make groups twice, and would split what is split.

    Both are the same for all models of a process, which therefore need the same numbers of heads.
    """
    held = importlib.import_module(_GROUPS)
    held._SEQUENCE_PARALLEL_GROUP = held._SEQUENCE_DATA_PARALLEL_GROUP = None  # type: ignore[attr-defined]
    functions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    if kind in functions:
        functions[kind] = _whole_attention.setdefault(kind, functions[kind])


def average_over_parts(engine: Any) -> None:
    """Lets ``engine`` average gradients over all processes, those that have parts of the same sequences included.

    Stages 0 to 2, and 3 without ``reduce_scatter``, add gradients of parts up. Where each process computes the mean
    over all tokens through a differentiable gathering, as the original's documentation does, that mean counts once for
    each process: the sum is too large by their number, the average is the gradient of one process.
    """
    for one in (engine, engine.optimizer):
        if hasattr(
            one, "sequence_parallel_size"
        ):  # otherwise, it only overrides a type of communication that was chosen
            one.sequence_parallel_size = 1


def split_loader(loader: Any, device: torch.device) -> Any:
    """``loader``, whose batches are gathered from the processes of a group and given to each as its part of each
    sequence."""
    groups = importlib.import_module("deepspeed.utils.groups")
    adapter: Any = importlib.import_module(_MODULE).UlyssesSPDataLoaderAdapter

    class Parts(adapter):  # type: ignore[misc]
        def __next__(self) -> dict[str, Any]:
            """The parts as tensors of their own, which they are on accelerators: losses of transformers need that."""
            parts = super().__next__().items()
            return {name: one.contiguous() if isinstance(one, torch.Tensor) else one for name, one in parts}

    return Parts(
        loader,
        sp_rank=groups._get_sequence_parallel_rank(),
        sp_group=groups._get_sequence_parallel_group(),
        sp_world_size=groups._get_sequence_parallel_world_size(),
        device=device,
    )
