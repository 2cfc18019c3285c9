"""Steps in fp32 on parameters in low precision."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.precision.master_weights import MasterWeights, master_dtypes

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: list[Make] = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=False),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def ones(lr: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Parameter, MasterWeights]:
    parameter = nn.Parameter(torch.ones(4, dtype=dtype))
    return parameter, MasterWeights(torch.optim.SGD([parameter], lr=lr))


def step(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, gradient: float) -> None:
    parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()


def gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_steps_are_those_of_a_model_in_fp32(make: Make) -> None:
    stored, reference = network().bfloat16(), network().bfloat16().float()
    ours, theirs = MasterWeights(make(stored.parameters())), make(reference.parameters())
    for number in range(20):
        gradients(stored, number)
        for parameter, own in zip(reference.parameters(), stored.parameters(), strict=True):
            parameter.grad = own.grad.float()
        ours.step()
        theirs.step()
    for parameter, own in zip(reference.parameters(), stored.parameters(), strict=True):
        assert own.dtype == torch.bfloat16
        assert torch.equal(own, parameter.bfloat16())


def test_steps_too_small_for_bf16_add_up() -> None:
    parameter, optimizer = ones()
    plain = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    without = torch.optim.SGD([plain], lr=1.0)
    for _ in range(64):
        step(optimizer, parameter, 2**-10)
        step(without, plain, 2**-10)
    assert parameter.tolist() == [1 - 64 * 2**-10] * 4
    assert plain.tolist() == [1.0] * 4


def test_parameters_in_fp32_frozen_ones_and_those_without_a_gradient_are_left_alone() -> None:
    single, frozen, idle = (
        nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, *[torch.bfloat16] * 2)
    )
    frozen.requires_grad_(False)
    inner = torch.optim.SGD([single, frozen, idle], lr=1.0)
    optimizer = MasterWeights(inner)
    assert inner.param_groups[0]["params"][:2] == [single, frozen]
    step(optimizer, single, 0.5)
    assert (single.tolist(), frozen.tolist(), idle.tolist()) == ([0.5, 0.5], [1.0, 1.0], [1.0, 1.0])
    frozen.requires_grad_(True)
    for _ in range(4):
        step(optimizer, frozen, 2**-9)
    assert frozen.tolist() == [1 - 2**-7] * 2, "a parameter that thaws gets its copy then"


def test_gradients_are_found_at_the_models_own_parameters_and_cleared_there() -> None:
    model = network().bfloat16()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = MasterWeights(inner)
    assert [id(one) for group in optimizer.param_groups for one in group["params"]] == [
        id(one) for one in model.parameters()
    ]
    gradients(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(master.grad is None for group in inner.param_groups for master in group["params"])


def test_a_scheduler_sets_the_learning_rate_of_the_steps() -> None:
    parameter, optimizer = ones(lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    step(optimizer, parameter, 1.0)
    scheduler.step()
    step(optimizer, parameter, 1.0)
    assert parameter.tolist() == [0.25] * 4


def test_a_scheduler_of_the_optimizer_inside_is_refused() -> None:
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    torch.optim.lr_scheduler.StepLR(inner, step_size=1)
    with pytest.raises(InvalidArgument, match=r"SGD has a scheduler already; .* MasterWeights\(optimizer\) first"):
        MasterWeights(inner)


def test_parameters_that_were_written_to_are_taken_over() -> None:
    parameter, optimizer = ones()
    step(optimizer, parameter, 2**-10)
    with torch.no_grad():
        parameter.fill_(4.0)
    step(optimizer, parameter, 1.0)
    assert parameter.tolist() == [3.0] * 4


def test_writing_what_the_copies_round_to_loses_nothing() -> None:
    parameter, optimizer = ones()
    for _ in range(8):
        step(optimizer, parameter, 2**-10)
        with torch.no_grad():
            parameter.copy_(parameter.clone())
    assert parameter.tolist() == [1 - 2**-7] * 4


def test_the_state_goes_through_a_file_with_all_its_bits() -> None:
    def fresh() -> tuple[nn.Module, MasterWeights]:
        model = network().bfloat16()
        model[0].weight.requires_grad_(False)
        return model, MasterWeights(torch.optim.AdamW(model.parameters(), lr=1e-3))

    model, optimizer = fresh()
    for number in range(5):
        gradients(model, number)
        optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for order in (["model", "optimizer"], ["optimizer", "model"]):
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        resumed, its_optimizer = fresh()
        for what in order:
            {"model": resumed, "optimizer": its_optimizer}[what].load_state_dict(saved[what])
        continued, continued_optimizer = copy.deepcopy((model, optimizer))
        for number in range(5, 10):
            for one in (resumed, continued):
                gradients(one, number)
            its_optimizer.step()
            continued_optimizer.step()
        theirs, ours = continued_optimizer.state_dict(), its_optimizer.state_dict()
        assert theirs["master_weights"].keys() == ours["master_weights"].keys() == {1, 2, 3}
        for number, master in theirs["master_weights"].items():
            assert torch.equal(master, ours["master_weights"][number])
            assert not torch.equal(master, master.bfloat16().float())
            assert torch.equal(theirs["state"][number]["exp_avg"], ours["state"][number]["exp_avg"])
            assert ours["state"][number]["exp_avg"].dtype == torch.float32


def test_a_loaded_state_brings_its_options_and_can_be_that_of_a_plain_optimizer() -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    plain = torch.optim.SGD([parameter], lr=0.25, momentum=0.5)
    step(plain, parameter, 1.0)
    other, optimizer = ones(lr=9.0)
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[0]["params"] == [other]
    step(optimizer, other, 1.0)
    assert other.tolist() == [1 - 0.25 * 1.5] * 4, "the momentum was loaded"


def test_copies_of_other_parameters_are_refused() -> None:
    _, optimizer = ones()
    saved = optimizer.state_dict()
    saved["master_weights"] = {0: torch.ones(3)}
    with pytest.raises(InvalidArgument, match=r"shapes \{0: \(3,\)\}.* expected \{0: \(4,\)\}"):
        optimizer.load_state_dict(saved)
    _, single = ones(dtype=torch.float32)
    with pytest.raises(InvalidArgument, match=r"expected \{\}"):
        single.load_state_dict(saved)


def test_the_state_of_an_optimizer_that_has_stepped_goes_along() -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    inner = torch.optim.SGD([parameter], lr=0.25, momentum=0.5)
    step(inner, parameter, 1.0)
    optimizer = MasterWeights(inner)
    step(optimizer, parameter, 1.0)
    assert parameter.tolist() == [0.75 - 0.25 * 1.5] * 4
    assert [state["momentum_buffer"].dtype for state in optimizer.state.values()] == [torch.float32]


def test_groups_can_be_added() -> None:
    _, optimizer = ones()
    added = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer.add_param_group({"params": [added], "lr": 2.0})
    for _ in range(4):
        step(optimizer, added, 2**-10)
    assert added.tolist() == [1 - 2**-7] * 2
    assert len(optimizer.state_dict()["param_groups"]) == 2


def test_a_closure_is_called_once_with_gradients_enabled() -> None:
    parameter, optimizer = ones()
    calls = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = parameter.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert calls == [True]
    assert parameter.tolist() == [0.0] * 4


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_steps_on_its_own_parameters(duplicate: Callable[[Any], Any]) -> None:
    parameter, optimizer = ones()
    step(optimizer, parameter, 2**-10)
    other, its_optimizer = duplicate((parameter, optimizer))
    for _ in range(3):
        step(its_optimizer, other, 2**-10)
    assert other.tolist() == [1 - 2**-8] * 4
    assert parameter.tolist() == [1.0] * 4


def test_the_dtype_of_steps_is_known_for_any_optimizer() -> None:
    low, single = nn.Parameter(torch.ones(1).bfloat16()), nn.Parameter(torch.ones(1))
    inner = torch.optim.SGD([low, single])
    assert master_dtypes(inner) == {low: torch.bfloat16, single: torch.float32}
    assert master_dtypes(MasterWeights(inner)) == {low: torch.float32, single: torch.float32}
