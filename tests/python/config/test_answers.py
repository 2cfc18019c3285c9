"""From answers to the values of a configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import ClusterConfig

from accelerate_cpp.config import answers, file
from accelerate_cpp.config.answers import answered, answers_of_file, file_values, kept, not_asked
from accelerate_cpp.config.questions import QUESTIONS, Answers, Machine, Question
from accelerate_cpp.config.unsupported_flags import Flag, Group
from accelerate_cpp.errors import InvalidArgument

MACHINE = Machine(gpus=0)


def written(folder: Path, text: str, name: str = "answers.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def suggested(question: Question, before: Answers, value: Any) -> Any:
    return value


def test_missing_answers_are_the_defaults(tmp_path: Path) -> None:
    given = answers_of_file(written(tmp_path, "mixed_precision: bf16\n"), MACHINE)
    assert (given["distributed_type"], given["use_cpu"], given["mixed_precision"]) == ("NO", True, "bf16")
    assert given == answered(suggested, MACHINE) | {"mixed_precision": "bf16"}


def test_words_that_yaml_takes_for_truths_are_read_as_they_are_meant(tmp_path: Path) -> None:
    text = "distributed_type: NO\nuse_cpu: no\nmixed_precision: no\n"
    given = answers_of_file(written(tmp_path, text), MACHINE)
    assert (given["distributed_type"], given["use_cpu"], given["mixed_precision"]) == ("NO", False, "no")


def test_answers_may_be_json_with_sections(tmp_path: Path) -> None:
    text = (
        '{"mixed_precision": "fp8", "fp8_config": {"backend": "te", "override_linear_precision": [false, true, false]}}'
    )
    given = answers_of_file(written(tmp_path, text, "answers.json"), MACHINE)
    assert given["fp8_config.backend"] == "TE"
    assert file_values(given)["fp8_config"]["override_linear_precision"] == [False, True, False]


def test_several_machines_are_written_as_the_original_has_them(tmp_path: Path) -> None:
    text = (
        "distributed_type: MULTI_CPU\nnum_machines: 2\nmachine_rank: 1\nmain_process_ip: 10.0.0.1\nsame_network: no\n"
    )
    values = file_values(answers_of_file(written(tmp_path, text), MACHINE))
    path = tmp_path / "config.yaml"
    file.save(path, values)
    given = file.load(path).given
    assert (given["num_machines"], given["machine_rank"], given["num_processes"]) == (2, 1, 2)
    assert (given["main_process_ip"], given["main_process_port"]) == ("10.0.0.1", 29500)
    assert (given["rdzv_backend"], given["same_network"], given["use_cpu"]) == ("static", False, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_proceses: 2", "unknown key num_proceses; the nearest known key is num_processes"),
        ("fp8_config:\n  bakend: AO", "unknown key fp8_config.bakend; the nearest known key is fp8_config.backend"),
        ("machine_rank: 1", "machine_rank would have no effect: it is only used if num_machines is more than 1"),
        ("use_cpu: maybe", "use_cpu: 'maybe': expected yes or no"),
        ("distributed_type: MULTI_CPU\nnum_machines: 2", "main_process_ip is missing and has no default"),
        ("parallelism_config: {}", "parallelism_config would have no effect: it is only used if distributed_type is"),
        (
            "distributed_type: MEGATRON_LM\nnum_processes: 4\nmegatron_lm_config: {megatron_lm_tp_degree: 3}",
            "megatron_lm_config.megatron_lm_tp_degree: 3: expected a divisor of 4",
        ),
        ("- 1", "expected keys and values, found list"),
    ],
)
def test_wrong_answers_are_refused_by_name(text: str, words: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InvalidArgument, match=words) as refusal:
        answers_of_file(path, MACHINE)
    assert str(path) in str(refusal.value)


def test_an_earlier_file_is_suggested_where_it_fits() -> None:
    before = {"distributed_type": "MULTI_CPU", "num_processes": 6, "num_machines": "many", "mixed_precision": "bf16"}
    given = answered(suggested, MACHINE, before)
    assert (given["num_processes"], given["num_machines"], given["mixed_precision"]) == (6, 1, "bf16")


def test_what_is_not_asked_about_stays() -> None:
    before = {
        "distributed_type": "XLA",
        "megatron_lm_config": {"megatron_lm_tp_degree": 2},
        "deepspeed_config": {"zero_stage": 2},
        "main_process_ip": "a",
    }
    given = answered(suggested, MACHINE, before)
    sections = {name: before[name] for name in ("megatron_lm_config", "deepspeed_config")}
    assert kept(given, before) == sections
    values = file_values(given, before)
    assert (values["megatron_lm_config"], values["main_process_ip"]) == ({"megatron_lm_tp_degree": 2}, None)


def test_training_through_deepspeed_is_written_as_the_original_reads_it(tmp_path: Path) -> None:
    text = (
        "distributed_type: DEEPSPEED\nnum_machines: 2\nmain_process_ip: a\ndeepspeed_config:\n  zero_stage: 3\n"
        "  gradient_clipping: 1\n  deepspeed_multinode_launcher: pdsh\n  deepspeed_hostfile: hosts\n"
    )
    values = file_values(answers_of_file(written(tmp_path, text), MACHINE))
    path = tmp_path / "config.yaml"
    file.save(path, values)
    original = ClusterConfig.from_yaml_file(path)
    assert (original.distributed_type, original.num_processes, original.use_cpu) == ("DEEPSPEED", 2, True)
    assert original.deepspeed_config == {
        "zero_stage": 3,
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero3_save_16bit_model": False,
        "zero3_init_flag": False,
        "deepspeed_multinode_launcher": "pdsh",
        "deepspeed_hostfile": "hosts",
    }
    again = file_values(answered(suggested, MACHINE, file.load(path).given), file.load(path).given)
    assert again == values


def test_the_degrees_of_megatron_are_written_as_the_original_reads_them(tmp_path: Path) -> None:
    text = "distributed_type: MEGATRON_LM\nnum_processes: 4\nmegatron_lm_config: {megatron_lm_tp_degree: 2}\n"
    values = file_values(answers_of_file(written(tmp_path, text), MACHINE))
    path = tmp_path / "config.yaml"
    file.save(path, values)
    original = ClusterConfig.from_yaml_file(path)
    assert (original.distributed_type, original.num_processes, original.use_cpu) == ("MEGATRON_LM", 4, True)
    assert original.megatron_lm_config == {
        "megatron_lm_tp_degree": 2,
        "megatron_lm_sequence_parallelism": True,
        "megatron_lm_pp_degree": 1,
        "megatron_lm_num_micro_batches": 1,
        "megatron_lm_context_parallel_size": 1,
        "megatron_lm_recompute_activations": True,
        "megatron_lm_use_distributed_optimizer": True,
        "megatron_lm_gradient_clipping": 1.0,
    }
    before = file.load(path).given
    assert file_values(answered(suggested, MACHINE, before), before) == values


def test_a_mesh_is_written_where_one_is_asked_for(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nnum_processes: 8\n"
    without = file_values(answers_of_file(written(tmp_path, text), MACHINE))
    assert without["parallelism_config"] is None
    for asked in ("yes", "{parallelism_config_tp_size: 1}"):
        values = file_values(answers_of_file(written(tmp_path, f"{text}parallelism_config: {asked}\n"), MACHINE))
        assert values["parallelism_config"] == {
            **{f"parallelism_config_{name}_size": 1 for name in ("tp", "pp", "cp", "dp_replicate")},
            "parallelism_config_dp_shard_size": 8,
        }
    path = tmp_path / "config.yaml"
    file.save(path, values)
    before = file.load(path).given
    assert ClusterConfig.from_yaml_file(path).parallelism_config == values["parallelism_config"]
    assert file_values(answered(suggested, MACHINE, before), before) == values
    plain = {**before, "distributed_type": "NO"}
    assert file_values(answered(suggested, MACHINE, plain), plain)["parallelism_config"] is None


def test_a_file_of_deepspeed_leaves_no_other_answers(tmp_path: Path) -> None:
    before = {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "deepspeed_config": {"zero_stage": 3}}
    text = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"
    values = file_values(answers_of_file(written(tmp_path, text), MACHINE), before)
    assert values["deepspeed_config"] == {"deepspeed_config_file": "ds.json", "zero3_init_flag": False}
    assert values["mixed_precision"] is None


def test_models_in_shards_are_asked_about_and_written_for_the_version_that_works(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nfsdp_config: {fsdp_state_dict_type: FULL_STATE_DICT}\n"
    before = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1, "fsdp_ignored_modules": "head"}}
    values = file_values(answers_of_file(written(tmp_path, text), MACHINE), before)
    assert (values["distributed_type"], values["use_cpu"]) == ("FSDP", True)
    assert values["fsdp_config"] == {
        "fsdp_ignored_modules": "head",
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_activation_checkpointing": False,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": False,
    }


def test_a_section_that_is_asked_about_is_new() -> None:
    before = {"fp8_config": {"backend": "MSAMP", "opt_level": "O1"}, "mixed_precision": "fp8"}
    assert file_values(answered(suggested, MACHINE, before), before)["fp8_config"] == before["fp8_config"]
    other = answered(suggested, MACHINE, before) | {"fp8_config.backend": "AO"}
    del other["fp8_config.opt_level"]
    assert file_values(other, before)["fp8_config"] == {"backend": "AO"}


def test_not_compiling_is_not_written() -> None:
    given = answered(suggested, MACHINE)
    assert given["dynamo_config.dynamo_backend"] == "NO"
    assert file_values(given)["dynamo_config"] is None
    compiled = file_values(
        {**given, "dynamo_config.dynamo_backend": "INDUCTOR", "dynamo_config.dynamo_mode": "default"}
    )
    assert compiled["dynamo_config"] == {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default"}


def test_what_does_not_work_yet_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = (Group("Far", "teleporting", (Flag("far_away", ""),)), Group("Near", "walking", ()))
    monkeypatch.setattr(answers, "GROUPS", groups)
    assert not_asked() == "teleporting, walking"


def test_every_value_that_is_written_passes_the_checks_of_the_file(tmp_path: Path) -> None:
    def any_answer(question: Question, before: Answers, value: Any) -> Any:
        return {
            "distributed_type": "MULTI_GPU",
            "num_machines": 2,
            "main_process_ip": "a",
            "mixed_precision": "fp8",
        }.get(question.key, value)

    path = tmp_path / "config.yaml"
    file.save(path, file_values(answered(any_answer, Machine(gpus=4))))
    assert file.load(path).given["num_processes"] == 8
    assert len(QUESTIONS) > len(file.load(path).given["fp8_config"]) > 0
