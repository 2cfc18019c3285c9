"""Logits of which each process has a part of the vocabulary are those of the whole to everybody."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

from processes import run_processes
from test_tensor_parallel_libraries import OFFLINE, batch, decoder

# Torch is imported inside the functions: each runs in a process of its own, and the collecting one needs none of it.

SPLIT: dict[str, Callable[[Any], Any]] = {
    "float": lambda logits: logits.float(),
    "double": lambda logits: logits.to(dtype=logits.dtype).double(),
    "scaled": lambda logits: logits / 2.0 * 3,
    "capped": lambda logits: (logits / 30).tanh() * 30,
    "contiguous": lambda logits: logits[:, 1:].contiguous(),
    "shifted": lambda logits: logits[..., :-1, :],
    "a row": lambda logits: logits[1],
    "rows by their largest": lambda logits: logits[logits.max(-1).values > 0],
    "last tokens": lambda logits: logits[:, -1, :],
    "viewed": lambda logits: logits.view(-1, logits.size(-1)),
    "reshaped": lambda logits: logits.reshape(logits.shape[0] * logits.shape[1], -1),
    "flat": lambda logits: logits.flatten(0, 1),
    "cloned": lambda logits: logits.clone(),
}
WHOLE: dict[str, Callable[[Any], Any]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "argmax": lambda logits: logits.argmax(-1),
    "sum": lambda logits: logits.sum(),
    "added": lambda logits: logits + 1,
    "multiplied by a tensor": lambda logits: logits * logits.detach(),
    "transposed": lambda logits: logits.transpose(1, 2),
    "turned": lambda logits: logits.mT,
    "a part of the vocabulary": lambda logits: logits[..., 2:5],
    "one entry": lambda logits: logits[:, :, 3],
    "everything flat": lambda logits: logits.flatten(),
    "a new dimension": lambda logits: logits[:, None],
    "data": lambda logits: logits.data,
    "detached": lambda logits: logits.detach(),
    "list": lambda logits: logits.tolist(),
    "two of them": lambda logits: __import__("torch").cat([logits, logits]),
}


def logits_of(split: bool) -> tuple[Any, Any]:
    """Inputs that require gradients, and logits of shape (2, 3, 8) computed from them."""
    import torch
    import torch.distributed as dist

    from accelerate_cpp.parallel.tensor.vocabulary import SplitLogits

    inputs = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    outputs = inputs * 1
    if not split:
        return inputs, outputs
    return inputs, SplitLogits.of(outputs.tensor_split(dist.get_world_size(), -1)[dist.get_rank()], dist.group.WORLD)


def looks_the_same() -> list[str]:
    """What differs between split logits and whole ones."""
    import torch

    from accelerate_cpp import PartialState
    from accelerate_cpp.parallel.tensor.vocabulary import SplitLogits

    PartialState(cpu=True)
    wrong = []
    for name, function in {**SPLIT, **WHOLE}.items():
        _, logits = logits_of(split=True)
        _, whole = logits_of(split=False)
        found, wanted = function(logits), function(whole)
        if isinstance(found, SplitLogits) is not (name in SPLIT):
            wrong.append(f"{name} gives {type(found).__name__}")
        if isinstance(wanted, torch.Tensor):
            if (found.shape, found.dtype, found.ndim, found.numel()) != (
                wanted.shape,
                wanted.dtype,
                wanted.ndim,
                wanted.numel(),
            ):
                wrong.append(f"{name} looks like {found.shape} of {found.dtype}")
            found = found.whole() if isinstance(found, SplitLogits) else found
            if not torch.equal(found, wanted):
                wrong.append(f"{name} has other values")
        elif found != wanted:
            wrong.append(f"{name} is {found}")
    return wrong


def written() -> list[str]:
    """What differs after something was written into split logits, and after what cannot be done with them."""
    import torch
    from torch.nn import functional

    from accelerate_cpp import PartialState
    from accelerate_cpp.errors import InvalidArgument

    PartialState(cpu=True)
    ways: dict[str, Callable[[Any], Any]] = {
        "an entry": lambda logits: logits.__setitem__((..., 3), 7.0),
        "in place": lambda logits: logits.mul_(2),
        "masked": lambda logits: logits.masked_fill_(logits > 0, -1.0),
        "added": lambda logits: logits.__iadd__(torch.arange(8.0)),
    }
    wrong = []
    for name, write in ways.items():
        (inputs, logits), (others, whole) = logits_of(split=True), logits_of(split=False)
        for one in (logits, whole):
            write(one)
        if not torch.equal(logits[:, 1:].softmax(-1), whole[:, 1:].softmax(-1)):
            wrong.append(f"{name} was not written")
        labels = torch.tensor([0, 7, 3, 1, 4, 5])
        for one in (logits, whole):
            functional.cross_entropy(one.view(-1, 8), labels).backward()
        torch.distributed.all_reduce(inputs.grad)
        if not torch.allclose(inputs.grad, others.grad):
            wrong.append(f"{name} has another gradient")
    _, logits = logits_of(split=True)
    if len(logits[0, 0]) != 8:
        wrong.append("another length")
    refused: dict[str, Callable[[], Any]] = {
        "retain": lambda: logits.retain_grad(),
        "out": lambda: torch.add(torch.ones(2, 3, 8), 1, out=logits),
        "data": lambda: setattr(logits, "data", torch.ones(2, 3, 8)),
    }
    for name, action in refused.items():
        try:
            action()
        except InvalidArgument as error:
            if "call logits.whole()" not in str(error):
                wrong.append(f"{name}: {error}")
        else:
            wrong.append(f"{name} was not refused")
    for bad, kind in ((9, IndexError), (-1, IndexError)):
        try:
            functional.cross_entropy(logits[0], torch.tensor([0, bad, 1]))
        except kind as error:
            if str(error) != f"Target {bad} is out of bounds.":
                wrong.append(str(error))
        else:
            wrong.append(f"label {bad} was taken")
    try:
        functional.cross_entropy(logits[0], torch.tensor([0, 2, 1]), reduction="avg")
    except ValueError:
        pass
    else:
        wrong.append("avg was taken")
    return wrong


def cross_entropies(own: bool) -> list[tuple[Any, Any]]:
    """Values and gradients of cross entropies in all ways."""
    import torch
    from torch.nn import functional

    from accelerate_cpp import PartialState

    PartialState(cpu=True)
    labels = torch.tensor([[0, 7, 3], [-100, 4, 5]])
    ways: list[Callable[[Any], Any]] = [
        lambda logits: functional.cross_entropy(logits.view(-1, 8), labels.view(-1)),
        lambda logits: functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 7,
        lambda logits: functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none"),
        lambda logits: torch.nn.CrossEntropyLoss(label_smoothing=0.1)(logits.view(-1, 8), labels.view(-1)),
        lambda logits: functional.cross_entropy(logits.view(-1, 8), labels.clamp(0).view(-1), ignore_index=3),
        lambda logits: functional.cross_entropy(logits.transpose(1, 2), labels),
        lambda logits: functional.cross_entropy(logits.view(-1, 8), labels.view(-1), torch.arange(1.0, 9.0)),
        lambda logits: functional.cross_entropy(logits.view(-1, 8), torch.eye(8)[labels.clamp(0).view(-1)]),
        lambda logits: functional.cross_entropy(logits.double().view(-1, 8), labels.view(-1)),
        # Rounded logits, but a loss in float32.
        lambda logits: functional.cross_entropy(logits.bfloat16().view(-1, 8).float(), labels.view(-1)),
        lambda logits: functional.nll_loss(logits.log_softmax(-1).flatten(0, 1), labels.flatten()),
    ]
    found = []
    for way in ways:
        inputs, logits = logits_of(split=own)
        loss = way(logits)
        (loss * torch.arange(1, loss.numel() + 1).reshape(loss.shape)).sum().backward()
        gradient = inputs.grad.clone()
        if own:
            torch.distributed.all_reduce(gradient)
        found.append((loss.tolist(), gradient.tolist()))
    return found


def trained(options: dict[str, Any], gathers: bool) -> tuple[list[float], list[float], int]:
    """Losses of split logits and of one process, and how many elements were gathered in a step at most."""
    import torch
    import torch.distributed as dist

    from accelerate_cpp import Accelerator, ParallelismConfig
    from accelerate_cpp.utils import TorchTensorParallelConfig

    handler = TorchTensorParallelConfig(loss_parallel=not gathers, **options)
    run = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2, tp_handler=handler))
    model, plain = decoder("Llama"), decoder("Llama")
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
    alone = torch.optim.SGD(plain.parameters(), lr=0.2)
    with torch.no_grad():
        assert type(model(**batch(0)).logits) is torch.Tensor
    sizes: list[int] = []
    all_gather = dist.all_gather

    def counting(parts: Any, part: Any, *arguments: Any, **named: Any) -> Any:
        sizes.append(sum(one.numel() for one in parts))
        return all_gather(parts, part, *arguments, **named)

    dist.all_gather = counting
    found, wanted = [], []
    for step in range(4):
        outputs = model(**batch(step))
        run.backward(outputs.loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(outputs.loss.item())
        loss = plain(**batch(step)).loss
        loss.backward()
        alone.step()
        alone.zero_grad()
        wanted.append(loss.item())
    dist.all_gather = all_gather
    gathered = run.gather_for_metrics(outputs.logits)
    assert type(gathered) is torch.Tensor
    assert gathered.shape == (8, 12, 64)
    return found, wanted, max(sizes, default=0)


def test_split_logits_are_the_whole_to_everybody() -> None:
    assert run_processes(looks_the_same, 2) == [[], []]


def test_what_is_written_into_split_logits_is_in_the_whole() -> None:
    assert run_processes(written, 2) == [[], []]


def test_cross_entropies_and_gradients_are_those_of_torch() -> None:
    (wanted,) = run_processes(cross_entropies, 1, False)
    for processes in (2, 4):
        for own in run_processes(cross_entropies, processes, True):
            for number, (found, expected) in enumerate(zip(own, wanted, strict=True)):
                for one, other in zip(found, expected, strict=True):
                    assert flat(one) == pytest.approx(flat(other), rel=2e-5, abs=1e-6), number


def flat(numbers: Any) -> list[float]:
    return [one for part in numbers for one in flat(part)] if isinstance(numbers, list) else [numbers]


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.long), {"sequence_parallel": True}], ids=str)
def test_a_decoder_trains_without_gathered_logits(options: dict[str, Any]) -> None:
    logits = 8 * 12 * 64
    for found, wanted, most in run_processes(trained, 2, options, False, environment=OFFLINE):
        assert found == pytest.approx(wanted, rel=1e-5)
        assert most < logits
    for _, _, most in run_processes(trained, 2, options, True, environment=OFFLINE):
        assert most == logits  # what the count above would have found
