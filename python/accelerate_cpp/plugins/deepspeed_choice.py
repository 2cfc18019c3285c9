"""Which plugins of DeepSpeed a run has, from arguments and the environment, and what follows from them for the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_cpp.config import env_table
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.deepspeed import DeepSpeedPlugin, active_plugin

__all__ = ["adopt_precision", "chosen_deepspeed_plugins", "one_argument", "precision_in", "tensor_axes"]

Plugins = DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin]


def one_argument(plugin: Any, plugins: Any) -> Any:
    """What the arguments ``deepspeed_plugin`` and ``deepspeed_plugins``, which mean the same, say together.

    Raises:
        InvalidArgument: both are given.
    """
    if plugin is not None and plugins is not None:
        raise InvalidArgument(
            "deepspeed_plugin and deepspeed_plugins are both given, and mean the same; pass one of them"
        )
    return plugins if plugin is None else plugin


def chosen_deepspeed_plugins(argument: Any, running: Plugins | None, has_state: bool) -> Plugins | None:
    """The plugins of a run: the argument, else those that the run has, else with ``ACCELERATE_USE_DEEPSPEED`` a new
    one.

    Args:
        has_state: whether the run has a state already, whose plugins cannot change.

    Raises:
        InvalidArgument: the argument is no plugin, or another than that of the run.
    """
    if argument is None:
        fresh = not has_state and env_table.USE_DEEPSPEED.get()
        return DeepSpeedPlugin() if running is None and fresh else running
    several = argument.values() if isinstance(argument, Mapping) else [argument]
    if not several or not all(isinstance(one, DeepSpeedPlugin) for one in several):
        raise InvalidArgument(
            f"deepspeed_plugin={argument!r}: expected a DeepSpeedPlugin, or a dict of names with a DeepSpeedPlugin each"
        )
    if has_state and argument is not running:
        raise InvalidArgument(
            "deepspeed_plugin: this process already has a state, and all its models are prepared in one way; pass the "
            "plugins to the first Accelerator, as a dict if there are several"
        )
    chosen: Plugins = argument
    return chosen


def adopt_precision(plugins: Plugins, precision: str) -> None:
    """Writes the precision of the run into the configurations, and selects the first plugin."""
    several = list(plugins.values()) if isinstance(plugins, Mapping) else [plugins]
    for plugin in several:
        plugin.set_mixed_precision(precision)
    several[0].select(_from_accelerator_state=True)


def precision_in(plugins: Plugins, asked: str | None) -> str | None:
    """The precision in which the selected plugin trains; ``asked`` if that is ``"fp8"`` or not known yet."""
    if asked in (None, "fp8"):
        return asked
    plugin = active_plugin(plugins)
    half = (name for name in ("fp16", "bf16") if plugin.get_value(f"{name}.enabled", False) is True)
    return next(half, "no")


def tensor_axes(plugins: Plugins, processes: int) -> dict[str, int] | None:
    """The axes of a run whose layers DeepSpeed splits (``tensor_parallel.autotp_size``); ``None`` if it does not.

    Raises:
        InvalidArgument: the number of processes is not divisible by that size.
    """
    size = int(active_plugin(plugins).get_value("tensor_parallel.autotp_size", 1) or 1)
    if processes % size:
        raise InvalidArgument(
            f"the configuration of DeepSpeed has tensor_parallel.autotp_size={size}, by which the {processes} "
            "processes are not divisible; start a multiple of it, or change it"
        )
    return None if size == 1 else {"dp_replicate": processes // size, "tp": size}
