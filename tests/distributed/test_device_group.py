"""Gradients that a process group of torch sums, as on accelerators, while shared memory carries the rest.

The models are on the CPU and the group is Gloo's; `test_model_zoo.py` trains its models this way, too.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from processes import run_processes

# Torch is imported inside the functions: they run in processes of their own.


@contextmanager
def wrapped(**options: Any):
    """A linear layer of ones, from 3 to 1, in our wrapper, and this process's rank."""
    import torch
    import torch.distributed as dist

    import accelerate_cpp.comm.backend
    from accelerate_cpp.parallel.data_parallel import DataParallel, core_backend

    accelerate_cpp.comm.backend.register()
    dist.init_process_group("cpu:shm")
    module = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.constant_(module.weight, float(dist.get_rank() + 1))
    backend = core_backend()
    assert backend is not None
    make = partial(dist.new_group, backend="gloo")
    yield (
        DataParallel(module, backend.communicator, backend.timeout, make_device_group=make, **options),
        dist.get_rank(),
    )
    # Rank 0, which serves the store of Gloo's group, leaves last.
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() > 0:
        store.set(f"gone/{dist.get_rank()}", "")
    else:
        store.wait([f"gone/{rank}" for rank in range(1, dist.get_world_size())])
    dist.destroy_process_group()


def averages() -> list[Any]:
    import torch

    with wrapped() as (model, rank):
        found = [model.module.weight.tolist()]
        for weight in (None, 1.0 + 2 * rank, 0.0, None):
            model.zero_grad()
            loss = model(torch.full((1, 3), float(rank))).sum()
            model.set_weight(weight)
            loss.backward()
            found.append(model.module.weight.grad.tolist())
        with model.no_sync():
            model(torch.full((1, 3), float(rank))).sum().backward()
        found.append(model.module.weight.grad.tolist())
        return found


def test_gradients_are_averaged_by_weight_and_left_alone_within_no_sync():
    for rank, found in enumerate(run_processes(averages, 3)):
        # The gradients 0, 1 and 2 are sums over 1, 3 and 5 samples: in one process, their mean over all 9 is 3 / 9.
        expected = [1.0, 1.0, 3 / 9, 0.0, 1.0, 1.0 + rank]
        assert [row for (row,) in found] == [pytest.approx([value] * 3, rel=1e-6) for value in expected]


def averages_without_the_kernels() -> list[Any]:
    import os
    import warnings

    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # One rank asks for kernels; those of CUDA are not for the CPU.
        with wrapped(device_kernels=os.environ["RANK"] == "1") as (model, rank):
            model(torch.full((1, 3), float(rank))).sum().backward()
            messages = [str(warning.message).splitlines()[0] for warning in caught if "kernels" in str(warning.message)]
            return [model.module.weight.grad.tolist(), messages]


def test_kernels_that_are_not_available_are_done_without_and_named():
    (first, no_message), (second, [message]) = run_processes(averages_without_the_kernels, 2)
    assert first == second == [[0.5] * 3]
    assert no_message == []
    assert "kernels are not available, and torch's operations serve instead" in message
    assert "found cpu" in message


def averages_without_nccl() -> list[Any]:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with wrapped(nccl=True) as (model, rank):
            average = backward_of(model, rank, None, late=False)
            return [average, [str(warning.message) for warning in caught if "NCCL" in str(warning.message)]]


def test_where_nccl_cannot_be_opened_the_process_group_sums_and_a_warning_says_so():
    for average, [message] in run_processes(averages_without_nccl, 2):
        assert average == [1.5] * 3
        assert "torch's process group sums gradients instead: NCCL is for CUDA devices; found cpu" in message


