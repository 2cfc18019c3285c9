"""The table of questions: what each accepts, suggests, and when it is asked."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate_cpp.config import file
from accelerate_cpp.config.questions import QUESTIONS, Machine, Question

BY_KEY = {question.key: question for question in QUESTIONS}
MESH = "parallelism_config.parallelism_config"
MEGATRON = "megatron_lm_config.megatron_lm"
SEVERAL = {"distributed_type": "MULTI_GPU", "num_machines": 2}


def asked(answers: dict[str, Any]) -> set[str]:
    return {question.key for question in QUESTIONS if question.when.holds({"distributed_type": "NO"} | answers)}


def test_every_key_is_one_of_the_file() -> None:
    assert {key.partition(".")[0] for key in BY_KEY} <= file.KEYS.keys()
    assert len(BY_KEY) == len(QUESTIONS)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.key)
@pytest.mark.parametrize("gpus", [0, 1, 8])
@pytest.mark.parametrize("kind", ["MULTI_CPU", "MULTI_GPU"])
def test_what_is_suggested_is_accepted(question: Question, gpus: int, kind: str) -> None:
    answers = {"distributed_type": kind, "num_machines": 3}
    value = question.default(answers, Machine(gpus))
    without_default = ("main_process_ip", "deepspeed_config.deepspeed_hostfile", f"{MESH}_sp_seq_length")
    if question.key in without_default:
        assert value is None
        return
    typed = ",".join("yes" if flag else "no" for flag in value) if isinstance(value, list) else str(value)
    assert question.read(typed, answers) == value


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("distributed_type", " multi_gpu ", "MULTI_GPU"),
        ("use_cpu", "Y", True),
        ("machine_rank", "1", 1),
        ("num_processes", "4", 4),
        ("gpu_ids", "0, 2", "0,2"),
        ("main_process_ip", "node-0", "node-0"),
        ("fp8_config.override_linear_precision", "(no, no, yes)", [False, False, True]),
        ("deepspeed_config.zero_stage", "3", 3),
        ("deepspeed_config.gradient_clipping", "0.5", 0.5),
        ("deepspeed_config.gradient_clipping", "", ""),
        (f"{MEGATRON}_gradient_clipping", "0", 0.0),
    ],
)
def test_an_answer_becomes_a_value(key: str, text: str, value: Any) -> None:
    assert BY_KEY[key].read(text, SEVERAL) == value


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("distributed_type", "XLA", "expected one of NO, MULTI_CPU, MULTI_GPU, FSDP, DEEPSPEED, MEGATRON_LM"),
        ("use_cpu", "maybe", "expected yes or no"),
        ("num_machines", "0", "expected an integer of at least 1"),
        ("num_machines", "two", "expected an integer of at least 1"),
        ("machine_rank", "2", "expected an integer from 0 to 1"),
        ("main_process_ip", "a b", "expected an address"),
        ("main_process_port", "65536", "expected an integer from 1 to 65535"),
        ("num_processes", "1", "expected an integer of at least 2"),
        ("num_processes", "5", "expected a multiple of 2"),
        ("gpu_ids", "0,,1", "expected all, or ids"),
        ("gpu_ids", "all,1", "expected all, or ids"),
        ("fp8_config.override_linear_precision", "yes", "expected three"),
        ("deepspeed_config.zero_stage", "4", "expected one of 0, 1, 2, 3"),
        ("deepspeed_config.gradient_clipping", "-1", "expected a number of at least 0, or nothing"),
        ("deepspeed_config.gradient_clipping", "much", "expected a number of at least 0, or nothing"),
        ("deepspeed_config.deepspeed_hostfile", "", "expected a text that is not empty"),
        (f"{MEGATRON}_gradient_clipping", "", "expected a number of at least 0$"),
        (f"{MEGATRON}_tp_degree", "0", "expected an integer of at least 1"),
    ],
)
def test_a_wrong_answer_is_told_what_is_expected(key: str, text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        BY_KEY[key].read(text, SEVERAL)


def test_defaults_use_all_gpus_of_all_machines() -> None:
    assert BY_KEY["distributed_type"].default({}, Machine(8)) == "MULTI_GPU"
    assert BY_KEY["num_processes"].default(SEVERAL, Machine(8)) == 16
    assert BY_KEY["num_processes"].default({"distributed_type": "MULTI_CPU"}, Machine(8)) == 2
    assert BY_KEY["use_cpu"].default({}, Machine(0)) is True


def test_machines_are_asked_about_only_where_there_are_several() -> None:
    of_machines = {"machine_rank", "main_process_ip", "main_process_port", "same_network"}
    assert not asked({"distributed_type": "MULTI_CPU", "num_machines": 1}) & of_machines
    assert asked({"distributed_type": "MULTI_CPU", "num_machines": 2}) >= of_machines
    assert "num_machines" not in asked({})


def test_how_machines_meet_is_asked_only_where_they_are_apart() -> None:
    assert "rdzv_backend" not in asked({**SEVERAL, "same_network": True})
    assert "rdzv_backend" in asked({**SEVERAL, "same_network": False})


def test_gpus_are_asked_about_only_where_they_are_used() -> None:
    assert "gpu_ids" in asked({"use_cpu": False})
    assert "gpu_ids" not in asked({"use_cpu": True})
    assert "gpu_ids" not in asked({"distributed_type": "MULTI_CPU"})


@pytest.mark.parametrize(("backend", "key"), [("AO", "pad_inner_dim"), ("TE", "margin"), ("MSAMP", "opt_level")])
def test_the_recipe_of_fp8_is_that_of_its_library(backend: str, key: str) -> None:
    own = {name for name in asked({"mixed_precision": "fp8", "fp8_config.backend": backend}) if "fp8_config" in name}
    assert f"fp8_config.{key}" in own
    assert not [name for name in asked({"mixed_precision": "bf16"}) if "fp8_config" in name]


def test_how_to_compile_is_asked_only_where_models_are_compiled() -> None:
    assert "dynamo_config.dynamo_backend" in asked({})
    assert "dynamo_config.dynamo_mode" not in asked({"dynamo_config.dynamo_backend": "NO"})
    assert "dynamo_config.dynamo_mode" in asked({"dynamo_config.dynamo_backend": "INDUCTOR"})


def asked_of_deepspeed(machines: int = 1, **answers: Any) -> set[str]:
    section = {f"deepspeed_config.{name}": value for name, value in answers.items()}
    found = asked({"distributed_type": "DEEPSPEED", "num_machines": machines} | section)
    return {name.removeprefix("deepspeed_config.") for name in found if name.startswith("deepspeed_config.")}


def test_of_deepspeed_only_what_has_an_effect_is_asked() -> None:
    always = {"deepspeed_config_file", "deepspeed_moe_layer_cls_names"}
    without_file = always | {"zero_stage", "gradient_accumulation_steps", "gradient_clipping"}
    assert asked_of_deepspeed(deepspeed_config_file="ds.json") == always | {"zero3_init_flag"}
    assert asked_of_deepspeed(zero_stage=1) == without_file
    assert asked_of_deepspeed(zero_stage=2) == without_file | {"offload_optimizer_device"}
    assert asked_of_deepspeed(zero_stage=3, offload_optimizer_device="nvme", offload_param_device="cpu") == (
        without_file
        | {"offload_optimizer_device", "offload_optimizer_nvme_path", "offload_param_device"}
        | {"zero3_init_flag", "zero3_save_16bit_model"}
    )
    assert "offload_param_nvme_path" in asked_of_deepspeed(zero_stage=3, offload_param_device="nvme")
    assert not [name for name in asked({"distributed_type": "FSDP"}) if "deepspeed" in name]


def test_the_machines_of_deepspeeds_launcher_are_asked_about_only_where_it_starts() -> None:
    of_launcher = {"deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter"}
    assert "deepspeed_multinode_launcher" not in asked_of_deepspeed(machines=1)
    assert "deepspeed_multinode_launcher" in asked_of_deepspeed(machines=2)
    assert not asked_of_deepspeed(machines=2, deepspeed_multinode_launcher="standard") & of_launcher
    assert asked_of_deepspeed(machines=2, deepspeed_multinode_launcher="pdsh") >= of_launcher
    excluding = asked_of_deepspeed(machines=2, deepspeed_multinode_launcher="pdsh", deepspeed_exclusion_filter="a:0")
    assert excluding & of_launcher == of_launcher - {"deepspeed_inclusion_filter"}


def test_the_precision_is_asked_where_no_file_of_deepspeed_has_it() -> None:
    kind = {"distributed_type": "DEEPSPEED"}
    assert "mixed_precision" in asked(kind | {"deepspeed_config.deepspeed_config_file": ""})
    assert "mixed_precision" not in asked(kind | {"deepspeed_config.deepspeed_config_file": "ds.json"})


def asked_of(prefix: str, kind: str, **answers: Any) -> set[str]:
    given = {f"{prefix}_{name}": value for name, value in answers.items()} | {"parallelism_config": True}
    found = asked({"distributed_type": kind, "num_processes": 8} | given)
    return {name.removeprefix(f"{prefix}_") for name in found if name.startswith(f"{prefix}_")}


def test_of_megatron_only_what_has_an_effect_is_asked() -> None:
    always = {"tp_degree", "pp_degree", "recompute_activations", "use_distributed_optimizer", "gradient_clipping"}
    always |= {"num_micro_batches"}  # without stages, they accumulate
    assert asked_of(MEGATRON, "MEGATRON_LM", tp_degree=1, pp_degree=1) == always | {"context_parallel_size"}
    split = asked_of(MEGATRON, "MEGATRON_LM", tp_degree=2, pp_degree=2)
    assert split == always | {"sequence_parallelism"}
    assert asked_of(MEGATRON, "FSDP") == set()
    defaults = {name: BY_KEY[f"{MEGATRON}_{name}"].default({f"{MEGATRON}_pp_degree": 4}, Machine(0)) for name in split}
    assert defaults == {
        **dict.fromkeys(("sequence_parallelism", "recompute_activations", "use_distributed_optimizer"), True),
        **dict.fromkeys(("tp_degree", "pp_degree"), 1),
        "num_micro_batches": 8,
        "gradient_clipping": 1.0,
    }
    assert BY_KEY[f"{MEGATRON}_num_micro_batches"].default({f"{MEGATRON}_pp_degree": 1}, Machine(0)) == 1


def test_a_mesh_is_asked_about_only_where_there_is_to_be_one() -> None:
    assert not [name for name in asked({"parallelism_config": False}) if name.startswith(MESH)]
    kinds = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")
    with_mesh = {kind for kind in kinds if "parallelism_config" in asked({"distributed_type": kind})}
    assert with_mesh == {"MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED"}


def test_of_a_mesh_only_what_the_kind_of_training_has_is_asked() -> None:
    plain = {"tp_size", "pp_size", "cp_size", "dp_replicate_size"}
    assert asked_of(MESH, "MULTI_CPU") == plain
    assert asked_of(MESH, "FSDP") == plain | {"dp_shard_size"}
    assert asked_of(MESH, "FSDP", cp_size=2) == plain | {"dp_shard_size", "cp_comm_strategy"}
    assert asked_of(MESH, "MULTI_CPU", pp_size=2) == plain - {"cp_size"} | {"pp_schedule", "pp_micro_batches"}
    assert asked_of(MESH, "DEEPSPEED") == {"sp_size"}
    lengths = {"sp_size", "sp_attn_implementation", "sp_seq_length_is_variable"}
    assert asked_of(MESH, "DEEPSPEED", sp_size=2) == lengths
    fixed = asked_of(MESH, "DEEPSPEED", sp_size=2, sp_seq_length_is_variable=False)
    assert fixed == lengths | {"sp_seq_length"}


def test_sizes_multiply_to_the_number_of_processes() -> None:
    answers = {"distributed_type": "FSDP", "num_processes": 8, f"{MESH}_tp_size": 2}
    assert BY_KEY[f"{MESH}_cp_size"].read("4", answers) == 4
    with pytest.raises(ValueError, match="expected a divisor of 4"):
        BY_KEY[f"{MESH}_cp_size"].read("8", answers)
    answers |= {f"{MESH}_dp_replicate_size": 2}
    assert BY_KEY[f"{MESH}_dp_shard_size"].default(answers, Machine(0)) == 2
    with pytest.raises(ValueError, match="expected 2, so that"):
        BY_KEY[f"{MESH}_dp_shard_size"].read("1", answers)
    plain = {"distributed_type": "MULTI_CPU", "num_processes": 8, f"{MESH}_pp_size": 2}
    assert BY_KEY[f"{MESH}_dp_replicate_size"].default(plain, Machine(0)) == 4
    with pytest.raises(ValueError, match="expected 4, so that"):
        BY_KEY[f"{MESH}_dp_replicate_size"].read("2", plain)
    with pytest.raises(ValueError, match="expected a divisor of 3"):
        BY_KEY[f"{MEGATRON}_pp_degree"].read("2", {"num_processes": 6, f"{MEGATRON}_tp_degree": 2})
