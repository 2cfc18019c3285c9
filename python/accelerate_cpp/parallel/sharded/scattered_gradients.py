"""Gradients of whole weights, summed over the processes into the rows that each of them steps on.

They are reduced in buckets while the backward pass computes the next ones, and freed at once: a process never holds
more than its rows and some buckets. Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models" (arXiv:1910.02054).
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from accelerate_cpp._native import C10dBackend, copy_into_blocks
from accelerate_cpp.devices.shards import local_part, rows_of_rank, wrapped_like
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.sharded.kept_buffers import KeptBuffers, holders_of, reduce_scatter

_BUCKET_BYTES = 32 << 20
_BUCKETS_AT_ONCE = 2


@dataclass
class ScatteredWeight:
    """One weight that is trained.

    Attributes:
        whole: the parameter that forward passes use.
        shard: the parameter that optimizers step on: the rows of this process, as a ``DTensor`` like the whole.
    """

    whole: torch.nn.Parameter
    shard: torch.nn.Parameter


class _Bucket:
    """Weights of one dtype. Its memory is one block per process, of one size, with that one's rows of each weight."""

    def __init__(self, weights: Sequence[ScatteredWeight], size: int) -> None:
        self.weights = list(weights)
        self.dtype = weights[0].whole.dtype
        self._size = size
        self._places: list[tuple[int, int]] = []
        self.block = 0
        for weight in weights:
            elements = -(-len(weight.whole) // size) * weight.whole[0].numel() if len(weight.whole) else 0
            self._places.append((self.block, elements))
            self.block += elements

    def fill(self, memory: torch.Tensor, slot: int) -> None:
        """Copies the gradient of a weight into ``memory``, zeros if there is none, and frees it. Leaves padding out."""
        weight, (begin, elements) = self.weights[slot], self._places[slot]
        gradient, weight.whole.grad = weight.whole.grad, None
        if gradient is None:
            memory.view(self._size, self.block)[:, begin : begin + elements].zero_()
            return
        if gradient.requires_grad:
            raise InvalidArgument(
                "backward(create_graph=True) through a synchronised model is not available: the averaged gradient has "
                "no graph. Use torch.autograd.grad"
            )
        dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
        copy_into_blocks(dense, memory, begin, elements, self._size)

    def rows_of(self, block: torch.Tensor) -> list[torch.Tensor]:
        """The gradients of the rows of this process in ``block``, its own one."""
        parts = [local_part(weight.shard) for weight in self.weights]
        return [
            block[begin : begin + part.numel()].view(part.shape)
            for part, (begin, _) in zip(parts, self._places, strict=True)
        ]


class _Result:
    """Where the averages of a bucket are, of the rows of this process, and the gradients that share this memory."""

    def __init__(self, bucket: _Bucket) -> None:
        self.block = torch.empty(bucket.block, dtype=bucket.dtype)
        parts = zip(bucket.weights, bucket.rows_of(self.block), strict=True)
        self.gradients: list[Any] = [wrapped_like(weight.shard, part) for weight, part in parts]
        self._unused = self._holders()

    def _holders(self) -> list[int]:
        return [holders_of(self.block), *(sys.getrefcount(one) for one in self.gradients)]

    def is_kept(self) -> bool:
        """Whether the program holds a gradient of an earlier pass."""
        return any(now > unused for now, unused in zip(self._holders(), self._unused, strict=True))


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
        synchronizing: whether passes average; if not, gradients stay whole where they were computed, and the next pass
            that averages takes them in.
    """

    def __init__(
        self,
        weights: Sequence[ScatteredWeight],
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None,
        at_end: Callable[[], None],
        overlaps: bool,
    ) -> None:
        self.synchronizing = True
        self._group = group
        self._replicas = replicas
        self._at_end = at_end
        self._overlaps = overlaps
        self._size = dist.get_world_size(group)
        self._averages = isinstance(group._get_backend(torch.device("cpu")), C10dBackend)  # Gloo only sums
        self._buffers = KeptBuffers()
        self._all = list(weights)
        self._announced = False
        self._in_progress: Callable[[], Any] = lambda: None  # the end of a pass that nobody has announced
        # By shard: its gradient after a local pass, its version then, and whether it shows the local one.
        self._local: dict[torch.Tensor, tuple[torch.Tensor, int, bool]] = {}
        self._pass: int | None = None  # the number that autograd gives it
        self._alone = True  # in this pass
        self._missing: list[int] = []
        self._used: list[list[bool | None]] = []  # by bucket and slot; None where the average was added at once
        self._next = 0  # bucket to be reduced
        self._memory: torch.Tensor | None = None  # of that one, and what is in it
        self._filled: set[int] = set()
        self._under_way: deque[tuple[int, torch.Tensor, Any]] = deque()
        self._hooks: list[Any] = []
        self.peers: Callable[[], list[ScatteredGradients]] = lambda: [self]
        self.watch()

    def watch(self) -> None:
        """Makes buckets for the weights that require gradients by now."""
        trained = [weight for weight in self._all if weight.whole.requires_grad]
        for hook in self._hooks:
            hook.remove()
        self._buckets = _divide(trained, self._size)
        self._largest = {
            dtype: max(bucket.block * self._size for bucket in self._buckets if bucket.dtype == dtype)
            for dtype in dict.fromkeys(bucket.dtype for bucket in self._buckets)
        }
        self._results = [_Result(bucket) for bucket in self._buckets]
        this = weakref.ref(self)
        self._hooks = [
            weight.whole.register_post_accumulate_grad_hook(_arrival(this, index, slot))
            for index, bucket in enumerate(self._buckets)
            for slot, weight in enumerate(bucket.weights)
        ]

    @property
    def is_announced(self) -> bool:
        """Whether the caller says how the pass in progress, or the next one, ends."""
        return self._announced

    def expect(self) -> None:
        """The caller says how the next backward pass ends, by :meth:`finish` or :meth:`give_up`."""
        self._announced = False
        self.prepare()
        self._announced = True

    def prepare(self) -> None:
        """Called before a gradient can arrive: forgets what earlier passes have left and nobody wants any more."""
        if self._announced or self._in_progress() is not None:
            return
        self._drop_unfinished()
        self._forget_cleared()

    @property
    def has_begun(self) -> bool:
        """Whether a backward pass that is in progress has come to this model."""
        return self._pass is not None

    def begin(self) -> None:
        """Called within a backward pass, at its beginning or when a gradient arrives.

        A pass that nobody has announced ends when autograd says so; one that was announced may contain others, as with
        reentrant checkpoints.

        Raises:
            InvalidArgument: a pass that nobody has announced contains another.
        """
        current = 0 if self._announced else torch._C._current_graph_task_id()
        if self._pass == current:
            return
        if self._pass is not None and self._in_progress() is not None:
            raise InvalidArgument(
                "a gradient arrived from another backward pass than the one in progress. Reentrant checkpointing does "
                "this: call accelerator.backward(loss) instead of loss.backward(), or use torch.utils.checkpoint with "
                "use_reentrant=False"
            )
        self._pass = current
        self._alone = len(self.peers()) == 1
        self._next = 0
        self._missing = [sum(one.whole.requires_grad for one in bucket.weights) for bucket in self._buckets]
        self._used = [[False] * len(bucket.weights) for bucket in self._buckets]
        if not self._announced:
            end = _End(self)
            self._in_progress = weakref.ref(end)  # autograd lets go of it when the pass has ended in an exception
            torch.autograd.Variable._execution_engine.queue_callback(end)

    def _drop_unfinished(self) -> None:
        """Forgets a pass that ended in an exception, of which nobody has told."""
        for _, _, work in self._under_way:
            if work is not None:
                work.wait()
        self._under_way.clear()
        self._memory = None
        self._filled.clear()
        self._clear()

    def _clear(self) -> None:
        """Drops the gradients of a pass that has begun, and those to which it adds."""
        if self._pass is None:
            return
        self._pass = None
        for weight in self._all:
            weight.whole.grad = weight.shard.grad = None

    def give_up(self) -> None:
        """The pass has failed: its gradients are lost."""
        self._announced = False
        self._clear()
        self._at_end()

    def arrived(self, index: int, slot: int) -> None:
        """The gradient of a weight is complete."""
        self.begin()
        if not self.synchronizing:
            return
        if index < self._next or (index == self._next and slot in self._filled):
            raise InvalidArgument(
                "a parameter received two gradients in one backward pass, after the first had been handed to the other "
                "ranks. Reentrant checkpointing does this when a module is called twice: use torch.utils.checkpoint "
                "with use_reentrant=False"
            )
        self._missing[index] -= 1
        if not self._alone:
            return  # other models may be in this pass; at its end all processes take them in one order
        if index == self._next:
            self._fill(slot)  # while it is in cache
        while self._next < len(self._buckets) and self._missing[self._next] <= 0:
            self._start()

    def _fill(self, slot: int) -> None:
        """Takes in a gradient of the next bucket, of which there may be none."""
        bucket = self._buckets[self._next]
        if self._memory is None:
            if self._under_way and (not self._overlaps or len(self._under_way) >= _BUCKETS_AT_ONCE):
                self._take()
            memory = self._buffers.take([self._largest[bucket.dtype]], bucket.dtype)
            self._memory = memory[: bucket.block * self._size]
        with torch.no_grad():
            self._used[self._next][slot] = bucket.weights[slot].whole.grad is not None
            bucket.fill(self._memory, slot)
        self._filled.add(slot)

    def _start(self) -> None:
        """Reduces the next bucket; all processes take them in the same order."""
        index, bucket = self._next, self._buckets[self._next]
        for slot in range(len(bucket.weights)):
            if slot not in self._filled:
                self._fill(slot)
        block = self._results[index].block
        if any(weight.shard.grad is not None for weight in bucket.weights):
            block = torch.empty_like(block)  # it may hold the gradient to which this is added
        elif self._results[index].is_kept():
            self._results[index] = _Result(bucket)
            block = self._results[index].block
        op = dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM
        work = reduce_scatter(block, self._memory, op=op, group=self._group, async_op=self._overlaps)
        self._under_way.append((index, block, work))
        self._memory = None
        self._filled.clear()
        self._next += 1

    def _take(self) -> None:
        index, block, work = self._under_way.popleft()
        if work is not None:
            work.wait()
        if not self._averages:
            block /= self._size
        if self._replicas is not None:
            dist.all_reduce(block, group=self._replicas)
            block /= dist.get_world_size(self._replicas)
        result = self._results[index]
        if block is result.block:
            return
        bucket = self._buckets[index]
        for slot, (weight, part) in enumerate(zip(bucket.weights, bucket.rows_of(block), strict=True)):
            if weight.shard.grad is not None:
                local_part(weight.shard.grad).add_(part)
                self._used[index][slot] = None
            else:
                local_part(result.gradients[slot]).copy_(part)

    def finish(self) -> None:
        """The pass has ended; returns when shards have the averages."""
        began, self._announced = self._pass is not None, False
        if not began:
            return
        self._pass = None
        if self.synchronizing:
            while self._next < len(self._buckets):
                self._start()
            with torch.no_grad():
                while self._under_way:
                    self._take()
            self._give()
        else:
            self._show_local()
        self._at_end()

    def _show_local(self) -> None:
        """Gradients that stay whole are shown as those of shards, so that whoever clears these clears them, too."""
        for weight in self._all:
            if weight.whole.grad is None:
                continue
            shows = weight.shard.grad is None
            if weight.shard.grad is None:
                rows = rows_of_rank(weight.whole.grad, dist.get_rank(self._group), self._size)
                weight.shard.grad = wrapped_like(weight.shard, rows)
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

    def _give(self) -> None:
        """Gives shards the averages that they do not have yet; one that no process has a gradient for keeps none."""
        flags = torch.tensor([float(used is True) for bucket in self._used for used in bucket])
        for group in (self._group, self._replicas):
            if group is not None and flags.numel():
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        used_anywhere = iter(flags.tolist())
        for bucket, used, result in zip(self._buckets, self._used, self._results, strict=True):
            for weight, here, gradient in zip(bucket.weights, used, result.gradients, strict=True):
                present = weight.shard.grad
                if not next(used_anywhere) or here is None:
                    continue
                if present is None:
                    weight.shard.grad = gradient
                else:  # the loss depended on the shard itself, as a penalty of weights does
                    local_part(present).add_(local_part(gradient))


class _End:
    """What autograd calls at the end of a pass."""

    def __init__(self, gradients: ScatteredGradients) -> None:
        self._gradients = gradients

    def __call__(self) -> None:
        for one in self._gradients.peers():  # in the same order on all processes
            one.finish()


def _arrival(gradients: weakref.ref[ScatteredGradients], index: int, slot: int) -> Callable[[torch.Tensor], None]:
    def arrived(_: torch.Tensor) -> None:
        found = gradients()
        if found is not None:
            found.arrived(index, slot)

    return arrived


def _divide(weights: Sequence[ScatteredWeight], size: int) -> list[_Bucket]:
    """Buckets in the order in which gradients tend to arrive: the reverse of that of the model."""
    buckets: list[_Bucket] = []
    open_ones: dict[torch.dtype, list[ScatteredWeight]] = {}
    for weight in reversed(weights):
        together = open_ones.setdefault(weight.whole.dtype, [])
        together.append(weight)
        if sum(one.whole.nbytes for one in together) >= _BUCKET_BYTES:
            buckets.append(_Bucket(open_ones.pop(weight.whole.dtype), size))
    return buckets + [_Bucket(together, size) for together in open_ones.values()]
