"""What a step of several processes uses although it was never prepared, or should not be: it trains wrongly."""

from __future__ import annotations

import gc
import sys
import warnings
from typing import Any

from torch.utils.data import RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from accelerate_cpp.comm.call_site import call_site
from accelerate_cpp.parallel.bundle import Bundle
from accelerate_cpp.parallel.strategy import Strategy
from accelerate_cpp.runtime.reading import Reading


def warn_of_unprepared(prepared: Bundle, reading: Reading, strategy: Strategy, num_processes: int) -> None:
    """Warns at the first backward pass of a model, an optimizer or a loader that no ``prepare`` has seen, and of a
    prepared loader that divides what processes need in common.

    Not of a loader that may divide its data by itself: over a stream, or with a sampler that is not one of torch's own
    for one process.

    Args:
        prepared: what the ``Accelerator`` has prepared.
        reading: which prepared loaders the process reads, or has read.
        strategy: knows the parameters of models as optimizers hold them.
    """
    if num_processes == 1:
        return
    place = call_site().rpartition("\t")[2]
    sharing = strategy.processes_per_batch
    if sharing > 1:
        data = _divided(sharing) if reading.has_begun else None
    else:
        data = None if reading.has_begun else _loader(num_processes)
    found = [_model(prepared, strategy, num_processes), data]
    for sentence in filter(None, found):
        warnings.warn(f"{place}: {sentence}", UserWarning, stacklevel=3)


def _model(prepared: Bundle, strategy: Strategy, num_processes: int) -> str | None:
    if not prepared.models:
        return (
            f"no model has been prepared: gradients are not averaged, and each of the {num_processes} processes trains "
            "a model of its own. Pass the model to accelerator.prepare, and use what that returns"
        )
    models = [strategy.unwrap(model) for model in prepared.models]
    known = {id(parameter) for model in models for _, parameter in strategy.named_parameters(model)}
    groups = [group for optimizer in prepared.optimizers for group in optimizer.param_groups]
    stepped = [parameter for group in groups for parameter in group["params"]]
    strangers = sum(id(parameter) not in known for parameter in stepped if parameter.requires_grad)
    if not strangers:
        return None
    return (
        f"{strangers} of the {len(stepped)} parameters of prepared optimizers belong to no prepared model: their "
        f"gradients are not averaged, and differ on the {num_processes} processes. Pass each model that is trained to "
        "accelerator.prepare"
    )


def _divided(sharing: int) -> str:
    """A prepared loader is read, where layers are split."""
    return (
        f"the layers of a model are split over {sharing} processes, which as a rule compute with the same batches, but "
        "a prepared loader gives each process others. Leave it out of prepare, and let each of these processes read "
        "the same, as with torch's DistributedSampler(num_replicas=..., rank=...) over the groups of such processes"
    )


def _loader(num_processes: int) -> str | None:
    """A plain loader that is being read, while no prepared one ever was."""
    if not any(_gives_all_to_everybody(iterator) for iterator in _living_iterators()):
        return None
    return (
        f"the DataLoader that is read has not been prepared: each of the {num_processes} processes trains on all of "
        "its data. Pass it to accelerator.prepare, and loop over what that returns"
    )


def _living_iterators() -> list[Any]:
    """The iterators of torch's loaders, of which a loop holds one between two batches."""
    kind = sys.modules["torch.utils.data.dataloader"]._BaseDataLoaderIter
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]


def _gives_all_to_everybody(iterator: Any) -> bool:
    """Whether it goes through a whole dataset by a sampler of torch's that knows of no other process."""
    sampler = getattr(iterator._index_sampler, "sampler", iterator._index_sampler)
    return type(sampler) in (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
