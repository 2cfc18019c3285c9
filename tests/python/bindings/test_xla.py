from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from accelerate_cpp import _native


def test_groups_have_numbers_of_their_own_and_are_forgotten() -> None:
    backend = _native.create_backend(dist.HashStore(), 0, 1, timedelta(seconds=10))
    numbers = [_native.register_xla_group(backend.communicator, backend.timeout) for _ in range(2)]
    assert numbers[0] != numbers[1]
    for number in numbers:
        _native.forget_xla_group(number)
        _native.forget_xla_group(number)  # once more does nothing


def test_handlers_are_capsules_for_all_calls_or_there_are_none() -> None:
    handlers = _native.xla_handlers()
    assert handlers.keys() in ({"all_reduce", "all_gather", "broadcast", "reduce", "reduce_scatter", "barrier"}, set())
    assert {type(handler).__name__ for handler in handlers.values()} <= {"PyCapsule"}
