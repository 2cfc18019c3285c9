"""Whether a state fits is what torch finds when it loads it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from accelerate_cpp.checkpoint.fitting import (
    check_loader,
    check_model,
    check_optimizer,
    check_scaler,
    check_scheduler,
)
from accelerate_cpp.errors import CheckpointError


class Renaming(torch.nn.Linear):
    """Accepts an old name of its weight."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}old" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}old")
        super()._load_from_state_dict(state_dict, prefix, *args)


def renamed_by_hook() -> torch.nn.Module:
    model = torch.nn.Linear(2, 2, bias=False)
    model.register_load_state_dict_pre_hook(
        lambda _module, state, prefix, *_: state.update({f"{prefix}weight": state.pop(f"{prefix}old")})
    )
    return model


WEIGHT, BIAS = torch.ones(2, 2), torch.ones(2)
MODELS: list[tuple[torch.nn.Module, dict[str, Any]]] = [
    (torch.nn.Linear(2, 2), {"weight": WEIGHT, "bias": BIAS}),
    (torch.nn.Linear(2, 2), {"weight": WEIGHT}),
    (torch.nn.Linear(2, 2), {"weight": WEIGHT, "bias": BIAS, "other": BIAS}),
    (torch.nn.Linear(2, 2), {"weight": WEIGHT, "bias": torch.ones(3)}),
    (torch.nn.Linear(2, 2), {"weight": WEIGHT.double(), "bias": BIAS}),
    (torch.nn.BatchNorm1d(2), dict.fromkeys(("weight", "bias", "running_mean", "running_var"), BIAS)),
    (torch.nn.BatchNorm1d(2), dict.fromkeys(("weight", "bias", "running_mean"), BIAS)),
    (torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2, bias=False)), {"weight": WEIGHT}),
    (torch.nn.LazyLinear(2), {"weight": WEIGHT, "bias": BIAS}),
    (Renaming(2, 2, bias=False), {"old": WEIGHT}),
    (renamed_by_hook(), {"old": WEIGHT}),
]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("index", range(len(MODELS)))
def test_a_model_is_refused_what_torch_refuses_to_load_into_it(index: int, strict: bool) -> None:
    model, state = MODELS[index]
    own_way = index >= 7
    before = copy.deepcopy(model.state_dict())
    found = None
    try:
        check_model(dict(state), model, "the file", strict)
    except CheckpointError as error:
        found = error
    torch.testing.assert_close(dict(model.state_dict()), dict(before)) if index != 8 else None
    try:
        copy.deepcopy(model).load_state_dict(dict(state), strict=strict)
    except RuntimeError:
        assert found is not None or own_way
    else:
        assert found is None


def adam(*shapes: tuple[int, ...], kind: Any = torch.optim.Adam) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer: torch.optim.Optimizer = kind(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    "kind", [torch.optim.Adam, torch.optim.Adafactor, torch.optim.SGD, torch.optim.NAdam, torch.optim.LBFGS]
)
def test_an_optimizer_fits_the_state_of_its_like_and_none_with_more_or_fewer_parameters(kind: Any) -> None:
    if kind is torch.optim.LBFGS:
        weight = torch.nn.Parameter(torch.ones(2))
        one = torch.optim.LBFGS([weight])
        check_optimizer(one.state_dict(), torch.optim.LBFGS([weight]), "the file")
        return
    state = adam((2, 3), (3,), kind=kind).state_dict()
    check_optimizer(state, adam((2, 3), (3,), kind=kind), "the file")
    for other in (adam((2, 3), kind=kind), adam((2, 3), (3,), (1,), kind=kind)):
        with pytest.raises(ValueError, match="parameter group"):
            copy.deepcopy(other).load_state_dict(state)
        with pytest.raises(CheckpointError, match="groups of"):
            check_optimizer(state, other, "the file")


def test_moments_of_another_shape_are_refused_which_torch_would_take() -> None:
    with pytest.raises(CheckpointError, match=r"exp_avg of parameter 0 \(2, 3\) for \(3, 2\)"):
        check_optimizer(adam((2, 3)).state_dict(), adam((3, 2)), "the file")


@pytest.mark.parametrize("wrapped", [lambda one: one, lambda one: [{"more": (one,)}]], ids=["itself", "within"])
def test_expanded_tensors_that_a_cast_would_write_out_are_refused(wrapped: Any) -> None:
    optimizer = adam((2,))
    state = optimizer.state_dict()
    state["state"][0]["more"] = wrapped(torch.ones(1, dtype=torch.half).expand(2))
    check_optimizer(state, optimizer, "the file")
    state["state"][0]["more"] = wrapped(torch.ones(1, dtype=torch.half).expand(400_000_000))
    with pytest.raises(CheckpointError, match=r"those of parameter 0 \(2,\) that have 4\d+ elements, written out"):
        check_optimizer(state, optimizer, "the file")
    state["state"][0]["more"] = wrapped([torch.ones(10_000, dtype=torch.half)] * 100)
    with pytest.raises(CheckpointError, match=r"that have 10\d+ elements, written out"):
        check_optimizer(state, optimizer, "the file")


