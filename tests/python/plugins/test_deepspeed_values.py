"""Entries that say "auto" get the values that the original fills in; what contradicts them is told."""

from __future__ import annotations

import copy
import logging
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import DummyOptim as OriginalDummyOptim
from accelerate.utils import DummyScheduler as OriginalDummyScheduler
from torch.utils.data import DataLoader

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.deepspeed import DeepSpeedPlugin
from accelerate_cpp.plugins.deepspeed_stand_ins import DummyOptim, DummyScheduler
from accelerate_cpp.plugins.deepspeed_values import (
    RunOfDeepSpeed,
    configuration_for,
    settle_accumulation,
    settle_batch_sizes,
)

AUTO = "auto"
OPTIMIZER = {"type": "AdamW", "params": {"lr": AUTO, "weight_decay": AUTO, "torch_adam": True}}
SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO, "total_num_steps": AUTO},
}
BUCKETS = {
    "stage": 3,
    "reduce_bucket_size": AUTO,
    "stage3_prefetch_bucket_size": AUTO,
    "stage3_param_persistence_threshold": AUTO,
}
SIZES = {"train_batch_size": AUTO, "train_micro_batch_size_per_gpu": AUTO, "gradient_accumulation_steps": AUTO}


@dataclass
class Program:
    """What a program has when it prepares."""

    config: dict[str, Any]
    steps: int = 1
    optimizer: str | None = "torch"
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    scheduler: str | None = None
    scheduler_options: dict[str, Any] = field(default_factory=dict)
    batch_sizes: tuple[int | None, ...] = (4,)
    split_batches: bool = False
    processes: int = 2
    model_config: Any = None
    plugin: dict[str, Any] = field(default_factory=dict)

    def parts(self, of_original: bool) -> tuple[Any, Any, Any, list[Any]]:
        """The model, its optimizer, its schedule and the loaders."""
        model = torch.nn.Linear(2, 2)
        if self.model_config is not None:
            model.config = self.model_config
        stands_in, schedules = (
            (OriginalDummyOptim, OriginalDummyScheduler) if of_original else (DummyOptim, DummyScheduler)
        )
        optimizer: Any = None
        if self.optimizer == "torch":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        elif self.optimizer is not None:
            optimizer = stands_in(model.parameters(), **self.optimizer_options)
        scheduler: Any = None
        if self.scheduler == "torch":
            of_torch = torch.optim.SGD(model.parameters(), lr=0.3) if self.optimizer == "stand-in" else optimizer
            scheduler = torch.optim.lr_scheduler.StepLR(of_torch, 1)
        elif self.scheduler is not None:
            scheduler = schedules(optimizer, **self.scheduler_options)
        loaders = [DataLoader(torch.zeros(8, 2), batch_size=size) for size in self.batch_sizes]  # type: ignore[arg-type]
        return model, optimizer, scheduler, loaders

    def own(self) -> dict[str, Any]:
        """What this package passes to DeepSpeed."""
        model, optimizer, scheduler, loaders = self.parts(of_original=False)
        plugin = DeepSpeedPlugin(hf_ds_config=copy.deepcopy(self.config), **self.plugin)
        run = RunOfDeepSpeed(self.processes, self.processes, self.split_batches)
        settle_accumulation(plugin, self.steps)
        settle_batch_sizes(plugin, loaders, run)
        return configuration_for(plugin, model, optimizer, scheduler, run)

    def originals(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """What the original does."""
        passed: list[dict[str, Any]] = []

        def initialize(config_params: dict[str, Any], **others: Any) -> None:
            passed.append(copy.deepcopy(config_params))
            raise StopIteration

        library = ModuleType("deepspeed")
        library.initialize = initialize  # type: ignore[attr-defined]
        schedules = SimpleNamespace(VALID_LR_SCHEDULES=["WarmupDecayLR"])
        library.runtime = SimpleNamespace(lr_schedules=schedules)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "deepspeed", library)
        monkeypatch.setattr("accelerate.accelerator.logger", logging.getLogger("original"))  # its own needs a state
        model, optimizer, scheduler, loaders = self.parts(of_original=True)
        run = SimpleNamespace(
            deepspeed_plugin=accelerate.DeepSpeedPlugin(hf_ds_config=copy.deepcopy(self.config), **self.plugin),
            fp8_backend=None,
            parallelism_config=None,
            split_batches=self.split_batches,
            num_processes=self.processes,
            gradient_accumulation_steps=self.steps,
            device=torch.device("cpu"),
            _prepare_one=lambda item, first_pass: item,
        )
        given = [one for one in (model, optimizer, scheduler, *loaders) if one is not None]
        with pytest.raises(StopIteration):
            accelerate.Accelerator._prepare_deepspeed(run, *given)  # type: ignore[arg-type]
        return passed[0]


def settings(**others: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2}, **SIZES, **others}


