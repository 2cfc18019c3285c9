"""Models in which nothing requires a gradient, prepared in two real processes, and thawed later."""

from __future__ import annotations

import io
import logging
from contextlib import contextmanager
from typing import Any

import pytest

from processes import run_processes

# Torch is imported inside the functions: each runs in a process of its own, and the collecting one needs none of it.

BACKENDS = [None, "gloo"]
ROWS, STEPS = 4, 3


def accelerator(backend: str | None, **options: Any) -> Any:
    from accelerate_cpp import Accelerator, InitProcessGroupKwargs

    handlers = [] if backend is None else [InitProcessGroupKwargs(backend=backend)]
    return Accelerator(cpu=True, kwargs_handlers=handlers, **options)


def networks() -> tuple[Any, Any]:
    """A frozen teacher and a student, the same on all ranks."""
    import torch

    torch.manual_seed(0)
    teacher = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    return teacher.requires_grad_(False), torch.nn.Linear(3, 2)


def rows_of(rank: int, world_size: int) -> list[Any]:
    import torch

    torch.manual_seed(1)
    rows = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    return [torch.randn(ROWS, 3)[rows] for _ in range(STEPS)]


def values(model: Any) -> list[float]:
    return [value for weight in model.parameters() for value in weight.flatten().tolist()]


def distilled(backend: str | None) -> dict[str, Any]:
    import torch

    own = accelerator(backend)
    teacher, student = networks()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.5)
    prepared = own.prepare(teacher)
    student, optimizer = own.prepare(student, optimizer)
    for batch in rows_of(own.process_index, own.num_processes):
        with own.accumulate(student, prepared):
            own.backward((student(batch) - prepared(batch)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return {
        "itself": prepared is teacher,
        "unwrapped": own.unwrap_model(prepared) is teacher,
        "again": own.prepare(prepared) is prepared,
        "evaluated": own.prepare_model(prepared, evaluation_mode=True) is prepared,
        "saved": len(own._models),
        "student": values(student),
    }


def distilled_alone() -> list[float]:
    """The same in plain torch on all rows."""
    import torch

    teacher, student = networks()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.5)
    for batch in rows_of(0, 1):
        (student(batch) - teacher(batch)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(student)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_frozen_teacher_comes_back_as_it_is_and_its_student_trains_as_on_one_process(backend: str | None) -> None:
    ranks = run_processes(distilled, 2, backend)
    (expected,) = run_processes(distilled_alone, 1)
    for rank in ranks:
        assert (rank["itself"], rank["unwrapped"], rank["again"], rank["evaluated"], rank["saved"]) == (True,) * 4 + (
            2,
        )
        assert rank["student"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert ranks[0]["student"] == ranks[1]["student"]


def in_low_precision() -> tuple[str, bool]:
    import torch

    own = accelerator(None, mixed_precision="bf16")
    teacher, _ = networks()
    batch = rows_of(0, 1)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = teacher(batch)
    found = own.prepare(teacher)(batch)
    return str(found.dtype), torch.equal(found, expected.float())


def test_a_frozen_model_computes_in_the_precision_of_the_run() -> None:
    assert run_processes(in_low_precision, 2) == [("torch.float32", True)] * 2


@contextmanager
def logged() -> Any:
    text = io.StringIO()
    handler, logger = logging.StreamHandler(text), logging.getLogger("accelerate_cpp")
    logger.addHandler(handler)
    try:
        yield text
    finally:
        logger.removeHandler(handler)


def thawed(backend: str | None) -> dict[str, Any]:
    import torch

    own = accelerator(backend)
    model = torch.nn.Linear(1, 1, bias=False).requires_grad_(False)
    prepared = own.prepare(model)
    inputs = torch.full((1, 1), float(own.process_index + 1))
    model.requires_grad_(True)
    with logged() as text:
        for _ in range(2):
            own.backward(prepared(inputs).sum())
            local = model.weight.grad.item()
            model.zero_grad()
    again = own.prepare(prepared)
    own.backward(again(inputs).sum())
    return {
        "local": local,
        "warnings": text.getvalue().count("Linear had no parameter that requires a gradient when it was prepared"),
        "averaged": model.weight.grad.item(),
        "wrapped": again is not prepared and own.unwrap_model(again) is model,
        "saved": [one is again for one in own._models],
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_thawed_model_is_averaged_once_it_is_prepared_again_and_a_warning_says_so(backend: str | None) -> None:
    for number, rank in enumerate(run_processes(thawed, 2, backend), 1):
        assert (rank["local"], rank["warnings"]) == (float(number), 1)
        assert (rank["averaged"], rank["wrapped"], rank["saved"]) == (1.5, True, [True])


def adapted() -> str:
    """What is logged where a frozen, prepared model is part of a larger one that is trained."""
    import torch

    own = accelerator(None)
    base = torch.nn.Linear(1, 1).requires_grad_(False)
    own.prepare(base)
    base.adapter = torch.nn.Linear(1, 1)
    outer = own.prepare(torch.nn.Sequential(base.adapter, base))
    with logged() as text:
        own.backward(outer(torch.ones(1, 1)).sum())
    return text.getvalue()


def test_parameters_that_another_model_averages_are_no_reason_to_warn() -> None:
    assert run_processes(adapted, 2) == ["", ""]


def alone_and_thawed() -> float:
    import torch

    own = accelerator(None)
    model = torch.nn.Linear(1, 1, bias=False).requires_grad_(False)
    prepared = own.prepare(model)
    model.requires_grad_(True)
    assert own.prepare(prepared) is model
    own.backward(prepared(torch.ones(1, 1)).sum(), weight=4.0)
    return model.weight.grad.item()


def test_one_process_trains_what_was_frozen_when_it_was_prepared() -> None:
    assert run_processes(alone_and_thawed, 1) == [0.25]
