"""Models without their wrappers, and files of one object."""

from __future__ import annotations

import inspect
import logging
import platform
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import accelerate.utils.other as original
import numpy as np
import pytest
import torch

from accelerate_cpp.errors import CheckpointError
from accelerate_cpp.precision import forward
from accelerate_cpp.precision.precision import precision_for
from accelerate_cpp.utils import other


@pytest.mark.parametrize("compiled", [False, True])
def test_a_module_gets_its_own_forward_back_on_request(compiled: bool) -> None:
    precision = precision_for("bf16", torch.device("cpu"))
    model: torch.nn.Module = torch.nn.Linear(2, 2)
    model = forward.install(torch.compile(model, backend="eager") if compiled else model, precision)
    assert "_original_forward" in other.extract_model_from_parallel(model).__dict__
    assert "_original_forward" not in other.extract_model_from_parallel(model, keep_fp32_wrapper=False).__dict__
    assert model(torch.ones(1, 2)).dtype == torch.float32


@pytest.mark.parametrize(
    "name",
    [
        "compile_regions",
        "convert_bytes",
        "extract_model_from_parallel",
        "get_module_children_bottom_up",
        "get_pretty_name",
        "has_compiled_regions",
        "is_compiled_module",
        "merge_dicts",
        "model_has_dtensor",
        "recursive_getattr",
        "wait_for_everyone",
    ],
)
def test_parameters_are_those_of_the_original(name):
    def shape(function):
        return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]

    assert shape(getattr(other, name)) == shape(getattr(original, name))


def test_a_model_is_taken_out_of_its_wrappers():
    model = torch.nn.Linear(1, 1)
    wrapped = torch.nn.DataParallel(torch.nn.DataParallel(model))
    assert other.extract_model_from_parallel(wrapped) is model
    assert other.extract_model_from_parallel(model) is model


def test_submodules_are_taken_out_if_asked_for():
    inner = torch.nn.Linear(1, 1)
    model = torch.nn.Sequential(torch.nn.DataParallel(inner))
    assert type(other.extract_model_from_parallel(model)[0]) is torch.nn.DataParallel
    assert other.extract_model_from_parallel(model, recursive=True)[0] is inner


@pytest.mark.parametrize("keep", [True, False])
def test_a_compiled_model_stays_compiled_unless_asked_not_to(keep):
    model = torch.nn.Linear(1, 1)
    compiled = torch.compile(torch.nn.DataParallel(model), backend="eager")
    extracted = other.extract_model_from_parallel(compiled, keep_torch_compile=keep)
    assert other.is_compiled_module(extracted) is keep
    assert (extracted._orig_mod if keep else extracted) is model


@pytest.mark.parametrize(("processes", "waits"), [(1, 0), (2, 1)])
def test_several_processes_wait_and_one_does_not(monkeypatch, processes, waits):
    barriers = []
    monkeypatch.setattr(other, "world_size", lambda: processes)
    monkeypatch.setattr(other.dist, "barrier", lambda: barriers.append(1))
    other.wait_for_everyone()
    assert len(barriers) == waits


@pytest.mark.parametrize(("writer", "reader"), [(other, original), (original, other)])
def test_what_one_package_saves_the_other_loads(tmp_path: Path, writer: Any, reader: Any) -> None:
    accelerate.PartialState(cpu=True)
    content = {"weights": torch.ones(2), "numpy": np.random.get_state()}
    writer.save(content, str(tmp_path / "f"))
    loaded = reader.load(str(tmp_path / "f"))
    assert torch.equal(loaded["weights"], torch.ones(2))
    assert np.array_equal(loaded["numpy"][1], content["numpy"][1])
    accelerate.PartialState._reset_state()


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save(print, tmp_path / "f")
    with pytest.raises(CheckpointError, match="would call functions"):
        other.load(tmp_path / "f")


def test_tensors_for_safetensors_are_whole_and_have_one_name_each():
    weight = torch.arange(6.0).reshape(2, 3)
    state = {"a": weight, "tied": weight, "turned": weight.T, "format": "nf4"}
    cleaned = other.clean_state_dict_for_safetensors(state)
    assert list(cleaned) == ["a", "turned", "format"]
    assert cleaned["turned"].is_contiguous()
    assert torch.equal(cleaned["turned"], weight.T)
    assert list(state) == ["a", "tied", "turned", "format"]


@pytest.mark.parametrize("names", [False, True])
def test_modules_are_listed_from_the_bottom_as_in_the_original(names):
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU()), torch.nn.Linear(1, 1))
    listed = other.get_module_children_bottom_up(model, return_fqns=names)
    assert listed == original.get_module_children_bottom_up(model, return_fqns=names)
    assert listed[-1] == (("", model) if names else model)


