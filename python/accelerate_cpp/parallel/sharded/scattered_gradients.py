"""Gradients of whole weights, averaged over the processes into the rows that each of them steps on.

``ScatteredReducer`` reduces them while the backward pass computes the next ones. Here is what it knows nothing of:
which pass averages, in which tensors optimizers find the averages, and what programs do with these.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from accelerate_cpp._native import ScatteredReducer
from accelerate_cpp.devices.shards import inner_tensor, local_part, rows_of_rank, wrapped_like
from accelerate_cpp.parallel.sharded.kept_buffers import holders_of

_BUCKET_BYTES = 16 << 20


@dataclass
class ScatteredWeight:
    """One weight that is trained.

    Attributes:
        name: for messages.
        whole: the parameter that forward passes use.
        shard: the parameter that optimizers step on: the rows of this process, as a ``DTensor`` like the whole.
    """

    name: str
    whole: torch.nn.Parameter
    shard: torch.nn.Parameter


class _Average:
    """Where the averages of the rows of one weight are, and the gradient that shares this memory."""

    def __init__(self, shard: torch.nn.Parameter) -> None:
        self.rows = torch.empty_like(inner_tensor(shard), requires_grad=False)
        self.gradient: Any = wrapped_like(shard, self.rows)
        self._unused = self._holders()

    def _holders(self) -> tuple[int, int]:
        return holders_of(self.rows), sys.getrefcount(self.gradient)

    def is_kept(self) -> bool:
        """Whether the program holds the gradient of an earlier pass."""
        return self._holders() != self._unused


class ScatteredGradients:
    """Averages the gradients of one model during backward passes; each process gets those of its rows.

    Args:
        weights: in the order of the model, the same on all processes.
        group: of the processes that share out the weights.
        replicas: the group of those that have the same rows; ``None`` without replicas.
        at_end: called when the averages of a pass are there.
        overlaps: whether the backward pass goes on while buckets are reduced: worth it where they travel between hosts,
            while processes of one host only take time from each other.

    Attributes:
        peers: those of all models that one pass may come to, in the same order on all processes, with this one. If
            there are several, buckets are reduced at the end of a pass.
        has_begun: whether a backward pass that is in progress has come to this model.
    """

    def __init__(
        self,
        weights: Sequence[ScatteredWeight],
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None,
        at_end: Callable[[], None],
        overlaps: bool,
    ) -> None:
        self.group = group
        self.replicas = replicas
        self._at_end = at_end
        self._overlaps = overlaps
        self._all = list(weights)
        self.has_begun = False
        self._announced = False
        # By shard: its gradient after a local pass, its version then, and whether it shows the local one.
        self._local: dict[torch.Tensor, tuple[torch.Tensor, int, bool]] = {}
        self._added: list[bool] = []  # in this pass: whether averages are added to the gradient of a shard as they come
        self._trained: list[ScatteredWeight] = []
        self._reducer: ScatteredReducer | None = None
        self.peers: Callable[[], list[ScatteredGradients]] = lambda: [self]
        self.watch()

    def watch(self) -> None:
        """Averages the gradients of the weights that require them by now. Collective if there are more than before.

        Those that no longer do have none.
        """
        known = {id(weight) for weight in self._trained}
        trained = [weight for weight in self._all if weight.whole.requires_grad or id(weight) in known]
        if self._reducer is not None and len(trained) == len(known):
            return
        synchronizing = self._reducer is None or self._reducer.synchronizing
        self._trained = trained
        self._averages: list[_Average | None] = [None] * len(self._trained)  # made when they are needed
        self._reducer = None  # its buckets and the new ones need not exist at the same time
        this = weakref.ref(self)

        def begin() -> None:
            found = this()
            if found is not None:
                found.begin()

        self._reducer = ScatteredReducer(
            self.group,
            self.replicas,
            [(weight.name, weight.whole) for weight in self._trained],
            bucket_bytes=_BUCKET_BYTES,
            overlaps=self._overlaps,
            begin=begin,
        )
        self._reducer.synchronizing = synchronizing
        if self._announced:
            self._reducer.expect()

    @property
    def _started(self) -> ScatteredReducer:
        assert self._reducer is not None  # unless watch() has failed
        return self._reducer

    @property
    def synchronizing(self) -> bool:
        """Whether passes average.

        If not, gradients stay whole where they were computed, and the next pass that averages takes them in.
        """
        return self._started.synchronizing

    @synchronizing.setter
    def synchronizing(self, value: bool) -> None:
        self._started.synchronizing = value

    @property
    def is_announced(self) -> bool:
        """Whether the caller says how the pass in progress, or the next one, ends."""
        return self._announced

    def expect(self) -> None:
        """The caller says how the next backward pass ends, by :meth:`finish` or :meth:`give_up`."""
        self._announced = False
        self.prepare()
        self._announced = True
        self._started.expect()

    def prepare(self) -> None:
        """Called before a gradient can arrive: forgets local gradients that nobody wants any more."""
        if not self._announced and not self.has_begun:
            self._forget_cleared()

    def begin(self) -> None:
        """Called within a backward pass, at its beginning or when the first gradient arrives."""
        if self.has_begun:
            return
        rows = [self._rows_of(index) for index in range(len(self._trained))] if self.synchronizing else []
        self._added = [adds for _, adds in rows]
        self._started.begin(rows, deferred=len(self.peers()) > 1)
        self.has_begun = True
        if not self._announced:
            torch.autograd.Variable._execution_engine.queue_callback(_End(self))

    def _rows_of(self, index: int) -> tuple[torch.Tensor, bool]:
        """Where the averages of a weight go, and whether they are added to what is there."""
        shard = self._trained[index].shard
        if shard.grad is not None:
            present = inner_tensor(shard.grad)
            if present.is_contiguous() and present.dtype == shard.dtype:
                return present, True
        average = self._averages[index]
        if average is None or average.is_kept():
            average = self._averages[index] = _Average(shard)
        return average.rows, False

    def give_up(self, error: BaseException | None = None) -> None:
        """The pass has failed: its gradients, and those to which it adds, are lost. The other processes raise, too."""
        if self.has_begun or (self._announced and self.synchronizing):  # as on the other processes
            for weight in self._all:
                weight.whole.grad = weight.shard.grad = None
        self.has_begun = self._announced = False
        what = "ended in an exception" if error is None else f"raised {type(error).__name__}: {error}"
        self._started.fail(f"its backward pass {what}")
        self._at_end()

    def finish(self) -> None:
        """The pass has ended; returns when shards have the averages."""
        self._announced = False
        used_anywhere = self._started.finish()
        if not self.has_begun:
            return
        if self.synchronizing:
            self._give(used_anywhere)
        else:
            self._show_local()
        self.has_begun = False
        self._at_end()

    def _show_local(self) -> None:
        """Gradients that stay whole are shown as those of shards, so that whoever clears these clears them, too."""
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        for weight in self._all:
            if weight.whole.grad is None:
                continue
            shows = weight.shard.grad is None
            if weight.shard.grad is None:
                weight.shard.grad = wrapped_like(weight.shard, rows_of_rank(weight.whole.grad, rank, size))
            self._local[weight.shard] = weight.shard.grad, weight.shard.grad._version, shows

    def _forget_cleared(self) -> None:
        """Drops local gradients that were cleared since, and no longer shows the others.

        Whoever sets gradients to zero in place changes their versions, in processes that have no rows as well.
        """
        for weight in self._all:
            if weight.shard not in self._local:
                continue
            shown, version, shows = self._local.pop(weight.shard)
            present = weight.shard.grad
            if present is not shown or shown._version != version:
                weight.whole.grad = None
            if shows and present is shown:
                weight.shard.grad = None

    def _give(self, used_anywhere: Sequence[bool]) -> None:
        """Gives shards the averages that they do not have yet; one that no process has a gradient for keeps none."""
        changed = []
        for weight, average, used, added in zip(self._trained, self._averages, used_anywhere, self._added, strict=True):
            present = weight.shard.grad
            if added:
                changed.append(inner_tensor(present))
            elif used:
                assert average is not None  # nothing was added
                if present is None:
                    weight.shard.grad = average.gradient
                else:  # the loss depended on the shard itself, as a penalty of weights does
                    local_part(present).add_(average.rows)
        torch.autograd.graph.increment_version([one for one in changed if one is not None])


@contextmanager
def given_up_on_errors(gradients: Sequence[ScatteredGradients]) -> Iterator[None]:
    """If this block raises, the pass through these models has failed."""
    try:
        yield
    except BaseException as error:
        for one in gradients:
            one.give_up(error)
        raise


def finish_all(gradients: Sequence[ScatteredGradients]) -> None:
    """A pass that may have come to several models has ended.

    Args:
        gradients: of all models, in the same order on all processes.
    """
    if len(gradients) > 1:
        _agree(gradients)
    for one in gradients:
        one.finish()


def _agree(gradients: Sequence[ScatteredGradients]) -> None:
    """A model that the pass has come to on one process takes part on all. Collective."""
    flags = torch.tensor([float(one.has_begun) for one in gradients])
    for group in (gradients[0].group, gradients[0].replicas):
        if group is not None:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    for one, somewhere in zip(gradients, flags.tolist(), strict=True):
        if somewhere:
            one.begin()


class _End:
    """What autograd calls at the end of a pass, and lets go of when the pass has ended in an exception."""

    def __init__(self, gradients: ScatteredGradients) -> None:
        self._gradients: ScatteredGradients | None = gradients

    def __call__(self) -> None:
        assert self._gradients is not None  # called once
        gradients, self._gradients = self._gradients.peers(), None
        with given_up_on_errors(gradients):
            for one in gradients:
                one.finish()

    def __del__(self) -> None:
        if self._gradients is not None and self._gradients.has_begun:
            self._gradients.give_up()
