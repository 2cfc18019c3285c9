"""Decoders of transformers in stages train as one process does, by changing the mesh alone."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from processes import run_processes
from test_tensor_parallel_libraries import OFFLINE, batch, decoder

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]

# Torch and transformers are imported inside the functions, which run in processes of their own.

STEPS = 4


def train(run: Any, model: Any, optimizer: Any, first: int) -> list[tuple[float, float]]:
    """A loop that is the same on every mesh, also on one process."""
    mesh, found = run._session.topology.mesh, []
    for step in range(first, first + STEPS):
        own = {name: rows.tensor_split(mesh.data_size)[mesh.data_rank] for name, rows in batch(step).items()}
        loss = run.train_batch(own)
        norm = run.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(run.reduce(loss, "mean")), float(norm)))
    return found


def trained(sizes: dict[str, int], options: dict[str, Any], folder: str) -> list[list[tuple[float, float]]]:
    """Steps of a run, of what goes on from its checkpoint on the same mesh, and on copies if there are processes."""
    import torch

    from accelerate_cpp import Accelerator, ParallelismConfig
    from accelerate_cpp.state import AcceleratorState, GradientState

    def start(**arguments: Any) -> tuple[Any, Any, Any]:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        run = Accelerator(cpu=True, **arguments)
        model = decoder("Llama", **options)
        return run, *run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    mesh: dict[str, Any] = {"parallelism_config": ParallelismConfig(**sizes)} if sizes else {}  # type: ignore[arg-type]
    run, model, optimizer = start(**mesh)
    found = [train(run, model, optimizer, 0)]
    run.save_state(f"{folder}/c{run.num_processes}")
    found.append(train(run, model, optimizer, 10))
    run.load_state(f"{folder}/c{run.num_processes}")
    found.append(train(run, model, optimizer, 10))
    if sizes:
        run, model, optimizer = start()
        run.load_state(f"{folder}/c{run.num_processes}")
        found.append(train(run, model, optimizer, 10))
    return found


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"pp_size": 2}, {"tie_word_embeddings": True}),
        ({"pp_size": 2, "tp_size": 2}, {}),
        ({"dp_replicate_size": 2, "pp_size": 2, "tp_size": 2}, {}),
    ],
    ids=str,
)
def test_a_decoder_in_stages_trains_as_one_process_does(
    sizes: dict[str, int], options: dict[str, Any], tmp_path: Path
) -> None:
    (alone,) = run_processes(trained, 1, {}, options, str(tmp_path), timeout=300, environment=OFFLINE)
    processes = 2 ** len(sizes)
    for own in run_processes(trained, processes, sizes, options, str(tmp_path), timeout=500, environment=OFFLINE):
        for number, steps in enumerate(own):
            for found, wanted in zip(steps, alone[min(number, 2)], strict=True):
                assert found == pytest.approx(wanted, rel=2e-5)
