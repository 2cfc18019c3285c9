"""What has become of parameters that sharding replaced, for optimizers that still hold them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from accelerate_cpp.devices.shards import sharded_like

Places = dict[tuple[int, str], torch.nn.Parameter]


def places_of(model: torch.nn.Module) -> Places:
    """The parameters of ``model``, by the module that holds them and the name there."""
    return {
        (id(module), name): weight
        for module in model.modules()
        for name, weight in module._parameters.items()
        if weight is not None
    }


class ReplacedParameters:
    """Knows the shards of parameters for as long as somebody holds these, and brings optimizers up to date."""

    def __init__(self) -> None:
        self._shards: dict[int, tuple[weakref.ref[torch.Tensor], torch.nn.Parameter]] = {}
        self._left: dict[int, weakref.ref[torch.Tensor]] = {}
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def leave_to_others(self, parameters: Iterable[torch.Tensor]) -> None:
        """Takes ``parameters``, which other processes train, out of optimizers, now and whenever one is followed."""
        for parameter in parameters:
            self._left[id(parameter)] = weakref.ref(parameter, partial(self._forget, id(parameter)))
        for optimizer in self._optimizers:
            self._update(optimizer)

    def note(self, before: Places, after: Places) -> None:
        """Records what the parameters at the same places were before and are after; updates known optimizers."""
        for place, old in before.items():
            new = after[place]
            if new is not old:
                self._shards[id(old)] = weakref.ref(old, partial(self._forget, id(old))), new
        for optimizer in self._optimizers:
            self._update(optimizer)

    def follow(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Brings ``optimizers`` up to date, now and whenever more parameters are replaced."""
        for optimizer in optimizers:
            self._update(optimizer)
            self._optimizers.add(optimizer)

    def _forget(self, key: int, _: Any) -> None:
        self._shards.pop(key, None)
        self._left.pop(key, None)

    def _is_left(self, parameter: Any) -> bool:
        known = self._left.get(id(parameter))
        return known is not None and known() is parameter

    def _current(self, parameter: Any) -> Any:
        """What ``parameter`` has become: its part, or the shard of that."""
        while (known := self._shards.get(id(parameter))) is not None and known[0]() is parameter:
            parameter = known[1]
        return parameter

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            parameters = group["params"]
            left = [one for one in parameters if self._is_left(one)]
            if left:
                if "param_names" in group:
                    named = zip(parameters, group["param_names"], strict=True)
                    group["param_names"] = [name for one, name in named if not self._is_left(one)]
                parameters[:] = [one for one in parameters if not self._is_left(one)]
                for one in left:
                    optimizer.state.pop(one, None)
            for index, old in enumerate(parameters):
                new = self._current(old)
                if new is old:
                    continue
                parameters[index] = new
                if old in optimizer.state:
                    state = optimizer.state.pop(old)
                    optimizer.state[new] = {name: sharded_like(new, value) for name, value in state.items()}
