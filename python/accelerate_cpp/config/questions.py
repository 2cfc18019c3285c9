"""The questions of ``accelerate-cpp config``: one table, a row each."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from accelerate_cpp.config.env_table import parse_flag
from accelerate_cpp.config.fp8 import LIBRARIES, is_installed
from accelerate_cpp.config.sharding_flags import PIPELINE_SCHEDULES, THIS_LAUNCHER

Answers = Mapping[str, Any]


@dataclass(frozen=True)
class Machine:
    """What defaults depend on."""

    gpus: int


@dataclass(frozen=True)
class Condition:
    """When a question is asked, and the same in words."""

    holds: Callable[[Answers], bool]
    words: str


@dataclass(frozen=True)
class Question:
    """One row of the table.

    Attributes:
        key: the key of the file that the answer becomes; ``section.key`` within a section.
        text: what is asked.
        parse: an answer as text, and the answers before it, to a value; ``ValueError`` says what is expected.
        default: the value where nothing is answered; ``None`` if it must be.
        choices: the possible answers and their meaning, for questions that have a menu; ``parse`` gets one of them.
    """

    key: str
    text: str
    parse: Callable[[str, Answers], Any]
    default: Callable[[Answers, Machine], Any]
    when: Condition
    choices: Mapping[str, str]

    def read(self, text: str, answers: Answers) -> Any:
        """The value that ``text`` stands for; ``ValueError`` says what is expected instead."""
        text = text.strip()
        if self.choices:
            chosen = next((choice for choice in self.choices if choice.casefold() == text.casefold()), None)
            if chosen is None:
                raise ValueError(f"expected one of {', '.join(self.choices)}")
            text = chosen
        return self.parse(text, answers)


_ALWAYS = Condition(lambda answers: True, "always")


def _same(text: str, answers: Answers) -> str:
    return text


def _yes_or_no(text: str, answers: Answers) -> bool:
    try:
        return parse_flag(text)
    except ValueError:
        raise ValueError("expected yes or no") from None


def _integer(text: str, minimum: int, maximum: int | None = None) -> int:
    number = int(text) if re.fullmatch(r"[+-]?[0-9]+", text) else minimum - 1
    if number < minimum or (maximum is not None and number > maximum):
        bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise ValueError(f"expected an integer {bounds}")
    return number


def _number_of_processes(text: str, answers: Answers) -> int:
    machines = answers.get("num_machines", 1)
    number = _integer(text, _fewest_processes(answers))
    if number % machines:
        raise ValueError(f"expected a multiple of {machines}, as each machine starts the same number")
    return number


def _fewest_processes(answers: Answers) -> int:
    machines = int(answers.get("num_machines", 1))
    return max(2, machines) if answers["distributed_type"] == "MULTI_GPU" else machines


def _usual_processes(answers: Answers, machine: Machine) -> int:
    on_gpus = answers["distributed_type"] == "MULTI_GPU" or answers.get("use_cpu") is False
    here = machine.gpus if on_gpus else 0
    machines = int(answers.get("num_machines", 1))
    return max(2, machines) if here == 0 else max(_fewest_processes(answers), here * machines)


def _gpu_ids(text: str, answers: Answers) -> str:
    entries = [entry.strip() for entry in text.split(",")]
    if not all(re.fullmatch(r"[\w-]+", entry) for entry in entries) or ("all" in entries and len(entries) > 1):
        raise ValueError("expected all, or ids with commas between, such as 0,1")
    return ",".join(entries)


def _address(text: str, answers: Answers) -> str:
    if not text or re.search(r"\s", text):
        raise ValueError("expected an address or a host name")
    return text


def _not_empty(text: str, answers: Answers) -> str:
    if not text:
        raise ValueError("expected a text that is not empty")
    return text


def _norm(text: str, answers: Answers) -> float:
    try:
        norm = float(text)
    except ValueError:
        norm = math.nan
    if not (math.isfinite(norm) and norm >= 0):
        raise ValueError("expected a number of at least 0")
    return norm


def _norm_or_nothing(text: str, answers: Answers) -> float | str:
    try:
        return _norm(text, answers) if text else ""
    except ValueError as error:
        raise ValueError(f"{error}, or nothing") from None


_MESH = "parallelism_config"
_OF_MESH = {name: f"{_MESH}.{_MESH}_{name}" for name in ("tp_size", "pp_size", "cp_size", "sp_size")}
_COPIES, _SHARDS = f"{_MESH}.{_MESH}_dp_replicate_size", f"{_MESH}.{_MESH}_dp_shard_size"
_MEGATRON = "megatron_lm_config.megatron_lm"
_SHARES = (
    *(*_OF_MESH.values(), _COPIES, _SHARDS),
    *(f"{_MEGATRON}_{name}" for name in ("tp_degree", "pp_degree", "context_parallel_size")),
)


def _processes_left(answers: Answers) -> int:
    """The processes of each group that the answers so far do not tell apart."""
    return int(answers.get("num_processes", 1)) // math.prod(int(answers.get(key, 1)) for key in _SHARES)


def _share(text: str, answers: Answers) -> int:
    """A number of processes that share something, so many times over that all processes do."""
    number, left = _integer(text, 1), _processes_left(answers)
    if left % number:
        raise ValueError(f"expected a divisor of {left}, so that the sizes multiply to the number of processes")
    return number


def _rest(text: str, answers: Answers) -> int:
    """The last of these numbers, which the others leave no choice."""
    left = _processes_left(answers)
    if _integer(text, 1) != left:
        raise ValueError(f"expected {left}, so that the sizes multiply to the number of processes")
    return left


def _three_flags(text: str, answers: Answers) -> list[bool]:
    parts = [part.strip() for part in text.strip("()[]").split(",")]
    if len(parts) != 3:
        raise ValueError("expected three answers, each yes or no, such as no,no,yes")
    return [_yes_or_no(part, answers) for part in parts]


def _is(**wanted: Any) -> Condition:
    words = " and ".join(f"{name} is {value}" for name, value in wanted.items())
    return Condition(lambda answers: all(answers.get(name) == value for name, value in wanted.items()), words)


_SEVERAL_PROCESSES = Condition(
    lambda answers: answers["distributed_type"] != "NO",
    "distributed_type is MULTI_CPU, MULTI_GPU, FSDP, DEEPSPEED or MEGATRON_LM",
)
_CPU_OR_GPUS = Condition(
    lambda answers: answers["distributed_type"] in ("NO", "FSDP", "DEEPSPEED", "MEGATRON_LM"),
    "distributed_type is NO, FSDP, DEEPSPEED or MEGATRON_LM",
)
_SEVERAL_MACHINES = Condition(lambda answers: answers.get("num_machines", 1) > 1, "num_machines is more than 1")
_DISTANT_MACHINES = Condition(
    lambda answers: answers.get("same_network") is False, "there are several machines and same_network is no"
)
_ON_GPUS = Condition(
    lambda answers: answers["distributed_type"] == "MULTI_GPU" or answers.get("use_cpu") is False,
    "distributed_type is MULTI_GPU or use_cpu is no",
)
_COMPILES = Condition(
    lambda answers: answers.get("dynamo_config.dynamo_backend", "NO") != "NO",
    "dynamo_config.dynamo_backend is not NO",
)


def _wraps(policy: str) -> Condition:
    return Condition(
        lambda answers: answers.get("fsdp_config.fsdp_auto_wrap_policy") == policy,
        f"distributed_type is FSDP and fsdp_config.fsdp_auto_wrap_policy is {policy}",
    )


def _deepspeed(words: str, holds: Callable[[Callable[[str], Any]], bool]) -> Condition:
    """``holds`` gets a function from keys of the section to their answers; what was not asked is ``""``."""

    def applies(answers: Answers) -> bool:
        if answers["distributed_type"] != "DEEPSPEED":
            return False
        return holds(lambda name: answers.get(f"deepspeed_config.{name}", ""))

    return Condition(applies, f"distributed_type is DEEPSPEED and {words}")


_NO_FILE_OF_DEEPSPEED = _deepspeed(
    "deepspeed_config.deepspeed_config_file is left open", lambda said: said("deepspeed_config_file") == ""
)
_STAGES_THAT_OFFLOAD = _deepspeed("deepspeed_config.zero_stage is 2 or 3", lambda said: said("zero_stage") in (2, 3))
_STAGE_3 = _deepspeed("deepspeed_config.zero_stage is 3", lambda said: said("zero_stage") == 3)
_MAY_BE_STAGE_3 = _deepspeed(
    "deepspeed_config.zero_stage is 3, or deepspeed_config.deepspeed_config_file is given",
    lambda said: said("zero_stage") == 3 or said("deepspeed_config_file") != "",
)
_DEEPSPEED_ON_MACHINES = Condition(
    lambda answers: answers["distributed_type"] == "DEEPSPEED" and answers.get("num_machines", 1) > 1,
    "distributed_type is DEEPSPEED and num_machines is more than 1",
)
_ITS_OWN_LAUNCHER = _deepspeed(
    f"deepspeed_config.deepspeed_multinode_launcher is not {THIS_LAUNCHER}",
    lambda said: said("deepspeed_multinode_launcher") not in ("", THIS_LAUNCHER),
)
_NO_EXCLUSION = _deepspeed(
    f"deepspeed_config.deepspeed_multinode_launcher is not {THIS_LAUNCHER}, and "
    "deepspeed_config.deepspeed_exclusion_filter is left open",
    lambda said: (
        said("deepspeed_multinode_launcher") not in ("", THIS_LAUNCHER) and said("deepspeed_exclusion_filter") == ""
    ),
)
_PRECISION_IS_OURS = Condition(
    lambda answers: not answers.get("deepspeed_config.deepspeed_config_file"),
    "no deepspeed_config.deepspeed_config_file is given, which has the precision in it",
)


_MAY_HAVE_MESH = Condition(
    lambda answers: answers["distributed_type"] in ("MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED"),
    "distributed_type is MULTI_CPU, MULTI_GPU, FSDP or DEEPSPEED",
)


def _on_mesh(words: str, holds: Callable[[Answers], bool]) -> Condition:
    return Condition(lambda answers: answers.get(_MESH) is True and holds(answers), f"{_MESH} is yes and {words}")


def _shares(name: str) -> Condition:
    """``name``, a size of the mesh, is more than 1."""
    key = _OF_MESH[name]
    return _on_mesh(f"{key} is more than 1", lambda answers: answers.get(key, 1) > 1)


_BY_TORCH = _on_mesh("distributed_type is not DEEPSPEED", lambda answers: answers["distributed_type"] != "DEEPSPEED")
_BY_DEEPSPEED = _on_mesh("distributed_type is DEEPSPEED", lambda answers: answers["distributed_type"] == "DEEPSPEED")
_WITHOUT_STAGES = _on_mesh(
    f"{_OF_MESH['pp_size']} is 1, and distributed_type is not DEEPSPEED",
    lambda answers: answers["distributed_type"] != "DEEPSPEED" and answers.get(_OF_MESH["pp_size"], 1) == 1,
)
_MESH_OF_SHARDS = _on_mesh("distributed_type is FSDP", lambda answers: answers["distributed_type"] == "FSDP")
_LENGTH_IS_FIXED = _on_mesh(
    f"{_MESH}.{_MESH}_sp_seq_length_is_variable is no",
    lambda answers: answers.get(f"{_MESH}.{_MESH}_sp_seq_length_is_variable") is False,
)


def _megatron(name: str, is_split: bool) -> Condition:
    """``name``, a degree of Megatron-LM, is more than 1, or is not."""
    key = f"{_MEGATRON}_{name}"
    return Condition(
        lambda answers: answers["distributed_type"] == "MEGATRON_LM" and (answers.get(key, 1) > 1) is is_split,
        f"distributed_type is MEGATRON_LM and {key} is {'more than ' if is_split else ''}1",
    )


def _offloads(what: str) -> Condition:
    key = f"offload_{what}_device"
    return _deepspeed(f"deepspeed_config.{key} is nvme", lambda said: said(key) == "nvme")


def _fp8(backend: str) -> Condition:
    return Condition(
        lambda answers: answers.get("fp8_config.backend") == backend,
        f"mixed_precision is fp8 and fp8_config.backend is {backend}",
    )


def _choice(key: str, text: str, default: str, when: Condition = _ALWAYS, **choices: str) -> Question:
    return Question(key, text, _same, lambda answers, machine: default, when, choices)


def _flag(key: str, text: str, default: bool = False, when: Condition = _ALWAYS) -> Question:
    return Question(key, text, _yes_or_no, lambda answers, machine: default, when, {})


def _number(key: str, text: str, default: int, minimum: int, when: Condition) -> Question:
    return Question(
        key, text, lambda text, answers: _integer(text, minimum), lambda answers, machine: default, when, {}
    )


def _processes(key: str, text: str, when: Condition) -> Question:
    """A question for a number of processes that share something."""
    return Question(key, text, _share, lambda answers, machine: 1, when, {})


def _words(key: str, text: str, when: Condition, default: str | None = "") -> Question:
    """A question that a text answers, which may be left open if it is the default."""
    return Question(key, text, _same if default == "" else _not_empty, lambda answers, machine: default, when, {})


QUESTIONS: tuple[Question, ...] = (
    Question(
        "distributed_type",
        "How is the training spread?",
        _same,
        lambda answers, machine: "MULTI_GPU" if machine.gpus > 1 else "NO",
        _ALWAYS,
        {
            "NO": "one process",
            "MULTI_CPU": "several processes on CPUs",
            "MULTI_GPU": "several processes, each with an NVIDIA GPU of its own",
            "FSDP": "several processes that share out parameters, gradients and optimizer states",
            "DEEPSPEED": "several processes that train through DeepSpeed",
            "MEGATRON_LM": "several processes that split models, by the settings of Megatron-LM",
        },
    ),
    Question(
        "use_cpu",
        "Train on the CPU, even when a GPU is present?",
        _yes_or_no,
        lambda answers, machine: machine.gpus == 0,
        _CPU_OR_GPUS,
        {},
    ),
    _number("num_machines", "On how many machines?", 1, 1, _SEVERAL_PROCESSES),
    Question(
        "machine_rank",
        "Which number has this machine, from 0? Machine 0 hosts the main process",
        lambda text, answers: _integer(text, 0, answers["num_machines"] - 1),
        lambda answers, machine: 0,
        _SEVERAL_MACHINES,
        {},
    ),
    Question(
        "main_process_ip",
        "Address or host name of machine 0, as the others reach it",
        _address,
        lambda answers, machine: None,
        _SEVERAL_MACHINES,
        {},
    ),
    Question(
        "main_process_port",
        "TCP port of machine 0 that the others may reach",
        lambda text, answers: _integer(text, 1, 65535),
        lambda answers, machine: 29500,
        _SEVERAL_MACHINES,
        {},
    ),
    _flag("same_network", "Are all machines in one local network?", True, _SEVERAL_MACHINES),
    _choice(
        "rdzv_backend",
        "How do the machines meet?",
        "static",
        _DISTANT_MACHINES,
        static="each knows its number",
        c10d="numbers are given when they meet",
    ),
    Question(
        "num_processes",
        "How many processes, on all machines together?",
        _number_of_processes,
        _usual_processes,
        _SEVERAL_PROCESSES,
        {},
    ),
    Question(
        "gpu_ids",
        "Which GPUs of this machine, by their ids with commas between?",
        _gpu_ids,
        lambda answers, machine: "all",
        _ON_GPUS,
        {},
    ),
    _choice(
        "fsdp_config.fsdp_auto_wrap_policy",
        "Which modules are gathered one by one?",
        "TRANSFORMER_BASED_WRAP",
        _is(distributed_type="FSDP"),
        TRANSFORMER_BASED_WRAP="the layers of some classes",
        SIZE_BASED_WRAP="modules with many parameters",
        NO_WRAP="none: the model as a whole is gathered",
    ),
    Question(
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
        "Names of these classes, with commas between; nothing for those that a model of transformers names",
        _same,
        lambda answers, machine: "",
        _wraps("TRANSFORMER_BASED_WRAP"),
        {},
    ),
    _number(
        "fsdp_config.fsdp_min_num_params",
        "How many parameters at least?",
        100_000_000,
        1,
        _wraps("SIZE_BASED_WRAP"),
    ),
    _flag(
        "fsdp_config.fsdp_reshard_after_forward",
        "Free what was gathered after the forward pass, and gather it again for the backward pass?",
        True,
        _is(distributed_type="FSDP"),
    ),
    _choice(
        "fsdp_config.fsdp_state_dict_type",
        "How are checkpoints written?",
        "SHARDED_STATE_DICT",
        _is(distributed_type="FSDP"),
        SHARDED_STATE_DICT="each process writes its part",
        FULL_STATE_DICT="the first process writes all",
    ),
    _flag(
        "fsdp_config.fsdp_activation_checkpointing",
        "Compute activations again in the backward pass, which saves memory?",
        when=_is(distributed_type="FSDP"),
    ),
    _flag(
        "fsdp_config.fsdp_cpu_ram_efficient_loading",
        "Let transformers load weights on the first process only?",
        True,
        _is(distributed_type="FSDP"),
    ),
    _flag(
        "fsdp_config.fsdp_offload_params",
        "Keep parameters and gradients in the memory of the host?",
        when=_is(distributed_type="FSDP"),
    ),
    _words(
        "deepspeed_config.deepspeed_config_file",
        "Path of a configuration of DeepSpeed, in JSON; nothing to answer questions about it",
        _is(distributed_type="DEEPSPEED"),
    ),
    Question(
        "deepspeed_config.zero_stage",
        "What do the processes share out?",
        lambda text, answers: int(text),
        lambda answers, machine: 2,
        _NO_FILE_OF_DEEPSPEED,
        {
            "0": "nothing",
            "1": "optimizer states",
            "2": "gradients, too",
            "3": "parameters, too",
        },
    ),
    _choice(
        "deepspeed_config.offload_optimizer_device",
        "Where are optimizer states kept?",
        "none",
        _STAGES_THAT_OFFLOAD,
        none="where the model is",
        cpu="in the memory of the host",
        nvme="on disks, in stage 3",
    ),
    _words(
        "deepspeed_config.offload_optimizer_nvme_path",
        "In which folder on these disks?",
        _offloads("optimizer"),
        "/nvme",
    ),
    _choice(
        "deepspeed_config.offload_param_device",
        "Where are parameters kept?",
        "none",
        _STAGE_3,
        none="where the model is computed",
        cpu="in the memory of the host",
        nvme="on disks",
    ),
    _words("deepspeed_config.offload_param_nvme_path", "In which folder on these disks?", _offloads("param"), "/nvme"),
    _number(
        "deepspeed_config.gradient_accumulation_steps",
        "How many micro-batches make an optimizer step?",
        1,
        1,
        _NO_FILE_OF_DEEPSPEED,
    ),
    Question(
        "deepspeed_config.gradient_clipping",
        "Which norm may gradients have at most? Nothing if the program clips, or nobody does",
        _norm_or_nothing,
        lambda answers, machine: "",
        _NO_FILE_OF_DEEPSPEED,
        {},
    ),
    _flag("deepspeed_config.zero3_save_16bit_model", "Gather 16-bit weights to save whole models?", when=_STAGE_3),
    _flag(
        "deepspeed_config.zero3_init_flag",
        "Share out parameters while transformers builds a model, which may be too large for one process?",
        when=_MAY_BE_STAGE_3,
    ),
    _words(
        "deepspeed_config.deepspeed_moe_layer_cls_names",
        "Classes of layers with experts, with commas between; nothing if there are none",
        _is(distributed_type="DEEPSPEED"),
    ),
    Question(
        "deepspeed_config.deepspeed_multinode_launcher",
        "Who starts the processes on the machines?",
        _same,
        lambda answers, machine: THIS_LAUNCHER,
        _DEEPSPEED_ON_MACHINES,
        {
            THIS_LAUNCHER: "accelerate-cpp launch, on each machine",
            "pdsh": "DeepSpeed, from this machine through pdsh",
            "openmpi": "DeepSpeed, through Open MPI",
            "mvapich": "DeepSpeed, through MVAPICH",
            "mpich": "DeepSpeed, through MPICH",
            "impi": "DeepSpeed, through Intel MPI",
            "nossh": "DeepSpeed, on each machine",
            "slurm": "DeepSpeed, through Slurm",
        },
    ),
    _words(
        "deepspeed_config.deepspeed_hostfile",
        "Path of the file with the machines, in lines such as gpu1 slots=8",
        _ITS_OWN_LAUNCHER,
        None,
    ),
    _words(
        "deepspeed_config.deepspeed_exclusion_filter",
        "Which of them to leave out, such as gpu1:0,2@gpu2? Nothing for none",
        _ITS_OWN_LAUNCHER,
    ),
    _words(
        "deepspeed_config.deepspeed_inclusion_filter",
        "Or which of them to use, such as gpu1:0,2@gpu2? Nothing for all",
        _NO_EXCLUSION,
    ),
    _processes(
        f"{_MEGATRON}_tp_degree", "Over how many processes are layers split?", _is(distributed_type="MEGATRON_LM")
    ),
    _flag(
        f"{_MEGATRON}_sequence_parallelism",
        "Split what is between these layers along the sequence?",
        True,
        _megatron("tp_degree", True),
    ),
    _processes(
        f"{_MEGATRON}_pp_degree",
        "Over how many processes are models cut into stages?",
        _is(distributed_type="MEGATRON_LM"),
    ),
    Question(
        f"{_MEGATRON}_num_micro_batches",
        "Of how many micro-batches does a step consist?",
        lambda text, answers: _integer(text, 1),
        lambda answers, machine: 2 * stages if (stages := int(answers.get(f"{_MEGATRON}_pp_degree", 1))) > 1 else 1,
        _is(distributed_type="MEGATRON_LM"),
        {},
    ),
    _processes(
        f"{_MEGATRON}_context_parallel_size",
        "Over how many processes are sequences split?",
        _megatron("pp_degree", False),
    ),
    _flag(
        f"{_MEGATRON}_recompute_activations",
        "Compute activations again in the backward pass, which saves memory?",
        True,
        _is(distributed_type="MEGATRON_LM"),
    ),
    _flag(
        f"{_MEGATRON}_use_distributed_optimizer",
        "Share out optimizer states over the copies of the model?",
        True,
        _is(distributed_type="MEGATRON_LM"),
    ),
    Question(
        f"{_MEGATRON}_gradient_clipping",
        "Which norm may gradients have at most? 0 for any",
        _norm,
        lambda answers, machine: 1.0,
        _is(distributed_type="MEGATRON_LM"),
        {},
    ),
    _flag(_MESH, "Split models or sequences over processes, too?", when=_MAY_HAVE_MESH),
    _processes(_OF_MESH["tp_size"], "Over how many processes are layers split?", _BY_TORCH),
    _processes(_OF_MESH["pp_size"], "Over how many processes are models cut into stages?", _BY_TORCH),
    Question(
        f"{_MESH}.{_MESH}_pp_schedule",
        "In which order do stages compute?",
        _same,
        lambda answers, machine: "1f1b",
        _shares("pp_size"),
        dict(
            zip(
                PIPELINE_SCHEDULES,
                (
                    "all forward passes, then all backward passes",
                    "a backward pass as soon as there can be one: less memory",
                    "the same with several stages in each process: less waiting",
                    "backward passes for weights fill the waiting",
                ),
                strict=True,
            )
        ),
    ),
    Question(
        f"{_MESH}.{_MESH}_pp_micro_batches",
        "Into how many parts is a batch cut, with which the stages compute in turns?",
        lambda text, answers: _integer(text, 1),
        lambda answers, machine: 2 * int(answers.get(_OF_MESH["pp_size"], 1)),
        _shares("pp_size"),
        {},
    ),
    _processes(_OF_MESH["cp_size"], "Over how many processes are sequences split?", _WITHOUT_STAGES),
    _choice(
        f"{_MESH}.{_MESH}_cp_comm_strategy",
        "How do keys and values reach the other processes?",
        "allgather",
        _shares("cp_size"),
        allgather="they are gathered",
        alltoall="they are passed around",
        ulysses="each process computes some of the heads, for all tokens",
    ),
    _processes(_OF_MESH["sp_size"], "Over how many processes are sequences split?", _BY_DEEPSPEED),
    _choice(
        f"{_MESH}.{_MESH}_sp_attn_implementation",
        "Which attention does the model use?",
        "sdpa",
        _shares("sp_size"),
        sdpa="torch's",
        flash_attention_2="FlashAttention 2, if installed",
        flash_attention_3="FlashAttention 3, if installed",
    ),
    _flag(f"{_MESH}.{_MESH}_sp_seq_length_is_variable", "Do sequences differ in length?", True, _shares("sp_size")),
    Question(
        f"{_MESH}.{_MESH}_sp_seq_length",
        "How many tokens has each?",
        lambda text, answers: _integer(text, 1),
        lambda answers, machine: None,
        _LENGTH_IS_FIXED,
        {},
    ),
    Question(
        _COPIES,
        "How many copies are there, of the model or of its shards?",
        lambda text, answers: (_share if answers["distributed_type"] == "FSDP" else _rest)(text, answers),
        lambda answers, machine: 1 if answers["distributed_type"] == "FSDP" else _processes_left(answers),
        _BY_TORCH,
        {},
    ),
    Question(
        _SHARDS,
        "Over how many processes are the parameters of a copy sharded?",
        _rest,
        lambda answers, machine: _processes_left(answers),
        _MESH_OF_SHARDS,
        {},
    ),
    _flag("enable_cpu_affinity", "Pin each process to cores of its own, near its GPU?"),
    _flag("debug", "Check the shapes of collectives before running them? Slower", when=_SEVERAL_PROCESSES),
    _choice(
        "dynamo_config.dynamo_backend",
        "Compile models with torch.compile while they are prepared?",
        "NO",
        NO="leave models as they are",
        INDUCTOR="torch's own compiler, the usual choice",
        EAGER="trace only, to find what cannot be compiled",
        AOT_EAGER="trace forward and backward only, for the same",
        CUDAGRAPHS="record and replay CUDA graphs",
        ONNXRT="ONNX Runtime, if installed",
        TENSORRT="TensorRT, if installed",
        TVM="Apache TVM, if installed",
    ),
    Question(
        "dynamo_config.dynamo_mode",
        "How much effort may compiling take?",
        _same,
        lambda answers, machine: "default",
        _COMPILES,
        {
            "default": "a good balance",
            "reduce-overhead": "less overhead of Python, more memory",
            "max-autotune": "try many kernels: slow to compile, fast to run",
        },
    ),
    _flag("dynamo_config.dynamo_use_fullgraph", "Refuse breaks of the graph?", when=_COMPILES),
    _flag("dynamo_config.dynamo_use_dynamic", "Compile for shapes that change?", when=_COMPILES),
    _flag("dynamo_config.dynamo_use_regional_compilation", "Compile repeated blocks once?", when=_COMPILES),
    _choice(
        "mixed_precision",
        "In which precision is the forward pass computed?",
        "no",
        _PRECISION_IS_OURS,
        no="that of the model",
        fp16="16 bits, for GPUs; gradients are scaled",
        bf16="16 bits with the range of float32",
        fp8="8 bits, through a library",
    ),
    Question(
        "fp8_config.backend",
        "Through which library?",
        _same,
        lambda answers, machine: next((backend for backend in LIBRARIES if is_installed(backend)), "AO"),
        _is(mixed_precision="fp8"),
        {backend: library.title for backend, library in LIBRARIES.items()},
    ),
    _flag("fp8_config.pad_inner_dim", "Pad matrices to multiples of 16?", True, _fp8("AO")),
    _flag("fp8_config.use_autocast_during_eval", "Compute in fp8 in evaluation mode, too?", False, _fp8("TE")),
    _number("fp8_config.margin", "Powers of two kept free above the largest value", 0, 0, _fp8("TE")),
    _number("fp8_config.interval", "Steps between two updates of the scales", 1, 1, _fp8("TE")),
    _choice(
        "fp8_config.fp8_format",
        "In which format?",
        "HYBRID",
        _fp8("TE"),
        HYBRID="E4M3 forward, E5M2 backward",
        E4M3="4 bits of exponent",
        E5M2="5 bits of exponent",
    ),
    _number("fp8_config.amax_history_len", "Steps whose largest values the scales are made from", 1024, 1, _fp8("TE")),
    _choice(
        "fp8_config.amax_compute_algo",
        "How are these combined?",
        "most_recent",
        _fp8("TE"),
        max="the largest",
        most_recent="the latest",
    ),
    Question(
        "fp8_config.override_linear_precision",
        "Which passes of linear layers stay in higher precision: forward, gradients of inputs, gradients of weights?",
        _three_flags,
        lambda answers, machine: [False, False, False],
        _fp8("TE"),
        {},
    ),
    _choice(
        "fp8_config.opt_level",
        "Which level?",
        "O2",
        _fp8("MSAMP"),
        O1="weight gradients in 8 bits",
        O2="optimizer states in 8 bits, too",
    ),
)
