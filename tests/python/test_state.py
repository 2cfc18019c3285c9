"""The state classes in one process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import accelerate.state as original
import pytest
import torch
import torch.distributed as dist

from accelerate_cpp import Accelerator
from accelerate_cpp.comm.topology import Topology
from accelerate_cpp.config.session_config import SessionConfig
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.single import SingleStrategy
from accelerate_cpp.precision.precision import precision_for
from accelerate_cpp.runtime import current
from accelerate_cpp.runtime.session import Session
from accelerate_cpp.state import AcceleratorState, GradientState, PartialState, is_initialized
from accelerate_cpp.utils.dataclasses import DistributedType, TorchDynamoPlugin

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_FSDP")


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_one_process_is_every_kind_of_first_and_last() -> None:
    state = PartialState(cpu=True)
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert state.is_main_process
    assert state.is_local_main_process
    assert state.is_last_process
    assert not state.use_distributed
    assert (state.distributed_type, state.backend, state.device) == (DistributedType.NO, None, torch.device("cpu"))


def test_all_instances_share_what_they_know() -> None:
    state = PartialState(cpu=True)
    state.note = "kept"  # type: ignore[attr-defined]
    assert PartialState().note == "kept"  # type: ignore[attr-defined]
    assert PartialState().__dict__ is state.__dict__


def test_debugging_and_forks_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    monkeypatch.setenv("FORK_LAUNCHED", "1")
    state = PartialState(cpu=True)
    assert state.debug
    assert state.fork_launched


def test_a_reset_forgets_everything_and_says_so() -> None:
    state = AcceleratorState(cpu=True)
    assert state.initialized
    AcceleratorState._reset_state(reset_partial_state=True)
    assert PartialState._shared_state == {}
    assert AcceleratorState._shared_state == {}
    assert not state.initialized
    with pytest.raises(AttributeError, match="create an Accelerator or a PartialState again"):
        _ = state.device


def test_a_reset_of_the_precision_alone_keeps_the_processes() -> None:
    AcceleratorState(cpu=True)
    AcceleratorState._reset_state()
    assert PartialState().initialized
    assert AcceleratorState._shared_state == {}
    assert AcceleratorState().mixed_precision == "no"


def test_a_state_whose_precision_was_reset_is_gone_until_there_is_another_accelerator() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state._reset_state()
    for ask in (lambda: accelerator.num_processes, lambda: accelerator.device, lambda: accelerator.state.backend):
        with pytest.raises(AttributeError, match=r"`AcceleratorState` object has no attribute .* create an Acc"):
            ask()
    accelerator.state.note = "kept"  # type: ignore[attr-defined]
    assert accelerator.state.note == "kept"  # type: ignore[attr-defined]
    assert PartialState().num_processes == 1
    assert Accelerator(cpu=True).num_processes == accelerator.num_processes == 1


def test_the_module_says_whether_there_is_an_accelerator() -> None:
    assert not is_initialized()
    PartialState(cpu=True)
    assert not is_initialized()
    AcceleratorState()
    assert is_initialized()
    AcceleratorState._reset_state()
    assert not is_initialized()


def test_debugging_can_be_set() -> None:
    state = AcceleratorState(cpu=True)
    session = current.session
    assert session is not None
    assert not state.debug
    state.debug = True
    assert PartialState().debug
    assert current.session is not None
    assert current.session.strategy is session.strategy
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(AttributeError, match="create an Accelerator again"):
        state.debug = True


def test_names_that_the_original_knows_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(original.PartialState._known_attrs) == set(PartialState._known_attrs)
    assert set(original.AcceleratorState._known_attrs) == set(AcceleratorState._known_attrs)
    state = PartialState(cpu=True)
    assert state._prepare_backend() == original.PartialState._prepare_backend(state) == (None, DistributedType.NO)
    assert state._prepare_backend(backend="gloo") == ("gloo", DistributedType.NO)


def test_the_precision_is_open_until_an_accelerator_state_chooses_it() -> None:
    PartialState(cpu=True)
    session = current.session
    assert session is not None
    assert session.config.mixed_precision is None
    assert AcceleratorState().mixed_precision == "no"
    assert PartialState().device == session.device


def test_another_precision_is_refused_once_one_is_chosen() -> None:
    AcceleratorState(cpu=True, mixed_precision="no")
    with pytest.raises(ValueError, match="already has a state with 'no'"):
        AcceleratorState(mixed_precision="bf16")
    assert AcceleratorState(mixed_precision="no").mixed_precision == "no"


def test_the_cpu_is_refused_once_another_device_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    AcceleratorState(cpu=True)
    assert current.session is not None
    monkeypatch.setattr(current, "session", replace(current.session, device=torch.device("cuda:0")))
    with pytest.raises(ValueError, match="device cuda:0"):
        AcceleratorState(cpu=True)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"timeout": timedelta(seconds=5)}, "timeout=0:00:05 has no effect"),
        ({"backend": "gloo"}, "backend=gloo has no"),
    ],
)
def test_an_option_of_the_processes_that_comes_too_late_is_named_in_a_warning(
    option: dict[str, Any], message: str
) -> None:
    PartialState(cpu=True)
    with pytest.warns(UserWarning, match=message):
        AcceleratorState(**option)


def test_an_option_that_agrees_with_the_running_processes_is_accepted(recwarn: pytest.WarningsRecorder) -> None:
    PartialState(cpu=True, backend="gloo", timeout=timedelta(seconds=5))
    AcceleratorState(backend="gloo", timeout=timedelta(seconds=5))
    AcceleratorState(backend="nccl")
    assert [warning for warning in recwarn if "no effect" in str(warning.message)] == []


def test_what_is_not_supported_is_refused_and_leaves_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="fsdp_plugin"):
        AcceleratorState(cpu=True, fsdp_plugin=object())
    monkeypatch.setenv("ACCELERATE_USE_SAGEMAKER", "true")
    with pytest.raises(InvalidArgument, match="ACCELERATE_USE_SAGEMAKER"):
        AcceleratorState(cpu=True)
    monkeypatch.delenv("ACCELERATE_USE_SAGEMAKER")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp7")
    with pytest.raises(InvalidArgument, match="ACCELERATE_MIXED_PRECISION"):
        AcceleratorState(cpu=True)
    assert current.session is None


@pytest.mark.parametrize("kind", [PartialState, AcceleratorState])
def test_what_a_reset_took_is_explained_and_what_never_was_is_not(kind: type[PartialState]) -> None:
    state = kind(cpu=True)
    with pytest.raises(AttributeError, match=f"^'{kind.__name__}' object has no attribute 'colour'$"):
        _ = state.colour  # type: ignore[attr-defined]
    AcceleratorState._reset_state(reset_partial_state=True)
    for name in ("device", "num_processes", "is_main_process"):
        expected = f"^`{kind.__name__}` object has no attribute `{name}`. This happens if `{kind.__name__}._reset_state"
        with pytest.raises(AttributeError, match=expected):
            getattr(state, name)
    with pytest.raises(AttributeError, match=f"^'{kind.__name__}' object has no attribute 'colour'$"):
        _ = state.colour  # type: ignore[attr-defined]


def test_the_device_can_be_made_the_current_one_again(monkeypatch: pytest.MonkeyPatch) -> None:
    PartialState(cpu=True)
    device, chosen = torch.device("cuda:1"), []
    monkeypatch.setattr(current, "session", replace(PartialState()._session, device=device))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    PartialState().set_device()
    assert chosen == [1]
    assert PartialState().device == device


def test_on_the_cpu_the_device_is_what_it_is() -> None:
    state = PartialState(cpu=True)
    state.set_device()
    assert state.device == torch.device("cpu")
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(AttributeError, match="`PartialState` object has no attribute `_cpu`"):
        state.set_device()


def test_what_is_refused_is_none() -> None:
    state = AcceleratorState(cpu=True)
    assert [state.parallelism_config, state.device_mesh, state.torch_tp_plugin] == [None] * 3
    for name in ("parallelism_config", "torch_tp_plugin", "megatron_lm_plugin"):
        with pytest.raises(InvalidArgument, match=name):
            AcceleratorState(**{name: object()})


def test_the_plugin_for_compilation_is_kept_until_another_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    plugin = AcceleratorState(cpu=True).dynamo_plugin
    assert plugin == TorchDynamoPlugin(backend="eager")
    assert AcceleratorState().dynamo_plugin is plugin
    other = TorchDynamoPlugin(backend="aot_eager")
    assert AcceleratorState(dynamo_plugin=other).dynamo_plugin is AcceleratorState().dynamo_plugin is other
    AcceleratorState._reset_state()
    assert AcceleratorState().dynamo_plugin == plugin


def test_an_unknown_backend_for_compilation_is_found_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "quick")
    with pytest.raises(InvalidArgument, match=r"ACCELERATE_DYNAMO_BACKEND='quick'.* EAGER"):
        AcceleratorState(cpu=True)
    assert not PartialState._shared_state


def test_a_run_without_deepspeed_has_no_deepspeed_plugin() -> None:
    assert AcceleratorState(cpu=True).deepspeed_plugin is None


def test_one_process_gets_the_very_inputs_it_splits() -> None:
    inputs = [1]
    with PartialState(cpu=True).split_between_processes(inputs, apply_padding=True) as part:
        assert part is inputs


def test_decorated_functions_run_in_a_single_process() -> None:
    state = PartialState(cpu=True)

    def seven() -> int:
        return 7

    for decorate in (state.on_main_process, state.on_local_main_process, state.on_last_process):
        assert decorate(seven)() == 7
    assert state.on_process(process_index=3)(seven)() == 7
    assert state.on_local_process(seven, local_process_index=3)() == 7
    assert state.on_main_process()(seven)() == 7


def test_a_single_process_waits_for_no_one_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    state = PartialState(cpu=True)
    with state.main_process_first(), state.local_main_process_first():
        state.wait_for_everyone()
    state.print("x", end="!")
    state.destroy_process_group()
    assert capsys.readouterr().out == "x!"


def test_a_process_group_is_destroyed_but_the_default_one_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    state = PartialState(cpu=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        state.destroy_process_group(group)
        with pytest.raises(KeyError):
            dist.get_process_group_ranks(group)
        monkeypatch.setattr(PartialState, "fork_launched", True)
        state.destroy_process_group()
        assert dist.is_initialized()
        monkeypatch.setattr(PartialState, "fork_launched", False)
        state.destroy_process_group()
        assert not dist.is_initialized()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize(
    ("world_size", "device", "expected"),
    [(1, "cuda:0", "NO"), (2, "cpu", "MULTI_CPU"), (2, "cuda:0", "MULTI_GPU"), (2, "xpu:0", "MULTI_XPU")],
)
def test_the_type_of_a_run_follows_from_processes_and_device(
    world_size: int, device: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision = precision_for("no", torch.device("cpu"))
    session = Session(
        SessionConfig(), Topology(world_size=world_size), torch.device(device), SingleStrategy(), precision
    )
    monkeypatch.setattr(current, "session", session)
    assert PartialState().distributed_type == expected


def test_its_text_names_processes_device_and_precision() -> None:
    text = repr(AcceleratorState(cpu=True))
    for line in ("Distributed environment: NO", "Num processes: 1", "Device: cpu", "Mixed precision type: no"):
        assert line in text


@pytest.mark.parametrize("kind", [PartialState, AcceleratorState])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_copy_shows_the_session_of_the_process_it_is_in(kind: type[PartialState], duplicate: Any) -> None:
    state = kind(cpu=True)
    copied = duplicate(state)
    assert type(copied) is kind
    assert (copied.device, copied.__dict__ is state.__dict__) == (state.device, True)
    AcceleratorState._reset_state(reset_partial_state=True)
    alone = duplicate(state)
    assert not alone.initialized
    with pytest.raises(AttributeError, match=f"`{kind.__name__}` object has no attribute `device`. This happens if"):
        _ = alone.device


@pytest.mark.parametrize("kind", [PartialState, AcceleratorState])
def test_copy_in_a_process_without_a_session_tells_what_the_state_told(kind: type[PartialState]) -> None:
    state = kind(cpu=True)
    data, text = pickle.dumps(state), repr(state)
    AcceleratorState._reset_state(reset_partial_state=True)
    for _ in range(2):
        alone = pickle.loads(data)
        assert not alone.initialized
        assert (alone.distributed_type, alone.device.type, repr(alone)) == ("NO", "cpu", text)
        assert kind._shared_state == {}
        data = pickle.dumps(alone)
    AcceleratorState(cpu=True, mixed_precision="bf16")
    assert alone.initialized
    if kind is AcceleratorState:
        assert (alone.mixed_precision, alone.dynamo_plugin) == ("bf16", AcceleratorState().dynamo_plugin)