@pytest.mark.parametrize("value", [torch.ones(2, device="meta"), torch.nested.nested_tensor([torch.ones(2)])])
def test_tensors_without_values_or_shape_are_refused(value: torch.Tensor) -> None:
    state = adam((2,)).state_dict()
    state["state"][0]["exp_avg"] = value
    with pytest.raises(CheckpointError, match="does not fit"):
        check_optimizer(state, adam((2,)), "the file")
    model = torch.nn.Linear(2, 1, bias=False)
    with pytest.raises(CheckpointError, match="does not fit"):
        check_model({"weight": value}, model, "the file")


@pytest.mark.parametrize(
    "state",
    [
        {"state": {}},
        {"param_groups": []},
        {"state": [1], "param_groups": 3},
        {"state": {0: 3}, "param_groups": [3]},
        {"state": {}, "param_groups": [{"lr": 1}]},
        {"state": {}, "param_groups": [{"params": [[1]]}]},
        {"state": {0: {"exp_avg": 1}}, "param_groups": [{"params": [0]}]},
    ],
)
def test_a_state_that_torch_stumbles_over_is_refused_with_its_file(state: dict[str, Any]) -> None:
    with pytest.raises((TypeError, KeyError, ValueError)):
        adam((2,)).load_state_dict(copy.deepcopy(state))
    with pytest.raises(CheckpointError, match=r"^the file.* nothing has been changed$"):
        check_optimizer(state, adam((2,)), "the file")


def test_an_optimizer_whose_hooks_change_what_is_loaded_is_not_judged_by_the_file() -> None:
    own = adam((2, 3))
    own.register_load_state_dict_pre_hook(lambda optimizer, _state: optimizer.state_dict())
    check_optimizer({"mine": 1}, own, "the file")


@pytest.mark.parametrize(("shape", "fits"), [((), True), ((1,), True), ((1, 1), False)])
def test_a_value_fits_a_parameter_without_dimensions_as_torch_says(shape: tuple[int, ...], fits: bool) -> None:
    model = torch.nn.Module()
    model.register_parameter("scale", torch.nn.Parameter(torch.tensor(1.0)))
    state = {"scale": torch.ones(shape)}
    if fits:
        model.load_state_dict(state)
        check_model(state, model, "the file", strict=True)
    else:
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict(state)
        with pytest.raises(CheckpointError, match="scale"):
            check_model(state, model, "the file", strict=True)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad])
def test_a_state_of_another_optimizer_is_refused_and_the_own_is_not_touched(kind: Any) -> None:
    own = adam((2, 3), (3,))
    before = copy.deepcopy(own.state_dict())
    with pytest.raises(CheckpointError, match="the file is not the state of Adam"):
        check_optimizer(adam((2, 3), (3,), kind=kind).state_dict(), own, "the file")
    torch.testing.assert_close(own.state_dict()["state"], before["state"])
    assert own.state_dict()["param_groups"] == before["param_groups"]


def test_an_optimizer_that_loads_in_a_way_of_its_own_is_asked() -> None:
    class Own(torch.optim.SGD):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise AssertionError

        def check_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise CheckpointError(f"{state_dict}")

    with pytest.raises(CheckpointError, match="'mine': 1"):
        check_optimizer({"mine": 1}, Own([torch.nn.Parameter(torch.ones(1))]), "the file")


class WithOwnState(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self) -> Any:
        return [1.0 for _ in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "step": 3, "optimizer": "Adam"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["step"]


def test_schedules_loaders_and_scalers_need_what_they_take_out() -> None:
    optimizer = adam((1,))
    plain = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    by_lambda = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    check_scheduler(plain.state_dict(), plain, "the file")
    check_scheduler(by_lambda.state_dict(), by_lambda, "the file")
    with pytest.raises(CheckpointError, match="the file lacks lr_lambdas"):
        check_scheduler(plain.state_dict(), by_lambda, "the file")
    with pytest.raises(CheckpointError, match="the file lacks last_epoch"):
        check_scheduler({"state": {}, "param_groups": []}, plain, "the file")
    for name in ("step", "optimizer"):
        with pytest.raises(CheckpointError, match=f"the file: '{name}' is no entry of the state of "):
            check_scheduler({**plain.state_dict(), name: 5}, plain, "the file")
    chain = torch.optim.lr_scheduler.SequentialLR(optimizer, [plain, by_lambda], [3])
    check_scheduler(chain.state_dict(), chain, "the file")
    state = chain.state_dict()
    state["_schedulers"][1]["get_lr"] = 5
    with pytest.raises(CheckpointError, match="the file: 'get_lr' is no entry of the state of LambdaLR"):
        check_scheduler(state, chain, "the file")
    for parts in (5, state["_schedulers"][:1]):
        with pytest.raises(CheckpointError, match="the file: expected the states of 2 schedules in '_schedulers'"):
            check_scheduler({**chain.state_dict(), "_schedulers": parts}, chain, "the file")
    own = WithOwnState(optimizer)
    check_scheduler(own.state_dict(), own, "the file")
    scaler = torch.amp.GradScaler("cpu")
    check_scaler(scaler.state_dict(), scaler, "the file")
    with pytest.raises(CheckpointError, match="the file lacks growth_factor"):
        check_scaler({"scale": 1.0}, scaler, "the file")
    for check, owner in ((check_scheduler, plain), (check_scaler, scaler), (check_loader, object())):
        with pytest.raises(CheckpointError, match="the file: expected a dict, found list"):
            check([], owner, "the file")