SAME_AS_THE_ORIGINAL = {
    "sizes from the loader": Program(settings()),
    "accumulation": Program(settings(), steps=3),
    "accumulation of the configuration": Program(settings(gradient_accumulation_steps=3)),
    "clipping": Program(settings(gradient_clipping=AUTO)),
    "no clipping": Program(settings(gradient_clipping=0.5)),
    "split batches": Program(settings(), split_batches=True),
    "the smallest batches": Program(settings(), batch_sizes=(4, 2)),
    "the largest batches": Program(settings(), batch_sizes=(4, 2), plugin={"is_train_batch_min": False}),
    "four processes": Program(settings(), processes=4, steps=2),
    "size of a micro-batch": Program(settings(train_micro_batch_size_per_gpu=4)),
    "gathering": Program(
        settings(zero_optimization={"stage": 3, "stage3_gather_16bit_weights_on_model_save": AUTO}),
    ),
    "hidden size": Program(
        settings(zero_optimization=BUCKETS), model_config=SimpleNamespace(hidden_size=33), plugin={"zero_stage": 3}
    ),
    "hidden sizes": Program(settings(zero_optimization=BUCKETS), model_config=SimpleNamespace(hidden_sizes=[8, 31, 4])),
    "some sizes of buckets": Program(
        settings(zero_optimization={**BUCKETS, "reduce_bucket_size": 7}), model_config=SimpleNamespace(hidden_size=5)
    ),
    "numbers for buckets": Program(settings(zero_optimization={"stage": 3, "reduce_bucket_size": 7})),
    "optimizer": Program(
        settings(optimizer=OPTIMIZER), optimizer="stand-in", optimizer_options={"lr": 0.02, "weight_decay": 0.1}
    ),
    "optimizer with defaults": Program(settings(optimizer=OPTIMIZER), optimizer="stand-in"),
    "schedule": Program(
        settings(optimizer=OPTIMIZER, scheduler=SCHEDULER),
        optimizer="stand-in",
        optimizer_options={"lr": 0.02},
        scheduler="stand-in",
        scheduler_options={"total_num_steps": 11, "warmup_num_steps": 3},
    ),
    "schedule without warm-up": Program(
        settings(optimizer=OPTIMIZER, scheduler=SCHEDULER),
        optimizer="stand-in",
        scheduler="stand-in",
        scheduler_options={"total_num_steps": 11},
    ),
    "schedule of split batches": Program(
        settings(optimizer=OPTIMIZER, scheduler=SCHEDULER),
        optimizer="stand-in",
        scheduler="stand-in",
        scheduler_options={"total_num_steps": 11},
        split_batches=True,
    ),
    "schedule of an optimizer of torch": Program(
        settings(scheduler=SCHEDULER), scheduler="stand-in", scheduler_options={"total_num_steps": 11}
    ),
    "schedule that is called": Program(
        settings(optimizer=OPTIMIZER),
        optimizer="stand-in",
        scheduler="stand-in",
        scheduler_options={"lr_scheduler_callable": print},
    ),
    "schedule of torch": Program(settings(), scheduler="torch"),
    "model alone": Program(settings(), optimizer=None),
}


@pytest.mark.parametrize("name", SAME_AS_THE_ORIGINAL)
def test_values_are_the_originals(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    program = SAME_AS_THE_ORIGINAL[name]
    expected = program.originals(monkeypatch)
    found = program.own()
    for own in (found, expected):
        assert AUTO not in str(own)
    assert found == expected


def test_values_of_the_configuration_win_over_those_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 0.5, "weight_decay": 0.25}}
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 2}}
    program = Program(
        settings(optimizer=optimizer, scheduler=scheduler, gradient_accumulation_steps=2),
        steps=4,
        optimizer="stand-in",
        optimizer_options={"lr": 0.02, "weight_decay": 0.1},
        scheduler="stand-in",
        scheduler_options={"total_num_steps": 11, "warmup_num_steps": 3},
    )
    expected = program.originals(monkeypatch)
    with pytest.warns(UserWarning, match="in the configuration of DeepSpeed, and the") as warned:
        assert program.own() == expected
    assert [str(one.message).partition(":")[0] for one in warned] == [
        "gradient_accumulation_steps is 2 in the configuration of DeepSpeed, and the Accelerator has 4",
        "optimizer.params.lr is 0.5 in the configuration of DeepSpeed, and the program says 0.02",
        "optimizer.params.weight_decay is 0.25 in the configuration of DeepSpeed, and the program says 0.1",
        "scheduler.params.total_num_steps is 9 in the configuration of DeepSpeed, and the program says 6",
        "scheduler.params.warmup_num_steps is 2 in the configuration of DeepSpeed, and the program says 3",
    ]


@pytest.mark.filterwarnings("error")
def test_what_the_program_does_not_say_contradicts_nothing() -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 0.5, "weight_decay": 0.25}}
    Program(settings(optimizer=optimizer), optimizer="stand-in").own()
    Program(settings(gradient_accumulation_steps=2), steps=1).own()
    Program(settings(gradient_accumulation_steps=2), steps=2).own()