def test_tensors_that_processes_hold_together_are_noticed(monkeypatch):
    from torch.distributed import tensor

    model = torch.nn.Linear(1, 1)
    assert not other.model_has_dtensor(model)
    monkeypatch.setattr(tensor, "DTensor", torch.nn.Parameter)
    assert other.model_has_dtensor(model)


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1536, 10**6, 2**30, 5 * 2**40, 3 * 2**50, 2**61])
def test_sizes_are_written_as_in_the_original(size):
    assert other.convert_bytes(size) == original.convert_bytes(size)


def test_dicts_are_merged_key_by_key():
    destination = {"a": {"b": 1, "c": 2}, "d": 3}
    assert other.merge_dicts({"a": {"c": 4}, "e": {"f": 5}}, destination) is destination
    assert destination == {"a": {"b": 1, "c": 4}, "d": 3, "e": {"f": 5}}


def test_attributes_of_attributes_are_found():
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(1, 1)))
    assert other.recursive_getattr(model, "0.0.weight") is model[0][0].weight
    with pytest.raises(AttributeError):
        other.recursive_getattr(model, "0.1")


@pytest.mark.parametrize("thing", [torch.nn.Linear, torch.nn.Linear(1, 1), len, str.upper, 5])
def test_things_have_the_name_that_they_have_in_the_original(thing):
    assert other.get_pretty_name(thing) == original.get_pretty_name(thing)


@pytest.mark.parametrize(
    ("system", "release", "warns"),
    [
        ("Linux", "5.4.0-35-generic", True),
        ("Linux", "4.19", True),
        ("Linux", "5.5.0", False),
        ("Linux", "6.0", False),
        ("Linux", "of my own", False),
        ("Darwin", "1.2.3", False),
    ],
)
def test_an_old_linux_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, system: str, release: str, warns: bool
) -> None:
    monkeypatch.setattr(platform, "uname", lambda: SimpleNamespace(system=system, release=release))
    other.check_os_kernel()
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [release in message and "5.5.0" in message for message in warned] == [True] * warns


def test_other_processes_do_not_repeat_the_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(platform, "uname", lambda: SimpleNamespace(system="Linux", release="4.19"))
    monkeypatch.setattr(other, "process_index", lambda: 1)
    other.check_os_kernel()
    assert caplog.records == []


def test_a_port_is_in_use_while_something_listens_on_it() -> None:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        port = server.getsockname()[1]
        assert other.is_port_in_use(port) is original.is_port_in_use(port) is False
        server.listen()
        assert other.is_port_in_use(port) is other.is_port_in_use(str(port)) is original.is_port_in_use(port) is True


def test_the_port_of_rank_0_is_looked_at_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(socket.socket, "connect_ex", lambda self, address: asked.append(address) or 0)
    assert other.is_port_in_use() is True
    assert asked == [("localhost", 29500)]


def test_a_split_model_says_over_how_many_processes() -> None:
    model = torch.nn.Linear(1, 1)
    assert other.get_model_tp_size(model) is original.get_model_tp_size(model) is None
    model.tp_size = 4  # type: ignore[assignment]
    assert other.get_model_tp_size(model) == original.get_model_tp_size(model) == 4
    model.tp_size = None  # type: ignore[assignment]
    for config in (SimpleNamespace(tp_size=8), {"tp_size": 8}):
        model.config = SimpleNamespace(distributed_config=config)  # type: ignore[assignment]
        assert other.get_model_tp_size(model) == original.get_model_tp_size(model) == 8
    model.config = SimpleNamespace()  # type: ignore[assignment]
    assert other.get_model_tp_size(model) is original.get_model_tp_size(model) is None


def test_models_of_peft_are_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class PeftModel(torch.nn.Linear):
        pass

    model = PeftModel(1, 1)
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    assert other.is_peft_model(model) is False
    assert "peft" not in sys.modules
    monkeypatch.setitem(sys.modules, "peft", SimpleNamespace(PeftModel=PeftModel))
    assert other.is_peft_model(model) is True
    assert other.is_peft_model(torch.compile(model, backend="eager")) is True
    assert other.is_peft_model(torch.nn.DataParallel(model)) is True
    assert [other.is_peft_model(no_model) for no_model in (torch.nn.Linear(1, 1), None)] == [False, False]


@pytest.mark.parametrize("name", ["check_os_kernel", "get_model_tp_size", "is_port_in_use"])
def test_signatures_of_what_is_asked_about_a_machine_are_the_originals(name: str) -> None:
    def shape(module: Any) -> list[tuple[str, Any]]:
        parameters = inspect.signature(getattr(module, name)).parameters.values()
        return [(parameter.name, parameter.default) for parameter in parameters]

    assert shape(other) == shape(original)
