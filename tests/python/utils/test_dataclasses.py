"""Options as users write them."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from typing import Any

import accelerate.utils.dataclasses as original
import pytest
import torch

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.handlers import by_class
from accelerate_cpp.utils.dataclasses import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DynamoBackend,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)

NO_HOOK = DDPCommunicationHookType.NO


@pytest.mark.parametrize(
    ("kind", "defaults"),
    [
        (AutocastKwargs, {"enabled": True, "cache_enabled": None, "outputs_in_fp32": True}),
        (
            DistributedDataParallelKwargs,
            {
                "dim": 0,
                "broadcast_buffers": True,
                "bucket_cap_mb": 25,
                "find_unused_parameters": False,
                "check_reduction": False,
                "gradient_as_bucket_view": False,
                "static_graph": False,
                "comm_hook": NO_HOOK,
                "comm_wrapper": NO_HOOK,
                "comm_state_option": {},
            },
        ),
        (
            GradScalerKwargs,
            {
                "init_scale": 65536.0,
                "growth_factor": 2.0,
                "backoff_factor": 0.5,
                "growth_interval": 2000,
                "enabled": True,
            },
        ),
        (InitProcessGroupKwargs, {"backend": "nccl", "init_method": None, "timeout": timedelta(minutes=10)}),
        (
            ProfileKwargs,
            {
                "activities": None,
                "schedule_option": None,
                "on_trace_ready": None,
                "record_shapes": False,
                "profile_memory": False,
                "with_stack": False,
                "with_flops": False,
                "with_modules": False,
                "output_trace_dir": None,
            },
        ),
        (
            DataLoaderConfiguration,
            {
                "split_batches": False,
                "dispatch_batches": None,
                "even_batches": True,
                "use_seedable_sampler": False,
                "data_seed": None,
                "non_blocking": False,
                "use_stateful_dataloader": False,
            },
        ),
        (
            GradientAccumulationPlugin,
            {"num_steps": None, "adjust_scheduler": True, "sync_with_dataloader": True, "sync_each_batch": False},
        ),
        (
            ProjectConfiguration,
            {
                "project_dir": None,
                "logging_dir": None,
                "automatic_checkpoint_naming": False,
                "total_limit": None,
                "iteration": 0,
                "save_on_each_node": False,
            },
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_fields_have_the_known_order_and_defaults(kind: type, defaults: dict[str, object]) -> None:
    instance = kind()
    assert [(field.name, getattr(instance, field.name)) for field in fields(kind)] == list(defaults.items())


def test_keyword_arguments_are_what_differs_from_the_defaults() -> None:
    assert GradScalerKwargs().to_kwargs() == {}
    assert GradScalerKwargs(init_scale=2.0).to_kwargs() == {"init_scale": 2.0}
    assert GradientAccumulationPlugin(2, adjust_scheduler=True).to_kwargs() == {"num_steps": 2}


def test_the_communication_hook_is_no_option_of_the_wrapper() -> None:
    handler = DistributedDataParallelKwargs(bucket_cap_mb=3, comm_hook=DDPCommunicationHookType.FP16)
    assert handler.to_kwargs() == {"bucket_cap_mb": 3}
    assert handler.to_dict(ignore_keys=())["comm_hook"] is DDPCommunicationHookType.FP16


def test_the_communication_hook_is_registered_with_a_model_that_is_given() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

    registered: list[tuple[Any, Any]] = []

    class Wrapped(torch.nn.Module):
        def register_comm_hook(self, state: Any, hook: Any) -> None:
            registered.append((state, hook))

    DistributedDataParallelKwargs().register_comm_hook(Wrapped())
    assert registered == []
    DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16).register_comm_hook(Wrapped())
    assert registered == [(None, default_hooks.fp16_compress_hook)]
    kind, options = DDPCommunicationHookType.POWER_SGD, {"matrix_approximation_rank": 3}
    DistributedDataParallelKwargs(comm_hook=kind, comm_state_option=options).register_comm_hook(model=Wrapped())
    assert registered[1][0].matrix_approximation_rank == 3
    assert registered[1][1] is power_sgd.powerSGD_hook
    with pytest.raises(InvalidArgument, match="comm_wrapper='fp16'"):
        DistributedDataParallelKwargs(comm_wrapper=DDPCommunicationHookType.FP16).register_comm_hook(Wrapped())


def test_an_explicit_timeout_is_passed_on_whatever_the_default_is() -> None:
    handler = InitProcessGroupKwargs(timeout=timedelta(seconds=1800))
    assert handler.to_kwargs()["timeout"] == timedelta(seconds=1800)
    assert "timeout" not in InitProcessGroupKwargs().to_kwargs()
    assert repr(InitProcessGroupKwargs(backend="gloo").timeout) == repr(timedelta(minutes=30))


def test_a_dict_of_options_does_not_share_values() -> None:
    handler = DistributedDataParallelKwargs(comm_state_option={"a": 1})
    handler.to_dict(ignore_keys=())["comm_state_option"]["a"] = 2
    assert handler.comm_state_option == {"a": 1}


def test_the_logs_go_to_the_project_unless_they_have_a_folder() -> None:
    assert ProjectConfiguration(project_dir="p").logging_dir == "p"
    assert ProjectConfiguration(project_dir="p", logging_dir="l").logging_dir == "l"
    project = ProjectConfiguration()
    project.set_directories("q")
    assert (project.project_dir, project.logging_dir) == ("q", "q")


def test_the_profiler_takes_its_settings() -> None:
    profiler = ProfileKwargs(
        activities=["cpu"], record_shapes=True, schedule_option={"wait": 1, "warmup": 1, "active": 1}
    ).build()
    assert profiler.activities == {torch.profiler.ProfilerActivity.CPU}
    assert profiler.record_shapes
    assert profiler.schedule(2) == torch.profiler.ProfilerAction.RECORD_AND_SAVE


def test_an_unknown_activity_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match="'tpu'; expected some of cpu, cuda"):
        ProfileKwargs(activities=["tpu"]).build()  # type: ignore[list-item]


def test_handlers_are_found_by_class() -> None:
    autocast, project = AutocastKwargs(), GradScalerKwargs()
    assert by_class([autocast, project]) == {AutocastKwargs: autocast, GradScalerKwargs: project}
    assert by_class(None) == {}


def test_two_handlers_of_one_class_and_other_objects_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="two AutocastKwargs"):
        by_class([AutocastKwargs(), AutocastKwargs()])
    with pytest.raises(InvalidArgument, match="instances of KwargsHandler"):
        by_class([DataLoaderConfiguration()])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"BACKEND": "aot_ts_nvfuser", "MODE": "reduce-overhead"},
        {"BACKEND": "NO", "MODE": "default", "USE_FULLGRAPH": "False", "USE_DYNAMIC": "False"},
        {"BACKEND": "EAGER", "USE_FULLGRAPH": "True", "USE_DYNAMIC": "True", "USE_REGIONAL_COMPILATION": "True"},
    ],
)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"backend": "InDuctor", "dynamic": True, "options": {"max_autotune": True}},
        {"backend": "eager", "mode": "max-autotune", "fullgraph": False, "use_regional_compilation": False},
        {"backend": "eager", "disable": True},
    ],
)
def test_a_plugin_for_compilation_is_filled_as_the_originals(
    arguments: dict[str, Any], variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", text)
    own, theirs = TorchDynamoPlugin(**arguments), original.TorchDynamoPlugin(**arguments)
    assert own.to_dict() == theirs.to_dict()
    assert own.to_kwargs() == theirs.to_kwargs()
    assert own.backend is DynamoBackend(theirs.backend.value)


def test_a_plugin_for_compilation_may_be_changed_before_models_are_compiled() -> None:
    plugin = TorchDynamoPlugin()
    assert plugin.dynamo_config() is None
    plugin.backend, plugin.use_regional_compilation, plugin.options = "Inductor", True, {"max_autotune": True}
    config = plugin.dynamo_config()
    assert config is not None
    assert (dict(config.options), config.by_region) == ({"backend": "inductor", "options": plugin.options}, True)
    plugin.options["max_autotune"] = False
    assert config.options["options"] == {"max_autotune": True}
    plugin.mode = "max-autotune"
    with pytest.raises(InvalidArgument, match="mode"):
        plugin.dynamo_config()


def test_an_unknown_backend_of_compilation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match=r"backend='quick'.*expected one of NO, EAGER, AOT_EAGER"):
        TorchDynamoPlugin(backend="quick")
