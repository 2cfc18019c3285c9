"""How flags, variables and files say that models are sharded, and what the workers are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate.commands.launch as original
import pytest

from accelerate_cpp.commands.launch import launch_command_parser, launch_options
from accelerate_cpp.config.sharding_flags import FSDP, MESH, SHARDING, keys_of
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.plan.environment import worker_environment
from accelerate_cpp.launch.plan.launch_plan import resolve


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").touch()
    return str(tmp_path / "train.py")


def told(script: str, *flags: str, config: str = "", environ: dict[str, str] | None = None) -> dict[str, str]:
    """What the workers get of it."""
    path = Path(script).with_name("config.yaml")
    kind = "" if "distributed_type" in config else "distributed_type: MULTI_CPU\n"
    path.write_text(f"num_processes: 2\n{kind}{config}")
    args = launch_command_parser().parse_args(["--cpu", "--config_file", str(path), *flags, script])
    group = resolve(launch_options(args, training_script_args=()), environ or {}).group
    environment = worker_environment(group, 0, 3, environ or {})
    words = ("FSDP", "PARALLELISM")
    return {name: text for name, text in environment.items() if any(word in name for word in words)}


DEFAULTS = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "1",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}


OWN = {"fsdp_weights_once_per_host", "fsdp_zero_stage"}


def test_flags_are_those_of_the_original_with_its_defaults() -> None:
    theirs = {action.dest: action for action in original.launch_command_parser()._actions}
    for group in SHARDING:
        assert group.switch in theirs
        for flag in group.flags:
            if flag.name in OWN:
                assert flag.default is None
                continue
            default = theirs[flag.name].default
            assert flag.default == (None if default is None else str(default))
            assert set(flag.choices) <= set(theirs[flag.name].choices or flag.choices)
    ours = {flag.name for flag in FSDP.flags} | {FSDP.switch}
    assert ours - OWN == {name for name in theirs if "fsdp" in name and not name.startswith(("fp8", "megatron"))}


def test_nothing_is_said_where_nothing_is_sharded(script: str) -> None:
    assert told(script) == {}


def test_the_switch_alone_says_the_originals_defaults(script: str) -> None:
    assert told(script, "--use_fsdp") == DEFAULTS


def test_a_flag_wins_over_a_variable_over_the_file(script: str) -> None:
    config = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_offload_params: true, state_dict_type: X}\n"
    assert told(script, config=config) == {
        **DEFAULTS,
        "FSDP_VERSION": "2",
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_STATE_DICT_TYPE": "X",
    }
    found = told(
        script,
        "--fsdp_offload_params",
        "false",
        config=config,
        environ={"FSDP_VERSION": "1", "FSDP_OFFLOAD_PARAMS": "true"},
    )
    assert (found["FSDP_VERSION"], found["FSDP_OFFLOAD_PARAMS"]) == ("1", "false")
    assert told(script, "--fsdp_version", "1", config=config)["FSDP_VERSION"] == "1"  # though that is the default


def test_a_list_in_the_file_is_one_text(script: str) -> None:
    config = "distributed_type: FSDP\nfsdp_config: {fsdp_transformer_layer_cls_to_wrap: [A, B]}\n"
    assert told(script, config=config)["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "A,B"


def test_of_a_mesh_only_what_applies_is_said(script: str) -> None:
    flags = ("--use_fsdp", "--use_parallelism_config", "--parallelism_config_dp_shard_size", "2")
    found = {name: text for name, text in told(script, *flags).items() if "PARALLELISM" in name}
    assert found == {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
        "PARALLELISM_CONFIG_TP_SIZE": "1",
        "PARALLELISM_CONFIG_CP_SIZE": "1",
        "PARALLELISM_CONFIG_CP_BACKEND": "torch",
        "PARALLELISM_CONFIG_SP_SIZE": "1",
        "PARALLELISM_CONFIG_SP_BACKEND": "deepspeed",
    }
    with_sequences = told(script, *flags, "--parallelism_config_cp_size", "2")
    assert with_sequences["PARALLELISM_CONFIG_CP_COMM_STRATEGY"] == "allgather"
    in_file = told(script, config="parallelism_config: {parallelism_config_dp_replicate_size: 2}\n")
    assert in_file["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] == "2"


def test_flags_without_the_switch_are_named(script: str) -> None:
    with pytest.warns(UserWarning, match="--fsdp_offload_params has no effect without --use_fsdp"):
        assert told(script, "--fsdp_offload_params", "true") == {}


@pytest.mark.parametrize(
    ("flags", "config", "message"),
    [
        (["--use_fsdp", "--fsdp_offload_params", "maybe"], "", "--fsdp_offload_params: 'maybe': expected one of yes"),
        (
            [],
            "distributed_type: FSDP\nfsdp_config: {fsdp_min_num_params: few}\n",
            "fsdp_config: fsdp_min_num_params: 'few'",
        ),
        ([], "distributed_type: FSDP\nfsdp_config: {fsdp_shardin: 1}\n", "fsdp_config: unknown key fsdp_shardin"),
    ],
)
def test_wrong_keys_and_values_are_refused_before_anything_starts(
    script: str, flags: list[str], config: str, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        told(script, *flags, config=config)


def test_one_process_of_sharded_models_has_a_rank(script: str) -> None:
    args = launch_command_parser().parse_args(["--cpu", "--num_processes", "1", "--use_fsdp", script])
    group = resolve(launch_options(args, training_script_args=()), {}).group
    environment: dict[str, Any] = worker_environment(group, 0, 3, {})
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("0", "1")


def test_what_no_flag_says_the_file_may_say() -> None:
    assert "fsdp_ignored_modules" in keys_of(FSDP)
    assert keys_of(MESH).keys() == {flag.name for flag in MESH.flags}