def test_the_plugin_keeps_its_sizes_and_nothing_of_a_model() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config=settings(gradient_clipping=AUTO, optimizer=OPTIMIZER))
    run = RunOfDeepSpeed(2, 2, False)
    assert settle_accumulation(plugin, 3) == 3
    settle_batch_sizes(plugin, [DataLoader(torch.zeros(8, 2), batch_size=4)], run)
    sizes = [plugin.deepspeed_config[name] for name in SIZES]
    assert sizes == [24, 4, 3]
    model = torch.nn.Linear(2, 2)
    configuration_for(plugin, model, DummyOptim(model.parameters(), lr=0.1), None, run)
    assert plugin.deepspeed_config["optimizer"] == OPTIMIZER


def test_processes_that_split_sequences_are_one_for_the_counts_of_samples() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config=settings())
    settle_accumulation(plugin, 1)
    settle_batch_sizes(plugin, [DataLoader(torch.zeros(8, 2), batch_size=4)], RunOfDeepSpeed(4, 2, False))
    assert plugin.deepspeed_config["train_batch_size"] == 8


def test_batches_smaller_than_the_processes_count_one_sample() -> None:
    assert Program(settings(), split_batches=True, processes=8).own()["train_micro_batch_size_per_gpu"] == 1


def test_a_micro_batch_follows_from_the_size_of_a_step() -> None:
    config = Program(settings(train_batch_size=24), steps=3, batch_sizes=(4,)).own()
    assert config["train_micro_batch_size_per_gpu"] == 4
    with pytest.raises(InvalidArgument, match=r"train_batch_size=25, which is not divisible by .*=3 × 2 processes"):
        Program(settings(train_batch_size=25), steps=3).own()


def test_sizes_that_contradict_each_other_are_refused() -> None:
    sizes = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4}
    assert Program(settings(**sizes), steps=3).own()["train_batch_size"] == 24
    with pytest.raises(InvalidArgument, match=r"=24, but .*=4 × gradient_accumulation_steps=1 × 2 processes is 8"):
        Program(settings(**sizes)).own()


def test_loaders_with_other_batches_than_the_configuration_says_are_told() -> None:
    with pytest.warns(UserWarning, match="is 3 in .*, and the loader's batches have 4 samples per process: .* counts"):
        config = Program(settings(train_micro_batch_size_per_gpu=3)).own()
    assert config["train_batch_size"] == 6


@pytest.mark.parametrize("batch_sizes", [(), (None,)])
def test_without_sizes_of_batches_one_sample_is_counted(batch_sizes: tuple[None, ...]) -> None:
    with pytest.warns(UserWarning, match="no loader with a batch size has been given to prepare: 1 is used"):
        config = Program(settings(), batch_sizes=batch_sizes).own()
    assert config["train_micro_batch_size_per_gpu"] == 1


def test_a_text_model_inside_of_another_has_the_hidden_size() -> None:
    inner = SimpleNamespace(hidden_size=3)
    nested = SimpleNamespace(get_text_config=lambda: inner)
    config = Program(settings(zero_optimization=BUCKETS), model_config=nested).own()
    assert config["zero_optimization"]["reduce_bucket_size"] == 9


@pytest.mark.parametrize("model_config", [None, SimpleNamespace(width=3)])
def test_sizes_of_buckets_need_a_width(model_config: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"'auto' for zero_optimization.reduce_bucket_size, .*Linear has neither"):
        Program(settings(zero_optimization=BUCKETS), model_config=model_config).own()


REFUSED = {
    "'optimizer', and the program has another one .SGD": Program(settings(optimizer=OPTIMIZER)),
    "DummyOptim, which stands for the entry 'optimizer' .* there is none": Program(settings(), optimizer="stand-in"),
    "'scheduler', and the program has another one .StepLR": Program(settings(scheduler=SCHEDULER), scheduler="torch"),
    "StepLR needs the optimizer that it changes, but the program has a DummyOptim": Program(
        settings(optimizer=OPTIMIZER), optimizer="stand-in", scheduler="torch"
    ),
    "DummyScheduler, which stands for the entry 'scheduler' .* there is none": Program(
        settings(), scheduler="stand-in"
    ),
    "scheduler.params.total_num_steps='auto', but nothing in the program says": Program(
        settings(scheduler=SCHEDULER), scheduler="stand-in"
    ),
    "optimizer.params.eps='auto', but nothing in the program says": Program(
        settings(optimizer={"type": "AdamW", "params": {"eps": AUTO}}), optimizer="stand-in"
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_program_and_a_configuration_have_to_complete_each_other(message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        REFUSED[message].own()


def test_a_configuration_that_says_nothing_of_accumulation_leaves_it_to_the_program() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}})
    assert settle_accumulation(plugin, 4) == 4
    assert plugin.deepspeed_config["gradient_accumulation_steps"] == 4
    said = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 1})
    with pytest.warns(UserWarning, match="gradient_accumulation_steps is 1 in the configuration .* Accelerator has 4"):
        assert settle_accumulation(said, 4) == 1
