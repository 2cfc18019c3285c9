"""Where each setting of a launch comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accelerate_cpp.config import env_table
from accelerate_cpp.config.file import ConfigFile
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.plan.launch_plan import LaunchOptions
from accelerate_cpp.launch.plan.settings import ROWS, Setting, fp8_recipe, resolved


def a_file(**given: Any) -> ConfigFile:
    return ConfigFile(Path("c.yaml"), {"distributed_type": "NO", **given})


def setting(name: str, file: ConfigFile | None = None, environ: dict[str, str] | None = None, **flags: Any) -> Setting:
    return resolved(LaunchOptions("train.py", **flags), environ or {}, file)[name]


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default() -> None:
    file, environ = a_file(mixed_precision="fp16"), {"ACCELERATE_MIXED_PRECISION": "bf16"}
    assert setting("mixed_precision", file, environ, mixed_precision="no") == Setting("no", "--mixed_precision")
    assert setting("mixed_precision", file, environ) == Setting(
        "bf16", "environment variable ACCELERATE_MIXED_PRECISION"
    )
    assert setting("mixed_precision", file) == Setting("fp16", "c.yaml: mixed_precision")
    assert setting("mixed_precision", a_file()) == Setting("no", "default")


def test_every_setting_is_a_flag() -> None:
    options = LaunchOptions("train.py")
    assert all(hasattr(options, row.name) for row in ROWS)


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"distributed_type": "MULTI_CPU", "num_processes": 3}, "cpu", True),
        ({"use_cpu": True}, "cpu", True),
        ({"use_cpu": False}, "cpu", False),
        ({"distributed_type": "MULTI_GPU", "num_processes": 2}, "multi_gpu", True),
        ({}, "num_processes", 1),
        ({"distributed_type": "MULTI_GPU"}, "num_processes", -1),
        ({"distributed_type": "MULTI_CPU", "num_processes": 3}, "num_processes", 3),
        ({"machine_rank": 1}, "machine_rank", 1),
        ({"main_process_port": 1234}, "main_process_port", 1234),
        ({"debug": True}, "debug", True),
        ({"gpu_ids": "0,1"}, "gpu_ids", "0,1"),
        ({"enable_cpu_affinity": True}, "enable_cpu_affinity", True),
        ({"mpirun_config": {"mpirun_hostfile": "hosts", "mpirun_ccl": "1"}}, "mpirun_hostfile", "hosts"),
    ],
)
def test_a_file_says_as_the_original_understands_it(given: dict[str, Any], name: str, value: Any) -> None:
    found = setting(name, a_file(**given))
    assert (found.value, found.source.startswith("c.yaml: ")) == (value, True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"distributed_type": "MULTI_MUSA"}, "distributed_type: MULTI_MUSA: training on devices of MULTI_MUSA"),
        ({"distributed_type": "MULTI_NPU"}, "distributed_type: MULTI_NPU: training on devices of MULTI_NPU"),
    ],
)
def test_what_does_not_work_yet_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        setting("cpu", a_file(**given))
    assert f"c.yaml: {words}" in str(refused.value)
    assert "--config_file" in str(refused.value)


def test_unknown_key_of_a_section_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"mpirun_config: .*mpirun_hosts.*mpirun_hostfile"):
        setting("cpu", a_file(mpirun_config={"mpirun_hosts": "hosts"}))


def test_sections_of_another_kind_of_training_do_not_count() -> None:
    given = {"fsdp_config": {"fsdp_version": 2}, "dynamo_config": {"dynamo_backend": "NO"}, "deepspeed_config": {}}
    assert setting("cpu", a_file(**given)).value is False


def test_a_recipe_of_fp8_becomes_variables() -> None:
    section = {
        "backend": "te",
        "margin": 2,
        "fp8_format": "E4M3",
        "amax_history_length": 16,
        "use_autocast_during_eval": True,
        "override_linear_precision": [True, False, True],
    }
    assert fp8_recipe({"ACCELERATE_FP8_MARGIN": "3"}, a_file(fp8_config=section)) == {
        env_table.FP8_BACKEND: "TE",
        env_table.FP8_FORMAT: "E4M3",
        env_table.FP8_AMAX_HISTORY_LEN: 16,
        env_table.FP8_USE_AUTOCAST_DURING_EVAL: True,
        env_table.FP8_OVERRIDE_FPROP: True,
        env_table.FP8_OVERRIDE_DGRAD: False,
        env_table.FP8_OVERRIDE_WGRAD: True,
    }
    in_one_text = fp8_recipe({}, a_file(fp8_config={"override_linear_precision": "(false, false, true)"}))
    assert list(in_one_text.values()) == [False, False, True]
    assert fp8_recipe({}, None) == fp8_recipe({}, a_file()) == {}


def test_a_flag_of_the_recipe_wins_over_a_variable_over_the_file() -> None:
    file, environ = a_file(fp8_config={"margin": 1, "interval": 4}), {"ACCELERATE_FP8_MARGIN": "2"}
    assert fp8_recipe(environ, file, {"margin": "3"}) == {env_table.FP8_MARGIN: 3, env_table.FP8_INTERVAL: 4}
    assert fp8_recipe(environ, file) == {env_table.FP8_INTERVAL: 4}
    with pytest.raises(InvalidArgument, match="--fp8: margin: 'wide': expected an integer"):
        fp8_recipe({}, None, {"margin": "wide"})


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"margn": 1}, "fp8_config: unknown key margn; the nearest known key is margin"),
        ({"fp8_margin": "wide"}, "fp8_config: fp8_margin: 'wide': expected an integer"),
        ({"backend": "own"}, "expected one of NO, AO, TE, MSAMP"),
        ({"override_linear_precision": [True]}, "override_linear_precision"),
    ],
)
def test_a_recipe_that_cannot_be_meant_is_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        fp8_recipe({}, a_file(fp8_config=section))
    assert words in str(refused.value)


def test_section_on_the_compiler_may_leave_its_prefix_out() -> None:
    given = {"dynamo_config": {"dynamo_backend": "INDUCTOR", "use_dynamic": True}}
    assert setting("dynamo_backend", a_file(**given)).value == "INDUCTOR"
    assert setting("dynamo_use_dynamic", a_file(**given)).value is True


def test_unknown_key_of_the_compiler_is_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidArgument, match=r"dynamo_config: unknown key dynamo_backnd.*dynamo_backend"):
        setting("cpu", a_file(dynamo_config={"dynamo_backnd": "INDUCTOR"}))
