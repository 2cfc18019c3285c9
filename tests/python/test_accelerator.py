"""The façade in one process."""

from __future__ import annotations

import inspect
import json
import weakref
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate_cpp.accelerator import Accelerator
from accelerate_cpp.errors import InvalidArgument, SystemFailure
from accelerate_cpp.prepare.metrics import drop_repeated, rows_of_last_batch
from accelerate_cpp.runtime import current
from accelerate_cpp.state import GradientState
from accelerate_cpp.utils.dataclasses import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)

VARIABLES = (
    "RANK WORLD_SIZE LOCAL_RANK ACCELERATE_MIXED_PRECISION ACCELERATE_DYNAMO_BACKEND "
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS ACCELERATE_USE_FSDP ACCELERATE_USE_DEEPSPEED"
)
ARGUMENTS = (
    "device_placement split_batches mixed_precision gradient_accumulation_steps cpu dataloader_config deepspeed_plugin "
    "fsdp_plugin torch_tp_plugin megatron_lm_plugin rng_types log_with project_dir project_config "
    "gradient_accumulation_plugin step_scheduler_with_optimizer kwargs_handlers dynamo_backend dynamo_plugin "
    "deepspeed_plugins parallelism_config"
)


@pytest.fixture(autouse=True)
def _no_variables(fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES.split():
        monkeypatch.delenv(name, raising=False)


def parts(samples: int = 8, batch_size: int = 2) -> tuple[torch.nn.Linear, torch.optim.SGD, DataLoader[Any]]:
    model = torch.nn.Linear(1, 1)
    data = torch.arange(samples, dtype=torch.float32).reshape(-1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=batch_size)  # type: ignore[arg-type]


class TestConstruction:
    def test_the_arguments_have_the_known_order_and_defaults(self) -> None:
        parameters = dict(inspect.signature(Accelerator).parameters)
        assert " ".join(parameters) == ARGUMENTS
        defaults = {name: parameter.default for name, parameter in parameters.items() if name != "split_batches"}
        assert {name: value for name, value in defaults.items() if value is not None} == {
            "device_placement": True,
            "gradient_accumulation_steps": 1,
            "cpu": False,
            "step_scheduler_with_optimizer": True,
        }

    @pytest.mark.parametrize(
        "argument",
        [
            {"deepspeed_plugin": object()},
            {"fsdp_plugin": object()},
            {"torch_tp_plugin": object()},
            {"megatron_lm_plugin": object()},
            {"deepspeed_plugins": {}},
            {"parallelism_config": object()},
            {"log_with": "nonsense"},
            {"dynamo_plugin": object()},
            {"dynamo_backend": "quick"},
            {"mixed_precision": "fp17"},
            {"dynamo_plugin": TorchDynamoPlugin(), "dynamo_backend": "eager"},
            {"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]},
            {"kwargs_handlers": [DistributedDataParallelKwargs(comm_wrapper=DDPCommunicationHookType.BF16)]},
            {"gradient_accumulation_steps": 0},
            {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(2)},
        ],
        ids=lambda argument: "-".join(argument),
    )
    def test_what_cannot_be_done_is_refused_before_anything_starts(self, argument: dict[str, Any]) -> None:
        with pytest.raises(InvalidArgument):
            Accelerator(cpu=True, **argument)
        assert current.session is None

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("ACCELERATE_USE_SAGEMAKER", "1"),
            ("ACCELERATE_MIXED_PRECISION", "fp7"),
            ("ACCELERATE_DYNAMO_BACKEND", "quick"),
        ],
    )
    def test_the_environment_is_refused_as_arguments_are(
        self, name: str, text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(name, text)
        with pytest.raises(InvalidArgument, match=name):
            Accelerator(cpu=True)

    def test_neutral_requests_are_accepted(self) -> None:
        accelerator = Accelerator(
            cpu=True,
            mixed_precision="no",
            dynamo_backend="no",
            log_with=[],
            kwargs_handlers=[AutocastKwargs(enabled=False), DistributedDataParallelKwargs(bucket_cap_mb=3)],
        )
        assert accelerator._session.config.ddp_kwargs == {"bucket_cap_mb": 3}
        with accelerator.autocast():
            assert not torch.is_autocast_enabled("cpu")

    def test_a_second_one_shares_the_state_and_brings_its_own_options(self) -> None:
        first = Accelerator(cpu=True, gradient_accumulation_steps=2)
        second = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)])
        assert second.device == first.device
        assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (2, 1)
        assert first._session.config.ddp_kwargs == {}
        assert second._session.config.ddp_kwargs == {"static_graph": True}
        with pytest.raises(ValueError, match="already"):
            Accelerator(mixed_precision="bf16")

    def test_split_batches_belongs_into_the_loader_configuration(self) -> None:
        with pytest.warns(UserWarning, match="DataLoaderConfiguration"):
            assert not Accelerator(cpu=True, split_batches=True).split_batches
        assert Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True)).split_batches

    def test_the_project_directory_fills_its_configuration(self, tmp_path: Path) -> None:
        accelerator = Accelerator(cpu=True, project_dir=tmp_path)
        assert (accelerator.project_dir, accelerator.logging_dir) == (tmp_path, tmp_path)
        configured = Accelerator(project_dir=tmp_path, project_config=ProjectConfiguration(logging_dir="logs"))
        assert (configured.project_dir, configured.logging_dir) == (tmp_path, "logs")


