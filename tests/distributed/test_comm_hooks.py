"""Communication hooks on our wrapper do what they do on torch's; and copies of prepared models are models."""

from __future__ import annotations

from typing import Any

import pytest

from processes import run_processes
from scenarios import Ranks, Scenarios, close

SCENARIOS = Scenarios()


def run_scenarios() -> dict[str, str]:
    return SCENARIOS.run()


@pytest.fixture(scope="module", params=[2, 3])
def failures(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_processes(run_scenarios, request.param)


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_every_rank(failures: list[dict[str, str]], name: str) -> None:
    found = [failure[name] for failure in failures if name in failure]
    assert not found, "\n".join(found)


def network() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


def loss(ranks: Ranks) -> Any:
    return lambda model, step: model(ranks.batch(step, 8, 6)).pow(2).mean()


@SCENARIOS.add
def fp16_compression_is_that_of_torch(ranks: Ranks) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    ours, theirs = ranks.pair(network, {"bucket_cap_mb": 0.01}, bucket_cap_mb=0.01)
    for model in (ours, theirs):
        model.register_comm_hook(None, fp16_compress_hook)
    for step in range(3):
        for model in (ours, theirs):
            model.zero_grad()
            loss(ranks)(model, step).backward()
        for (name, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            # Gloo adds up halves in an order that depends on where they lie in their bucket.
            close(own.grad, other.grad, name, relative=2e-3, absolute=1e-5)


@SCENARIOS.add
def a_hook_of_the_user_sees_buckets_parameters_and_its_state(ranks: Ranks) -> None:
    import torch

    seen: list[Any] = []

    def halve(state: list[Any], bucket: Any) -> Any:
        state.append((bucket.index(), bucket.is_last(), [tuple(p.shape) for p in bucket.parameters()]))
        assert [tuple(gradient.shape) for gradient in bucket.gradients()] == state[-1][2]
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(bucket.buffer().div_(2))
        return future

    model = ranks.wrap(network())
    local = network()
    local.load_state_dict(model.module.state_dict())
    model.register_comm_hook(seen, halve)
    for one in (model, local):
        loss(ranks)(one, 0).backward()
    for own, other in zip(model.parameters(), local.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad / 2)
    assert seen == [(0, True, [(3,), (3, 64), (64,), (64, 64), (64,), (64, 6)])]
    with pytest.raises(ValueError, match="has a communication hook already"):
        model.register_comm_hook(seen, halve)


@SCENARIOS.add
def an_exception_in_a_hook_keeps_its_type(ranks: Ranks) -> None:
    def broken(state: None, bucket: Any) -> Any:
        raise LookupError("in the hook")

    model = ranks.wrap(network())
    model.register_comm_hook(None, broken)
    with pytest.raises(LookupError, match="in the hook"):
        loss(ranks)(model, 0).backward()


@SCENARIOS.add
def weights_are_refused_with_a_hook(ranks: Ranks) -> None:
    from accelerate_cpp.comm.compression_hooks import average_as_bf16

    model = ranks.wrap(network())
    model.register_comm_hook(None, average_as_bf16)
    output = loss(ranks)(model, 0)
    model.set_weight(2.0)
    with pytest.raises(ValueError, match="a communication hook averages over all ranks alike"):
        output.backward()


@SCENARIOS.add
def copies_compute_what_the_model_computes(ranks: Ranks) -> None:
    import copy
    import io
    import pickle

    import torch
    from torch.optim.swa_utils import AveragedModel

    model = ranks.wrap(network())
    loss(ranks)(model, 0).backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    batch = ranks.batch(1, 4, 6)
    expected = model(batch)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    for one in (*copies, AveragedModel(model)):
        with torch.no_grad():
            torch.testing.assert_close(one(batch), expected)
    with torch.no_grad():
        copies[0].module[0].weight.zero_()
    torch.testing.assert_close(model(batch), expected)
    with pytest.raises(ValueError, match="there is no such process group here to train it in"):
        copies[0](batch)  # the default group of these tests is Gloo's


@SCENARIOS.add
def checkpoints_of_the_model_are_those_of_torchs_wrapper(ranks: Ranks) -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    ours, theirs = ranks.pair(network)
    states = [get_model_state_dict(model) for model in (ours, theirs)]
    assert list(states[0]) == list(states[1]) == list(ours.module.state_dict())
    set_model_state_dict(ours, {name: value * 2 for name, value in states[1].items()})
    for name, value in ours.module.state_dict().items():
        assert value.equal(theirs.module.state_dict()[name] * 2), name


@SCENARIOS.add
def torchs_join_lets_ranks_end_early(ranks: Ranks) -> None:
    from torch.distributed.algorithms.join import Join

    model = ranks.wrap(network())
    with Join([model]):
        for step in range(2 + ranks.rank):
            model.zero_grad()
            loss(ranks)(model, step).backward()
    assert all(parameter.grad is not None for parameter in model.parameters()) or ranks.rank < ranks.size - 1


def trained_copy() -> list[float]:
    import copy

    import torch

    from accelerate_cpp import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = copy.deepcopy(accelerator.prepare(torch.nn.Linear(2, 1, bias=False)))
    model(torch.full((1, 2), float(accelerator.process_index))).sum().backward()
    gradient: list[float] = model.module.weight.grad.flatten().tolist()
    return gradient


def test_a_copy_that_is_trained_averages_as_its_original() -> None:
    assert run_processes(trained_copy, 2) == [[0.5, 0.5]] * 2


def compressed(hook: str, wrapper: str, torchs_own: bool) -> list[float]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from accelerate_cpp import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs

    handler = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType(hook),
        comm_wrapper=DDPCommunicationHookType(wrapper),  # type: ignore[arg-type]
        comm_state_option={"start_powerSGD_iter": 2} if hook == "power_sgd" else {},
    )
    if torchs_own:
        accelerator = Accelerator(cpu=True)
        model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False), **handler.to_kwargs())
        handler.register_comm_hook(model)
    else:
        accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        model = accelerator.prepare(torch.nn.Linear(2, 1, bias=False))
    for _ in range(4):
        model.zero_grad()
        accelerator.backward(model(torch.full((1, 2), 0.1 + accelerator.process_index)).sum())
    gradient: list[float] = accelerator.unwrap_model(model).weight.grad.flatten().tolist()
    return gradient


@pytest.mark.parametrize("torchs_own", [False, True], ids=["prepared", "torchs_wrapper"])
@pytest.mark.parametrize(
    ("hook", "wrapper", "tolerance"),
    [
        ("fp16", "no", 1e-3),
        ("bf16", "no", 1e-2),
        ("power_sgd", "no", 1e-5),
        ("batched_power_sgd", "no", 1e-5),
        ("power_sgd", "fp16", 1e-3),
        ("power_sgd", "bf16", 1e-2),
    ],
)
def test_gradients_go_through_the_hook_that_is_asked_for(
    hook: str, wrapper: str, tolerance: float, torchs_own: bool
) -> None:
    first, second = run_processes(compressed, 2, hook, wrapper, torchs_own)
    assert first == second == pytest.approx([0.6, 0.6], rel=tolerance)
    if wrapper == "no" and tolerance > 1e-5:
        assert first != [0.6000000238418579] * 2, "nothing was rounded on the way"
