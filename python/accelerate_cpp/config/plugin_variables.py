"""The environment variables that fill the fields of plugins: for each plugin, its fields with their variables.

A variable's default is what the field is where neither the argument nor the variable says anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from accelerate_cpp.config.env_table import Variable, parse_flag, parse_integer


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("expected a number") from None


def _parse_integer_or_auto(text: str) -> int | str:
    return "auto" if text == "auto" else parse_integer(text)


def _parse_number_or_auto(text: str) -> float | str:
    return "auto" if text == "auto" else _parse_number(text)


_Row = tuple[str, Callable[[str], Any], Any, str]
_Variables = Mapping[str, Variable[Any]]


def _variables(prefix: str, rows: Iterable[_Row], renamed: Mapping[str, str] | None = None) -> _Variables:
    """Fields with their variables, which are ``prefix`` and the field in upper case, or that of ``renamed``."""
    names = {field: f"{prefix}{field.upper()}" for field, *_ in rows} | dict(renamed or {})
    return MappingProxyType(
        {field: Variable(names[field], parse, str, default, doc) for field, parse, default, doc in rows}
    )


FSDP: _Variables = _variables(
    "FSDP_",
    [
        ("fsdp_version", parse_integer, 1, "generation of torch's FSDP, 1 or 2"),
        ("sharding_strategy", str, None, "version 1: what is sharded, by its name in torch or its number"),
        ("reshard_after_forward", str, None, "version 2: free gathered parameters after the forward pass"),
        ("backward_prefetch", str, None, "version 1: BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH"),
        ("cpu_offload", parse_flag, False, "keep shards of parameters in the memory of the host"),
        ("ignored_modules", str, None, "regular expression of the names of modules that are not sharded"),
        ("state_dict_type", str, None, "FULL_STATE_DICT, SHARDED_STATE_DICT or, in version 1, LOCAL_STATE_DICT"),
        ("auto_wrap_policy", str, "NO_WRAP", "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP"),
        ("transformer_cls_names_to_wrap", str, None, "classes of layers that are sharded one by one, with commas"),
        ("min_num_params", parse_integer, 0, "parameters from which on a module is sharded on its own"),
        ("use_orig_params", parse_flag, False, "version 1: show the parameters of the model to optimizers"),
        ("sync_module_states", parse_flag, False, "version 1: start from the parameters of rank 0"),
        ("forward_prefetch", parse_flag, False, "version 1: gather what the forward pass needs next early"),
        ("activation_checkpointing", parse_flag, False, "compute activations again in the backward pass"),
        ("activation_checkpointing_offload", parse_flag, False, "version 2: and keep the inputs on the host"),
        ("cpu_ram_efficient_loading", parse_flag, False, "only rank 0 reads weights; transformers heeds it, too"),
        ("zero_stage", parse_integer, None, "1 to 3: ZeRO by exchanges of this package"),
        ("weights_once_per_host", parse_flag, False, "version 2: the processes of a host have the weights in common"),
    ],
    {
        "fsdp_version": "FSDP_VERSION",
        "cpu_offload": "FSDP_OFFLOAD_PARAMS",
        "transformer_cls_names_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    },
)

PARALLELISM: _Variables = _variables(
    "PARALLELISM_CONFIG_",
    [
        ("dp_replicate_size", parse_integer, 1, "copies of the model, or of its shards"),
        ("dp_shard_size", parse_integer, 1, "processes over which parameters are sharded"),
        ("tp_size", parse_integer, 1, "processes over which layers are split"),
        ("cp_size", parse_integer, 1, "processes over which sequences are split, attention by torch"),
        ("cp_backend", str, "torch", "what does so: torch"),
        ("sp_size", parse_integer, 1, "processes over which sequences are split, attention by DeepSpeed"),
        ("sp_backend", str, "deepspeed", "what does so: deepspeed"),
        ("pp_size", parse_integer, 1, "processes over which models are cut into stages"),
    ],
)
PIPELINE: _Variables = _variables(
    "PARALLELISM_CONFIG_PP_",
    [
        ("schedule", str, "1f1b", "the order in which stages compute: gpipe, 1f1b, interleaved or zero_bubble"),
        ("micro_batches", parse_integer, None, "the parts of a batch that stages compute with in turns"),
    ],
)
CONTEXT_PARALLEL: _Variables = _variables(
    "PARALLELISM_CONFIG_",
    [("cp_comm_strategy", str, "allgather", "how keys and values reach the other processes: allgather or alltoall")],
)
SEQUENCE_PARALLEL: _Variables = _variables(
    "PARALLELISM_CONFIG_",
    [
        ("sp_seq_length", parse_integer, None, "length of every sequence, if it is the same"),
        ("sp_seq_length_is_variable", parse_flag, True, "whether sequences differ in length"),
        ("sp_attn_implementation", str, None, "attention of the model: sdpa, flash_attention_2, flash_attention_3"),
    ],
)

DEEPSPEED: _Variables = _variables(
    "ACCELERATE_DEEPSPEED_",
    [
        ("hf_ds_config", str, None, "file with the configuration of DeepSpeed, which counts instead of the rest"),
        ("gradient_accumulation_steps", _parse_integer_or_auto, "auto", "micro-batches per optimizer step"),
        ("gradient_clipping", _parse_number_or_auto, "auto", "the largest norm of gradients"),
        ("zero_stage", parse_integer, 2, "what is sharded: 0 nothing, 1 optimizers, 2 gradients too, 3 all"),
        ("offload_optimizer_device", str, "none", "where states of optimizers are kept: none, cpu or nvme"),
        ("offload_param_device", str, "none", "where parameters are kept: none, cpu or nvme"),
        ("offload_optimizer_nvme_path", str, "none", "folder for states of optimizers"),
        ("offload_param_nvme_path", str, "none", "folder for parameters"),
        ("zero3_init_flag", parse_flag, None, "stage 3: shard models while they are built; the default there"),
        ("zero3_save_16bit_model", parse_flag, False, "stage 3: gather 16-bit weights for saving"),
        ("msamp_opt_level", str, "O1", "of MS-AMP: O1 or O2"),
    ],
    {
        "hf_ds_config": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
        "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
        "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
        "msamp_opt_level": "ACCELERATE_FP8_OPT_LEVEL",
    },
)
DEEPSPEED_MOE_LAYERS: Variable[Any] = Variable(
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", str, str, None, "classes of layers with experts, with commas"
)
DEEPSPEED_CONFIGURED: Variable[str] = Variable(
    "ACCELERATE_CONFIG_DS_FIELDS", str, str, "", "fields that the configuration of the launch sets, with commas"
)


class Assumed(int):
    """A default of the original that nobody asked for, as an integer; what a field has from the user is none."""


_EXPERTS = "processes over which experts are split"

MEGATRON: _Variables = _variables(
    "MEGATRON_LM_",
    [
        ("tp_degree", parse_integer, 1, "processes over which layers are split"),
        ("pp_degree", parse_integer, 1, "stages of the pipeline"),
        ("use_custom_fsdp", parse_flag, False, "shard parameters"),
        ("overlap_cpu_optimizer_d2h_h2d", parse_flag, False, "copy to and from the host while it computes"),
        ("no_load_optim", parse_flag, False, "leave states of optimizers out when loading"),
        ("eod_mask_loss", parse_flag, False, "leave ends of documents out of the loss"),
        ("no_save_optim", parse_flag, False, "leave states of optimizers out when saving"),
        ("optimizer_cpu_offload", parse_flag, False, "keep states of optimizers on the host"),
        ("use_precision_aware_optimizer", parse_flag, False, "states of optimizers in lower precision"),
        ("decoder_last_pipeline_num_layers", parse_integer, None, "layers of the last stage"),
        ("recompute_granularity", str, "full", "what is computed again in the backward pass: full or selective"),
        ("recompute_method", str, "uniform", "how layers that are computed again are chosen: uniform or block"),
        ("recompute_num_layers", parse_integer, 1, "layers per group of these"),
        ("attention_backend", parse_flag, True, "let Megatron-LM choose the attention"),
        ("expert_model_parallel_size", parse_integer, 1, _EXPERTS),
        ("context_parallel_size", parse_integer, Assumed(2), "processes over which sequences are split"),
        ("attention_dropout", _parse_number, 0.0, "probability"),
        ("hidden_dropout", _parse_number, 0.0, "probability"),
        ("attention_softmax_in_fp32", parse_flag, True, "compute the softmax of attention in fp32"),
        ("expert_tensor_parallel_size", parse_integer, 1, f"{_EXPERTS}, layer by layer"),
        ("calculate_per_token_loss", parse_flag, True, "weigh the loss by tokens"),
        ("use_rotary_position_embeddings", parse_flag, True, "rotary embeddings of positions"),
        ("num_micro_batches", parse_integer, 1, "micro-batches per optimizer step"),
        ("gradient_clipping", _parse_number, 1.0, "the largest norm of gradients; 0 means none"),
        ("sequence_parallelism", parse_flag, False, "split what tensor parallelism does not along the sequence"),
        ("recompute_activations", parse_flag, False, "compute activations of attention again"),
        ("use_distributed_optimizer", parse_flag, False, "shard states of optimizers"),
    ],
)


def fill(plugin: Any, variables: _Variables, fields: Iterable[str] | None = None) -> None:
    """Sets the attributes of ``plugin`` that are ``None`` from their variables.

    Args:
        fields: keys of ``variables``; all of them by default.

    Raises:
        InvalidArgument: a variable has a text that cannot be understood.
    """
    for field in variables if fields is None else fields:
        if getattr(plugin, field) is None:
            setattr(plugin, field, variables[field].get())