class TestPrepare:
    def test_objects_come_back_in_their_order(self) -> None:
        accelerator, (model, optimizer, loader) = Accelerator(cpu=True), parts()
        prepared = accelerator.prepare(loader, "text", model, optimizer)
        assert isinstance(prepared, tuple)
        assert prepared[1] == "text"
        assert prepared[2] is model
        assert prepared[3].optimizer is optimizer
        assert next(iter(prepared[0])).shape == (2, 1)

    def test_one_object_comes_back_alone_and_none_as_an_empty_tuple(self) -> None:
        accelerator, thing = Accelerator(cpu=True), {"a": 1}
        assert accelerator.prepare(thing) is thing
        assert accelerator.prepare() == ()

    def test_an_object_given_twice_is_prepared_once(self) -> None:
        accelerator, (_, optimizer, _) = Accelerator(cpu=True), parts()
        one, two = accelerator.prepare(optimizer, optimizer)
        assert one is two
        assert accelerator._optimizers == [one]

    def test_a_scheduler_given_first_finds_its_optimizer_among_several(self) -> None:
        accelerator, (_, optimizer, _), (_, other, _) = Accelerator(cpu=True), parts(), parts()
        inner = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        scheduler, _, prepared = accelerator.prepare(inner, other, optimizer)
        assert scheduler.scheduler is inner
        assert [wrapped is prepared for wrapped in scheduler.optimizers] == [True]

    def test_a_scheduler_prepared_later_finds_its_optimizer(self) -> None:
        accelerator, (_, optimizer, _) = Accelerator(cpu=True), parts()
        prepared = accelerator.prepare(optimizer)
        scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1))
        assert scheduler.optimizers[0] is prepared

    def test_optimizers_and_schedulers_can_be_prepared_by_themselves(self) -> None:
        accelerator, (_, optimizer, _) = Accelerator(cpu=True, step_scheduler_with_optimizer=False), parts()
        prepared = accelerator.prepare_optimizer(optimizer)
        scheduler = accelerator.prepare_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1))
        assert prepared.optimizer is optimizer
        assert scheduler.optimizers == [prepared]
        assert not scheduler.step_with_optimizer
        assert accelerator.prepare(prepared, scheduler) == (prepared, scheduler)
        assert (accelerator._optimizers, accelerator._schedulers) == ([prepared], [scheduler])

    def test_prepared_objects_are_returned_as_they_are(self) -> None:
        accelerator, (model, optimizer, loader) = Accelerator(cpu=True), parts()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        prepared = accelerator.prepare(model, optimizer, loader, schedule)
        again = accelerator.prepare(*prepared)
        assert [one is two for one, two in zip(prepared, again, strict=True)] == [True] * 4
        assert accelerator.prepare_model(prepared[0]) is prepared[0]
        assert (len(accelerator._models), len(accelerator._optimizers), len(accelerator._dataloaders)) == (1, 1, 1)
        assert len(accelerator._schedulers) == 1

    def test_placements_need_one_entry_for_each_object(self) -> None:
        accelerator, (model, optimizer, _) = Accelerator(cpu=True), parts()
        with pytest.raises(InvalidArgument, match="1 entries for 2 objects"):
            accelerator.prepare(model, optimizer, device_placement=[True])

    def test_without_placement_the_loader_leaves_batches_where_they_are(self) -> None:
        assert Accelerator(cpu=True, device_placement=False).prepare(parts()[2]).device is None
        accelerator = Accelerator(cpu=True)
        assert accelerator.prepare(parts()[2]).device == accelerator.device
        assert accelerator.prepare(parts()[2], device_placement=[False]).device is None

    def test_a_model_without_trainable_parameters_is_fine_in_one_process(self) -> None:
        accelerator, model = Accelerator(cpu=True), parts()[0].requires_grad_(False)
        assert accelerator.prepare(model) is model
        assert accelerator.prepare_model(torch.nn.Linear(1, 1), evaluation_mode=True).weight.requires_grad

    def test_skipped_batches_stay_skipped_once_prepared(self) -> None:
        accelerator, (_, _, loader) = Accelerator(cpu=True), parts(samples=6)
        rest = accelerator.skip_first_batches(accelerator.prepare(loader), 2)
        assert [batch.flatten().tolist() for batch in rest] == [[4.0, 5.0]]


