"""The plugin for Megatron-LM."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import accelerate.utils as original
import pytest
import torch

from accelerate_cpp.config import plugin_variables
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.megatron import MegatronLMPlugin
from accelerate_cpp.utils.megatron_lm import MegatronLMDummyScheduler

ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"tp_degree": 2, "gradient_clipping": 0.5, "num_micro_batches": 3},
    {"pp_degree": 2},
    {"use_distributed_optimizer": True, "sequence_parallelism": True, "recompute_activations": True},
    {"consumed_samples": [5]},
    {"consumed_samples": [1, 2, 3, 4]},
    {"tensorboard_dir": "logs", "return_logits": True, "eval_iters": 5},
    {"set_all_logging_options": True},
    {"other_megatron_args": {"lr_mult": 5, "more": 1}},
]


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(1))]


def both(**arguments: Any) -> tuple[Any, Any]:
    return MegatronLMPlugin(**copy.deepcopy(arguments)), original.MegatronLMPlugin(**copy.deepcopy(arguments))


def test_the_fields_and_their_order_are_the_originals() -> None:
    theirs = fields(original.MegatronLMPlugin)
    assert [(field.name, field.default) for field in fields(MegatronLMPlugin)] == [
        (field.name, field.default) for field in theirs
    ]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_arguments_come_to_what_they_come_to_in_the_original(
    arguments: dict[str, Any], comes_to: Callable[..., Any]
) -> None:
    own, theirs = (comes_to(kind, copy.deepcopy(arguments)) for kind in (MegatronLMPlugin, original.MegatronLMPlugin))
    assert own == theirs
    assert list(own["megatron_lm_default_args"]) == list(theirs["megatron_lm_default_args"])


@pytest.mark.parametrize("field", plugin_variables.MEGATRON)
@pytest.mark.parametrize("text", ["3", "0.25", "true", "false", "block"])
def test_variables_come_to_what_they_come_to_in_the_original(
    field: str, text: str, comes_to: Callable[..., Any]
) -> None:
    environment = {f"MEGATRON_LM_{field.upper()}": text}
    own, theirs = (comes_to(kind, {}, environment) for kind in (MegatronLMPlugin, original.MegatronLMPlugin))
    assert own == theirs


def test_logging_everything_needs_megatron() -> None:
    with pytest.raises(InvalidArgument, match="set_all_logging_options=True: switching on everything"):
        MegatronLMPlugin(tensorboard_dir="logs", set_all_logging_options=True)
    with pytest.raises(InvalidArgument, match="pass tensorboard_dir: losses, rates and norms are logged"):
        MegatronLMPlugin().set_tensorboard_logging_options()


@pytest.mark.parametrize("mixed_precision", ["fp16", "bf16", "no", None])
def test_the_precision_of_the_run_is_an_argument(mixed_precision: str | None) -> None:
    own, theirs = both()
    for plugin in (own, theirs):
        plugin.set_mixed_precision(mixed_precision)
    assert vars(own) == vars(theirs)


def test_sizes_of_batches_are_arguments() -> None:
    own, theirs = both(num_micro_batches=3)
    for plugin in (own, theirs):
        plugin.set_training_args(4, 2)
    assert vars(own) == vars(theirs)
    assert own.megatron_lm_default_args["global_batch_size"] == 24


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.optim.AdamW(parameters(), lr=0.2, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-5),
        lambda: torch.optim.SGD(parameters(), lr=0.1, momentum=0.5),
        lambda: type("FusedAdam", (), {"defaults": {"lr": 1, "betas": (0.1, 0.2), "eps": 3, "weight_decay": 4}})(),
    ],
)
def test_the_options_of_optimizers_are_arguments(make: Callable[[], Any]) -> None:
    own, theirs = both()
    for plugin in (own, theirs):
        plugin.set_optimizer_type(make())
    assert vars(own) == vars(theirs)


def test_an_optimizer_that_megatron_lacks_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="has no RMSprop; expected Adam, AdamW or SGD"):
        MegatronLMPlugin().set_optimizer_type(torch.optim.RMSprop(parameters()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"train_iters": 100},
        {"train_samples": 100, "lr_warmup_samples": 3},
        {"lr_decay_iters": 7, "lr_warmup_iters": 3},
        {"lr_decay_style": "cosine", "min_lr": 0.1, "start_weight_decay": 0.1},
    ],
    ids=str,
)
def test_the_schedule_is_an_argument(arguments: dict[str, Any]) -> None:
    own, theirs = both(**arguments)
    for plugin in (own, theirs):
        plugin.set_training_args(4, 2)
        plugin.set_scheduler_args(MegatronLMDummyScheduler(None, total_num_steps=10, warmup_num_steps=3))
    assert vars(own) == vars(theirs)


def test_a_schedule_without_steps_or_batch_sizes_is_refused() -> None:
    plugin = MegatronLMPlugin()
    with pytest.raises(InvalidArgument, match="call set_training_args first"):
        plugin.set_scheduler_args(MegatronLMDummyScheduler(None, 10))
    plugin.set_training_args(1, 1)
    with pytest.raises(InvalidArgument, match="MegatronLMDummyScheduler has no total_num_steps"):
        plugin.set_scheduler_args(MegatronLMDummyScheduler(None))


def test_sizes_of_models_are_arguments() -> None:
    config = SimpleNamespace(model_type="gpt2", n_layer=1, n_embd=2, n_head=3, n_positions=4, vocab_size=5)
    config.return_dict = True
    model: Any = torch.nn.Module()
    model.config = config
    own, theirs = both()
    for plugin in (own, theirs):
        plugin.set_network_size_args(model, {"input_ids": torch.zeros(2, 7)})
    assert vars(own) == vars(theirs)
    assert own.seq_length == 7
