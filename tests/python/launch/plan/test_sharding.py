"""How flags, variables and files say that models are sharded or split, and what workers are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate.commands.launch as original
import pytest

from accelerate_cpp.commands.launch import launch_command_parser, launch_options
from accelerate_cpp.config.sharding_flags import DEEPSPEED, FSDP, MEGATRON, MESH, PIPELINE_SCHEDULES, SHARDING
from accelerate_cpp.errors import InvalidArgument, MissingLibrary
from accelerate_cpp.launch.plan import launch_plan
from accelerate_cpp.launch.plan.environment import worker_environment
from accelerate_cpp.launch.plan.launch_plan import resolve, resolve_group
from accelerate_cpp.parallel.pipeline.schedules import SCHEDULES


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
    words = ("FSDP", "PARALLELISM", "DEEPSPEED", "DS_FIELDS", "ACCELERATE_GRADIENT", "MEGATRON")
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


OWN = {
    *("fsdp_weights_once_per_host", "fsdp_zero_stage"),
    *("parallelism_config_pp_size", "parallelism_config_pp_schedule", "parallelism_config_pp_micro_batches"),
}


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


@pytest.mark.parametrize("group", [MEGATRON, MESH], ids=lambda group: group.switch)
def test_flags_of_split_models_are_all_of_the_originals_in_a_section_of_the_same_name(group: Any) -> None:
    theirs = next(one for one in original.launch_command_parser()._action_groups if one.title == group.title)
    assert {flag.name for flag in group.flags} - OWN == {action.dest for action in theirs._group_actions}
    kinds = {action.dest: action.type for action in theirs._group_actions}
    for flag in group.flags:
        if flag.name not in OWN and flag.name != "parallelism_config_sp_seq_length_is_variable":
            assert flag.value_type is kinds[flag.name], flag.name


def test_schedules_of_pipelines_are_those_that_there_are() -> None:
    assert set(PIPELINE_SCHEDULES) == SCHEDULES.keys()


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


def test_each_flag_of_a_mesh_is_its_variable(script: str) -> None:
    texts = {
        "dp_replicate_size": "2",
        "dp_shard_size": "3",
        "tp_size": "4",
        "cp_size": "5",
        "cp_backend": "torch",
        "cp_comm_strategy": "alltoall",
        "sp_size": "6",
        "sp_backend": "deepspeed",
        "sp_seq_length": "7",
        "sp_seq_length_is_variable": "False",
        "sp_attn_implementation": "flash_attention_2",
        "pp_size": "8",
        "pp_schedule": "zero_bubble",
        "pp_micro_batches": "9",
    }
    assert [f"parallelism_config_{name}" for name in texts] == [flag.name for flag in MESH.flags]
    flags = [word for name, text in texts.items() for word in (f"--parallelism_config_{name}", text)]
    assert told(script, "--use_parallelism_config", *flags) == {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        **{f"PARALLELISM_CONFIG_{name.upper()}": text for name, text in texts.items()},
    }
    several = ["--parallelism_config_cp_size", "2", "--parallelism_config_sp_size", "2"]
    by_default = told(script, "--use_parallelism_config", *several)
    assert by_default["PARALLELISM_CONFIG_CP_COMM_STRATEGY"] == "allgather"
    assert by_default["PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE"] == "True"
    assert by_default["PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION"] == "sdpa"
    assert "PARALLELISM_CONFIG_SP_SEQ_LENGTH" not in by_default


def test_a_pipeline_is_said_by_flags_or_by_the_file(script: str) -> None:
    flags = ["--use_parallelism_config", "--parallelism_config_pp_size", "2"]
    of_pipeline = {"PARALLELISM_CONFIG_PP_SIZE": "2"}

    def said(*more: str, **others: Any) -> dict[str, str]:
        return {name: text for name, text in told(script, *more, **others).items() if "_PP_" in name}

    assert said(*flags) == of_pipeline
    flags += ["--parallelism_config_pp_schedule", "gpipe", "--parallelism_config_pp_micro_batches", "6"]
    of_pipeline |= {"PARALLELISM_CONFIG_PP_SCHEDULE": "gpipe", "PARALLELISM_CONFIG_PP_MICRO_BATCHES": "6"}
    assert said(*flags) == of_pipeline
    assert said(config="parallelism_config: {pp_size: 2, pp_schedule: gpipe, pp_micro_batches: 6}\n") == of_pipeline
    with pytest.raises(InvalidArgument, match="pp_schedule: 'fifo': expected one of gpipe, 1f1b"):
        said(config="parallelism_config: {pp_size: 2, pp_schedule: fifo}\n")


def test_options_of_dimensions_with_one_process_are_named(script: str) -> None:
    flags = ["--use_parallelism_config", "--parallelism_config_pp_schedule", "gpipe"]
    with pytest.warns(UserWarning, match="--parallelism_config_pp_schedule has no effect while .*_pp_size is 1"):
        assert "PARALLELISM_CONFIG_PP_SCHEDULE" not in told(script, *flags)
    with_size = told(script, *flags, environ={"PARALLELISM_CONFIG_PP_SIZE": "2"})
    assert with_size["PARALLELISM_CONFIG_PP_SCHEDULE"] == "gpipe"


def test_a_truth_in_the_file_is_written_as_the_original_writes_it(script: str) -> None:
    config = "distributed_type: FSDP\nfsdp_config: {fsdp_forward_prefetch: true}\n"
    assert told(script, config=config)["FSDP_FORWARD_PREFETCH"] == "true"
    assert told(script, "--use_fsdp", "--fsdp_forward_prefetch", "True")["FSDP_FORWARD_PREFETCH"] == "true"
    config = "parallelism_config: {sp_size: 2, sp_seq_length_is_variable: false}\n"
    assert told(script, config=config)["PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE"] == "False"


OF_MEGATRON = {
    "ACCELERATE_USE_MEGATRON_LM": "true",
    "MEGATRON_LM_TP_DEGREE": "1",
    "MEGATRON_LM_PP_DEGREE": "1",
    "MEGATRON_LM_USE_CUSTOM_FSDP": "False",
    "MEGATRON_LM_NO_LOAD_OPTIM": "False",
    "MEGATRON_LM_NO_SAVE_OPTIM": "False",
    "MEGATRON_LM_EOD_MASK_LOSS": "False",
    "MEGATRON_LM_OVERLAP_CPU_OPTIMIZER_D2H_H2D": "False",
    "MEGATRON_LM_OPTIMIZER_CPU_OFFLOAD": "False",
    "MEGATRON_LM_USE_PRECISION_AWARE_OPTIMIZER": "False",
    "MEGATRON_LM_GRADIENT_CLIPPING": "1.0",
}
TEXTS_OF_MEGATRON = {  # of the flags that say nothing by default
    "decoder_last_pipeline_num_layers": "3",
    "num_micro_batches": "4",
    "sequence_parallelism": "true",
    "recompute_activations": "True",
    "use_distributed_optimizer": "false",
    "recompute_granularity": "selective",
    "recompute_method": "block",
    "recompute_num_layers": "2",
    "attention_backend": "false",
    "expert_model_parallel_size": "2",
    "context_parallel_size": "1",
    "attention_dropout": "0.1",
    "hidden_dropout": "0.2",
    "attention_softmax_in_fp32": "true",
    "expert_tensor_parallel_size": "1",
    "calculate_per_token_loss": "false",
    "use_rotary_position_embeddings": "true",
}


def test_the_switch_of_megatron_alone_says_the_originals_defaults(script: str) -> None:
    assert told(script, "--use_megatron_lm") == OF_MEGATRON
    assert told(script, environ={"ACCELERATE_USE_MEGATRON_LM": "true"}) == OF_MEGATRON


def test_each_flag_of_megatron_is_its_variable(script: str) -> None:
    says_nothing = {flag.name.removeprefix("megatron_lm_") for flag in MEGATRON.flags if flag.default is None}
    assert says_nothing == TEXTS_OF_MEGATRON.keys()
    flags = [word for name, text in TEXTS_OF_MEGATRON.items() for word in (f"--megatron_lm_{name}", text)]
    flags += ["--megatron_lm_tp_degree", "2", "--megatron_lm_pp_degree", "4", "--megatron_lm_gradient_clipping", "0"]
    found = told(script, "--use_megatron_lm", *flags)
    assert found == {
        **OF_MEGATRON,
        **{f"MEGATRON_LM_{name.upper()}": text for name, text in TEXTS_OF_MEGATRON.items()},
        "MEGATRON_LM_TP_DEGREE": "2",
        "MEGATRON_LM_PP_DEGREE": "4",
        "MEGATRON_LM_GRADIENT_CLIPPING": "0.0",
    }


def test_a_file_says_the_same_of_megatron(script: str) -> None:
    section = (
        "  megatron_lm_tp_degree: 2\n  megatron_lm_sequence_parallelism: true\n  megatron_lm_no_save_optim: true\n"
    )
    config = f"distributed_type: MEGATRON_LM\nmegatron_lm_config:\n{section}"
    in_file = {
        **OF_MEGATRON,
        "MEGATRON_LM_TP_DEGREE": "2",
        "MEGATRON_LM_SEQUENCE_PARALLELISM": "True",
        "MEGATRON_LM_NO_SAVE_OPTIM": "True",
    }
    assert told(script, config=config) == in_file
    variables = {"MEGATRON_LM_TP_DEGREE": "4", "MEGATRON_LM_GRADIENT_CLIPPING": "0.5"}
    assert told(script, config=config, environ=variables) == in_file | variables
    by_flag = told(script, "--megatron_lm_tp_degree", "1", config=config, environ=variables)
    assert by_flag == in_file | variables | {"MEGATRON_LM_TP_DEGREE": "1"}
    assert told(script, config=config.replace("MEGATRON_LM\n", "MULTI_CPU\n")) == {}
    assert told(script, "--use_megatron_lm", config=config.replace("MEGATRON_LM\n", "FSDP\n")) == in_file


def test_a_switch_of_megatron_is_on_whatever_it_is_given_as_with_the_original(script: str) -> None:
    with pytest.warns(UserWarning, match="--megatron_lm_no_load_optim False counts as True.*leave the flag out"):
        found = told(script, "--use_megatron_lm", "--megatron_lm_no_load_optim", "False")
    assert found == {**OF_MEGATRON, "MEGATRON_LM_NO_LOAD_OPTIM": "True"}
    assert told(script, "--use_megatron_lm", "--megatron_lm_no_load_optim", "True") == found


def test_flags_of_megatron_without_the_switch_are_named(script: str) -> None:
    with pytest.warns(UserWarning, match="--megatron_lm_tp_degree has no effect without --use_megatron_lm"):
        assert told(script, "--megatron_lm_tp_degree", "2") == {}


def test_wrong_keys_and_values_of_megatron_are_refused(script: str) -> None:
    config = "distributed_type: MEGATRON_LM\nmegatron_lm_config: {{{}}}\n"
    with pytest.raises(InvalidArgument, match="megatron_lm_config: megatron_lm_tp_degree: 'two': expected an integer"):
        told(script, config=config.format("megatron_lm_tp_degree: two"))
    with pytest.raises(InvalidArgument, match="unknown key megatron_lm_tp; the nearest known key is megatron_lm_tp_"):
        told(script, config=config.format("megatron_lm_tp: 2"))


def test_megatron_and_a_mesh_exclude_each_other(script: str) -> None:
    switch, mesh = "--use_megatron_lm", "--use_parallelism_config"
    with pytest.raises(InvalidArgument, match=f"^{switch} and {mesh} exclude each other"):
        told(script, switch, mesh)
    section = "parallelism_config: {tp_size: 2}\n"
    with pytest.raises(InvalidArgument, match=r"distributed_type and .*: parallelism_config exclude each other"):
        told(script, config=f"distributed_type: MEGATRON_LM\n{section}")
    with pytest.raises(InvalidArgument, match=f"distributed_type and {mesh} exclude each other"):
        told(script, mesh, config="distributed_type: MEGATRON_LM\n")
    environ = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
    off = {"ACCELERATE_USE_PARALLELISM_CONFIG": "false"}
    assert told(script, switch, config=section, environ=environ) == OF_MEGATRON | off


def test_megatron_is_launched_like_plain_processes(script: str) -> None:
    args = launch_command_parser().parse_args(["--cpu", "--num_processes", "1", "--use_megatron_lm", script])
    plan = resolve(launch_options(args, training_script_args=()), {})
    assert (plan.deepspeed, plan.agent, plan.group.world_size) == (None, None, 1)
    assert worker_environment(plan.group, 0, 3, {})["RANK"] == "0"


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
        (
            [],
            "distributed_type: FSDP\nfsdp_config: {fsdp_shardin: 1}\n",
            "fsdp_config: unknown key fsdp_shardin; .* is fsdp_sharding",
        ),
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