class TestTraining:
    def test_the_loss_is_divided_by_the_number_of_micro_batches(self) -> None:
        accelerator, weight = Accelerator(cpu=True, gradient_accumulation_steps=4), torch.nn.Parameter(torch.ones(1))
        accelerator.backward((weight * 2).sum())
        assert weight.grad is not None
        assert weight.grad.item() == 0.5

    def test_accumulation_synchronises_every_nth_and_the_last_batch(self) -> None:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, optimizer, loader = accelerator.prepare(*parts(samples=5, batch_size=1))
        seen = []
        for batch in loader:
            with accelerator.accumulate(model):
                before = model.weight.item()
                accelerator.backward(model(batch).sum() + 1)
                optimizer.step()
                optimizer.zero_grad()
                seen.append((accelerator.sync_gradients, model.weight.item() != before))
        assert [synchronised for synchronised, _ in seen] == [False, True, False, True, True]
        assert [stepped for _, stepped in seen] == [False, True, False, True, True]
        assert accelerator.step == 0

    def test_the_environment_wins_over_the_number_of_micro_batches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
        assert Accelerator(cpu=True, gradient_accumulation_steps=5).gradient_accumulation_steps == 3

    def test_the_number_of_micro_batches_can_be_changed_but_not_to_zero(self) -> None:
        accelerator = Accelerator(cpu=True)
        accelerator.gradient_accumulation_steps = 3
        assert accelerator.gradient_accumulation_steps == 3
        with pytest.raises(InvalidArgument, match="at least 1"):
            accelerator.gradient_accumulation_steps = 0

    def test_a_plugin_can_leave_the_last_batch_alone(self) -> None:
        plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
        accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
        model, _, loader = accelerator.prepare(*parts(samples=3, batch_size=1))
        seen = []
        for _ in loader:
            with accelerator.accumulate(model):
                seen.append(accelerator.sync_gradients)
        assert seen == [False, True, False]

    def test_gradients_are_clipped_in_place_by_norm_and_by_value(self) -> None:
        accelerator, weight = Accelerator(cpu=True), torch.nn.Parameter(torch.zeros(2))
        weight.grad = torch.tensor([3.0, 4.0])
        assert accelerator.clip_grad_norm_(weight, 1.0).item() == 5.0
        assert weight.grad.norm().item() == pytest.approx(1.0, abs=1e-4)
        accelerator.clip_grad_value_([weight], 0.5)
        assert weight.grad.max().item() == 0.5

    def test_no_optimizer_of_full_precision_skips_a_step(self) -> None:
        accelerator, (_, optimizer, _) = Accelerator(cpu=True), parts()
        accelerator.prepare(optimizer)
        assert not accelerator.optimizer_step_was_skipped

    def test_a_profile_is_written_for_each_rank(self, tmp_path: Path) -> None:
        handler = ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path / "traces"))
        accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        with accelerator.profile():
            torch.ones(2) + 1
        assert "traceEvents" in json.loads((tmp_path / "traces" / "profile_0.json").read_text())

    def test_a_profile_goes_through_no_link(self, tmp_path: Path) -> None:
        """Which others may have put where torch writes first."""
        (tmp_path / "theirs").touch()
        for name in ("profile_0.json", "profile_0.json.tmp"):
            (tmp_path / name).symlink_to("theirs")
        handler = ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path))
        with Accelerator(cpu=True, kwargs_handlers=[handler]).profile():
            torch.ones(2) + 1
        assert (tmp_path / "theirs").read_text() == ""
        assert "traceEvents" in json.loads((tmp_path / "profile_0.json").read_text())
        assert sorted(path.name for path in tmp_path.iterdir()) == ["profile_0.json", "profile_0.json.tmp", "theirs"]
        (tmp_path / "folder" / "profile_0.json").mkdir(parents=True)
        handler = ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path / "folder"))
        profile = Accelerator(cpu=True, kwargs_handlers=[handler]).profile()
        with (
            pytest.raises(SystemFailure, match=r"profile_0\.json cannot be written; make room or choose another"),
            profile,
        ):
            torch.ones(2) + 1


