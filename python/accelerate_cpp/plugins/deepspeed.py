"""The plugin for DeepSpeed: a few fields, or a whole configuration, and the dict that DeepSpeed receives."""

from __future__ import annotations

import copy
import importlib
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from accelerate_cpp.config import env_table, plugin_variables
from accelerate_cpp.config.libraries import is_installed
from accelerate_cpp.errors import InvalidArgument, MissingLibrary
from accelerate_cpp.plugins.deepspeed_config import HfDeepSpeedConfig
from accelerate_cpp.plugins.fsdp import get_module_class_from_name

__all__ = ["DeepSpeedPlugin", "active_plugin"]

_INTEGRATION = "transformers.integrations.deepspeed"
_LEVELS = ("O1", "O2")
# Fields, and their entries in a configuration that the user passes.
_PLACES: Mapping[str, str] = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}


@dataclass
class DeepSpeedPlugin:
    """How DeepSpeed trains. Fields that are ``None`` are read from ``ACCELERATE_DEEPSPEED_*`` and the like.

    It may be changed until models are prepared.

    Attributes:
        hf_ds_config: a configuration, the path of one, or an :class:`HfDeepSpeedConfig`. It takes precedence; its
            ``"auto"`` entries are filled from the other fields.
        gradient_accumulation_steps: micro-batches per optimizer step, or ``"auto"``.
        gradient_clipping: the largest norm of gradients, or ``"auto"``.
        zero_stage: what is sharded: 0 nothing, 1 states of optimizers, 2 also gradients, 3 also parameters.
        is_train_batch_min: use the batch size of the loader with the smallest batches.
        offload_optimizer_device, offload_param_device: ``"none"``, ``"cpu"`` or ``"nvme"``.
        offload_optimizer_nvme_path, offload_param_nvme_path: folders for ``"nvme"``.
        zero3_init_flag: stage 3: shard models of transformers while they are built.
        zero3_save_16bit_model: stage 3: gather 16-bit weights when saving.
        transformer_moe_cls_names: classes of layers with experts, separated by commas, that stage 3 gathers as a whole.
        enable_msamp: train in fp8 through MS-AMP.
        msamp_opt_level: ``"O1"`` or ``"O2"``.
        deepspeed_config: the configuration that DeepSpeed receives; the same dict as ``hf_ds_config.config``.

    Raises:
        InvalidArgument: fields contradict each other, or the configuration has no ``zero_optimization``.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | str | None = None
    gradient_clipping: float | str | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None

    def __post_init__(self) -> None:
        given = {name: value for name in _PLACES if (value := getattr(self, name)) is not None}
        plugin_variables.fill(self, plugin_variables.DEEPSPEED)
        if self.enable_msamp is None:
            self.enable_msamp = env_table.FP8_BACKEND.get() == "MSAMP"
        if self.hf_ds_config in (None, "none"):
            self.hf_ds_config = HfDeepSpeedConfig(_config_of(self))
        else:
            _adopt(self, given)
        self.deepspeed_config: dict[str, Any] = self.hf_ds_config.config
        self.deepspeed_config["steps_per_print"] = math.inf
        _resolve_initialisation(self)
        _resolve_msamp(self)
        self._selected = False

    @property
    def leaves_accumulation_open(self) -> bool:
        """Whether a configuration was passed that does not say how many micro-batches a step has."""
        return bool(self.hf_ds_config.leaves_accumulation_open)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The entry ``"section.key"`` of the configuration, or ``default``."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether the entry is ``"auto"``, to be filled before training."""
        return bool(self.get_value(ds_key_long) == "auto")

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Fills the entry, if it is ``"auto"``, with the value that ``kwargs`` has under its dotted name.

        Args:
            mismatches: gets a line if the entry already has another value, unless ``must_match`` is false.

        Raises:
            InvalidArgument: the entry is ``"auto"`` and ``kwargs`` lacks it.
        """
        node, key = self.hf_ds_config.find_config_node(ds_key_long)
        if node is None:
            return
        if node.get(key) == "auto":
            if ds_key_long not in kwargs:
                raise InvalidArgument(
                    f"the configuration of DeepSpeed has {ds_key_long}='auto', but there is no value to fill in; write "
                    "a value there"
                )
            node[key] = kwargs[ds_key_long]
            return
        held, asked = node.get(key), kwargs.get(ds_key_long)
        if must_match and mismatches is not None and None not in (held, asked) and held != asked:
            mismatches.append(f"- ds {ds_key_long}={held} vs arg {ds_key_long}={asked}")

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: Mapping[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fills every entry that is ``"auto"`` from ``kwargs``, which have dotted names.

        Args:
            prefix: the prefix of the names in ``config``, if that is a section; by default it is the whole
                configuration.
            mismatches: gets a line for each entry with another value, unless ``must_match`` is false.

        Raises:
            InvalidArgument: an entry is ``"auto"`` and ``kwargs`` lacks it, or there are mismatches.
        """
        found = [] if mismatches is None else mismatches
        for key, value in (self.deepspeed_config if config is None else config).items():
            if isinstance(value, dict):
                self.deepspeed_config_process(f"{prefix}{key}.", found, value, must_match, **kwargs)
            else:
                self.fill_match(prefix + key, found, must_match, **kwargs)
        if found and not prefix:
            raise InvalidArgument(
                "the configuration of DeepSpeed contradicts arguments; make these entries 'auto':\n" + "\n".join(found)
            )

    def set_mixed_precision(self, mixed_precision: str | None) -> None:
        """Writes the precision of the run into the configuration, if that leaves it open.

        Args:
            mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"``, or ``"fp8"``, which means bf16 here.

        Raises:
            InvalidArgument: the configuration enables another one.
        """
        config, half = self.deepspeed_config, "bf16" if mixed_precision in ("bf16", "fp8") else mixed_precision
        for name, excluded in (("fp16", half not in ("fp16", "no")), ("bf16", half == "fp16")):
            if excluded and self.get_value(f"{name}.enabled") is True:
                raise InvalidArgument(
                    f"mixed_precision={mixed_precision!r}: the configuration of DeepSpeed enables {name}; set "
                    f"{name}.enabled there to 'auto' or false, or choose {name}"
                )
        for name in ("fp16", "bf16"):
            if name not in config:
                config[name] = {"enabled": "auto", "auto_cast": True} if name == half == "fp16" else {"enabled": "auto"}
            enabled: dict[str, Any] = {f"{name}.enabled": half == name}
            self.fill_match(f"{name}.enabled", must_match=False, **enabled)

    def is_zero3_init_enabled(self) -> bool:
        """Whether models of transformers are sharded while they are built."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """A block in which models of transformers are, or are not, sharded while they are built."""
        before = self.zero3_init_flag
        try:
            if before != enable:
                self.zero3_init_flag = enable
                self._tell_transformers()
            yield
        finally:
            if before != enable:
                self.zero3_init_flag = before
                self._tell_transformers()

    def set_deepspeed_weakref(self) -> None:
        """Makes the configuration known to transformers, as long as this plugin exists.

        Transformers shards every model that it builds in stage 3, so without ``zero3_init_flag`` it knows nothing until
        one is prepared. In the original, which always tells it, the flag has no effect.

        Raises:
            MissingLibrary: transformers is not installed.
        """
        if not is_installed("transformers"):
            raise MissingLibrary("DeepSpeedPlugin.set_deepspeed_weakref needs transformers; pip install transformers")
        if self.is_zero3_init_enabled() or not self.hf_ds_config.is_zero3():
            self._make_known()
        else:
            importlib.import_module(_INTEGRATION).unset_hf_deepspeed_config()
            self.dschf = None

    def make_engine_known(self) -> None:
        """Lets transformers, if it is installed, know that models are sharded: it then generates on all processes."""
        if is_installed("transformers") and not self.is_zero3_init_enabled():
            self._make_known()

    def _make_known(self) -> None:
        integration = importlib.import_module(_INTEGRATION)
        config = copy.deepcopy(self.deepspeed_config)
        for name in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
            if config.get(name, "auto") == "auto":
                config[name] = 1
        if config.get("train_batch_size") == "auto":
            del config["train_batch_size"]
        integration.unset_hf_deepspeed_config()
        self.dschf = integration.HfDeepSpeedConfig(config)

    def _tell_transformers(self) -> None:
        if is_installed("transformers"):
            self.set_deepspeed_weakref()

    def set_moe_leaf_modules(self, model: torch.nn.Module) -> None:
        """Makes stage 3 gather each layer with experts that ``transformer_moe_cls_names`` names as a whole.

        Raises:
            MissingLibrary: DeepSpeed is not installed.
            InvalidArgument: ``model`` has no such layer.
        """
        if self.transformer_moe_cls_names is None:
            self.transformer_moe_cls_names = plugin_variables.DEEPSPEED_MOE_LAYERS.get()
        if self.transformer_moe_cls_names is None:
            return
        classes = [_class_of(model, name.strip()) for name in self.transformer_moe_cls_names.split(",")]
        if not is_installed("deepspeed"):
            raise MissingLibrary("DeepSpeedPlugin.set_moe_leaf_modules needs DeepSpeed; pip install deepspeed")
        importlib.import_module("deepspeed.utils").set_z3_leaf_modules(model, classes)

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Makes this plugin the active one of several; ``AcceleratorState.select_deepspeed_plugin`` calls it.

        Raises:
            InvalidArgument: something else called it.
        """
        if not _from_accelerator_state:
            raise InvalidArgument(
                "DeepSpeedPlugin.select: call AcceleratorState().select_deepspeed_plugin(name), which unselects others"
            )
        self._selected = True
        self._tell_transformers()

    @property
    def selected(self) -> bool:
        """Whether this plugin is the active one."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        raise InvalidArgument(
            f"DeepSpeedPlugin.selected={value!r}: call AcceleratorState().select_deepspeed_plugin(name) instead"
        )

    def _unselect(self) -> None:
        self._selected = False


def active_plugin(plugins: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin]) -> DeepSpeedPlugin:
    """The selected one of several plugins by name, or the only one."""
    if isinstance(plugins, DeepSpeedPlugin):
        return plugins
    chosen = [plugin for plugin in plugins.values() if plugin.selected]
    return chosen[0] if chosen else next(iter(plugins.values()))


def _config_of(plugin: DeepSpeedPlugin) -> dict[str, Any]:
    """The configuration that results from the fields."""

    def place(device: str | None, path: str | None) -> dict[str, str | None]:
        return {"device": device, "nvme_path": path if device == "nvme" else None}

    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": plugin.gradient_accumulation_steps,
        "zero_optimization": {
            "stage": plugin.zero_stage,
            "offload_optimizer": place(plugin.offload_optimizer_device, plugin.offload_optimizer_nvme_path),
            "offload_param": place(plugin.offload_param_device, plugin.offload_param_nvme_path),
            "stage3_gather_16bit_weights_on_model_save": plugin.zero3_save_16bit_model,
        },
        "gradient_clipping": plugin.gradient_clipping,
    }


def _adopt(plugin: DeepSpeedPlugin, given: Mapping[str, Any]) -> None:
    """Sets the fields from a configuration that the user passed; ``given`` are those that were arguments."""
    _refuse_fields_of_launch()
    if not isinstance(plugin.hf_ds_config, HfDeepSpeedConfig):
        plugin.hf_ds_config = HfDeepSpeedConfig(plugin.hf_ds_config)
    held = plugin.hf_ds_config
    if "zero_optimization" not in held.config:
        raise InvalidArgument("hf_ds_config: the configuration of DeepSpeed has no zero_optimization; add it")
    held.leaves_accumulation_open = "gradient_accumulation_steps" not in held.config
    held.config.setdefault("gradient_accumulation_steps", 1)
    for name, place in _PLACES.items():
        node, key = held.find_config_node(place)
        if node is None or key not in node:
            continue
        if node[key] == "auto":
            node[key] = getattr(plugin, name)
        elif name in given and given[name] not in ("auto", node[key]):
            warnings.warn(
                f"DeepSpeedPlugin: {name}={given[name]!r} has no effect, because hf_ds_config says {node[key]!r}",
                stacklevel=5,
            )
        setattr(plugin, name, node[key])
    held.set_stage_and_offload()


def _refuse_fields_of_launch() -> None:
    """Refuses fields that the configuration of a launch sets in addition to a file, because they would be ignored."""
    configured = {name.strip() for name in plugin_variables.DEEPSPEED_CONFIGURED.get().split(",")}
    ignored = sorted(configured & {*_PLACES, "mixed_precision"})
    if ignored:
        raise InvalidArgument(
            f"the configuration of the launch sets {', '.join(ignored)} in addition to deepspeed_config_file, which "
            "takes precedence; move them into that file"
        )


def _resolve_initialisation(plugin: DeepSpeedPlugin) -> None:
    if plugin.zero3_init_flag is None:
        plugin.zero3_init_flag = plugin.hf_ds_config.is_zero3()
    elif plugin.zero3_init_flag and not plugin.hf_ds_config.is_zero3():
        warnings.warn(
            f"zero3_init_flag=True has no effect in stage {plugin.zero_stage}; it is switched off", stacklevel=4
        )
        plugin.zero3_init_flag = False


def _resolve_msamp(plugin: DeepSpeedPlugin) -> None:
    if not plugin.enable_msamp:
        return
    if "msamp" not in plugin.deepspeed_config and plugin.msamp_opt_level not in _LEVELS:
        raise InvalidArgument(
            f"DeepSpeedPlugin: msamp_opt_level={plugin.msamp_opt_level!r}; expected one of {', '.join(_LEVELS)}"
        )
    if plugin.zero_stage == 3:
        raise InvalidArgument("DeepSpeedPlugin: MS-AMP does not work with zero_stage=3; choose stage 0, 1 or 2")
    plugin.deepspeed_config.setdefault("msamp", {"enabled": True, "opt_level": plugin.msamp_opt_level})


def _class_of(model: torch.nn.Module, name: str) -> type[torch.nn.Module]:
    found = get_module_class_from_name(model, name)
    if found is None:
        raise InvalidArgument(
            f"DeepSpeedPlugin: transformer_moe_cls_names has {name!r}, but {type(model).__name__} has no such layer"
        )
    return found
