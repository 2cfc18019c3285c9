"""Precedence of arguments and environment."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from accelerate_cpp.config.compile import (
    DYNAMO_DEFAULTS,
    compile_accumulation,
    compile_dynamo,
    compile_dynamo_field,
    compile_precision,
    compile_process,
    freeze,
)
from accelerate_cpp.config.session_config import AccumulationConfig
from accelerate_cpp.errors import InvalidArgument, MissingLibrary

STEPS = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
PRECISION = "ACCELERATE_MIXED_PRECISION"


@pytest.mark.parametrize(
    ("argument", "environ", "expected"),
    [(1, {}, 1), (5, {}, 5), (5, {STEPS: "3"}, 3), (1, {STEPS: "3"}, 3), (5, {STEPS: ""}, 5)],
)
def test_the_environment_wins_over_the_number_of_accumulation_steps(
    argument: int, environ: dict[str, str], expected: int
) -> None:
    assert compile_accumulation(argument, environ=environ) == AccumulationConfig(num_steps=expected)


def test_a_plugin_wins_over_the_environment() -> None:
    config = compile_accumulation(plugin={"num_steps": 4, "sync_with_dataloader": False}, environ={STEPS: "3"})
    assert config == AccumulationConfig(num_steps=4, sync_with_dataloader=False)


def test_a_plugin_without_steps_means_one() -> None:
    assert compile_accumulation(plugin={}, environ={}).num_steps == 1


def test_steps_and_plugin_together_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="both given"):
        compile_accumulation(2, plugin={"num_steps": 2}, environ={})


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "2"])
def test_a_number_of_steps_that_is_no_positive_integer_is_refused(steps: object) -> None:
    with pytest.raises(InvalidArgument, match="at least 1"):
        compile_accumulation(steps, environ={})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="at least 1"):
        compile_accumulation(plugin={"num_steps": steps}, environ={})


def test_zero_steps_in_the_environment_are_refused_by_the_name_of_the_variable() -> None:
    with pytest.raises(InvalidArgument, match=f"{STEPS}=0"):
        compile_accumulation(environ={STEPS: "0"})


@pytest.mark.parametrize(
    ("argument", "environ"), [(None, {}), ("no", {}), ("no", {PRECISION: "bf16"}), (None, {PRECISION: "NO"})]
)
def test_a_precision_argument_wins_over_the_environment(argument: str | None, environ: dict[str, str]) -> None:
    assert compile_precision(argument, environ) == "no"


@pytest.mark.parametrize(
    ("argument", "environ", "precision"), [("bf16", {}, "bf16"), (None, {PRECISION: "FP16"}, "fp16")]
)
def test_half_precisions_are_taken_from_either(argument: str | None, environ: dict[str, str], precision: str) -> None:
    assert compile_precision(argument, environ) == precision


@pytest.mark.parametrize(("argument", "environ"), [("fp8", {}), (None, {PRECISION: "fp8"})])
def test_fp8_is_taken_where_a_library_for_it_is_installed(
    argument: str | None, environ: dict[str, str], only_installed: Callable[..., None]
) -> None:
    only_installed("torchao")
    assert compile_precision(argument, environ) == "fp8"
    only_installed()
    with pytest.raises(MissingLibrary, match=r"'fp8': fp8 training needs one of .* use mixed_precision='bf16'"):
        compile_precision(argument, environ)


def test_an_unknown_precision_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match="'fp17': expected one of no, fp8, fp16, bf16"):
        compile_precision("fp17", {})


@pytest.mark.parametrize(
    ("name", "argument", "text", "expected"),
    [
        ("backend", None, "", "no"),
        ("backend", None, "INDUCTOR", "INDUCTOR"),
        ("backend", "eager", "INDUCTOR", "eager"),
        ("mode", None, "max-autotune", "max-autotune"),
        ("fullgraph", None, "True", True),
        ("fullgraph", False, "True", False),
        ("dynamic", None, "", None),
        ("dynamic", None, "False", False),
        ("use_regional_compilation", None, "1", True),
    ],
)
def test_an_option_of_compilation_is_the_argument_or_else_its_variable(
    name: str, argument: object, text: str, expected: object
) -> None:
    variable = {"backend": "BACKEND", "mode": "MODE"}.get(name, f"USE_{name.upper().removeprefix('USE_')}")
    value, found = compile_dynamo_field(name, argument, {f"ACCELERATE_DYNAMO_{variable}": text})
    assert value == expected
    assert found == (
        f"environment variable ACCELERATE_DYNAMO_{variable}={expected!r}"
        if argument is None
        else f"{name}={argument!r}"
    )


def test_a_variable_of_compilation_that_is_no_switch_is_named() -> None:
    with pytest.raises(InvalidArgument, match="ACCELERATE_DYNAMO_USE_FULLGRAPH='maybe'"):
        compile_dynamo_field("fullgraph", None, {"ACCELERATE_DYNAMO_USE_FULLGRAPH": "maybe"})


@pytest.mark.parametrize("options", [{}, {"mode": "max-autotune"}, {"backend": "eager", "disable": True}])
def test_nothing_is_compiled_without_a_backend_or_when_it_is_switched_off(options: dict[str, object]) -> None:
    assert compile_dynamo(options, by_region=True) is None


def test_what_models_are_compiled_with_cannot_be_changed() -> None:
    options = {"backend": "eager", "mode": "default"}
    config = compile_dynamo(options, by_region=True)
    options["backend"] = "inductor"
    assert config is not None
    assert (dict(config.options), config.by_region) == ({"backend": "eager", "mode": "default"}, True)
    with pytest.raises(TypeError):
        config.options["mode"] = "max-autotune"  # type: ignore[index]


def test_a_mode_and_options_exclude_each_other() -> None:
    with pytest.raises(InvalidArgument, match=r"mode='max-autotune' and options=.*leave out the mode"):
        compile_dynamo({"backend": "inductor", "mode": "max-autotune", "options": {"max_autotune": True}}, False)


def test_compilation_is_off_by_default() -> None:
    assert DYNAMO_DEFAULTS["backend"] == "no"


def test_the_processes_take_their_settings_from_the_environment() -> None:
    environ = {"ACCELERATE_USE_CPU": "yes", "ACCELERATE_TORCH_DEVICE": "cuda:1", "ACCELERATE_DEBUG_MODE": "1"}
    config = compile_process(environ=environ)
    assert (config.cpu, config.device, config.debug, config.fork_launched) == (True, "cuda:1", True, False)
    assert config.mixed_precision is None


def test_pinning_is_asked_for_by_its_variable() -> None:
    assert compile_process(environ={"ACCELERATE_CPU_AFFINITY": "1"}).cpu_affinity is True
    assert compile_process(environ={}).cpu_affinity is False


def test_an_explicit_timeout_is_kept_and_nccl_means_the_right_backend_for_the_device() -> None:
    config = compile_process(backend="nccl", timeout=timedelta(seconds=1800), environ={})
    assert (config.backend, config.timeout) == (None, timedelta(seconds=1800))
    assert compile_process(backend="gloo", environ={}).backend == "gloo"


def test_the_rendezvous_is_the_one_of_the_environment() -> None:
    assert compile_process(init_method="env://", environ={}) == compile_process(environ={})
    with pytest.raises(InvalidArgument, match="MASTER_ADDR"):
        compile_process(init_method="tcp://host:1", environ={})


def test_an_unknown_option_of_the_processes_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="colour"):
        compile_process(colour="red", environ={})


def test_frozen_options_do_not_follow_the_original() -> None:
    options = {"bucket_cap_mb": 1}
    frozen = freeze(options)
    options["bucket_cap_mb"] = 2
    assert frozen == {"bucket_cap_mb": 1}
    with pytest.raises(TypeError):
        frozen["bucket_cap_mb"] = 3  # type: ignore[index]
