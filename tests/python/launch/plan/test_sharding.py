"""How flags, variables and files say that models are sharded, by FSDP or through DeepSpeed; what workers are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate.commands.launch as original
import pytest

from accelerate_cpp.commands.launch import launch_command_parser, launch_options
from accelerate_cpp.config.sharding_flags import DEEPSPEED, FSDP, MESH, SHARDING
from accelerate_cpp.errors import InvalidArgument, MissingLibrary
from accelerate_cpp.launch.plan import launch_plan
from accelerate_cpp.launch.plan.environment import worker_environment
from accelerate_cpp.launch.plan.launch_plan import resolve, resolve_group


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
    words = ("FSDP", "PARALLELISM", "DEEPSPEED", "DS_FIELDS", "ACCELERATE_GRADIENT")
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


@pytest.fixture(autouse=True)
def deepspeed_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed here."""
    monkeypatch.setattr(launch_plan, "has_code", lambda module: True)


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
    group = next(group for group in original.launch_command_parser()._action_groups if "DeepSpeed" in group.title)
    assert {flag.name for flag in DEEPSPEED.flags} | {"gradient_accumulation_steps"} == {
        action.dest for action in group._group_actions
    }
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
    assert "fsdp_ignored_modules" in FSDP.keys
    assert "gradient_accumulation_steps" in DEEPSPEED.keys
    assert MESH.keys.keys() == {flag.name for flag in MESH.flags}


PLAIN_DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_CONFIG_DS_FIELDS": ""}
PREFIX = "ACCELERATE_DEEPSPEED_"


def test_deepspeed_alone_says_no_defaults(script: str) -> None:
    assert told(script, "--use_deepspeed") == PLAIN_DEEPSPEED


def test_flags_of_deepspeed_become_the_variables_of_the_original(script: str) -> None:
    flags = ["--zero_stage", "3", "--offload_optimizer_device", "CPU", "--offload_param_device", "nvme"]
    flags += ["--zero3_init_flag", "True", "--zero3_save_16bit_model", "yes", "--gradient_clipping", "1"]
    flags += ["--gradient_accumulation_steps", "3", "--deepspeed_config_file", "Ds.json"]
    flags += ["--deepspeed_moe_layer_cls_names", "A,B"]
    ours = {"--offload_optimizer_nvme_path": "/O", "--offload_param_nvme_path": "/P"}  # which the original forgets
    assert told(script, "--use_deepspeed", *flags, *(word for pair in ours.items() for word in pair)) == {
        **PLAIN_DEEPSPEED,
        f"{PREFIX}ZERO_STAGE": "3",
        f"{PREFIX}OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        f"{PREFIX}OFFLOAD_PARAM_DEVICE": "nvme",
        f"{PREFIX}OFFLOAD_OPTIMIZER_NVME_PATH": "/O",
        f"{PREFIX}OFFLOAD_PARAM_NVME_PATH": "/P",
        f"{PREFIX}ZERO3_INIT": "true",
        f"{PREFIX}ZERO3_SAVE_16BIT_MODEL": "true",
        f"{PREFIX}CONFIG_FILE": "Ds.json",
        f"{PREFIX}MOE_LAYER_CLS_NAMES": "A,B",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3",
        "ACCELERATE_GRADIENT_CLIPPING": "1.0",
    }


FILE = """\
distributed_type: DEEPSPEED
mixed_precision: bf16
deepspeed_config:
  zero_stage: 2
  gradient_accumulation_steps: 4
  gradient_clipping: 0.5
  zero3_init_flag: false
"""
IN_FILE = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_CONFIG_DS_FIELDS": (
        "zero_stage,gradient_accumulation_steps,gradient_clipping,zero3_init_flag,mixed_precision"
    ),
    f"{PREFIX}ZERO_STAGE": "2",
    f"{PREFIX}ZERO3_INIT": "false",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_GRADIENT_CLIPPING": "0.5",
}


def test_the_section_of_deepspeed_counts_where_the_file_trains_through_it(script: str) -> None:
    assert told(script, config=FILE) == IN_FILE
    plain = FILE.replace("DEEPSPEED", "MULTI_CPU")
    assert told(script, config=plain) == {}
    assert told(script, "--use_deepspeed", config=plain) == IN_FILE


