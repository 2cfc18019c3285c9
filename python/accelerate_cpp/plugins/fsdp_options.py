"""Converts options of torch's FSDP from the forms that users write to torch's objects."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from accelerate_cpp.errors import InvalidArgument

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

__all__ = [
    "FSDP_AUTO_WRAP_POLICY",
    "default_state_dict_configs",
    "dtype_of",
    "member_of",
    "new_policy",
    "policy_of_dict",
    "require_instance",
]

FSDP_AUTO_WRAP_POLICY = ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]

E = TypeVar("E", bound=Enum)

_DTYPES = {"fp8": torch.bfloat16, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def member_of(kind: type[E], value: Any, field: str) -> E:
    """The member of an enum of torch that ``value`` is, or whose name (in upper or lower case) or number it is.

    Args:
        field: the user's name for the value, for the error message.

    Raises:
        InvalidArgument: there is no such member.
    """
    if isinstance(value, kind):
        return value
    text = str(value).strip().upper()
    for member in kind:
        if text in (member.name.lstrip("_"), member.name, str(member.value)):
            return member
    known = ", ".join(member.name.lstrip("_") for member in kind)
    raise InvalidArgument(f"FullyShardedDataParallelPlugin: {field}={value!r}; expected one of {known}")


def dtype_of(value: Any) -> torch.dtype | None:
    """The dtype in which parameters are gathered for ``fp16``, ``bf16``, ``fp32`` and ``fp8`` (bf16), or ``value``.

    Raises:
        InvalidArgument: ``value`` is another string, or not a dtype.
    """
    if value is None or isinstance(value, torch.dtype):
        return value
    if not isinstance(value, str) or value not in _DTYPES:
        raise InvalidArgument(
            f"FullyShardedDataParallelPlugin: mixed precision {value!r}; expected one of {', '.join(_DTYPES)}, or a "
            "dtype of torch"
        )
    return _DTYPES[value]


def new_policy(
    version: int, param: torch.dtype | None, reduce: torch.dtype | None, last: torch.dtype | None
) -> MixedPrecision | MixedPrecisionPolicy:
    """The policy of mixed precision of this version of FSDP; ``last`` is for buffers in 1 and for outputs in 2."""
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    if version == 2:
        return MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, output_dtype=last)
    return MixedPrecision(param_dtype=param, reduce_dtype=reduce, buffer_dtype=last)


def policy_of_dict(version: int, dtypes: Mapping[str, Any]) -> MixedPrecision | MixedPrecisionPolicy:
    """The policy of mixed precision with these dtypes.

    Args:
        dtypes: ``param_dtype``, ``reduce_dtype`` and ``buffer_dtype`` (version 1) or ``output_dtype`` (2).

    Raises:
        InvalidArgument: other names, or values that are not floating dtypes of at most 32 bits.
    """
    names = ("param_dtype", "reduce_dtype", "output_dtype" if version == 2 else "buffer_dtype")
    if set(dtypes) != set(names) or not all(value in _DTYPES.values() for value in dtypes.values()):
        raise InvalidArgument(
            f"FullyShardedDataParallelPlugin: mixed_precision_policy={dict(dtypes)!r}; expected the keys "
            f"{', '.join(names)} with torch.float16, torch.bfloat16 or torch.float32"
        )
    return new_policy(version, *(dtypes[name] for name in names))


def require_instance(value: Any, kind: type, field: str, version: int) -> None:
    """Refuses a ``value`` of a class that this version of FSDP does not accept."""
    if not isinstance(value, kind):
        raise InvalidArgument(
            f"FullyShardedDataParallelPlugin: {field}={value!r}; expected an instance of "
            f"torch.distributed.fsdp.{kind.__name__} in version {version}"
        )


def default_state_dict_configs() -> Mapping[Any, tuple[Any, Any]]:
    """For each type of state dicts with a configuration: the configurations of models and of optimizers."""
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictType,
    )

    return {
        StateDictType.FULL_STATE_DICT: (
            FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
            FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
        ),
        StateDictType.SHARDED_STATE_DICT: (
            ShardedStateDictConfig(offload_to_cpu=True),
            ShardedOptimStateDictConfig(offload_to_cpu=True),
        ),
    }
