"""Checkpoints of other numbers of processes, and such as do not fit on one of them."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest

from processes import run_processes

# Torch is imported inside the functions: they run in processes of their own.


def run_of(width: int = 1) -> tuple[Any, ...]:
    """An Accelerator with two models, of which the last one has ``width`` outputs, and their optimizer."""
    import torch

    from accelerate_cpp import Accelerator

    accelerator = Accelerator(cpu=True)
    models = torch.nn.Linear(2, 2), torch.nn.Linear(2, width)
    optimizer = torch.optim.Adam([weight for model in models for weight in model.parameters()])
    return accelerator, models, accelerator.prepare(*models, optimizer)[-1]


def saved(folder: str) -> float:
    import torch

    accelerator, models, _ = run_of()
    torch.nn.init.constant_(models[0].weight, 5.0)
    random.seed(100 + accelerator.process_index)
    accelerator.step = 3
    accelerator.save_state(folder)
    return random.random()


def loaded(folder: str) -> tuple[float, float, int, list[str]]:
    """The weight, the next random number, the step and the warnings."""
    accelerator, models, _ = run_of()
    random.seed(200 + accelerator.process_index)
    told: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("accelerate_cpp")
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    accelerator.load_state(folder)
    logger.removeHandler(handler)
    return models[0].weight[0, 0].item(), random.random(), accelerator.step, told


@pytest.mark.parametrize(("writers", "readers"), [(2, 4), (4, 2)])
def test_ranks_that_the_checkpoint_did_not_have_keep_their_random_states_and_say_so_once(
    tmp_path: Path, writers: int, readers: int
) -> None:
    continued = run_processes(saved, writers, str(tmp_path / "c"))
    for rank, (weight, number, step, told) in enumerate(run_processes(loaded, readers, str(tmp_path / "c"))):
        assert (weight, step) == (5.0, 3)
        if rank < writers:
            assert number == continued[rank]
            assert told == []
        else:
            assert number == random.Random(200 + rank).random()
            assert len(told) == 1
            assert f"random_states_{rank}.pkl is missing" in told[0]


def misfitting(folder: str) -> dict[str, Any]:
    """What rank 1, whose last model is wider, and the others have before and after a load that fails."""
    import torch

    from accelerate_cpp import Accelerator
    from accelerate_cpp.errors import CheckpointError

    accelerator = Accelerator(cpu=True)
    width = 3 if accelerator.process_index == 1 else 1
    models = torch.nn.Linear(2, 2), torch.nn.Linear(2, width)
    for model in models:  # not distributed, as processes that differ could not be
        accelerator.prepare_model(model, evaluation_mode=True)
    optimizer = torch.optim.Adam(models[0].parameters())
    prepared = accelerator.prepare(optimizer)

    def state() -> list[Any]:
        weights = [weight.tolist() for model in models for weight in model.parameters()]
        return [weights, prepared.state_dict()["state"], random.getstate(), torch.get_rng_state().tolist()]

    before = state()
    try:
        accelerator.load_state(folder)
    except CheckpointError as error:
        return {"error": str(error), "unchanged": state() == before}
    return {}


def saved_for_misfits(folder: str) -> None:
    import torch

    from accelerate_cpp import Accelerator

    accelerator = Accelerator(cpu=True)
    models = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    for model in models:
        accelerator.prepare_model(model, evaluation_mode=True)
    accelerator.prepare(torch.optim.Adam(models[0].parameters()))
    accelerator.save_state(folder)


def test_a_model_that_does_not_fit_on_one_rank_leaves_all_ranks_as_they_were(tmp_path: Path) -> None:
    run_processes(saved_for_misfits, 2, str(tmp_path / "c"))
    ranks = run_processes(misfitting, 2, str(tmp_path / "c"))
    assert [rank["unchanged"] for rank in ranks] == [True, True]
    assert all(
        "model_1.safetensors does not fit Linear: shapes differ: weight (1, 2) for (3, 2)" in rank["error"]
        for rank in ranks
    )
    assert "rank 1 failed" in ranks[0]["error"]