class TestCollectivesOfOneProcess:
    def test_they_return_their_input_and_reduce_a_copy(self) -> None:
        accelerator, tensor = Accelerator(cpu=True), torch.ones(2)
        assert accelerator.gather(tensor) is tensor
        assert accelerator.pad_across_processes(tensor) is tensor
        reduced = accelerator.reduce(tensor, "mean")
        assert reduced is not tensor
        assert torch.equal(reduced, tensor)

    def test_metrics_of_another_length_are_whole_on_a_short_last_batch(self) -> None:
        accelerator, (_, _, loader) = Accelerator(cpu=True), parts(samples=5)
        matrix = torch.ones(3, 2)
        for _ in accelerator.prepare(loader):
            assert accelerator.gather_for_metrics(matrix) is matrix
            assert accelerator.gather_for_metrics(["a", "b", "c"]) == ["a", "b", "c"]

    def test_a_trigger_is_seen_once(self) -> None:
        accelerator = Accelerator(cpu=True)
        accelerator.set_trigger()
        assert accelerator.check_trigger() is True
        assert accelerator.check_trigger() is False

    def test_nothing_is_uneven(self) -> None:
        with Accelerator(cpu=True).join_uneven_inputs([]):
            pass


class LastBatch:
    """A loader of 4 samples per step on two processes, with one real sample in the last step."""

    end_of_dataloader = True
    remainder = 1
    total_batch_size = 4


