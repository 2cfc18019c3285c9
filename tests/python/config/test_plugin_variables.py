"""The variables of plugins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from accelerate_cpp.config import plugin_variables
from accelerate_cpp.config.env_table import Variable
from accelerate_cpp.errors import InvalidArgument

TABLES = {
    name: table
    for name, table in vars(plugin_variables).items()
    if name.isupper() and not isinstance(table, Variable) and not name.startswith("_")
}


def test_every_field_of_every_plugin_has_a_variable_of_its_own() -> None:
    names = [variable.name for table in TABLES.values() for variable in table.values()]
    assert len(names) == len(set(names))
    assert {"FSDP_VERSION", "FSDP_OFFLOAD_PARAMS", "FSDP_TRANSFORMER_CLS_TO_WRAP", "PARALLELISM_CONFIG_TP_SIZE"} <= {
        *names
    }
    assert {"ACCELERATE_DEEPSPEED_CONFIG_FILE", "ACCELERATE_DEEPSPEED_ZERO3_INIT", "MEGATRON_LM_TP_DEGREE"} <= {*names}
    assert len(TABLES["MEGATRON"]) == 27


@pytest.mark.parametrize(
    ("table", "field", "text", "value"),
    [
        ("FSDP", "fsdp_version", "2", 2),
        ("FSDP", "cpu_offload", "True", True),
        ("FSDP", "auto_wrap_policy", "NO_WRAP", "NO_WRAP"),
        ("DEEPSPEED", "gradient_accumulation_steps", "auto", "auto"),
        ("DEEPSPEED", "gradient_accumulation_steps", "4", 4),
        ("DEEPSPEED", "gradient_clipping", "auto", "auto"),
        ("DEEPSPEED", "gradient_clipping", "0.5", 0.5),
        ("MEGATRON", "hidden_dropout", "0.1", 0.1),
    ],
)
def test_texts_become_values_and_back(table: str, field: str, text: str, value: Any) -> None:
    variable = TABLES[table][field]
    assert variable.get({variable.name: text}) == value
    assert variable.get({variable.name: variable.render(value)}) == value


@pytest.mark.parametrize(
    ("table", "field", "expected"),
    [
        ("FSDP", "fsdp_version", "an integer"),
        ("FSDP", "cpu_offload", "one of yes"),
        ("DEEPSPEED", "gradient_accumulation_steps", "an integer"),
        ("DEEPSPEED", "gradient_clipping", "a number"),
        ("MEGATRON", "hidden_dropout", "a number"),
    ],
)
def test_a_text_that_cannot_be_understood_is_refused(table: str, field: str, expected: str) -> None:
    variable = TABLES[table][field]
    with pytest.raises(InvalidArgument, match=f"{variable.name}='soon': expected {expected}"):
        variable.get({variable.name: "soon"})


def test_what_is_none_is_filled_and_the_rest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_MIN_NUM_PARAMS", "7")
    plugin = SimpleNamespace(fsdp_version=None, min_num_params=3, use_orig_params=None)
    plugin_variables.fill(plugin, plugin_variables.FSDP, ["fsdp_version", "min_num_params"])
    assert vars(plugin) == {"fsdp_version": 2, "min_num_params": 3, "use_orig_params": None}


def test_without_names_all_fields_are_filled() -> None:
    plugin = SimpleNamespace(**dict.fromkeys(plugin_variables.PARALLELISM))
    plugin_variables.fill(plugin, plugin_variables.PARALLELISM)
    assert (plugin.tp_size, plugin.cp_backend, plugin.sp_backend) == (1, "torch", "deepspeed")
