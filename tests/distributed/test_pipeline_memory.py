"""A process has the values of its own stages: none of the others come to it, but for one tensor at a time."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from meshes import accelerator
from processes import run_processes
from test_sharded_checkpoints import growth_of_memory

# Torch is imported inside the functions: each runs in a process of its own, and the collecting one needs none of it.

LAYERS, WIDTH = 8, 2048
TENSOR = 4 * WIDTH * WIDTH
MEBIBYTE = 1 << 20


def deep(tied: bool = False, width: int = WIDTH) -> Any:
    """With a buffer in each layer; if ``tied``, the last layer has the weight of the first one."""
    import torch
    from torch import nn

    class Layer(nn.Linear):
        def __init__(self, number: int) -> None:
            super().__init__(width, width)
            self.register_buffer("offset", torch.full((width,), float(number)))

        def forward(self, inputs: Any) -> Any:
            return super().forward(inputs) + self.offset

    torch.manual_seed(0)
    model = nn.Sequential(*map(Layer, range(LAYERS)))
    if tied:
        model[-1].weight = model[0].weight
    return model


def empty_but_on_rank_0(**options: Any) -> Any:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 0:
        return deep(**options)
    with torch.device("meta"):
        return deep(**options)


def grown() -> int:
    """By how many bytes the memory of a rank without values grows at most while its model is prepared."""
    run = accelerator({"pp_size": 2})
    model = empty_but_on_rank_0()
    run.prepare(deep(width=8))  # what is imported and made once is there already
    prepared: list[Any] = []
    growth = growth_of_memory(lambda: prepared.append(run.prepare(model)))
    (model,) = prepared
    assert sum(value.nbytes for value in model.parameters()) >= LAYERS // 2 * TENSOR
    return growth


@pytest.mark.skipif(platform.system() != "Linux", reason="other systems do not tell")
def test_a_process_gets_the_values_of_its_stages_and_one_tensor_at_a_time() -> None:
    _, second = run_processes(grown, 2, timeout=300)
    assert second < (LAYERS // 2 + 1) * TENSOR + 8 * MEBIBYTE


@contextmanager
def sending() -> Iterator[list[tuple[int, ...]]]:
    """Collects the shapes of the tensors that are sent from one rank to all in the block."""
    import torch.distributed as dist

    sent: list[tuple[int, ...]] = []
    broadcast = dist.broadcast

    def noted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        sent.append(tuple(tensor.shape))
        return broadcast(tensor, *args, **kwargs)

    dist.broadcast = noted
    try:
        yield sent
    finally:
        dist.broadcast = broadcast


def values_of_rank_0(schedule: str) -> None:
    """Also of buffers and of weights that several stages have; optimizers step on what came."""
    import torch

    run = accelerator({"pp_size": 2}, stages={"schedule": schedule, "micro_batches": 4})
    for tied in (False, True):
        model = empty_but_on_rank_0(tied=tied, width=8)
        expected = deep(tied=tied, width=8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sending() as sent:
            model, optimizer = run.prepare(model, optimizer)
        whole = expected.state_dict()
        assert sent == [tuple(value.shape) for value in (*expected.parameters(), *expected.buffers())], "each once"
        names = set(model.state_dict())
        assert 0 < len(names) < len(whole)
        for name, value in model.state_dict().items():
            assert torch.equal(value, whole[name]), name
        stepped = {id(one) for group in optimizer.param_groups for one in group["params"]}
        assert stepped == {id(one) for one in model.parameters()}
        inputs = torch.linspace(-1, 1, 64).reshape(8, 8)
        plain = torch.optim.SGD(expected.parameters(), lr=0.1)
        for _ in range(2):
            loss = run.train_batch(inputs, lambda outputs: outputs.square().mean() / 100, model=model)
            wanted = expected(inputs).square().mean() / 100
            wanted.backward()
            torch.testing.assert_close(loss, wanted.detach())
            for one in (optimizer, plain):
                one.step()
                one.zero_grad()
        state = run.get_state_dict(model)
        if run.is_main_process:
            for name, value in expected.state_dict().items():
                torch.testing.assert_close(state[name], value, msg=name)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_stages_without_values_get_those_of_rank_0(schedule: str) -> None:
    run_processes(values_of_rank_0, 2, schedule, timeout=300)


def without_values_anywhere(folder: str) -> None:
    """A checkpoint brings them."""
    import torch

    run = accelerator({"pp_size": 2})
    model = run.prepare(deep(width=8))
    run.save_state(folder)
    with torch.device("meta"):
        empty = deep(width=8)
    run = accelerator({"pp_size": 2})
    prepared = run.prepare(empty)
    assert all(value.is_meta for value in prepared.parameters())
    run.load_state(folder)
    for name, value in deep(width=8).named_parameters():
        if name in dict(prepared.named_parameters()):
            assert torch.equal(prepared.get_parameter(name), value), name
    del model


def test_what_no_process_has_waits_for_a_checkpoint(tmp_path: Any) -> None:
    run_processes(without_values_anywhere, 2, str(tmp_path / "state"))
