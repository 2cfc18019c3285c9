"""Precedence, written once: arguments and environment become a frozen :class:`SessionConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from accelerate_cpp.config import env_table, fp8, unsupported
from accelerate_cpp.config.session_config import AccumulationConfig, DynamoConfig, SessionConfig
from accelerate_cpp.errors import InvalidArgument

PRECISIONS = ("no", "fp8", "fp16", "bf16")


def _require_steps(steps: Any, source: str) -> int:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InvalidArgument(f"{source}={steps!r}: expected a whole number of micro-batches, at least 1")
    return steps


def compile_accumulation(
    steps: int = 1, plugin: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> AccumulationConfig:
    """Resolves gradient accumulation: only a plugin is used if there is one; otherwise the environment precedes
    ``steps``.

    Args:
        steps: the ``gradient_accumulation_steps`` argument.
        plugin: the fields that the user's plugin sets to other than their defaults; ``None`` without a plugin.
            ``adjust_scheduler`` is therefore never on: its default is ``True``, so that only ``False`` arrives here.
        environ: ``os.environ`` when ``None``.

    Raises:
        InvalidArgument: both ``steps`` and ``plugin`` are given, or a number of steps is below 1.
    """
    if plugin is not None:
        if steps != 1:
            raise InvalidArgument(
                f"gradient_accumulation_steps={steps!r} and a gradient_accumulation_plugin are both given; give one"
            )
        _require_steps(plugin.get("num_steps", 1), "GradientAccumulationPlugin.num_steps")
        return AccumulationConfig(**plugin)
    variable = env_table.GRADIENT_ACCUMULATION_STEPS
    if variable.is_set(environ):
        return AccumulationConfig(_require_steps(variable.get(environ), variable.name))
    return AccumulationConfig(_require_steps(steps, "gradient_accumulation_steps"))


def compile_precision(argument: object | None, environ: Mapping[str, str] | None = None) -> str:
    """Settles mixed precision: the argument wins, the environment fills a ``None``, and ``"no"`` is the default.

    Raises:
        InvalidArgument: an unknown name.
        MissingLibrary: ``"fp8"``, and none of its libraries is installed.
    """
    variable = env_table.MIXED_PRECISION
    if argument is not None:
        text, found = str(argument), f"mixed_precision={str(argument)!r}"
    else:
        text = str(variable.get(environ) or "no").lower()
        found = f"environment variable {variable.name}={text!r}"
    if text not in PRECISIONS:
        raise InvalidArgument(f"{found}: expected one of {', '.join(PRECISIONS)}")
    if text == "fp8":
        fp8.require_any(found)
    return text


def compile_downcast(precision: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether torch_xla is to store floats in bf16; if so, it is told by its own variable, which it reads at first use.

    Raises:
        InvalidArgument: the run is in another precision than bf16.
    """
    if not env_table.DOWNCAST_BF16.get(environ):
        return False
    if precision != "bf16":
        raise InvalidArgument(
            f"environment variable {env_table.DOWNCAST_BF16.name} (--downcast_bf16) is for mixed_precision='bf16', but "
            f"the precision is {precision!r}; change one of them"
        )
    env_table.export({env_table.XLA_DOWNCAST_BF16: True})
    return True


_DYNAMO: Mapping[str, tuple[env_table.Variable[Any], Any]] = {
    "backend": (env_table.DYNAMO_BACKEND, "no"),
    "mode": (env_table.DYNAMO_MODE, "default"),
    "fullgraph": (env_table.DYNAMO_USE_FULLGRAPH, False),
    "dynamic": (env_table.DYNAMO_USE_DYNAMIC, None),
    "use_regional_compilation": (env_table.DYNAMO_USE_REGIONAL_COMPILATION, False),
}
DYNAMO_DEFAULTS: Mapping[str, Any] = MappingProxyType({name: default for name, (_, default) in _DYNAMO.items()})
"""What the fields of a ``TorchDynamoPlugin`` that have variables are where neither says anything."""


def compile_dynamo_field(name: str, argument: Any, environ: Mapping[str, str] | None = None) -> tuple[Any, str]:
    """Settles one field of a ``TorchDynamoPlugin``: the argument wins, and its variable fills a ``None``.

    Args:
        name: a key of :data:`DYNAMO_DEFAULTS`, which applies where both say nothing.

    Returns:
        The value, and what the caller wrote for it.
    """
    variable, default = _DYNAMO[name]
    if argument is not None:
        return argument, f"{name}={argument!r}"
    value = variable.get(environ) if variable.is_set(environ) else default
    return value, f"environment variable {variable.name}={value!r}"


def compile_dynamo(options: Mapping[str, Any], by_region: bool) -> DynamoConfig | None:
    """How models are compiled; ``None`` if they are not.

    Args:
        options: arguments of ``torch.compile``, as far as they are not the defaults of ``TorchDynamoPlugin``.
        by_region: compile repeated blocks one by one.

    Raises:
        InvalidArgument: a mode and options for the backend are both given.
    """
    if options.get("backend", "no") == "no" or options.get("disable"):
        return None
    mode, own = options.get("mode"), options.get("options")
    if mode is not None and own is not None:
        raise InvalidArgument(
            f"TorchDynamoPlugin has mode={mode!r} and options={own!r}, and torch.compile takes one of them, as a mode "
            "is a name for options; leave out the mode (or ACCELERATE_DYNAMO_MODE), or the options"
        )
    return DynamoConfig(freeze(options), by_region)


def compile_process(
    *,
    cpu: bool = False,
    backend: str | None = None,
    timeout: timedelta | None = None,
    environ: Mapping[str, str] | None = None,
    **others: Any,
) -> SessionConfig:
    """The configuration of the processes and their devices alone, precision left open.

    Args:
        cpu: the caller's ``cpu`` argument; ``ACCELERATE_USE_CPU`` can also switch it on.
        backend: of the process group; ``"nccl"``, the default of ``InitProcessGroupKwargs``, means one for the device.
        timeout: of every collective. An explicit one always applies, also when it equals a default.
        others: further options of a process group; those that are not ``None`` are refused.
    """
    known = {name: others.pop(name, None) for name in ("init_method", "_use_sagemaker_dp")}
    unsupported.refuse_given({name: value for name, value in known.items() if value not in (False, "env://")})
    if others:
        raise InvalidArgument(f"unknown options for the processes: {', '.join(others)}; expected cpu, backend, timeout")
    return SessionConfig(
        cpu=cpu or env_table.USE_CPU.get(environ),
        device=env_table.TORCH_DEVICE.get(environ),
        backend=None if backend == "nccl" else backend,
        timeout=timeout,
        debug=env_table.DEBUG_MODE.get(environ),
        fork_launched=env_table.FORK_LAUNCHED.get(environ),
        cpu_affinity=env_table.CPU_AFFINITY.get(environ),
    )


def freeze(options: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """A read-only copy of ``options``; empty for ``None``."""
    return MappingProxyType(dict(options or {}))