class TestRepeatedSamples:
    def rows(self, num_processes: int = 2, **changes: Any) -> Any:
        loader = type("Loader", (LastBatch,), changes)()
        state = GradientState()
        state._add_dataloader(loader)
        found = rows_of_last_batch(state, num_processes)
        state._remove_dataloader(loader)
        return found

    def test_a_completed_batch_is_a_full_one_or_the_next_multiple_of_the_processes(self) -> None:
        assert self.rows() == (frozenset({4, 2}), 1)

    def test_batches_without_a_common_size_are_as_long_as_they_are_on_all_processes(self) -> None:
        assert self.rows(total_batch_size=None, completed=[3, 4]) == (frozenset({7, 2}), 1)
        assert self.rows(total_batch_size=None) == (frozenset({None, 2}), 1)

    @pytest.mark.parametrize("changes", [{"end_of_dataloader": False}, {"remainder": 0}, {"remainder": -1}])
    def test_other_batches_have_none(self, changes: dict[str, Any]) -> None:
        assert self.rows(**changes) is None

    def test_in_one_process_a_short_batch_counts_as_a_full_one(self) -> None:
        assert self.rows(num_processes=1) == (frozenset({4, 1}), 1)

    def test_only_rows_of_the_global_batch_are_cut(self) -> None:
        pair = namedtuple("pair", "logits loss")
        local = {"ids": torch.zeros(2, 3), "stats": [pair(torch.zeros(2), torch.tensor(0.0))], "other": torch.zeros(5)}
        gathered = {"ids": torch.zeros(4, 3), "stats": [pair(torch.zeros(4), torch.zeros(2))], "other": torch.zeros(10)}
        cut = drop_repeated(gathered, local, False, frozenset({4, 2}), 1)
        assert cut["ids"].shape == (1, 3)
        assert type(cut["stats"][0]) is pair
        assert (len(cut["stats"][0].logits), len(cut["stats"][0].loss), len(cut["other"])) == (1, 2, 10)

    def test_gathered_objects_are_cut_when_there_is_one_for_each_sample(self) -> None:
        lengths = frozenset({4, 2})
        assert drop_repeated(["a", "b", "c", "d"], ["a", "b"], True, lengths, 3) == ["a", "b", "c"]
        assert drop_repeated(["a", "b", "c"], ["a"], True, lengths, 1) == ["a", "b", "c"]


class TestTheEnd:
    def test_models_are_unwrapped_to_what_was_given(self) -> None:
        accelerator, (model, _, _) = Accelerator(cpu=True), parts()
        prepared = accelerator.prepare(model)
        assert accelerator.unwrap_model(prepared) is model
        assert list(accelerator.get_state_dict(prepared)) == ["weight", "bias"]
        assert list(accelerator.get_state_dict(prepared, unwrap=False)) == ["weight", "bias"]

    @pytest.mark.parametrize("free", ["free_memory", "clear"])
    def test_freed_memory_holds_no_prepared_object(self, free: str) -> None:
        accelerator = Accelerator(cpu=True)
        model, optimizer, loader = accelerator.prepare(*parts())
        seen = weakref.ref(model)
        accelerator.step = 3
        model, optimizer, loader = getattr(accelerator, free)(model, optimizer, loader)
        assert (model, optimizer, loader) == (None, None, None)
        assert seen() is None
        assert (accelerator._models, accelerator._optimizers, accelerator._dataloaders) == ([], [], [])
        assert (accelerator._schedulers, accelerator.step) == ([], 0)

    def test_decorators_contexts_and_printing_work_in_one_process(self, capsys: pytest.CaptureFixture[str]) -> None:
        accelerator = Accelerator(cpu=True)
        decorators = (
            accelerator.on_main_process,
            accelerator.on_local_main_process,
            accelerator.on_last_process,
            accelerator.on_process(process_index=0),
            accelerator.on_local_process(local_process_index=0),
        )
        assert [decorate(lambda: 7)() for decorate in decorators] == [7] * 5
        with accelerator.main_process_first(), accelerator.local_main_process_first():
            accelerator.print("hello")
        with accelerator.split_between_processes([1, 2]) as share:
            assert share == [1, 2]
        accelerator.end_training()
        assert capsys.readouterr().out == "hello\n"
        assert accelerator.is_main_process
        assert accelerator.is_local_main_process
        assert accelerator.is_last_process
        assert (accelerator.distributed_type, accelerator.local_process_index) == ("NO", 0)


def test_mean_that_is_repeated_for_a_full_batch_counts_for_the_samples_of_a_short_one() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(5), batch_size=4))
    lengths = [[len(accelerator.gather_for_metrics(batch.float().mean().repeat(4))), len(batch)] for batch in loader]
    assert lengths == [[4, 4], [1, 1]]
