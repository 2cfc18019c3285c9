"""Precedence of arguments and environment."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from accelerate_cpp.config.compile import (
    compile_accumulation,
    compile_precision,
    compile_process,
    freeze,
    require_no_dynamo,
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
    ("argument", "environ"),
    [(None, {}), ("no", {"ACCELERATE_DYNAMO_BACKEND": "inductor"}), (None, {"ACCELERATE_DYNAMO_BACKEND": "no"})],
)
def test_no_compilation_is_accepted(argument: str | None, environ: dict[str, str]) -> None:
    require_no_dynamo(argument, environ)


@pytest.mark.parametrize(("argument", "environ"), [("inductor", {}), (None, {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"})])
def test_compilation_is_refused(argument: str | None, environ: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match=r"torch\.compile"):
        require_no_dynamo(argument, environ)


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
