"""The flags of a launch, and the sections of the configuration file, that say how models are sharded."""

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
        variable: what tells the workers.
        default: the text that the workers get where nobody says anything; ``None`` sets no variable.
    """

    name: str
    variable: Variable[Any]
    meaning: str
    default: str | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShardingFlags:
    """Flags that belong together.

    Attributes:
        switch: the flag without which the others have no effect, and its variable.
        prefix: of the names, which keys of the section may lack.
        section: of the file.
        in_file: whether the file as a whole switches them on.
    """

    title: str
    switch: str
    switch_variable: Variable[bool]
    meaning: str
    prefix: str
    section: str
    in_file: Callable[[Mapping[str, Any]], bool]
    flags: tuple[ShardingFlag, ...]


def _fsdp(field: str, meaning: str, default: str | None = None, **others: Any) -> ShardingFlag:
    variable = plugin_variables.FSDP[field]
    name = {
        "cpu_offload": "offload_params",
        "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
    }.get(field, field)
    return ShardingFlag(f"fsdp_{name.removeprefix('fsdp_')}", variable, meaning, default, **others)


def _mesh(field: str, meaning: str, default: str | None = None, **others: Any) -> ShardingFlag:
    variables = {
        **plugin_variables.PARALLELISM,
        **plugin_variables.CONTEXT_PARALLEL,
        **plugin_variables.SEQUENCE_PARALLEL,
    }
    return ShardingFlag(f"parallelism_config_{field}", variables[field], meaning, default, **others)


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
        _fsdp("cpu_offload", "keep parameters and gradients on the CPU", "false"),
        _fsdp("min_num_params", "parameters of a unit, at least", "100000000"),
        _fsdp("sharding_strategy", "what is sharded, in FSDP 1", "FULL_SHARD"),
        _fsdp("reshard_after_forward", "shard parameters again after the forward pass", "true"),
        _fsdp("auto_wrap_policy", "how the model is divided into units"),
        _fsdp("transformer_cls_names_to_wrap", "classes of units, with commas between"),
        _fsdp("backward_prefetch", "when the next unit is gathered in the backward pass, in FSDP 1"),
        _fsdp("state_dict_type", "whether state dicts are whole or sharded"),
        _fsdp("forward_prefetch", "gather the next unit in the forward pass, in FSDP 1", "false"),
        _fsdp("use_orig_params", "keep the parameters of the model, in FSDP 1", "true"),
        _fsdp("cpu_ram_efficient_loading", "load weights on the first process only", "true"),
        _fsdp("sync_module_states", "send the weights of the first process to the others", "true"),
        _fsdp("activation_checkpointing", "compute activations again in the backward pass", "false"),
        _fsdp("activation_checkpointing_offload", "keep the inputs of these on the CPU", "false"),
        _fsdp("zero_stage", "stage of ZeRO, on CPUs", choices=("1", "2", "3")),
        _fsdp("weights_once_per_host", "let the processes of a host have the weights in common"),
    ),
)
_IGNORED = _fsdp("ignored_modules", "regular expression of modules that are not sharded")

MESH = ShardingFlags(
    "Mesh",
    "use_parallelism_config",
    env_table.USE_PARALLELISM_CONFIG,
    "train on a mesh",
    "parallelism_config_",
    "parallelism_config",
    lambda given: bool(given.get("parallelism_config")),
    (
        _mesh("dp_replicate_size", "replicas of the model", "1"),
        _mesh("dp_shard_size", "ranks that share parameters", "1"),
        _mesh("tp_size", "ranks that share a layer; not yet", "1"),
        _mesh("cp_size", "ranks that share a sequence; not yet", "1"),
        _mesh("cp_backend", "implementation of that", "torch", choices=("torch",)),
        _mesh("cp_comm_strategy", "how keys and values go round", "allgather"),
        _mesh("sp_size", "ranks that share a sequence through DeepSpeed; not yet", "1"),
        _mesh("sp_backend", "implementation of that", "deepspeed", choices=("deepspeed",)),
        _mesh("sp_seq_length", "length of sequences"),
        _mesh("sp_seq_length_is_variable", "whether lengths differ", "True"),
        _mesh("sp_attn_implementation", "implementation of attention", "sdpa"),
    ),
)
SHARDING: tuple[ShardingFlags, ...] = (FSDP, MESH)


def keys_of(group: ShardingFlags) -> dict[str, ShardingFlag]:
    """What the section of the file may say; also what no flag says."""
    known = (*group.flags, _IGNORED) if group is FSDP else group.flags
    return {flag.name: flag for flag in known}
