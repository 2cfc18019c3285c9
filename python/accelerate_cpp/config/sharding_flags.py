"""The flags of a launch, and the sections of the configuration file, that say how models are sharded or split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from accelerate_cpp.config import env_table, plugin_variables
from accelerate_cpp.config.env_table import Variable


@dataclass(frozen=True)
class ShardingFlag:
    """One flag, without its dashes, which is also a key of the section.

    Attributes:
        variable: what tells the workers; ``None`` for what only the launch needs.
        default: the text that the workers get where nobody says anything; ``None`` sets no variable.
        is_lowered: whether the text counts in lower case, and truth and numbers as Python writes them.
        value_type: what the command line makes of the text, as the original's does: of ``bool``, true whatever it says.
    """

    name: str
    variable: Variable[Any] | None
    meaning: str
    default: str | None = None
    choices: tuple[str, ...] = ()
    is_lowered: bool = False
    value_type: type[str] | type[int] | type[float] = str

    def text_for_workers(self, text: str) -> str:
        """The text that says the same as ``text`` and that the workers get.

        Raises:
            ValueError: it cannot be read; says what is expected.
        """
        value = text if self.variable is None else self.variable.parse(text)
        written = str(value).lower() if self.is_lowered else text
        if self.choices and written not in self.choices:
            raise ValueError(f"expected one of {', '.join(self.choices)}")
        return written


@dataclass(frozen=True)
class ShardingFlags:
    """Flags that belong together.

    Attributes:
        switch: the flag without which the others have no effect, and its variable.
        prefix: of the names, which keys of the section may lack.
        section: of the file.
        in_file: whether the file as a whole switches them on.
        flags: those that it adds to a launch.
        other_keys: what the section may say besides; their flags belong to no group, or there are none.
    """

    title: str
    switch: str
    switch_variable: Variable[bool]
    meaning: str
    prefix: str
    section: str
    in_file: Callable[[Mapping[str, Any]], bool]
    flags: tuple[ShardingFlag, ...]
    other_keys: tuple[ShardingFlag, ...] = ()

    @property
    def keys(self) -> dict[str, ShardingFlag]:
        """What the section of the file may say, by name."""
        return {flag.name: flag for flag in (*self.flags, *self.other_keys)}


def _fsdp(field: str, meaning: str, default: str | None = None, **others: Any) -> ShardingFlag:
    variable = plugin_variables.FSDP[field]
    name = {
        "cpu_offload": "offload_params",
        "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
    }.get(field, field)
    return ShardingFlag(f"fsdp_{name.removeprefix('fsdp_')}", variable, meaning, default, **others)


def _deepspeed(field: str, meaning: str, **others: Any) -> ShardingFlag:
    has_path = field.endswith("_path")
    return ShardingFlag(field, plugin_variables.DEEPSPEED[field], meaning, is_lowered=not has_path, **others)


def _mesh(field: str, meaning: str, default: str | None = None, **others: Any) -> ShardingFlag:
    variables = {
        **plugin_variables.PARALLELISM,
        **plugin_variables.CONTEXT_PARALLEL,
        **plugin_variables.SEQUENCE_PARALLEL,
    }
    return ShardingFlag(f"parallelism_config_{field}", variables[field], meaning, default, **others)


def _pipeline(field: str, meaning: str, **others: Any) -> ShardingFlag:
    return ShardingFlag(f"parallelism_config_pp_{field}", plugin_variables.PIPELINE[field], meaning, **others)


def _megatron(field: str, meaning: str, default: str | None = None, **others: Any) -> ShardingFlag:
    return ShardingFlag(f"megatron_lm_{field}", plugin_variables.MEGATRON[field], meaning, default, **others)


FSDP = ShardingFlags(
    "Sharding (FSDP)",
    "use_fsdp",
    env_table.USE_FSDP,
    "shard parameters, gradients and optimizer states over the processes",
    "fsdp_",
    "fsdp_config",
    lambda given: given.get("distributed_type") == "FSDP",
    (
        _fsdp("fsdp_version", "generation of FSDP, whose options are given", "1", choices=("1", "2")),
        _fsdp("cpu_offload", "keep parameters and gradients on the CPU", "false", is_lowered=True),
        _fsdp("min_num_params", "parameters of a unit, at least", "100000000"),
        _fsdp("sharding_strategy", "what is sharded, in FSDP 1", "FULL_SHARD"),
        _fsdp("reshard_after_forward", "shard parameters again after the forward pass", "true", is_lowered=True),
        _fsdp("auto_wrap_policy", "how the model is divided into units"),
        _fsdp("transformer_cls_names_to_wrap", "classes of units, with commas between"),
        _fsdp("backward_prefetch", "when the next unit is gathered in the backward pass, in FSDP 1"),
        _fsdp("state_dict_type", "whether state dicts are whole or sharded"),
        _fsdp("forward_prefetch", "gather the next unit in the forward pass, in FSDP 1", "false", is_lowered=True),
        _fsdp("use_orig_params", "keep the parameters of the model, in FSDP 1", "true", is_lowered=True),
        _fsdp("cpu_ram_efficient_loading", "load weights on the first process only", "true", is_lowered=True),
        _fsdp("sync_module_states", "send the weights of the first process to the others", "true", is_lowered=True),
        _fsdp("activation_checkpointing", "compute activations again in the backward pass", "false", is_lowered=True),
        _fsdp("activation_checkpointing_offload", "keep the inputs of these on the CPU", "false", is_lowered=True),
        _fsdp("zero_stage", "stage of ZeRO, on CPUs", choices=("1", "2", "3")),
        _fsdp("weights_once_per_host", "let the processes of a host have the weights in common", is_lowered=True),
    ),
    (_fsdp("ignored_modules", "regular expression of modules that are not sharded"),),
)

PIPELINE_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
"""The orders in which the stages of a pipeline may compute."""
THIS_LAUNCHER = "standard"
"""What the file and the flag call a launch of this package on each machine."""
DEEPSPEED_LAUNCHERS = (THIS_LAUNCHER, "pdsh", "openmpi", "mvapich", "mpich", "impi", "nossh", "slurm")
_DEVICES = ("none", "cpu", "nvme")
DEEPSPEED = ShardingFlags(
    "DeepSpeed",
    "use_deepspeed",
    env_table.USE_DEEPSPEED,
    "train through DeepSpeed",
    "",
    "deepspeed_config",
    lambda given: given.get("distributed_type") == "DEEPSPEED",
    (
        ShardingFlag(
            "deepspeed_config_file",
            plugin_variables.DEEPSPEED["hf_ds_config"],
            "DeepSpeed's own configuration, which counts instead of the flags below",
        ),
        _deepspeed(
            "zero_stage",
            "what is sharded: 0 nothing, 1 states of optimizers, 2 gradients too, 3 parameters too; default: 2",
            choices=("0", "1", "2", "3"),
        ),
        _deepspeed("offload_optimizer_device", "where states of optimizers are kept; default: none", choices=_DEVICES),
        _deepspeed("offload_param_device", "where parameters are kept; default: none", choices=_DEVICES),
        _deepspeed("offload_optimizer_nvme_path", "folder for states of optimizers"),
        _deepspeed("offload_param_nvme_path", "folder for parameters"),
        _deepspeed(
            "gradient_clipping", "the largest norm of gradients, or auto; default: auto, which is 1.0; 0.0 is none"
        ),
        _deepspeed("zero3_init_flag", "build models in shards, in stage 3; default: true"),
        _deepspeed("zero3_save_16bit_model", "save whole 16-bit weights, in stage 3; default: false"),
        ShardingFlag(
            "deepspeed_moe_layer_cls_names",
            plugin_variables.DEEPSPEED_MOE_LAYERS,
            "classes of layers with experts, with commas between",
        ),
        ShardingFlag("deepspeed_hostfile", None, "file with the machines, for DeepSpeed's own launcher"),
        ShardingFlag("deepspeed_exclusion_filter", None, "machines and devices of that file to leave out"),
        ShardingFlag("deepspeed_inclusion_filter", None, "machines and devices of that file to use"),
        ShardingFlag(
            "deepspeed_multinode_launcher",
            None,
            "how DeepSpeed's launcher starts processes on the machines of that file, or standard, which is this "
            "launcher on each machine; default: pdsh if there is such a file",
            choices=DEEPSPEED_LAUNCHERS,
            is_lowered=True,
        ),
    ),
    (
        ShardingFlag(
            "gradient_accumulation_steps", env_table.GRADIENT_ACCUMULATION_STEPS, "micro-batches per optimizer step"
        ),
    ),
)

MEGATRON = ShardingFlags(
    "Megatron-LM Arguments",
    "use_megatron_lm",
    env_table.USE_MEGATRON_LM,
    "split models as the flags of Megatron-LM say",
    "megatron_lm_",
    "megatron_lm_config",
    lambda given: given.get("distributed_type") == "MEGATRON_LM",
    (
        _megatron("tp_degree", "processes over which layers are split", "1", value_type=int),
        _megatron("use_custom_fsdp", "shard parameters", "False", value_type=bool),
        _megatron("no_load_optim", "leave states of optimizers out when loading", "False", value_type=bool),
        _megatron("eod_mask_loss", "leave ends of documents out of the loss", "False", value_type=bool),
        _megatron(
            "overlap_cpu_optimizer_d2h_h2d",
            "copy to and from an optimizer on the host while it steps",
            "False",
            value_type=bool,
        ),
        _megatron("no_save_optim", "leave states of optimizers out when saving", "False", value_type=bool),
        _megatron("optimizer_cpu_offload", "keep states of optimizers on the host", "False", value_type=bool),
        _megatron(
            "use_precision_aware_optimizer", "keep states of optimizers in lower precision", "False", value_type=bool
        ),
        _megatron("decoder_last_pipeline_num_layers", "layers of the last stage of the pipeline", value_type=int),
        _megatron("pp_degree", "stages of the pipeline", "1", value_type=int),
        _megatron("num_micro_batches", "parts of a batch that stages compute with in turns", value_type=int),
        _megatron("sequence_parallelism", "split along the sequence what is not split in layers"),
        _megatron("recompute_activations", "compute activations of attention again in the backward pass"),
        _megatron("use_distributed_optimizer", "shard states of optimizers over the copies of the model"),
        _megatron("gradient_clipping", "the largest norm of gradients; 0 means none", "1.0", value_type=float),
        _megatron(
            "recompute_granularity",
            "what is computed again in the backward pass",
            choices=("full", "selective", "none"),
        ),
        _megatron("recompute_method", "how layers that are computed again are chosen", choices=("uniform", "block")),
        _megatron("recompute_num_layers", "layers per group of these", value_type=int),
        _megatron("attention_backend", "let Megatron-LM choose the attention"),
        _megatron("expert_model_parallel_size", "processes over which experts are split", value_type=int),
        _megatron("context_parallel_size", "processes over which sequences are split", value_type=int),
        _megatron("attention_dropout", "probability of dropout in attention", value_type=float),
        _megatron("hidden_dropout", "probability of dropout between layers", value_type=float),
        _megatron("attention_softmax_in_fp32", "compute the softmax of attention in fp32"),
        _megatron(
            "expert_tensor_parallel_size", "processes over which the layers of experts are split", value_type=int
        ),
        _megatron("calculate_per_token_loss", "weigh the loss by tokens"),
        _megatron("use_rotary_position_embeddings", "rotary embeddings of positions"),
    ),
)

MESH = ShardingFlags(
    "ParallelismConfig Arguments",
    "use_parallelism_config",
    env_table.USE_PARALLELISM_CONFIG,
    "train on a mesh",
    "parallelism_config_",
    "parallelism_config",
    lambda given: bool(given.get("parallelism_config")),
    (
        _mesh("dp_replicate_size", "copies of the model, or of its shards", "1", value_type=int),
        _mesh("dp_shard_size", "processes over which parameters are sharded", "1", value_type=int),
        _mesh("tp_size", "processes over which layers are split", "1", value_type=int),
        _mesh("cp_size", "processes over which sequences are split for torch's attention", "1", value_type=int),
        _mesh("cp_backend", "implementation of that", "torch", choices=("torch",)),
        _mesh("cp_comm_strategy", "how keys and values reach the other processes", "allgather"),
        _mesh("sp_size", "processes over which sequences are split for DeepSpeed's attention", "1", value_type=int),
        _mesh("sp_backend", "implementation of that", "deepspeed", choices=("deepspeed",)),
        _mesh("sp_seq_length", "length of every sequence, if it is the same"),
        _mesh("sp_seq_length_is_variable", "whether sequences differ in length", "True"),
        _mesh("sp_attn_implementation", "implementation of attention there", "sdpa"),
        _mesh("pp_size", "processes over which models are cut into stages", value_type=int),
        _pipeline("schedule", "the order in which stages compute; default: 1f1b", choices=PIPELINE_SCHEDULES),
        _pipeline(
            "micro_batches",
            "the parts of a batch that stages compute with in turns; default: two for each stage",
            value_type=int,
        ),
    ),
)
SHARDING: tuple[ShardingFlags, ...] = (FSDP, DEEPSPEED, MEGATRON, MESH)
