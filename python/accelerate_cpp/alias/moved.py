"""Modules of this package under the names that they had before they moved: pickles and programs may still use those."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_PACKAGE = __name__.partition(".")[0]

HOME_OF: dict[str, str] = {
    "borrowed_names": "alias.borrowed_names",
    "commands.memory_report": "placement.memory_report",
    "gradient_state": "runtime.gradient_state",
    "loggers": "alias.loggers",
    "preparation": "prepare.private_steps",
    "processes": "runtime.processes",
    "runtime.detached_session": "runtime.session",
    "runtime.remembered": "runtime.session",
    "runtime.topology": "comm.topology",
    "tracked_loader": "prepare.tracked_loader",
    "utils.align_devices": "placement.align_devices",
    "utils.bnb_layers": "quantization.layers",
    "utils.checkpoint_loading": "placement.checkpoint_loading",
    "utils.checkpoint_placing": "placement.checkpoint_placing",
    "utils.checkpoint_reading": "placement.checkpoint_reading",
    "utils.deepspeed_config": "plugins.deepspeed_config",
    "utils.deepspeed_plugin": "plugins.deepspeed",
    "utils.device_map": "placement.device_map",
    "utils.device_memory": "placement.device_memory",
    "utils.dispatching": "placement.model_dispatch",
    "utils.empty_init": "placement.empty_init",
    "utils.empty_models": "placement.empty_models",
    "utils.enums": "plugins.enums",
    "utils.fitting": "placement.fitting",
    "utils.fsdp_options": "plugins.fsdp_options",
    "utils.fsdp_plugin": "plugins.fsdp",
    "utils.handlers": "plugins.handlers",
    "utils.host_sharing": "placement.host_sharing",
    "utils.kv_cache": "placement.kv_cache",
    "utils.map_picture": "placement.map_picture",
    "utils.map_plan": "placement.map_plan",
    "utils.map_table": "placement.map_table",
    "utils.megatron_models": "plugins.megatron_models",
    "utils.megatron_plugin": "plugins.megatron",
    "utils.model_memory": "placement.model_memory",
    "utils.model_parts": "placement.model_parts",
    "utils.module_hooks": "placement.module_hooks",
    "utils.module_sizes": "placement.module_sizes",
    "utils.module_tensors": "placement.module_tensors",
    "utils.offload_ahead": "placement.read_ahead",
    "utils.offloaded_modules": "placement.offloaded_modules",
    "utils.offloaded_tensors": "placement.offloaded_tensors",
    "utils.parallelism": "plugins.parallelism",
    "utils.pipeline_stages": "placement.pipeline_stages",
    "utils.placement": "placement.first_fit",
    "utils.plain_parallelism": "plugins.data_parallelism",
    "utils.quantization": "quantization.options",
    "utils.quantized_parameters": "placement.quantized_parameters",
    "utils.recipes": "plugins.fp8_recipes",
    "utils.regions": "prepare.compile_regions",
    "utils.sharded_models": "parallel.sharded_models",
    "utils.split_sequences": "plugins.split_sequences",
    "utils.tied_parameters": "placement.tied_parameters",
    "utils.workload": "placement.workload",
}
"""By the former name of a module, inside the package, the one that it has now."""


class _Finder:
    """Finds a module by its former name: the same object as under the present one.

    It is a finder and a loader of ``importlib.abc`` without being derived from them: their module takes long to load,
    and this one is loaded with the package.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        own, _, name = fullname.partition(".")
        found = own == _PACKAGE and name in HOME_OF
        return ModuleSpec(fullname, self) if found else None  # type: ignore[arg-type]  # a loader by its methods

    def create_module(self, spec: ModuleSpec) -> None:
        """The usual empty module is made."""

    def exec_module(self, module: ModuleType) -> None:
        # Whoever imports it gets what is in the table of modules when this returns.
        _, _, name = module.__name__.partition(".")
        sys.modules[module.__name__] = importlib.import_module(f"{_PACKAGE}.{HOME_OF[name]}")


def find_moved() -> None:
    """Lets imports find modules by their former names, where nothing else has these."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
