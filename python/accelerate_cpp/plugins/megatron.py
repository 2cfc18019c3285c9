"""The plugin for Megatron-LM: its fields, and the arguments that Megatron-LM receives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from accelerate_cpp.config import plugin_variables, unsupported
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.megatron_models import write_model_arguments

__all__ = ["MegatronLMPlugin"]

# Megatron-LM's names for fields with different names, in its order; the other fields follow under their own names.
_ARGUMENTS: Mapping[str, str] = {
    "tensor_model_parallel_size": "tp_degree",
    "pipeline_model_parallel_size": "pp_degree",
    "pipeline_model_parallel_split_rank": "pipeline_model_parallel_split_rank",
    "num_layers_per_virtual_pipeline_stage": "num_layers_per_virtual_pipeline_stage",
    "DDP_impl": "DDP_impl",
    "use_distributed_optimizer": "use_distributed_optimizer",
    "sequence_parallel": "sequence_parallelism",
    "clip_grad": "gradient_clipping",
}
_SAME_NAMES = (
    *("num_micro_batches", "consumed_samples", "no_wd_decay_cond", "scale_lr_cond", "lr_mult", "megatron_dataset_flag"),
    *("eval_iters", "eval_interval", "use_custom_fsdp", "no_load_optim", "eod_mask_loss", "no_save_optim"),
    *("optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer"),
    *("decoder_last_pipeline_num_layers", "recompute_granularity", "recompute_method", "recompute_num_layers"),
    *("attention_backend", "expert_model_parallel_size", "context_parallel_size", "attention_dropout"),
    *("hidden_dropout", "attention_softmax_in_fp32", "expert_tensor_parallel_size", "calculate_per_token_loss"),
    "use_rotary_position_embeddings",
)
_OF_SCHEDULE = (
    *("train_iters", "lr_warmup_iters", "train_samples", "lr_warmup_samples", "lr_decay_iters", "lr_decay_samples"),
    *("lr_warmup_fraction", "lr_decay_style", "weight_decay_incr_style", "start_weight_decay", "end_weight_decay"),
    "min_lr",
)


@dataclass
class MegatronLMPlugin:
    """How Megatron-LM trains. The first 27 fields are read from ``MEGATRON_LM_*`` if they are ``None``.

    It may be changed until models are prepared, but for degrees, which count when an ``Accelerator`` is created. The
    library is not needed: models of transformers are split, cut and trained by this package, on the mesh that the
    degrees describe (docs/model_parallelism.md). Fields that are not described have the names of Megatron-LM's own
    arguments, and choose implementations of its own models.

    Attributes:
        tp_degree: processes over which layers are split.
        pp_degree: processes over which models are cut into stages.
        context_parallel_size: processes over which sequences are split.
        use_distributed_optimizer: share states of optimizers out over the processes with other batches.
        use_custom_fsdp: share parameters and gradients out, too.
        num_layers_per_virtual_pipeline_stage: layers of a stage; each process then has several, in turn.
        decoder_last_pipeline_num_layers: layers of the last stage.
        recompute_granularity: ``"full"``, layers, ``"selective"``, attention, or ``"none"``, not in the original, are
            computed again in the backward pass; ``recompute_activations`` is the same as ``"selective"``.
        recompute_method: ``"block"``: only the first ``recompute_num_layers`` layers of each stage.
        attention_dropout, hidden_dropout: the probabilities with which elements of models drop out.
        calculate_per_token_loss: all tokens of a step count equally, instead of all micro-batches.
        no_save_optim, no_load_optim: leave states of optimizers out of checkpoints, or do not load them.
        num_micro_batches: micro-batches per optimizer step.
        gradient_clipping: the largest norm of gradients; 0 means none.
        sequence_parallelism: split everything that ``tp_degree`` does not split along the sequence.
        is_train_batch_min: use the batch size of the loader with the smallest batches.
        train_iters, train_samples: the length of the training, for ``MegatronLMDummyScheduler``; pass one of them.
        consumed_samples: without effect (a warning says so): ``load_state`` and ``skip_first_batches`` go on within
            loaders. Missing numbers, up to three, are 0.
        megatron_dataset_flag: data in Megatron-LM's own format.
        seq_length, encoder_seq_length, decoder_seq_length: the length of sequences, in tokens; by default that of the
            first batch.
        tensorboard_dir, set_all_logging_options: what Megatron-LM logs, and where.
        return_logits: make ``eval`` steps return logits.
        custom_train_step_class, custom_train_step_kwargs: a subclass of ``AbstractTrainStep`` and its arguments.
        custom_model_provider_function, custom_prepare_model_function, custom_megatron_datasets_provider_function,
        custom_get_batch_function, custom_loss_function: functions that replace those for the kind of the model.
        other_megatron_args: further arguments; they take precedence over those from fields.
        megatron_lm_default_args: the arguments that Megatron-LM receives.
        DDP_impl: ``"local"`` for pipelines, sharded optimizers and bf16, else ``"torch"``.
    """

    tp_degree: int | None = None
    pp_degree: int | None = None
    use_custom_fsdp: bool | None = None
    overlap_cpu_optimizer_d2h_h2d: bool | None = None
    no_load_optim: bool | None = None
    eod_mask_loss: bool | None = None
    no_save_optim: bool | None = None
    optimizer_cpu_offload: bool | None = None
    use_precision_aware_optimizer: bool | None = None
    decoder_last_pipeline_num_layers: int | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    attention_backend: bool | None = None
    expert_model_parallel_size: int | None = None
    context_parallel_size: int | None = None
    attention_dropout: float | None = None
    hidden_dropout: float | None = None
    attention_softmax_in_fp32: bool | None = None
    expert_tensor_parallel_size: int | None = None
    calculate_per_token_loss: bool | None = None
    use_rotary_position_embeddings: bool | None = None
    num_micro_batches: int | None = None
    gradient_clipping: float | None = None
    sequence_parallelism: bool | None = None
    recompute_activations: bool | None = None
    use_distributed_optimizer: bool | None = None
    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: bool = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: list[int] | None = None
    no_wd_decay_cond: Callable[..., Any] | None = None
    scale_lr_cond: Callable[..., Any] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: type | None = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        plugin_variables.fill(self, plugin_variables.MEGATRON)
        self.DDP_impl = "local" if (self.pp_degree or 0) > 1 or self.use_distributed_optimizer else "torch"
        if self.consumed_samples:
            self.consumed_samples = [*self.consumed_samples, *[0] * (3 - len(self.consumed_samples))]
        arguments = dict(_ARGUMENTS) | {name: name for name in _SAME_NAMES}
        self.megatron_lm_default_args: dict[str, Any] = {
            argument: getattr(self, field) for argument, field in arguments.items()
        }
        if self.tensorboard_dir is not None:
            self.megatron_lm_default_args["tensorboard_dir"] = self.tensorboard_dir
            if self.set_all_logging_options:
                self.set_tensorboard_logging_options()
        self.megatron_lm_default_args.update(self.other_megatron_args or {})

    def set_network_size_args(self, model: torch.nn.Module, batch_data: Mapping[str, Any] | None = None) -> None:
        """Writes the sizes of a model of transformers, of BERT's, GPT-2's, T5's or Llama's kind, into the arguments.

        Args:
            batch_data: the first batch, which determines the lengths of sequences that no field sets.

        Raises:
            InvalidArgument: a model of another kind; see :func:`add_model_config_to_megatron_parser`.
        """
        write_model_arguments(self, model, batch_data)

    def set_mixed_precision(self, mixed_precision: str | None) -> None:
        """Writes the precision, ``"fp16"`` or ``"bf16"``, into the arguments; others leave them as they are."""
        if mixed_precision == "fp16":
            self.megatron_lm_default_args["fp16"] = True
        elif mixed_precision == "bf16":
            self.DDP_impl = "local"
            self.megatron_lm_default_args.update(bf16=True, DDP_impl=self.DDP_impl)

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Writes the sizes of batches into the arguments.

        Args:
            micro_batch_size: samples per micro-batch and copy of the model.
            dp_degree: the number of these copies.
        """
        self.data_parallel_size, self.micro_batch_size = dp_degree, micro_batch_size
        self.global_batch_size = dp_degree * micro_batch_size * (self.num_micro_batches or 1)
        for name in ("data_parallel_size", "micro_batch_size", "global_batch_size"):
            self.megatron_lm_default_args[name] = getattr(self, name)

    def set_optimizer_type(self, optimizer: Any) -> None:
        """Writes the options of an optimizer of Adam's or SGD's kind into the arguments.

        Raises:
            InvalidArgument: another kind.
        """
        name, defaults = type(optimizer).__name__.lower(), optimizer.defaults
        if "adam" in name:
            first, second = defaults["betas"]
            options = {"optimizer": "adam", "adam_beta1": first, "adam_beta2": second, "adam_eps": defaults["eps"]}
        elif "sgd" in name:
            options = {"optimizer": "sgd", "sgd_momentum": defaults["momentum"]}
        else:
            raise InvalidArgument(f"Megatron-LM has no {type(optimizer).__name__}; expected Adam, AdamW or SGD")
        options |= {"lr": defaults["lr"], "weight_decay": defaults["weight_decay"]}
        self.megatron_lm_default_args.update(options)

    def set_scheduler_args(self, scheduler: Any) -> None:
        """Writes the schedule of the learning rate into the arguments.

        If ``train_iters`` or ``lr_warmup_iters`` is ``None``, the value of the scheduler is used, and ``train_samples``
        and ``lr_warmup_samples`` are ignored.

        Args:
            scheduler: a ``MegatronLMDummyScheduler``, whose steps are those of all copies of the model.

        Raises:
            InvalidArgument: :meth:`set_training_args` was not called before, or the scheduler lacks a value.
        """
        copies = self.megatron_lm_default_args.get("data_parallel_size")
        if copies is None:
            raise InvalidArgument("set_scheduler_args needs the number of copies; call set_training_args first")
        if self.train_iters is None:
            self.train_iters, self.train_samples = _steps(scheduler, "total_num_steps") // copies, None
        if self.lr_warmup_iters is None:
            self.lr_warmup_iters, self.lr_warmup_samples = _steps(scheduler, "warmup_num_steps") // copies, 0
        self.megatron_lm_default_args.update({name: getattr(self, name) for name in _OF_SCHEDULE})

    def set_tensorboard_logging_options(self) -> None:
        """Not supported: only Megatron-LM knows the options that switch on everything that it can log."""
        unsupported.refuse("set_all_logging_options", "MegatronLMPlugin.set_all_logging_options=True")


def _steps(scheduler: Any, name: str) -> int:
    found = getattr(scheduler, name, None)
    if found is None:
        raise InvalidArgument(
            f"set_scheduler_args: {type(scheduler).__name__} has no {name}; pass a MegatronLMDummyScheduler with it, "
            "or pass train_iters and lr_warmup_iters to MegatronLMPlugin"
        )
    return int(found)
