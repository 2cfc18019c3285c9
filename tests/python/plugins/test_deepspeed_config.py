"""The configuration of DeepSpeed."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import accelerate.utils.deepspeed as original
import pytest

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.deepspeed_config import HfDeepSpeedConfig

CONFIG = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "on": True, "off": False}, "x": 1}
NAMES = [
    "x",
    "zero_optimization",
    "zero_optimization.stage",
    "zero_optimization.off",
    "zero_optimization.no",
    "no",
    "a.b",
]


def zero(stage: Any, **sections: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **sections}}


@pytest.mark.parametrize("name", NAMES)
def test_entries_are_found_as_in_the_original(name: str) -> None:
    own, theirs = HfDeepSpeedConfig(CONFIG), original.HfDeepSpeedConfig(CONFIG)
    assert own.find_config_node(name) == theirs.find_config_node(name)
    assert (own.get_value(name), own.get_value(name, 7)) == (theirs.get_value(name), theirs.get_value(name, 7))
    assert (own.is_true(name), own.is_false(name)) == (theirs.is_true(name), theirs.is_false(name))


def test_an_entry_below_a_value_is_missing() -> None:
    config = HfDeepSpeedConfig(CONFIG)
    assert config.find_config_node("x.y") == (None, "y")
    assert config.get_value("x.y", 7) == 7


@pytest.mark.parametrize(
    "config",
    [
        {},
        zero(2),
        zero(3, offload_optimizer={"device": "nvme"}),
        zero(1, offload_optimizer={"device": "cpu"}),
        zero(2, offload_optimizer={"device": "none"}),
        zero("auto"),
        CONFIG,
    ],
    ids=str,
)
def test_what_it_says_of_zero_is_what_it_says_in_the_original(config: dict[str, Any]) -> None:
    own, theirs = HfDeepSpeedConfig(config), original.HfDeepSpeedConfig(config)
    assert (own.is_zero2(), own.is_zero3(), own.is_offload()) == (
        theirs.is_zero2(),
        theirs.is_zero3(),
        theirs.is_offload(),
    )


def test_a_changed_configuration_is_looked_at_again() -> None:
    config = HfDeepSpeedConfig(zero(2, offload_optimizer={"device": "cpu"}))
    config.config["zero_optimization"] = {"stage": 3}
    assert (config.is_zero2(), config.is_offload()) == (True, True)
    config.set_stage_and_offload()
    assert (config.is_zero3(), config.is_offload()) == (True, False)


def test_an_entry_can_be_removed() -> None:
    config = HfDeepSpeedConfig(CONFIG)
    config.del_config_sub_tree("zero_optimization.offload_param")
    config.del_config_sub_tree("x", must_exist=True)
    config.del_config_sub_tree("no.such.entry")
    assert config.config == zero(3, on=True, off=False)
    with pytest.raises(InvalidArgument, match=r"no entry no\.such\.entry"):
        config.del_config_sub_tree("no.such.entry", must_exist=True)


def test_a_dict_is_copied_and_files_json_and_base64_are_read(tmp_path: Path) -> None:
    text, file = json.dumps(CONFIG), tmp_path / "ds.json"
    file.write_text(text)
    own = HfDeepSpeedConfig(CONFIG)
    own.config["zero_optimization"]["stage"] = 1
    assert CONFIG["zero_optimization"]["stage"] == 3  # type: ignore[index]
    for source in (file, str(file), text, base64.urlsafe_b64encode(text.encode()).decode()):
        assert HfDeepSpeedConfig(source).config == CONFIG


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("/no/such/file.json", "there is no such file"),
        ("{" * 5000, "is neither a file with JSON nor JSON"),
        (None, "None; expected a dict or the path"),
        ("[1]", "is neither a file"),
    ],
)
def test_what_cannot_be_read_is_refused(found: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        HfDeepSpeedConfig(found)


def test_a_file_without_an_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(InvalidArgument, match="does not contain a JSON object"):
        HfDeepSpeedConfig(tmp_path / "list.json")
