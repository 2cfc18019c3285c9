"""Training in fp8 in two real processes, and in one that lacks the library."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from processes import run_processes

# Torch is imported inside the functions: each runs in a process of its own, and the collecting one needs none of it.

STEPS = 10


def trained() -> dict[str, Any]:
    """Trains a small transformer to repeat its input, each rank on tokens of its own."""
    import torch

    from accelerate_cpp import Accelerator

    run = Accelerator(cpu=True, mixed_precision="fp8")
    torch.manual_seed(run.process_index)  # the weights of rank 0 count
    model = torch.nn.Sequential(
        torch.nn.Embedding(16, 32),
        torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True),
        torch.nn.Linear(32, 32),
        torch.nn.Linear(32, 16),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = run.prepare(model, optimizer)
    start = {name: parameter.detach().clone() for name, parameter in model.module.named_parameters()}
    tokens = torch.Generator().manual_seed(run.process_index)
    losses, norms, gradients = [], [], {}
    for _ in range(STEPS):
        batch = torch.randint(0, 16, (4, 8), generator=tokens)
        loss = torch.nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
        run.backward(loss)
        gradients = {name: parameter.grad.numpy().copy() for name, parameter in model.module.named_parameters()}
        norms.append(run.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(run.reduce(loss.detach(), "mean").item())
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "parameters": {name: parameter.detach().numpy() for name, parameter in model.module.named_parameters()},
        "unmoved": [name for name, value in model.module.named_parameters() if torch.equal(value, start[name])],
        "in_fp8": [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"],
        "plan": run.precision_plan(model),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_processes(trained, 2)


def test_the_loss_falls_and_every_parameter_moves(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["in_fp8"] == ["module.1.linear1", "module.1.linear2", "module.2"]
        assert rank["losses"][-1] < 0.6 * rank["losses"][0]
        assert rank["unmoved"] == []


@pytest.mark.parametrize("what", ["gradients", "parameters"])
def test_ranks_have_the_same_bits(ranks: list[dict[str, Any]], what: str) -> None:
    first, second = ranks
    assert (first["losses"], first["norms"]) == (second["losses"], second["norms"])
    assert first[what].keys() == second[what].keys()
    for name, value in first[what].items():
        assert (value == second[what][name]).all(), name


def test_gradients_travel_in_the_dtype_of_the_plan(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for group in rank["plan"].groups:
            found = {str(rank["gradients"][name].dtype) for name in group.names}
            assert found == {str(group.reduce_dtype).removeprefix("torch.")} == {"float32"}
    in_fp8 = [group.names for group in ranks[0]["plan"].groups if str(group.compute_dtype) == "torch.float8_e4m3fn"]
    assert in_fp8 == [("1.linear1.weight", "1.linear2.weight", "2.weight")]


WITHOUT_LIBRARY = """
import sys
sys.modules.update({"torchao": None, "transformer_engine": None, "msamp": None})
from accelerate_cpp import Accelerator
Accelerator(cpu=True, mixed_precision="bf16" if "bf16" in sys.argv else "fp8")
"""


@pytest.mark.parametrize("arguments", [["bf16"], []], ids=["bf16", "fp8"])
def test_only_fp8_needs_the_library_and_the_error_says_how_to_get_it(arguments: list[str]) -> None:
    command = [sys.executable, "-c", WITHOUT_LIBRARY, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == (0 if arguments else 1), ended.stderr
    if not arguments:
        last = ended.stderr.strip().splitlines()[-1]
        assert last.startswith("accelerate_cpp.errors.MissingLibrary: mixed_precision='fp8'")
        assert "pip install torchao" in last
        assert "mixed_precision='bf16'" in last


def test_the_package_loads_torchao_only_for_fp8() -> None:
    script = (
        "import sys; from accelerate_cpp import Accelerator; from accelerate_cpp.utils import AORecipeKwargs; "
        "Accelerator(cpu=True, mixed_precision='bf16'); print('torchao' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.split() == ["False"]
