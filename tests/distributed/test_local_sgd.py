"""LocalSGD in two real processes: what is averaged, when, and what happens when an exception leaves the block."""

from __future__ import annotations

from typing import Any

import pytest

from processes import Outcome, run_processes, start_processes

# Torch is imported inside the functions: each runs in a process of its own, and the collecting one needs none of it.

STEPS_BETWEEN = 2
STEPS = 5
RATE = 0.1


def accelerator(backend: str | None = None, **arguments: Any) -> Any:
    from accelerate_cpp import Accelerator, InitProcessGroupKwargs
    from accelerate_cpp.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    handlers = [] if backend is None else [InitProcessGroupKwargs(backend=backend)]
    return Accelerator(cpu=True, kwargs_handlers=handlers, **arguments)


def scenarios(backend: str | None) -> dict[str, Any]:
    """Everything that the tests look at, from one start of the processes."""
    own = accelerator(backend)
    results = {scenario.__name__: scenario(own) for scenario in (contract, trained, kinds, taken_out, left_early)}
    return results | {"accumulated": accumulated(backend), "backend": own.state.backend}


@pytest.fixture(scope="module", params=[None, "gloo"], ids=["shm", "gloo"])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The results of :func:`scenarios` on both ranks."""
    results = run_processes(scenarios, 2, request.param)
    assert [rank["backend"] for rank in results] == [request.param or "shm"] * 2
    return results


def contract(own: Any) -> list[float]:
    import torch

    from accelerate_cpp.local_sgd import LocalSGD

    rank, model = own.process_index, torch.nn.Linear(1, 1, bias=False)
    weight, seen = model.weight, []
    storage = weight.data_ptr()
    with LocalSGD(accelerator=own, model=own.prepare(model), local_sgd_steps=2) as local:
        weight.data.fill_(float(rank))
        for _ in range(2):
            local.step()
            seen.append(weight.item())
        weight.data.fill_(float(rank * 4))
    return [*seen, weight.item(), float(local.num_steps), float(weight.data_ptr() == storage)]


def test_parameters_are_averaged_every_so_many_steps_and_once_more_at_the_end(ranks: list[dict[str, Any]]) -> None:
    assert [rank["contract"] for rank in ranks] == [[0.0, 0.5, 2.0, 2.0, 1.0], [1.0, 0.5, 2.0, 2.0, 1.0]]


def network() -> Any:
    import torch

    torch.manual_seed(3)
    layers = [torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 1)]
    return torch.nn.Sequential(*layers).double()


def batch(rank: int, step: int) -> Any:
    import torch

    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def make_step(model: Any, optimizer: Any, data: Any, backward: Any) -> None:
    optimizer.zero_grad()
    backward((model(data) - data.sum(1, keepdim=True)).pow(2).mean())
    optimizer.step()


def state_of(model: Any, optimizer: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """The parameters, the buffers and the momenta, as arrays."""
    momenta = [optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters()]
    kinds = ([p.detach() for p in model.parameters()], list(model.buffers()), momenta)
    return tuple([tensor.numpy().copy() for tensor in kind] for kind in kinds)  # type: ignore[return-value]


def trained(own: Any) -> dict[str, Any]:
    import torch

    from accelerate_cpp.local_sgd import LocalSGD

    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    prepared, optimizer = own.prepare(model, plain)
    with LocalSGD(own, prepared, STEPS_BETWEEN) as local:
        for step in range(STEPS):
            make_step(prepared, optimizer, batch(own.process_index, step), own.backward)
            local.step()
    state = state_of(model, plain)
    # Outside the block gradients are synchronised again.
    make_step(prepared, optimizer, batch(own.process_index, STEPS), own.backward)
    return {"state": state, "after": state_of(model, plain)[0]}


def averaged_by_hand() -> list[tuple[list[Any], list[Any], list[Any]]]:
    """Both ranks' training in this process alone: each takes its own steps, and parameters are averaged in between."""
    import torch

    models = [network() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9) for model in models]
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            make_step(model, optimizer, batch(rank, step), lambda loss: loss.backward())
        if (step + 1) % STEPS_BETWEEN == 0 or step + 1 == STEPS:
            with torch.no_grad():
                for pair in zip(*(model.parameters() for model in models), strict=True):
                    mean = (pair[0] + pair[1]) / 2
                    for parameter in pair:
                        parameter.copy_(mean)
    return [state_of(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]


def test_training_is_that_of_separate_processes_whose_parameters_are_averaged_by_hand(
    ranks: list[dict[str, Any]],
) -> None:
    for rank, by_hand in zip(ranks, averaged_by_hand(), strict=True):
        for kind, expected in zip(rank["trained"]["state"], by_hand, strict=True):
            for own, other in zip(kind, expected, strict=True):
                assert own == pytest.approx(other, rel=1e-9, abs=1e-12)


def test_parameters_are_bitwise_equal_at_the_end_and_buffers_and_momenta_are_each_processs_own(
    ranks: list[dict[str, Any]],
) -> None:
    parameters, buffers, momenta = zip(*(rank["trained"]["state"] for rank in ranks), strict=True)
    assert all((one == other).all() for one, other in zip(*parameters, strict=True))
    running_mean = [kind[0] for kind in buffers]
    assert (running_mean[0] != running_mean[1]).any()
    assert all((one != other).any() for one, other in zip(*momenta, strict=True))


def test_gradients_are_synchronised_again_after_the_block(ranks: list[dict[str, Any]]) -> None:
    import torch

    # Equal parameters before and equal gradients: what is left of the difference is the momentum's.
    before, _, momenta = zip(*(rank["trained"]["state"] for rank in ranks), strict=True)
    after = [rank["trained"]["after"] for rank in ranks]
    for index in range(len(before[0])):
        moved = after[0][index] - after[1][index]
        drift = -RATE * 0.9 * (momenta[0][index] - momenta[1][index])
        torch.testing.assert_close(torch.tensor(moved), torch.tensor(drift), rtol=1e-6, atol=1e-12)


def kinds(own: Any) -> dict[str, Any]:
    """Parameters of every kind, set to what depends on the rank, before the average at the end of the block."""
    import torch

    from accelerate_cpp.local_sgd import LocalSGD

    class Kinds(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.single = torch.nn.Parameter(torch.zeros(3))
            self.narrow = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
            self.transposed = torch.nn.Parameter(torch.zeros(2, 3).t())
            self.tied = self.single
            self.empty = torch.nn.Parameter(torch.zeros(0, 4))
            self.frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
            self.integer = torch.nn.Parameter(torch.zeros(2, dtype=torch.long), requires_grad=False)
            self.frozen_in_the_block = torch.nn.Parameter(torch.zeros(2))
            self.register_buffer("buffer", torch.zeros(2))

    rank, model = own.process_index, Kinds()
    with LocalSGD(own, own.prepare(model), 100):
        with torch.no_grad():
            for tensor in (*model.parameters(), model.buffer):
                tensor.copy_((torch.arange(tensor.numel()).reshape(tensor.shape) + 1) * 2 * rank)
        model.frozen_in_the_block.requires_grad_(False)
    model.frozen_in_the_block.requires_grad_(True)
    return {name: (tensor.tolist(), str(tensor.dtype)) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("single", [1.0, 2.0, 3.0]),
        ("tied", [1.0, 2.0, 3.0]),
        ("narrow", [1.0, 2.0]),
        ("transposed", [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
        ("empty", []),
        ("frozen_in_the_block", [1.0, 2.0]),
    ],
)
def test_trained_parameters_of_every_layout_and_dtype_are_averaged(
    ranks: list[dict[str, Any]], name: str, expected: list[Any]
) -> None:
    assert [rank["kinds"][name][0] for rank in ranks] == [expected] * 2
    assert ranks[0]["kinds"]["narrow"][1] == "torch.bfloat16"


@pytest.mark.parametrize("name", ["frozen", "integer", "buffer"])
def test_what_is_not_trained_stays_as_it_is(ranks: list[dict[str, Any]], name: str) -> None:
    assert [rank["kinds"][name][0] for rank in ranks] == [[0, 0], [2, 4]]
    assert ranks[0]["kinds"]["integer"][1] == "torch.int64"


def taken_out(own: Any) -> list[float]:
    """The gradient of a model that is named by its inner module, by a compiled one around it, and outside the block."""
    import torch

    from accelerate_cpp.local_sgd import LocalSGD

    model = torch.nn.Linear(1, 1, bias=False)
    prepared, gradients = own.prepare(model), []

    def gradient() -> float:
        model.zero_grad()
        own.backward(prepared(torch.full((1, 1), float(own.process_index + 1))).sum())
        return float(model.weight.grad.item())

    for named in (model, torch.compile(prepared, backend="eager")):
        with LocalSGD(own, named, 100):
            gradients.append(gradient())
    return [*gradients, gradient()]


def test_gradients_stay_local_also_where_the_model_is_named_without_or_below_its_wrapper(
    ranks: list[dict[str, Any]],
) -> None:
    assert [rank["taken_out"] for rank in ranks] == [[1.0, 1.0, 1.5], [2.0, 2.0, 1.5]]


def left_early(own: Any) -> dict[str, Any]:
    """An exception leaves the block on every rank; later collectives of the run find each other."""
    import torch

    from accelerate_cpp.local_sgd import LocalSGD

    model = torch.nn.Linear(1, 1, bias=False)
    prepared, caught = own.prepare(model), ""
    try:
        with LocalSGD(own, prepared, 100):
            model.weight.data.fill_(float(own.process_index))
            raise LookupError("out of data")
    except LookupError as error:
        caught = f"{type(error).__name__}: {error}, {error.__context__}"
    weight = model.weight.item()
    own.backward(prepared(torch.full((1, 1), float(own.process_index + 1))).sum())
    total = own.reduce(torch.tensor(1.0)).item()
    return {"caught": caught, "weight": weight, "gradient": model.weight.grad.item(), "total": total}


def test_an_exception_leaves_the_block_as_it_is_without_an_average_and_gradients_are_synchronised_again(
    ranks: list[dict[str, Any]],
) -> None:
    for index, rank in enumerate(ranks):
        assert rank["left_early"] == {
            "caught": "LookupError: out of data, None",
            "weight": float(index),
            "gradient": 1.5,
            "total": 2.0,
        }


def accumulated(backend: str | None) -> list[float]:
    """Gradients stay local in the micro-batch that completes a step, too."""
    import torch

    from accelerate_cpp.local_sgd import LocalSGD

    own = accelerator(backend, gradient_accumulation_steps=2)
    model, seen = torch.nn.Linear(1, 1, bias=False), []
    prepared = own.prepare(model)
    with LocalSGD(own, prepared, 100):
        for _ in range(2):
            with own.accumulate(prepared):
                own.backward(prepared(torch.full((1, 1), float(own.process_index + 1))).sum())
                seen.append(model.weight.grad.item())
    return seen


def test_accumulated_gradients_stay_local(ranks: list[dict[str, Any]]) -> None:
    assert [rank["accumulated"] for rank in ranks] == [[0.5, 1.0], [1.0, 2.0]]


def fails_on_rank_0(averages: bool) -> None:
    import torch

    from accelerate_cpp.local_sgd import LocalSGD

    own = accelerator()
    prepared = own.prepare(torch.nn.Linear(64, 64))
    with LocalSGD(own, prepared, 1) as local:
        local.step()
        if own.is_main_process:
            raise LookupError("out of data")
        if averages:
            local.step()


@pytest.mark.parametrize("averages", [True, False], ids=["in a step", "at the end"])
def test_a_process_that_fails_in_the_block_keeps_its_error_and_the_others_do_not_wait_for_it(averages: bool) -> None:
    failed, waiting = start_processes(fails_on_rank_0, 2, averages, timeout=120)
    assert (failed.exit_code, waiting.exit_code) == (1, 1)
    assert _lines(failed)[-1] == "LookupError: out of data"
    assert "During handling" not in failed.stderr
    assert any(line.startswith("accelerate_cpp.errors.PeerLost") for line in _lines(waiting)), waiting.stderr
    assert "During handling" not in waiting.stderr


def _lines(outcome: Outcome) -> list[str]:
    """The lines of standard error, without the rank that torch puts before each line of a traceback."""
    return [line.removeprefix(f"[rank{outcome.rank}]: ") for line in outcome.stderr.splitlines()]


def mixed() -> list[float]:
    """One coalesced collective per dtype, not one per parameter."""
    import torch
    import torch.distributed as dist

    from accelerate_cpp.local_sgd import LocalSGD

    own = accelerator()
    model = own.prepare(torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(4)], torch.nn.Linear(3, 3).double()))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with LocalSGD(own, model, 1) as local:
            local.step()
        dist.barrier()
    names = [event.name for event in profiler.events()]
    return [float(names.count("shm:all_reduce_coalesced")), float(sum("all_reduce" in name for name in names))]


def test_the_parameters_of_a_dtype_travel_in_one_collective() -> None:
    assert run_processes(mixed, 2) == [[4.0, 4.0]] * 2  # two dtypes, in the step and at the end of the block
