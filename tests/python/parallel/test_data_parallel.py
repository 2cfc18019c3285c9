"""The wrapper in a group of one process. Several processes are in tests/distributed."""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from accelerate_cpp._native import create_backend
from accelerate_cpp.comm.backend import register
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel import data_parallel
from accelerate_cpp.parallel.data_parallel import DataParallel, connect_nccl, core_backend, device_group_maker

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="backend shm exists on Linux only")

TIMEOUT = timedelta(seconds=120)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """The default process group, whose backend on GPUs is Gloo."""
    register()
    dist.init_process_group("cpu:shm,cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrap(module: torch.nn.Module) -> DataParallel:
    return DataParallel(module, create_backend(dist.HashStore(), 0, 1, TIMEOUT).communicator, TIMEOUT)


def test_gradients_of_the_cpu_need_no_process_group() -> None:
    assert device_group_maker(torch.device("cpu"), TIMEOUT) is None


@pytest.mark.usefixtures("group_of_one")
def test_gradients_of_gpus_have_a_process_group_of_their_own_with_the_default_backend_there() -> None:
    make = device_group_maker(torch.device("cuda"), TIMEOUT)
    assert make is not None
    group = make()
    assert dist.get_backend(group) == "gloo"
    assert group is not dist.group.WORLD


def test_outputs_and_arguments_pass_through() -> None:
    class Model(torch.nn.Linear):
        def forward(self, data: torch.Tensor, *, scale: float = 1) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"loss": super().forward(data).sum() * scale}

    model = Model(2, 1)
    wrapped = wrap(model)
    data = torch.ones(1, 2)
    assert torch.equal(wrapped(data, scale=3)["loss"], model(data, scale=3)["loss"])


def test_attribute_of_the_model_inside_says_how_to_reach_it() -> None:
    wrapped = wrap(torch.nn.Linear(2, 2))
    with pytest.raises(AttributeError, match=r"the Linear inside it has: accelerator\.unwrap_model\(model\)\.weight$"):
        _ = wrapped.weight
    assert not hasattr(wrapped, "weight")
    with pytest.raises(AttributeError, match=r"'DataParallel' object has no attribute 'nowhere'"):
        _ = wrapped.nowhere


def test_training_and_evaluation_modes_reach_the_module() -> None:
    wrapped = wrap(torch.nn.Linear(2, 2))
    wrapped.eval()
    assert not wrapped.module.training
    wrapped.train()
    assert wrapped.module.training


def test_without_a_process_group_there_is_no_backend_and_no_training_of_copies() -> None:
    import copy

    assert core_backend() is None
    duplicate = copy.deepcopy(wrap(torch.nn.Linear(2, 2)))
    with pytest.raises(InvalidArgument, match="there is no such process group here"):
        duplicate(torch.ones(1, 2))


def test_modules_that_are_made_elsewhere_do_not_change_what_is_averaged() -> None:
    wrapped = wrap(torch.nn.Linear(2, 2))
    reducer = wrapped._reducer
    torch.nn.Linear(2, 2)
    wrapped(torch.ones(1, 2)).sum().backward()
    assert wrapped._reducer is reducer
    wrapped.module.register_parameter("unused", torch.nn.Parameter(torch.ones(1)))
    wrapped(torch.ones(1, 2))
    assert wrapped._reducer is not reducer


def test_where_nccl_lacks_on_one_rank_no_rank_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_except_on_rank_1(device: torch.device) -> None:
        if threading.current_thread().name.endswith("1"):
            raise InvalidArgument("no libnccl.so.2")

    def waits_for_all_ranks(*_: object) -> None:
        pytest.fail("a rank waits for one that does not come")

    monkeypatch.setattr(data_parallel, "open_nccl", open_except_on_rank_1)
    monkeypatch.setattr(data_parallel, "NcclComm", waits_for_all_ranks)
    store, device = dist.HashStore(), torch.device("cuda")

    def connect(rank: int) -> object:
        threading.current_thread().name = f"rank {rank}"
        communicator = create_backend(store, rank, 2, TIMEOUT).communicator
        return connect_nccl(None, communicator, device, TIMEOUT)  # type: ignore[arg-type]

    with pytest.warns(RuntimeWarning, match="sums gradients instead: no libnccl"), ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(connect, range(2))) == [None, None]
