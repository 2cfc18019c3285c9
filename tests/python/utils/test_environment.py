"""Environment variables for a while, and pinning a process by hand."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import sys
import unittest
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import accelerate.utils.environment as original
import pytest
import torch

from accelerate_cpp.devices.table import kind_of
from accelerate_cpp.errors import InvalidArgument, SystemFailure
from accelerate_cpp.runtime import current
from accelerate_cpp.utils import environment, override_numa_affinity, set_numa_affinity


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """What pinning is asked for: local rank, number of workers, whether they use GPUs. It answers with two cores."""
    seen: list[tuple[int, int, bool]] = []

    def record(local_rank: int, workers: int, *, nodes: Any) -> list[int]:
        seen.append((local_rank, workers, nodes == kind_of("cuda").numa_nodes))
        return [4, 5]

    monkeypatch.setattr(environment, "pin_process", record)
    monkeypatch.setattr(current, "session", None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    environment._pin_once.cache_clear()
    return seen


@pytest.mark.parametrize("name", sorted({*environment.__all__} - {"CPUInformation"}))
def test_signatures_are_the_originals(name: str) -> None:
    def shape(module: Any) -> list[tuple[str, Any]]:
        parameters = inspect.signature(getattr(module, name)).parameters.values()
        return [(parameter.name, parameter.default) for parameter in parameters]

    assert shape(environment) == shape(original)


def test_the_same_call_pins_once_unless_it_overrides(calls: list[tuple[int, int, bool]]) -> None:
    for index in (1, 1, 2):
        set_numa_affinity(index)
    assert calls == [(1, 3, True), (2, 3, True)]
    override_numa_affinity(2)
    override_numa_affinity(2)
    assert calls[2:] == [(2, 3, True)] * 2


def test_a_fork_is_pinned_for_itself(calls: list[tuple[int, int, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    set_numa_affinity(1)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    set_numa_affinity(1)
    assert len(calls) == 2


def test_the_environment_tells_how_many_processes_there_are_and_whether_they_use_gpus(
    calls: list[tuple[int, int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    override_numa_affinity(0)
    assert calls == [(0, 1, False)]


@pytest.mark.parametrize(("verbose", "debug", "logs"), [(None, "", 0), (None, "1", 1), (True, "", 1), (False, "1", 0)])
def test_cores_are_logged_when_asked_or_in_debug_mode(
    calls: list[tuple[int, int, bool]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    verbose: bool | None,
    debug: str,
    logs: int,
) -> None:
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", debug)
    with caplog.at_level(logging.INFO):
        override_numa_affinity(2, verbose)
    assert [record.getMessage() for record in caplog.records] == [
        "CPU affinity: local process 2 is pinned to cores 4-5"
    ] * logs


def test_an_index_that_is_no_process_of_this_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "session", None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(InvalidArgument, match="expected 0 to 1"):
        override_numa_affinity(2)


def test_patched_variables_are_texts_in_upper_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTER", "before")
    with environment.patch_environment(outer=1, inner=True):
        assert (os.environ["OUTER"], os.environ["INNER"]) == ("1", "True")
        with environment.clear_environment():
            assert dict(os.environ) == {}
    assert os.environ["OUTER"] == "before"
    assert "INNER" not in os.environ


def test_a_function_can_run_with_patched_variables() -> None:
    @environment.patch_environment(some_variable="x")
    def read() -> str | None:
        return os.environ.get("SOME_VARIABLE")

    assert (read(), read(), os.environ.get("SOME_VARIABLE")) == ("x", "x", None)


@pytest.mark.parametrize("text", ["yes", "True", "ON", "1", "no", "F", "off", "0", "maybe", ""])
def test_texts_mean_what_they_mean_in_the_original(text: str) -> None:
    try:
        expected = original.str_to_bool(text)
    except ValueError:
        with pytest.raises(ValueError, match="expected one of"):
            environment.str_to_bool(text)
    else:
        assert environment.str_to_bool(text) == expected
        with environment.patch_environment(some_flag=text):
            assert environment.parse_flag_from_env("SOME_FLAG") is bool(expected)


def test_what_is_not_set_has_a_default() -> None:
    with environment.clear_environment():
        assert environment.parse_flag_from_env("SOME_FLAG", default=True) is True
        assert environment.parse_choice_from_env("SOME_CHOICE") == "no"
        assert environment.get_int_from_env(["FIRST", "SECOND"], 9) == 9
        with environment.patch_environment(first=-1, second=3, some_choice="eager"):
            assert environment.get_int_from_env(["FIRST", "SECOND"], 9) == 3
            assert environment.parse_choice_from_env("SOME_CHOICE") == "eager"


def accelerate_variables() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name.startswith("ACCELERATE_")}


@pytest.fixture
def _before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_KEPT", "before")
    monkeypatch.setenv("ACCELERATE_GONE", "before")
    before = accelerate_variables()
    yield
    assert accelerate_variables() == before


def change() -> int:
    """What users' code does to the environment."""
    os.environ.update(ACCELERATE_KEPT="after", ACCELERATE_NEW="x", OTHER_NEW="x")
    del os.environ["ACCELERATE_GONE"]
    return 5