def operations_of_a_step() -> list[Any]:
    """Of a third step that un-scales, clips and steps fused: the norm, and what torch was asked to do."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from accelerate_cpp.parallel.clipping import clip_grad_norm
    from accelerate_cpp.precision.device_grad_scaler import DeviceGradScaler
    from accelerate_cpp.precision.grad_scaler import overflowed, unscale_all

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(function.name())
            return function(*args, **(kwargs or {}))

    with wrapped() as (model, rank):
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, fused=True)
        scaler = DeviceGradScaler("cpu", init_scale=8.0)
        for _ in range(3):
            names: list[str] = []
            optimizer.zero_grad()
            # Not recorded, as Python would take hold of the gradients, which are then measured again.
            scaler.scale(model(torch.full((1, 3), float(rank + 1))).sum()).backward()
            with Recorded():
                norm = clip_grad_norm(parameters, 0.5, measured=unscale_all(scaler, [optimizer], left=parameters))
                scaler.step(optimizer)
            skipped = overflowed(scaler, optimizer)
            scaler.update()
        return [norm.item(), bool(skipped), names]


def test_a_step_on_a_device_reads_no_number_from_it_and_passes_over_gradients_twice():
    for norm, skipped, names in run_processes(operations_of_a_step, 2):
        assert norm == pytest.approx(1.5 * 3**0.5)
        assert not skipped
        assert "aten::_fused_adamw_.tensor_lr" in names or "aten::_fused_adamw_" in names
        assert not {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"} & set(names)
        # One pass multiplies, by the inverse scale and by what clips.
        assert names.count("aten::_amp_foreach_non_finite_check_and_unscale_") == 1
        # The pass that reads them is that of the reduction.
        assert names.count("aten::_foreach_norm.Scalar") == 0


def backward_of(model: Any, rank: int, failing: int | None, late: bool) -> list[float]:
    """The average gradient of a pass in which rank r's is r + 1, unless it fails on one rank.

    Args:
        late: when that rank has begun to sum, too.
    """
    import torch

    model.zero_grad()
    data = torch.full((1, 3), float(rank + 1), requires_grad=True) * 1
    loss = model(data).sum()
    if rank == failing:
        (data if late else loss).register_hook(raise_out_of_memory)
    model.expect_backward()
    try:
        loss.backward()
        model.backward_ended()
    except BaseException as error:
        model.backward_failed(f"its backward pass raised {error}")
        raise
    return model.module.weight.grad[0].tolist()


def raise_out_of_memory(_: Any) -> None:
    raise RuntimeError("out of memory")


def failures_between_steps() -> list[Any]:
    with wrapped() as (model, rank):
        found: list[Any] = []
        for failing, late in ((None, False), (1, False), (None, False), (0, True), (1, True), (2, False), (None, True)):
            try:
                found.append(backward_of(model, rank, failing, late))
            except RuntimeError as error:
                found.append(f"{type(error).__name__}: {error}")
                assert model.module.weight.grad is None
        return found


def test_a_backward_pass_that_fails_raises_on_every_rank_and_the_next_one_works():
    for rank, found in enumerate(run_processes(failures_between_steps, 3)):
        assert [found[step] for step in (0, 2, 6)] == [[2.0] * 3] * 3
        for step, failing in ((1, 1), (3, 0), (4, 1), (5, 2)):
            assert "out of memory" in found[step]
            assert found[step].startswith("RuntimeError: " if rank == failing else "PeerLost: ")


def fails_without_another_forward() -> list[str]:
    with wrapped() as (model, rank):
        messages = []
        import torch

        loss = model(torch.full((1, 3), 1.0)).sum()
        for _ in range(2):
            try:
                if rank == 1 and not messages:
                    model.expect_backward()
                    model.backward_failed("out of memory")
                    raise RuntimeError("out of memory")
                loss.backward(retain_graph=True)
            except RuntimeError as error:
                messages.append(f"{type(error).__name__}: {error}")
        return messages


def test_before_another_forward_pass_a_backward_pass_says_why_it_cannot_sum():
    for messages in run_processes(fails_without_another_forward, 2):
        assert len(messages) == 2
        assert "out of memory" in messages[0]
        assert messages[1].startswith("PeerLost: ")
        assert "the next forward pass of the model, on all ranks, makes another one" in messages[1]


def summed_tenfold(group: Any, bucket: Any) -> Any:
    """A communication hook."""
    import torch.distributed as dist

    work = dist.all_reduce(bucket.buffer().mul_(10), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def hooked() -> list[Any]:
    with wrapped() as (model, rank):
        model.register_comm_hook(model.join_process_group, summed_tenfold)
        found: list[Any] = [backward_of(model, rank, None, late=False)]
        for failing in (1, None):
            try:
                backward_of(model, rank, failing, late=True)
            except RuntimeError as error:
                found.append(f"{type(error).__name__}: {error}")
        return found


def test_a_communication_hook_takes_the_place_of_the_group_and_a_failed_pass_ends_what_it_has_begun():
    for average, failure, later in run_processes(hooked, 2):
        assert average == [30.0] * 3
        assert "out of memory" in failure
        assert "PeerLost: " in later
