"""The plugin for DeepSpeed."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch

from accelerate_cpp.errors import InvalidArgument, MissingLibrary
from accelerate_cpp.plugins import deepspeed as deepspeed_plugin
from accelerate_cpp.plugins.deepspeed import DeepSpeedPlugin
from accelerate_cpp.plugins.deepspeed_config import HfDeepSpeedConfig

AUTO = "auto"
OPEN = {
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    "zero_optimization": {
        "stage": AUTO,
        "offload_optimizer": {"device": AUTO, "nvme_path": AUTO},
        "offload_param": {"device": AUTO, "nvme_path": AUTO},
        "stage3_gather_16bit_weights_on_model_save": AUTO,
    },
}
CONFIGS: list[dict[str, Any]] = [
    {},
    {"zero_optimization": {}},
    {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/n"}}, "x": 1},
    {
        "zero_optimization": {"stage": 2},
        "gradient_accumulation_steps": 5,
        "gradient_clipping": 0.5,
        "steps_per_print": 1,
    },
    {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}},
    {"zero_optimization": {"stage": 2}, "msamp": {"enabled": True, "opt_level": "O2"}},
    OPEN,
]
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"gradient_accumulation_steps": 4, "gradient_clipping": 1.0, "is_train_batch_min": False},
    {"zero_stage": 0},
    {"zero_stage": 3},
    {"zero_stage": 3, "zero3_init_flag": False, "zero3_save_16bit_model": True},
    {"zero_stage": 2, "zero3_init_flag": True},
    {"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/n", "offload_param_device": "cpu"},
    {"offload_optimizer_nvme_path": "/n"},
    {"enable_msamp": True, "msamp_opt_level": "O2"},
    {"enable_msamp": True, "msamp_opt_level": "O9"},
    {"enable_msamp": True, "zero_stage": 3},
    {"transformer_moe_cls_names": "A,B"},
    {
        **{"zero_stage": 3, "gradient_accumulation_steps": 7, "gradient_clipping": 0.5, "zero3_save_16bit_model": True},
        **{"offload_optimizer_device": "cpu", "offload_param_device": "nvme", "offload_param_nvme_path": "/p"},
    },
]
VARIABLES = [
    {"GRADIENT_ACCUMULATION_STEPS": "3", "GRADIENT_CLIPPING": "0.5"},
    {"GRADIENT_ACCUMULATION_STEPS": "auto", "GRADIENT_CLIPPING": "auto"},
    {"GRADIENT_CLIPPING": "much"},
    {"DEEPSPEED_ZERO_STAGE": "3"},
    {"DEEPSPEED_ZERO_STAGE": "three"},
    {"DEEPSPEED_ZERO_STAGE": "3", "DEEPSPEED_ZERO3_INIT": "false", "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true"},
    {"DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "nvme", "DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "/n"},
    {"DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu", "DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "/n"},
    {"FP8_BACKEND": "MSAMP", "FP8_OPT_LEVEL": "O2"},
    {"DEEPSPEED_MOE_LAYER_CLS_NAMES": "A"},
    {"DEEPSPEED_CONFIG_FILE": "/no/such/file"},
]
PRECISIONS = ["fp16", "bf16", "fp8", "no", None]


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any] | None]:
    """The configurations that transformers, here a stand-in, was told; ``None`` where the one before was withdrawn."""
    told: list[dict[str, Any] | None] = []
    module = ModuleType("transformers.integrations.deepspeed")
    module.unset_hf_deepspeed_config = lambda: told.append(None)  # type: ignore[attr-defined]

    class Held:
        def __init__(self, config: dict[str, Any]) -> None:
            told.append(config)
            self.config = config

    module.HfDeepSpeedConfig = Held  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers.integrations.deepspeed", module)
    monkeypatch.setattr(deepspeed_plugin, "is_installed", lambda name: True)
    return told


def plugin_of(**config: Any) -> DeepSpeedPlugin:
    return DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}, **config})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", [None, *CONFIGS], ids=str)
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_arguments_and_configurations_come_to_what_they_come_to_in_the_original(
    arguments: dict[str, Any], config: dict[str, Any] | None, comes_to: Callable[..., Any]
) -> None:
    own, theirs = (
        comes_to(kind, {"hf_ds_config": copy.deepcopy(config), **arguments})
        for kind in (DeepSpeedPlugin, accelerate.DeepSpeedPlugin)
    )
    assert own == theirs


@pytest.mark.parametrize("variables", VARIABLES, ids=str)
def test_variables_come_to_what_they_come_to_in_the_original(
    variables: dict[str, str], comes_to: Callable[..., Any]
) -> None:
    environment = {f"ACCELERATE_{name}": text for name, text in variables.items()}
    assert comes_to(DeepSpeedPlugin, {}, environment) == comes_to(accelerate.DeepSpeedPlugin, {}, environment)


def test_the_fields_and_their_order_are_the_originals() -> None:
    theirs = fields(accelerate.DeepSpeedPlugin)
    assert [(field.name, field.default) for field in fields(DeepSpeedPlugin)] == [
        (field.name, field.default) for field in theirs
    ]


def test_a_file_and_a_held_configuration_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIGS[2]))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))
    plugin = DeepSpeedPlugin()
    assert (plugin.zero_stage, plugin.offload_param_device, plugin.deepspeed_config["x"]) == (3, "nvme", 1)
    held = HfDeepSpeedConfig({"zero_optimization": {"stage": AUTO}})
    plugin = DeepSpeedPlugin(hf_ds_config=held, zero_stage=3)
    assert plugin.hf_ds_config is held
    assert plugin.deepspeed_config is held.config
    assert held.is_zero3()


def test_an_argument_that_the_configuration_contradicts_is_said_to_have_no_effect() -> None:
    with pytest.warns(UserWarning, match="zero_stage=3 has no effect, because hf_ds_config says 2"):
        plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}}, zero_stage=3)
    assert plugin.zero_stage == 2


@pytest.mark.parametrize("names", ["zero_stage", "deepspeed_config_file, mixed_precision,gradient_clipping"])
def test_what_a_launch_configures_besides_a_file_is_refused(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", names)
    DeepSpeedPlugin()
    with pytest.raises(InvalidArgument, match="in addition to deepspeed_config_file"):
        plugin_of()
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "deepspeed_config_file,zero3_init_flag")
    assert plugin_of().zero_stage == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hf_ds_config": {}}, "has no zero_optimization"),
        ({"enable_msamp": True, "msamp_opt_level": "O3"}, "msamp_opt_level='O3'; expected one of O1, O2"),
        ({"enable_msamp": True, "zero_stage": 3}, "MS-AMP does not work with zero_stage=3"),
    ],
    ids=str,
)
def test_a_refusal_says_what_is_expected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        DeepSpeedPlugin(**arguments)


def test_initialisation_in_shards_is_said_to_be_of_stage_3() -> None:
    with pytest.warns(UserWarning, match="zero3_init_flag=True has no effect in stage 1"):
        assert not DeepSpeedPlugin(zero_stage=1, zero3_init_flag=True).is_zero3_init_enabled()
    assert DeepSpeedPlugin(zero_stage=3).is_zero3_init_enabled()


def test_entries_can_be_looked_up() -> None:
    plugin = plugin_of(a=AUTO, b={"c": 3})
    assert [plugin.get_value(name, 9) for name in ("a", "b.c", "b.no", "no.x")] == [AUTO, 3, 9, 9]
    assert [plugin.is_auto(name) for name in ("a", "b.c", "no")] == [True, False, False]


@pytest.mark.parametrize("must_match", [True, False])
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("a", {"a": 5}),
        ("b.d", {"b.d": 6}),
        ("b.c", {"b.c": 3}),
        ("b.c", {"b.c": 4}),
        ("b.c", {}),
        ("no.x", {"no.x": 1}),
    ],
    ids=str,
)
def test_open_entries_are_filled_and_others_compared(name: str, given: dict[str, Any], must_match: bool) -> None:
    config = {"zero_optimization": {"stage": 2}, "a": AUTO, "b": {"c": 3, "d": AUTO}}
    own, theirs = (kind(hf_ds_config=copy.deepcopy(config)) for kind in (DeepSpeedPlugin, accelerate.DeepSpeedPlugin))
    of_own: list[str] = []
    of_theirs: list[str] = []
    own.fill_match(name, of_own, must_match=must_match, **given)
    theirs.fill_match(name, of_theirs, must_match=must_match, **given)
    assert (own.deepspeed_config, of_own) == (theirs.deepspeed_config, of_theirs)


def test_an_open_entry_that_nothing_fills_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"has b\.d='auto', but there is no value"):
        plugin_of(b={"d": AUTO}).fill_match("b.d", a=1)


def test_the_whole_configuration_is_filled_and_compared() -> None:
    plugin = plugin_of(a=AUTO, b={"c": 3, "d": AUTO})
    values: dict[str, Any] = {"a": 1, "b.d": 2, "b.c": 8}
    plugin.deepspeed_config_process(must_match=False, **values)
    assert (plugin.deepspeed_config["a"], plugin.deepspeed_config["b"]) == (1, {"c": 3, "d": 2})
    found: list[str] = []
    with pytest.raises(InvalidArgument, match=r"contradicts arguments; .*\n- ds b\.c=3 vs arg b\.c=8$"):
        plugin.deepspeed_config_process(mismatches=found, **values)
    assert found == ["- ds b.c=3 vs arg b.c=8"]
    part = plugin_of(b={"c": AUTO, "d": AUTO})
    part.deepspeed_config_process(prefix="b.", config={"c": AUTO}, **{"b.c": 4})  # type: ignore[arg-type]
    assert part.deepspeed_config["b"] == {"c": 4, "d": AUTO}


@pytest.mark.parametrize("mixed_precision", PRECISIONS)
@pytest.mark.parametrize(
    "config",
    [
        {},
        *({name: {"enabled": value}} for name in ("fp16", "bf16") for value in (True, False, AUTO)),
        {"fp16": {"enabled": AUTO, "auto_cast": True}},
        {"fp16": {}},
    ],
    ids=str,
)
def test_the_precision_of_the_run_is_written_into_the_configuration(
    config: dict[str, Any], mixed_precision: str | None
) -> None:
    own, theirs = (
        kind(hf_ds_config={"zero_optimization": {"stage": 2}, **copy.deepcopy(config)})
        for kind in (DeepSpeedPlugin, accelerate.DeepSpeedPlugin)
    )
    try:
        theirs.set_mixed_precision(mixed_precision)
    except ValueError:
        with pytest.raises(InvalidArgument, match=f"mixed_precision={mixed_precision!r}: .* enables"):
            own.set_mixed_precision(mixed_precision)
    else:
        own.set_mixed_precision(mixed_precision)
        assert own.deepspeed_config == theirs.deepspeed_config


def test_transformers_is_told_a_configuration_without_open_batch_sizes(
    transformers: list[dict[str, Any] | None],
) -> None:
    plugin = plugin_of(train_batch_size=AUTO, gradient_accumulation_steps=AUTO, x=AUTO)
    plugin.set_deepspeed_weakref()
    withdrawn, told = transformers
    assert withdrawn is None
    assert told is not None
    assert (told["gradient_accumulation_steps"], told["train_micro_batch_size_per_gpu"], told["x"]) == (1, 1, AUTO)
    assert "train_batch_size" not in told
    assert plugin.deepspeed_config["train_batch_size"] == AUTO
    assert plugin.dschf is not None


def test_without_transformers_there_is_nobody_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_plugin, "is_installed", lambda name: False)
    plugin = DeepSpeedPlugin()
    with pytest.raises(MissingLibrary, match="needs transformers; pip install transformers"):
        plugin.set_deepspeed_weakref()
    with plugin.zero3_init_context_manager(enable=True):
        assert plugin.is_zero3_init_enabled()


def test_initialisation_in_shards_is_switched_for_a_while(transformers: list[dict[str, Any] | None]) -> None:
    plugin = DeepSpeedPlugin(zero_stage=3)
    with plugin.zero3_init_context_manager(enable=True):
        assert not transformers
    with pytest.raises(KeyError), plugin.zero3_init_context_manager():
        assert not plugin.is_zero3_init_enabled()
        assert transformers == [None]
        assert plugin.dschf is None
        raise KeyError
    assert plugin.is_zero3_init_enabled()
    assert transformers[1:] == [None, plugin.dschf.config]


def test_transformers_knows_of_engines_in_shards_also_if_models_are_not_built_so(
    transformers: list[dict[str, Any] | None],
) -> None:
    plugin = DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False)
    plugin.set_deepspeed_weakref()
    assert transformers == [None]
    plugin.make_engine_known()
    assert transformers[-1] is not None
    assert plugin.dschf is not None
    told = DeepSpeedPlugin(zero_stage=3)
    told.set_deepspeed_weakref()
    count = len(transformers)
    told.make_engine_known()
    assert len(transformers) == count


def test_only_the_state_selects_a_plugin(transformers: list[dict[str, Any] | None]) -> None:
    plugin = DeepSpeedPlugin()
    assert not plugin.selected
    with pytest.raises(InvalidArgument, match=r"select_deepspeed_plugin\(name\), which"):
        plugin.select()
    with pytest.raises(InvalidArgument, match="selected=True: call"):
        plugin.selected = True
    plugin.select(_from_accelerator_state=True)
    assert plugin.selected
    assert transformers[1:] == [plugin.dschf.config]
    plugin._unselect()
    assert not plugin.selected


def test_layers_with_experts_are_named_to_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU()), []
    DeepSpeedPlugin().set_moe_leaf_modules(model)
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "Linear, ReLU")
    plugin = DeepSpeedPlugin()
    monkeypatch.setattr(deepspeed_plugin, "is_installed", lambda name: False)
    with pytest.raises(MissingLibrary, match="needs DeepSpeed"):
        plugin.set_moe_leaf_modules(model)
    stand_in = SimpleNamespace(set_z3_leaf_modules=lambda *given: seen.append(given))
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.utils", stand_in)  # type: ignore[arg-type]
    monkeypatch.setattr(deepspeed_plugin, "is_installed", lambda name: True)
    plugin.set_moe_leaf_modules(model)
    assert seen == [(model, [torch.nn.Linear, torch.nn.ReLU])]
    with pytest.raises(InvalidArgument, match="has 'Zebra', but Sequential has no such layer"):
        DeepSpeedPlugin(transformer_moe_cls_names="Zebra").set_moe_leaf_modules(model)