@pytest.mark.usefixtures("_before")
def test_what_a_function_does_to_our_variables_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_NEW", "")  # so that it is gone afterwards
    monkeypatch.delenv("OTHER_NEW")
    purged = environment.purge_accelerate_environment(change)
    assert (purged(), purged.__name__, os.environ["OTHER_NEW"]) == (5, "change", "x")
    with pytest.raises(KeyError):
        environment.purge_accelerate_environment(lambda: [change(), os.environ["NO_SUCH_VARIABLE"]])()


@pytest.mark.usefixtures("_before")
def test_coroutines_and_generators_are_purged_when_they_end() -> None:
    @environment.purge_accelerate_environment
    async def coroutine() -> int:
        return change()

    @environment.purge_accelerate_environment
    def generator() -> Iterator[str]:
        change()
        yield os.environ["ACCELERATE_KEPT"]

    assert asyncio.run(coroutine()) == 5
    assert list(generator()) == ["after"]


@pytest.mark.usefixtures("_before")
def test_tests_of_a_class_and_of_its_subclasses_are_purged() -> None:
    heard: list[str] = []

    class Parent:
        def __init_subclass__(cls, word: str = "", **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            heard.append(word)

        def test_one(self) -> int:
            return change()

        def helper(self) -> str:
            return "not a test"

    helper = Parent.helper
    assert environment.purge_accelerate_environment(Parent) is Parent

    class Child(Parent, word="hello"):
        def test_two(self) -> int:
            return change()

    assert (Child().test_one(), Child().test_two(), Parent().test_one()) == (5, 5, 5)
    assert (Child.helper, heard) == (helper, ["hello"])


@pytest.mark.usefixtures("_before")
def test_what_set_up_sets_is_there_in_the_test_and_undone_after_it() -> None:
    found: list[str | None] = []

    @environment.purge_accelerate_environment
    class Case(unittest.TestCase):
        def setUp(self) -> None:
            os.environ["ACCELERATE_OF_SET_UP"] = "x"

        def test_it(self) -> None:
            found.append(os.environ.get("ACCELERATE_OF_SET_UP"))
            change()

    class Child(Case):
        pass

    for case in (Case, Child):
        assert unittest.defaultTestLoader.loadTestsFromTestCase(case).run(unittest.TestResult()) is not None
        assert "ACCELERATE_OF_SET_UP" not in os.environ
    assert found == ["x", "x"]


ODD = {f"NAME{character}": "x" for character in "`'\"$()*?{}[]!#~=:,%@^+|&; <>\n\t"}


@pytest.mark.parametrize("variables", [{"A": "1", "EMPTY": "", "": "x", "TWO": "a b"}, {"A": "x=y"}, ODD])
def test_variables_become_lines_as_in_the_original(variables: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    lines = environment.convert_dict_to_env_variables(variables)
    assert lines == original.convert_dict_to_env_variables(variables)
    warned = [record for record in caplog.records if record.name == environment.__name__]
    assert len(warned) == len(variables) - len(lines)


def test_what_is_left_out_is_told_by_name_and_not_by_value(caplog: pytest.LogCaptureFixture) -> None:
    environment.convert_dict_to_env_variables({"SECRET": "pass word"})
    assert "Skipping SECRET=... as it contains forbidden characters or missing values" in caplog.text
    assert "pass word" not in caplog.text


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "PMI_RANK": "7"},
        {"RANK": "-1", "PMI_RANK": "3", "PMI_SIZE": "4"},
        {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        *(
            {f"{name}_RANK": "3", f"{name}_SIZE": "8", f"{name}_LOCAL_RANK": "1", f"{name}_LOCAL_SIZE": "2"}
            for name in ("OMPI_COMM_WORLD", "MV2_COMM_WORLD", "PMI")
        ),
    ],
)
def test_launchers_of_all_kinds_tell_which_process_this_is(variables: dict[str, str]) -> None:
    with environment.clear_environment(), environment.patch_environment(**variables):
        found = environment.get_cpu_distributed_information()
        assert astuple(found) == astuple(original.get_cpu_distributed_information())
    assert (found.rank > 0) is any(name.endswith("RANK") and int(text) > 0 for name, text in variables.items())