def test_of_deepspeed_too_a_flag_wins_over_a_variable_over_the_file(script: str) -> None:
    variables = {f"{PREFIX}ZERO_STAGE": "1", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2"}
    by_variable = told(script, config=FILE, environ=variables)
    assert by_variable == IN_FILE | variables
    flags = ["--zero_stage", "0", "--gradient_accumulation_steps", "7"]
    by_flag = told(script, *flags, config=FILE, environ=variables)
    assert by_flag == IN_FILE | {f"{PREFIX}ZERO_STAGE": "0", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "7"}


def test_a_precision_of_a_flag_is_not_one_of_the_file(script: str) -> None:
    found = told(script, "--mixed_precision", "no", config=FILE)["ACCELERATE_CONFIG_DS_FIELDS"]
    assert found == "zero_stage,gradient_accumulation_steps,gradient_clipping,zero3_init_flag"


def test_a_flag_chooses_another_kind_of_training_than_a_variable_or_the_file(script: str) -> None:
    environ = {"ACCELERATE_USE_FSDP": "true"}
    assert told(script, "--use_deepspeed", environ=environ) == PLAIN_DEEPSPEED | {"ACCELERATE_USE_FSDP": "false"}
    assert told(script, "--use_fsdp", config=FILE) == DEFAULTS
    variable = {"ACCELERATE_USE_DEEPSPEED": "true"}
    assert told(script, config="distributed_type: FSDP\n", environ=variable) == PLAIN_DEEPSPEED


@pytest.mark.parametrize(
    ("flags", "environ", "named"),
    [
        (["--use_deepspeed", "--use_fsdp"], {}, "--use_fsdp and --use_deepspeed"),
        (["--use_deepspeed", "--use_megatron_lm"], {}, "--use_deepspeed and --use_megatron_lm"),
        (["--use_fsdp", "--use_megatron_lm"], {}, "--use_fsdp and --use_megatron_lm"),
        (
            [],
            {"ACCELERATE_USE_FSDP": "1", "ACCELERATE_USE_DEEPSPEED": "1"},
            "environment variable ACCELERATE_USE_FSDP and environment variable ACCELERATE_USE_DEEPSPEED",
        ),
    ],
)
def test_two_kinds_of_training_exclude_each_other(
    script: str, flags: list[str], environ: dict[str, str], named: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"^{named} exclude each other"):
        told(script, *flags, environ=environ)


def test_flags_of_deepspeed_without_it_are_named(script: str) -> None:
    with pytest.warns(UserWarning, match="--deepspeed_hostfile has no effect without --use_deepspeed"):
        assert told(script, "--deepspeed_hostfile", "hosts") == {}


@pytest.mark.parametrize(
    ("flags", "config", "message"),
    [
        (["--use_deepspeed", "--zero3_init_flag", "maybe"], "", "--zero3_init_flag: 'maybe': expected one of yes"),
        (["--use_deepspeed", "--gradient_clipping", "much"], "", "--gradient_clipping: 'much': expected a number"),
        ([], FILE.replace("2", "4", 1), r"config.yaml: deepspeed_config: zero_stage: '4': expected one of 0, 1, 2, 3"),
        (
            [],
            FILE + "  deepspeed_multinode_launcher: ssh\n",
            "deepspeed_multinode_launcher: 'ssh': expected one of standard",
        ),
        ([], FILE.replace("_steps: 4", "_steps: auto"), "gradient_accumulation_steps: 'auto': expected an integer"),
        ([], FILE + "  zero_stag: 1\n", "deepspeed_config: unknown key zero_stag; the nearest known key is zero_stage"),
    ],
)
def test_wrong_keys_and_values_of_deepspeed_are_refused(
    script: str, flags: list[str], config: str, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        told(script, *flags, config=config)


def test_without_deepspeed_a_launch_through_it_is_refused(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_plan, "has_code", lambda module: module != "deepspeed")
    with pytest.raises(MissingLibrary, match=r"^--use_deepspeed: expected DeepSpeed .*: pip install deepspeed$"):
        told(script, "--use_deepspeed")
    with pytest.raises(MissingLibrary, match=r"config.yaml: distributed_type: expected DeepSpeed"):
        told(script, config=FILE)
    args = launch_command_parser().parse_args(["--cpu", "--use_deepspeed", script])
    group, _ = resolve_group(launch_options(args, training_script_args=()), {})  # which `config explain` shows
    assert group.trains_through_deepspeed


def test_through_deepspeed_modules_of_this_folder_are_found_last(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(script).parent)
    args = launch_command_parser().parse_args(["--cpu", "--use_deepspeed", script])
    group = resolve(launch_options(args, training_script_args=()), {}).group
    assert worker_environment(group, 0, 3, {})["PYTHONPATH"] == str(Path.cwd())
    assert worker_environment(group, 0, 3, {"PYTHONPATH": "/a:"})["PYTHONPATH"] == f"/a:{Path.cwd()}"
    args = launch_command_parser().parse_args(["--cpu", "--use_fsdp", script])
    group = resolve(launch_options(args, training_script_args=()), {}).group
    assert "PYTHONPATH" not in worker_environment(group, 0, 3, {})
