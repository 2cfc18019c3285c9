"""The flags of the original's ``launch`` that do nothing here yet: known by name, and refused by a launch."""

from __future__ import annotations

from dataclasses import dataclass

INSTEAD = "leave it out: plain data parallelism over the processes is used"


@dataclass(frozen=True)
class Flag:
    """One flag, without its dashes, and what it says in the original.

    ``neutral`` is its default there, which changes nothing and is accepted.
    """

    name: str
    meaning: str
    takes_value: bool = True
    choices: tuple[str, ...] = ()
    neutral: str | None = None


@dataclass(frozen=True)
class Group:
    """Flags that belong together, and the purpose that does not work yet."""

    title: str
    purpose: str
    flags: tuple[Flag, ...]

    def sentence(self, flag: Flag) -> str:
        """The refusal of ``flag``."""
        return f"--{flag.name}: {self.purpose} does not work in accelerate_cpp yet; {INSTEAD}"


GROUPS: tuple[Group, ...] = (
    Group(
        "Megatron-LM",
        "training through Megatron-LM",
        (
            Flag("use_megatron_lm", "train through Megatron-LM", takes_value=False),
            Flag("megatron_lm_tp_degree", "ranks that share a layer", neutral="1"),
            Flag("megatron_lm_use_custom_fsdp", "use Megatron's own sharding", neutral="False"),
            Flag("megatron_lm_no_load_optim", "do not load optimizer states", neutral="False"),
            Flag("megatron_lm_eod_mask_loss", "leave ends of documents out of the loss", neutral="False"),
            Flag(
                "megatron_lm_overlap_cpu_optimizer_d2h_h2d",
                "overlap the copies of an optimizer on the CPU",
                neutral="False",
            ),
            Flag("megatron_lm_no_save_optim", "do not save optimizer states", neutral="False"),
            Flag("megatron_lm_optimizer_cpu_offload", "step on the CPU", neutral="False"),
            Flag(
                "megatron_lm_use_precision_aware_optimizer",
                "keep optimizer states in chosen precisions",
                neutral="False",
            ),
            Flag("megatron_lm_decoder_last_pipeline_num_layers", "layers of the last stage"),
            Flag("megatron_lm_pp_degree", "stages of the pipeline", neutral="1"),
            Flag("megatron_lm_num_micro_batches", "micro-batches in the pipeline"),
            Flag("megatron_lm_sequence_parallelism", "divide sequences among the ranks of a layer"),
            Flag("megatron_lm_recompute_activations", "compute activations again"),
            Flag("megatron_lm_use_distributed_optimizer", "shard optimizer states"),
            Flag("megatron_lm_gradient_clipping", "largest norm of the gradients", neutral="1.0"),
            Flag("megatron_lm_recompute_granularity", "which activations are computed again"),
            Flag("megatron_lm_recompute_method", "how layers for that are chosen"),
            Flag("megatron_lm_recompute_num_layers", "how many layers for that"),
            Flag("megatron_lm_attention_backend", "implementation of attention"),
            Flag("megatron_lm_expert_model_parallel_size", "ranks that share the experts"),
            Flag("megatron_lm_context_parallel_size", "ranks that share a sequence"),
            Flag("megatron_lm_attention_dropout", "dropout of attention"),
            Flag("megatron_lm_hidden_dropout", "dropout of hidden states"),
            Flag("megatron_lm_attention_softmax_in_fp32", "softmax of attention in fp32"),
            Flag("megatron_lm_expert_tensor_parallel_size", "ranks that share an expert"),
            Flag("megatron_lm_calculate_per_token_loss", "divide the loss by tokens"),
            Flag("megatron_lm_use_rotary_position_embeddings", "rotary positions"),
        ),
    ),
    Group(
        "TPU",
        "training on TPUs",
        (
            Flag("tpu", "train on TPUs", takes_value=False),
            Flag("tpu_cluster", "use a pod of TPUs", takes_value=False),
            Flag("no_tpu_cluster", "use no pod of TPUs", takes_value=False),
            Flag("tpu_use_sudo", "run commands on the pod as root", takes_value=False),
            Flag("vm", "a machine of the pod; may be repeated"),
            Flag("env", "a variable for the machines of the pod; may be repeated"),
            Flag("main_training_function", "function of the script that trains"),
            Flag("downcast_bf16", "store doubles as floats, and floats as bf16", takes_value=False),
        ),
    ),
    Group(
        "AWS",
        "starting jobs on SageMaker",
        (
            Flag("aws_access_key_id", "key of an AWS account"),
            Flag("aws_secret_access_key", "secret of an AWS account"),
        ),
    ),
)
