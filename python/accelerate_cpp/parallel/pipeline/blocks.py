"""What a model is cut between."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

__all__ = ["Absent", "Batch", "Batches", "Block", "Divisible", "cost_of", "sendable", "shallow_copy"]


class Absent(nn.Module):
    """In place of a module that another stage has; it returns what it gets."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


@dataclass(frozen=True)
class Block:
    """What stays together on one stage.

    Attributes:
        names: of the modules that begin it; a stage begins with the block if a user says one of them.
        cost: in no unit; stages are balanced by the sums of it.
    """

    names: tuple[str, ...]
    cost: int


@dataclass
class Batch:
    """A batch in the form in which stages take it.

    Attributes:
        args: what the first stage gets, tensors with equally many rows.
        kwargs: what every stage gets.
        targets: what the loss is computed from, beside the outputs.
    """

    args: tuple[Tensor, ...]
    kwargs: dict[str, Any]
    targets: Any


class Batches(Protocol):
    """How batches of a kind of model look; it does not hold the model, of which a rank keeps only its stages."""

    shapes_follow_inputs: bool
    """Whether what stages pass on has the first two dimensions of the inputs, and otherwise always the same shape."""

    def read(self, inputs: Any, targets: Any, kwargs: Mapping[str, Any] | None) -> Batch:
        """The batch that a user hands over."""

    def read_call(self, inputs: Mapping[str, Any]) -> Batch:
        """The batch of a forward pass with ``inputs``, which are under the names that the model has for them."""

    def default_loss(self, outputs: Any, targets: Any, count: float) -> Tensor:
        """A part of the model's own loss: the sum over what is counted in ``targets``, divided by ``count``."""

    def counted(self, targets: Any) -> int | None:
        """How many elements of ``targets`` the model's own loss is a mean over; ``None`` if that is not known."""


class Divisible(Protocol):
    """A model that can be cut between its blocks."""

    blocks: list[Block]
    batches: Batches

    def stage(self, begin: int, end: int) -> nn.Module:
        """The blocks from ``begin`` to before ``end``, with the parameters of the model under their names."""


def cost_of(modules: Iterable[nn.Module]) -> int:
    """The bytes of the parameters and buffers, and again of parameters with which each token is multiplied.

    Rows that are looked up in an embedding need memory, but no time.
    """
    found: dict[int, int] = {}
    for module in modules:
        for part in module.modules():
            times = 1 if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) else 2
            for parameter in part.parameters(recurse=False):
                found[id(parameter)] = max(found.get(id(parameter), 0), times * parameter.nbytes)
            found.update((id(buffer), buffer.nbytes) for buffer in part.buffers(recurse=False))
    return sum(found.values())


def sendable(outputs: Any) -> Any:
    """``outputs`` with tensors that can be sent, which are contiguous, and detached in place, which are no views."""

    def one(tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        return tensor.clone() if tensor._is_view() else tensor

    return tree_map_only(Tensor, one, outputs)


def shallow_copy(module: nn.Module) -> Any:
    """Another module with the same parameters, buffers and children, which can be replaced in it alone."""
    copied = copy.copy(module)
    for name in ("_modules", "_parameters", "_buffers"):
        copied.__dict__[name] = dict(module.__dict__[name])
    return copied