def test_libraries_that_are_imported_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tabnanny", raising=False)
    assert environment.are_libraries_initialized("torch", "tabnanny", "os") == ["torch", "os"]


@pytest.mark.parametrize(("available", "expected"), [(False, ("cpu", "MULTI_CPU")), (True, ("cuda", "MULTI_GPU"))])
def test_the_kind_of_device_goes_with_the_kind_of_run(
    monkeypatch: pytest.MonkeyPatch, available: bool, expected: tuple[str, str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(available))
    assert environment.get_current_device_type() == expected


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts an nvidia-smi into PATH that tells of these GPUs."""

    def tell(*names: str, driver: str = "550.54.14", status: int = 0) -> None:
        rows = "".join(f"{len(names)}, {name}\n" for name in names)
        versions = f"{driver}\n" * len(names)
        script = (
            f"#!/bin/sh\n[ {status} = 0 ] || {{ echo no driver >&2; exit {status}; }}\n"
            f"case $1 in *driver_version*) printf '{versions}';; *) printf '{rows}';; esac\n"
        )
        (tmp_path / "nvidia-smi").write_text(script)
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return tell


@pytest.mark.parametrize("driver", ["535.1", "550.40.06", "550.40.07", "551"])
@pytest.mark.parametrize(
    "names", [(), ("NVIDIA GeForce RTX 4090",), ("RTX 4000", "RTX 4000"), ("A100", "A100"), ("A100", "RTX 4090, Ti")]
)
def test_what_nvidia_smi_says_is_read_as_in_the_original(
    gpus: Callable[..., None], names: tuple[str, ...], driver: str
) -> None:
    gpus(*names, driver=driver)
    assert environment.get_gpu_info() == (list(names), len(names))
    assert environment.get_driver_version() == (driver if names else None)
    supported = not any("RTX 40" in name for name in names) or len(names) < 2 or driver in ("550.40.07", "551")
    assert environment.check_cuda_p2p_ib_support() is supported
    if names:
        assert original.check_cuda_p2p_ib_support() is supported


def test_a_machine_without_nvidia_smi_has_no_gpus_of_theirs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.get_gpu_info() == ([], 0)
    assert environment.get_driver_version() is None
    assert environment.check_cuda_p2p_ib_support() is True


def test_a_driver_that_does_not_answer_is_an_error_with_its_words(gpus: Callable[..., None]) -> None:
    gpus("A100", status=9)
    with pytest.raises(SystemFailure, match="count,name: exit status 9: no driver"):
        environment.get_gpu_info()


@pytest.mark.parametrize(("capability", "has_fp8"), [((8, 0), False), ((8, 9), True), ((9, 0), True), (None, False)])
def test_arithmetic_in_fp8_begins_with_8_9(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, has_fp8: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert environment.check_cuda_fp8_capability() is has_fp8
