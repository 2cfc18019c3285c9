"""Communication hooks: how the gradients that processes exchange are compressed.

Annotations are evaluated here, not kept as strings: torch's ``DistributedDataParallel`` compares those of a hook with
the types, and refuses strings. It also refuses bf16 hooks under torch's own names if there is no NCCL.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from accelerate_cpp.errors import InvalidArgument


def _average_as(dtype: torch.dtype, group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    group = dist.group.WORLD if group is None else group
    compressed = bucket.buffer().to(dtype).div_(group.size())
    future = dist.all_reduce(compressed, group=group, async_op=True).get_future()

    def decompressed(done: Any) -> torch.Tensor:
        return bucket.buffer().copy_(done.value()[0])

    averaged: torch.futures.Future[torch.Tensor] = future.then(decompressed)
    return averaged


def average_as_bf16(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages gradients as bf16, with any backend: torch's ``bf16_compress_hook`` insists on NCCL."""
    return _average_as(torch.bfloat16, group, bucket)


def exchange_as_bf16(hook: Any) -> Any:
    """``hook`` on gradients that are converted to bf16 for the exchange."""

    def compressing(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        original = bucket.buffer()
        bucket.set_buffer(original.to(torch.bfloat16))

        def decompressed(done: Any) -> torch.Tensor:
            value = done.value()
            return original.copy_(value[0] if isinstance(value, list) else value)

        averaged: torch.futures.Future[torch.Tensor] = hook(state, bucket).then(decompressed)
        return averaged

    return compressing


_WRAPPERS = ("fp16", "bf16")


def require_hook(hook: str, wrapper: str = "no") -> None:
    """Checks that such a hook and such a wrapper for it exist.

    Args:
        hook: a ``DDPCommunicationHookType``.
        wrapper: ``"fp16"`` or ``"bf16"`` for what ``hook`` exchanges, else ``"no"``.

    Raises:
        InvalidArgument: ``wrapper`` has no hook to wrap, or is not a wrapper.
    """
    if wrapper != "no" and (hook == "no" or wrapper not in _WRAPPERS):
        raise InvalidArgument(
            f"DistributedDataParallelKwargs(comm_hook={hook!r}, comm_wrapper={wrapper!r}): expected a wrapper among "
            f"{', '.join(map(repr, ('no', *_WRAPPERS)))}, together with a hook that it compresses further"
        )


def hook_for(hook: str, wrapper: str = "no", state_options: Mapping[str, Any] | None = None) -> tuple[Any, Any] | None:
    """The state and the function for ``register_comm_hook``; ``None`` when nothing is to be compressed.

    Args:
        hook, wrapper: as in :func:`require_hook`.
        state_options: arguments of ``PowerSGDState``.

    Raises:
        InvalidArgument: as in :func:`require_hook`.
    """
    require_hook(hook, wrapper)
    if hook == "no":
        return None
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

    hooks = {
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": average_as_bf16,
        "power_sgd": power_sgd.powerSGD_hook,
        "batched_power_sgd": power_sgd.batched_powerSGD_hook,
    }
    wrappers = {"fp16": default_hooks.fp16_compress_wrapper, "bf16": exchange_as_bf16}
    function = hooks[hook] if wrapper == "no" else wrappers[wrapper](hooks[hook])
    return (power_sgd.PowerSGDState(None, **(state_options or {})) if "power_sgd" in hook else None), function
