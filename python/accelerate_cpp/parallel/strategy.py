"""The interface between training and a way to parallelise it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from accelerate_cpp.config.session_config import DynamoConfig
from accelerate_cpp.parallel.bundle import Bundle
from accelerate_cpp.parallel.step_weights import PassWeights

Layout = Literal["plain", "whole", "shards", "engines"]
"""Files of a run without shards; states gathered into one file, or parts of all processes, both by names; or the files
that engines of another library write for their models, optimizers and schedules."""

Step = Callable[[torch.nn.Module], torch.nn.Module]

HandOver = Callable[[int, bool], None]
"""Gives what steps have changed, apart from weights, from the rank whose number it gets to those for which the second
argument is false: they have not trained to the end. Collective."""


def _unchanged(model: torch.nn.Module) -> torch.nn.Module:
    return model


@dataclass(frozen=True)
class ModelSteps:
    """What is done to one model besides distributing it; each step returns the model. Strategies know the order.

    Attributes:
        place: moves it to the device of the process, unless the user does that.
        cast: makes its forward compute in the precision of the run.
        compile_regions: compiles repeated blocks, if that is asked for.
        compile: compiles it as a whole, with what distributes it, if that is asked for.
        dynamo: how it is compiled, for strategies that do so themselves.
    """

    place: Step = _unchanged
    cast: Step = _unchanged
    compile_regions: Step = _unchanged
    compile: Step = _unchanged
    dynamo: DynamoConfig | None = None


class Strategy(ABC):
    """One way to train a model on one or more processes. It remembers the models that it prepared, and nothing else."""

    @abstractmethod
    def prepare(self, bundle: Bundle, steps: Sequence[ModelSteps] | None = None) -> Bundle:
        """Returns the bundle with its models (and, where needed, optimizers) prepared, in the same order.

        Args:
            steps: for each model; ``None`` distributes them and does nothing else.
        """

    def settle(self, accumulation_steps: int, loaders: Sequence[Any], split_batches: bool) -> int:
        """Tells, before models are prepared, what the run is like.

        Args:
            accumulation_steps: micro-batches per step.
            loaders: those that are prepared, or will be.
            split_batches: whether a batch of a loader is divided among the processes.

        Returns:
            The micro-batches per step that count from now on.
        """
        return accumulation_steps

    def adapted(self, loader: Any) -> Any:
        """The prepared ``loader`` as it yields what this process computes with, once its models are prepared."""
        return loader

    def engines(self) -> list[Any]:
        """The engines of another library that have been prepared and are still used, in that order."""
        return []

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer as it steps on the models that are prepared, or will be."""
        return optimizer

    def stepping(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Surrounds a step of ``optimizer``, which computes no gradients meanwhile."""
        return nullcontext()

    def recomputing(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``closure``, which computes gradients again while ``optimizer`` steps, so that the step sees the averages."""
        return closure

    def as_stepped(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """``parameters``, as models show them now, as optimizers hold them."""
        return list(parameters)

    def prepare_to_clip(self, parameters: Iterable[torch.Tensor]) -> None:
        """Called before gradients of ``parameters`` are changed one by one; averages them where that is left to do."""
        return

    @property
    def gradients_are_averaged(self) -> bool:
        """Whether the averages of gradients that a step needs have been taken, where it would take them."""
        return False

    def input_sharding(self) -> Any:
        """How torch_xla's loader shares out batches over the devices of this process; ``None`` elsewhere."""
        return None

    def to_host(self, state: Any) -> Any:
        """Nested ``state`` of prepared objects, as it can be written into files."""
        return state

    @property
    def steps_in_backward(self) -> bool:
        """Whether the backward pass that completes a step also takes it, as :meth:`backward_and_step` does."""
        return False

    def steps_optimizer(self, optimizer: Any) -> bool:
        """Whether the step of ``optimizer`` is taken in the backward pass, so that its own does nothing."""
        return False

    def steps_scheduler(self, scheduler: Any) -> bool:
        """Whether ``scheduler`` advances in the backward pass, so that its own step does nothing."""
        return False

    def backward_and_step(
        self, loss: torch.Tensor, completes: bool, models: Sequence[torch.nn.Module] = (), **kwargs: Any
    ) -> None:
        """``loss.backward(**kwargs)``, and if it ``completes`` a step the step of the models that ``loss`` depends on.

        Args:
            loss: divided by the micro-batches of a step already.
            models: those that may step; all, if none of them can.
        """
        raise NotImplementedError(f"{type(self).__name__} does not step in the backward pass")

    @property
    def trains_batches(self) -> bool:
        """Whether models only compute with whole batches, forwards and backwards in one, by :meth:`train_batch`."""
        return False

    def train_batch(self, model: torch.nn.Module, inputs: Any, **options: Any) -> torch.Tensor:
        """Adds the gradients of the loss of a batch to those of a prepared ``model``; returns the loss, 0-dim.

        Args:
            options: see ``Pipeline.train_batch``.
        """
        raise NotImplementedError(f"{type(self).__name__} computes forwards and backwards in turns")

    def eval_batch(self, model: torch.nn.Module, inputs: Any, **options: Any) -> Any:
        """The loss and the outputs of a prepared ``model`` for a batch.

        Args:
            options: see ``Pipeline.eval_batch``.
        """
        raise NotImplementedError(f"{type(self).__name__} computes forwards and backwards in turns")

    def any_rank(self, found: bool) -> bool:
        """Whether ``found`` on one of the ranks that have to decide alike, as each only looks at its own gradients.

        Where all ranks have the same gradients, that is ``found`` itself.
        """
        return found

    def is_thawed(self, model: torch.nn.Module) -> bool:
        """Whether ``model`` was not wrapped because it had nothing to train when it was prepared, but now has."""
        return False

    @abstractmethod
    def models(self) -> list[torch.nn.Module]:
        """The models whose gradients weights divide, as :meth:`backward` knows them, on all ranks in the same order."""

    @abstractmethod
    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Inside this block, backward passes through ``model`` do not synchronise gradients."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, weights: PassWeights | None = None, **kwargs: Any) -> None:
        """``loss.backward(**kwargs)``; an exception in it is reported to the other ranks.

        Args:
            weights: their totals divide the gradients of the models that the loss depends on, together with the totals
                of the other ranks, which give them, too; ``None``, or none of a model, where gradients are averaged
                over the ranks, or stay local.
        """

    @abstractmethod
    def join(self, models: Iterable[Any], hand_over: HandOver | None = None) -> AbstractContextManager[None]:
        """Inside this block, ranks may run out of batches; those that have some train ``models`` on.

        Args:
            hand_over: called on all ranks after the block, if some ran out of batches before others and have the
                weights of these now.
        """

    @property
    def can_join(self) -> bool:
        """Whether :meth:`join` lets processes train on whose batches have not run out."""
        return True

    def needs_all_ranks(self, models: Iterable[Any]) -> bool:
        """Whether no rank can train ``models`` without the others, so that ranks without batches repeat theirs."""
        return False

    @abstractmethod
    def clip_grad_norm(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float,
        measured: Mapping[int, tuple[float | torch.Tensor, float | torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        """Scales gradients in place so that their joint norm is at most ``max_norm``.

        Args:
            measured: by ``id`` of parameters, the sums of the squares of their gradients as they are, and factors by
                which these gradients have still to be multiplied.

        Returns:
            The norm before, 0-dim.
        """

    @abstractmethod
    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """The module that the user gave to ``prepare``, without wrappers that compile or distribute it."""

    @property
    def processes_per_batch(self) -> int:
        """How many processes compute with the same batches, as they split the layers of a model."""
        return 1

    def in_shards(self, model: torch.nn.Module) -> bool:
        """Whether each process has only a part of the prepared ``model``."""
        return False

    @abstractmethod
    def model_state(self, model: torch.nn.Module, here: bool = True) -> dict[str, torch.Tensor]:
        """The full state dict under the user's own names. A collective if the model is in shards.

        Args:
            here: whether this process gets it; not asked where every process has it.
        """

    def leaves(self, model: torch.nn.Module) -> Iterable[torch.Tensor]:
        """The tensors to which backward passes through ``model`` give gradients."""
        return model.parameters()

    def has_gradients(self, model: torch.nn.Module) -> bool:
        """Whether ``model`` has gradients of earlier passes, wherever they are kept."""
        return any(parameter.grad is not None for parameter in model.parameters())

    def named_parameters(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The parameters of ``model`` with their names there, as optimizers hold them."""
        return model.named_parameters()

    def names_elsewhere(self, model: torch.nn.Module) -> frozenset[str]:
        """The names of parameters and buffers of ``model`` that only other processes have."""
        return frozenset()

    def names_everywhere(self, groups: Sequence[Sequence[str]]) -> list[list[str]]:
        """The names of parameters in each group of an optimizer, of all processes. A collective where they differ."""
        return [list(names) for names in groups]

    def dtypes_on_the_way(
        self, model: torch.nn.Module, parameter: torch.nn.Parameter
    ) -> tuple[torch.dtype | None, torch.dtype | None]:
        """How ``parameter`` of a prepared ``model`` travels between processes.

        Returns:
            The dtype in which it is gathered, before operations read it, and the dtype in which its gradient is
            reduced; ``None`` where that does not happen.
        """
        return None, None

    @property
    def layout(self) -> Layout:
        """How checkpoints hold the states of models and optimizers, apart from their form in memory."""
        return "plain"

    def save_engines(
        self,
        models: Sequence[Any],
        folder: Path,
        tags: Sequence[str],
        write: Callable[[Path, Any], object],
        **options: Any,
    ) -> Exception | None:
        """With the layout ``"engines"``, writes the states of ``models`` into ``folder``, each under its tag.
        Collective.

        Args:
            write: writes a pickle to a path, down to the disk.
            options: of the library.

        Returns:
            The error with which a file of this rank could not be written; the rank has come with the others through all
            collectives.
        """
        raise NotImplementedError(f"{type(self).__name__} has no engines")

    def load_engines(
        self, models: Sequence[Any], folder: Path, tags: Sequence[str], read: Callable[..., Any], **options: Any
    ) -> None:
        """Loads what :meth:`save_engines` wrote. Collective.

        Args:
            read: reads a pickle: its path, the device, and classes that it may hold, of which none runs code.
            options: of the library.
        """
        raise NotImplementedError(f"{type(self).__name__} has no engines")

    def release(self, models: Sequence[torch.nn.Module]) -> None:
        """Frees what prepared ``models``, which nobody uses any more, hold besides themselves."""
        return

    def local_state(self, model: torch.nn.Module) -> dict[str, Any]:
        """The state dict under the user's own names, of tensors in shards what this process has of them."""
        return self.unwrap(model).state_dict()

    def restore_model(self, model: torch.nn.Module, state: Mapping[str, Any], **kwargs: Any) -> None:
        """Loads ``state``, of which this process has the whole, into the module that the user gave to ``prepare``.

        Args:
            kwargs: of ``load_state_dict``.
        """
        model.load_state_dict(state, **kwargs)
