"""The position of a prepared loader in its data. It can be saved, and any number of processes can continue there."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset

from accelerate_cpp.data import loaders, stateful
from accelerate_cpp.data.samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    RepeatableRandomSampler,
    SeedableRandomSampler,
    SkipBatchSampler,
)
from accelerate_cpp.errors import InvalidArgument

Cursor = dict[str, int | str]

_KEYS = frozenset({"epoch", "seed", "position", "samples", "batches", "world"})
_UNKNOWN = -1
_COMPUTED = "computed"


@dataclass
class Start:
    """Where in the data a pass starts: after ``steps`` batches of the training loop, or else after a global position.

    ``samples`` of the index sampler, or ``batches`` of the batch sampler as it was before it was sharded; used if the
    number of processes has changed so that they are not a whole number of steps. ``restored`` if the wrapped loader,
    torchdata's, starts there by itself.
    """

    steps: int = 0
    batches: int = 0
    samples: int = 0
    restored: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the pass starts after whole steps."""
        return self.batches == 0 and self.samples == 0


@dataclass
class Pass:
    """One pass over a loader: where it starts, whether it is the rest of one that was restored, and how it advances.

    Each step takes ``batches_per_step`` of the user's sampler over all processes, each of ``batch_size`` samples,
    ``None`` if that varies or is unknown. The process that reads takes ``read_per_step``, and keeps the states of a
    loader of torchdata in ``recorded``.
    """

    start: Start
    resumes: bool
    batches_per_step: int
    batch_size: int | None
    read_per_step: int
    recorded: stateful.Recorded | None = None


@dataclass
class Progress:
    """The progress of a loader, which it shares with the loaders that ``skip_first_batches`` creates from it.

    ``epoch`` counts complete passes. ``steps`` of the training loop, and over all processes ``batches`` of the user's
    sampler and ``samples``, have been given out since the latest pass began; ``in_pass`` until its last batch is out,
    even if the loop was left. ``next_start`` and ``resumes`` are for the next pass. ``source`` is the state of
    torchdata's loader after the returned batches, ``None`` if there is none.
    """

    epoch: int = 0
    in_pass: bool = False
    last_is_out: bool = False
    steps: int = 0
    batches: int = 0
    samples: int = 0
    generator_state: torch.Tensor | None = None
    next_start: Start | None = None
    resumes: bool = False
    latest: Pass | None = None
    source: stateful.State | None = None

    def begin(self, loader: Any) -> Pass:
        """A pass over ``loader`` begins."""
        start = Start() if loader.skipped_steps or self.next_start is None else self.next_start
        size, per_step = _batch_size(loader), loader.batches_per_step
        self.latest = Pass(start, self.resumes, per_step, size, read_in(loader, 1))
        self.next_start, self.resumes = None, False
        self.in_pass, self.last_is_out = True, False
        generator = _generator_of_order(loader)
        self.generator_state = None if generator is None else generator.get_state()
        self._count(loader, start)
        return self.latest

    def restart(self, loader: Any, start: Start | None, resumes: bool) -> None:
        """The next pass begins at ``start``; ``resumes`` if it is the rest of one that was restored."""
        self.in_pass = self.last_is_out = False
        self.next_start, self.resumes, self.source = start, resumes, None
        self._count(loader, start or Start())

    def _count(self, loader: Any, start: Start) -> None:
        """Counts the batches before ``start`` as returned."""
        size, per_step = _batch_size(loader), loader.batches_per_step
        self.batches = start.batches + (loader.skipped_steps + start.steps) * per_step
        if start.samples and size:
            self.batches = start.samples // size
        self.samples = (start.samples or self.batches * size) if size else _UNKNOWN
        self.steps = self.batches // per_step

    def advance(self, reading: Pass, is_last: bool, repeated: bool = False) -> None:
        """One more batch of the training loop has been returned; without effect if another pass has begun since.

        Args:
            repeated: only other processes have read one.
        """
        if reading is not self.latest:
            return
        self.steps += 1
        self.batches += reading.batches_per_step
        self.samples = self.samples + reading.batches_per_step * reading.batch_size if reading.batch_size else _UNKNOWN
        self.last_is_out, self.in_pass = is_last, not is_last
        recorded = reading.recorded
        if repeated and not is_last:
            return  # the source has been read to its end
        self.source = None if recorded is None else recorded.after(self.steps * reading.read_per_step, is_last)

    def end(self, reading: Pass, complete: bool) -> None:
        """The loop over a pass has ended, after its last batch if ``complete``."""
        self.epoch += complete
        if reading is self.latest:
            self.last_is_out, self.in_pass = False, self.in_pass and not complete


def cursor_of(loader: Any) -> Cursor:
    """The position of prepared ``loader``; that of rank 0 is valid for all ranks.

    Returns:
        ``epoch``; ``seed`` of the order, -1 if there is none yet; ``position``, the batches of the training loop that
        are out in the pass in progress, 0 between passes and while the last batch is out; over all ranks the
        ``samples`` (-1 if unknown) and the ``batches`` of the user's sampler that they hold; ``world``, the number of
        processes; ``order``, ``"computed"`` if that of a seedable sampler is, else ``"torch"``; and ``generator``, in
        base64 the state when the pass began of the generator that orders the samples, if there is one.
    """
    progress: Progress = loader.progress
    inside = progress.in_pass or progress.next_start is not None
    cursor: Cursor = {
        "epoch": progress.epoch + progress.last_is_out,
        "seed": _seed_of(loader, inside),
        "position": progress.steps if inside else 0,
        "samples": progress.samples if inside else 0,
        "batches": progress.batches if inside else 0,
        "world": loader.num_processes,
        "order": _order_of(loader),
    }
    generator = _generator_of_order(loader)
    if generator is not None:
        begun = progress.generator_state if progress.in_pass else None
        state = generator.get_state() if begun is None else begun
        cursor["generator"] = base64.b64encode(state.numpy().tobytes()).decode("ascii")
    return cursor


def restore_cursor(loader: Any, cursor: Cursor, continues: bool | None = None) -> None:
    """Makes the next pass over prepared ``loader`` use the epoch and the order of ``cursor``.

    Args:
        continues: the next pass also skips what was already returned, whatever the number of processes was. Default: if
            the loader was prepared with ``use_stateful_dataloader=True``; otherwise that is left to
            ``skip_first_batches``.

    Raises:
        InvalidArgument: ``cursor`` is not one, or its place does not exist for this loader.
    """
    start = check_cursor(loader, cursor, continues)
    loader.set_epoch(int(cursor["epoch"]))
    _restore_order(loader, cursor)
    progress: Progress = loader.progress
    restored, source = progress.next_start, progress.source
    same = restored is not None and restored.restored and start == Start(steps=restored.steps)
    progress.restart(loader, restored if same else start, _is_inside(cursor))
    progress.source = source if same else None


def restore_source(loader: Any, state: stateful.State, cursor: Cursor | None) -> None:
    """Makes the next pass over prepared ``loader`` continue where a ``state`` of torchdata's loader was saved.

    Args:
        cursor: the position of the loader at that time, if known and restored. Without it, the epoch and the order stay
            as they are.

    Raises:
        InvalidArgument: see :func:`check_source`.
    """
    progress: Progress = loader.progress
    restores = check_source(loader, state, cursor)
    if cursor is None:
        state = _in_whole_steps(loader, state)
        progress.restart(loader, _start_of(loader, state), not stateful.is_finished(state))
    if restores:
        progress.source = state
        if progress.next_start is not None or stateful.holds_dataset(state):
            loader.base_dataloader.load_state_dict(state)
        if progress.next_start is not None:
            progress.next_start.restored = True


def check_source(loader: Any, state: stateful.State, cursor: Cursor | None) -> bool:
    """Whether torchdata's loader restores ``state`` by itself, instead of ``cursor``.

    That is so with as many processes, workers and samples in a batch as before.

    Raises:
        InvalidArgument: neither is possible.
    """
    if cursor is not None:
        start = check_cursor(loader, cursor)
        if start is not None and start != Start(steps=int(cursor["position"])):
            return False
    if not stateful.is_torchdata(loader.base_dataloader):
        if cursor is None:
            stateful.check_needs_no_torchdata(state)
        return False
    try:
        stateful.check(state, loader.base_dataloader)
    except InvalidArgument:
        if cursor is None:
            raise
        return False
    return True


def _in_whole_steps(loader: Any, state: stateful.State) -> stateful.State:
    """``state``, which the original saved, with the batches of all steps that were returned.

    Its dispatched loaders count what has been read of the next step as well; with no workers they take a whole step but
    one batch from that, which is too much before a last step that is shorter.
    """
    if isinstance(loader.dataset, IterableDataset) or stateful.is_finished(state):
        return state
    count, per_step = stateful.batches_in(state), read_in(loader, 1)
    return stateful.advanced(state, -(count % per_step) if stateful.workers_of(state) else -count % per_step)


def _start_of(loader: Any, state: stateful.State) -> Start | None:
    steps = stateful.batches_in(state) // read_in(loader, 1)
    return None if stateful.is_finished(state) or steps == 0 else Start(steps=steps)


def source_of(loader: Any) -> stateful.State | None:
    """The state of torchdata's loader in prepared ``loader``; ``None`` if it cannot express it, or is not used."""
    progress: Progress = loader.progress
    if not stateful.is_torchdata(loader.base_dataloader):
        return None
    if progress.source is None and progress.next_start is None and not progress.in_pass:
        generators = {_generator_of_order(loader), loader.generator} - {None}
        progress.source = stateful.initial_state(loader.base_dataloader, generators)
    return progress.source


def check_cursor(loader: Any, cursor: Cursor, continues: bool | None = None) -> Start | None:
    """Raises ``InvalidArgument`` if :func:`restore_cursor` would; changes nothing.

    Returns:
        Where inside a pass the next one starts, if it does.
    """
    if missing := _KEYS - cursor.keys():
        raise InvalidArgument(
            f"a cursor of a loader has {', '.join(sorted(_KEYS))}; {', '.join(sorted(missing))} is missing: restore "
            "what cursor_of or state_dict returned"
        )
    state = cursor.get("generator")
    if isinstance(state, str):
        torch.Generator().set_state(_decoded(state))
    continues = loader.use_stateful_dataloader if continues is None else continues
    return _converted(loader, cursor) if continues and _is_inside(cursor) else None


def _is_inside(cursor: Cursor) -> bool:
    return int(cursor["position"]) > 0 or int(cursor["batches"]) > 0


def read_in(loader: Any, steps: int) -> int:
    """How many batches the process that reads takes from its loader in ``steps`` steps."""
    taken: int = steps * loader.batches_per_step if loader.dispatches else steps
    return taken


def _batch_size(loader: Any) -> int | None:
    """Samples of one batch of the user's sampler; ``None`` if that varies or is unknown."""
    size: int | None = None
    if isinstance(loader.dataset, IterableDatasetShard):
        return loader.dataset.batch_size
    if isinstance(loader.dataset, IterableDataset):
        # A dataset that distributes its own files may give each process a different number of samples.
        size = loader.batch_size if loader.batches_per_step == loader.num_processes or loader.dispatches else None
        return size
    sampler = loaders.samplers_of(loader)[0]
    while isinstance(sampler, BatchSamplerShard | SkipBatchSampler):
        sampler = sampler.batch_sampler
    return sampler.batch_size if type(sampler) is BatchSampler else None


def _converted(loader: Any, cursor: Cursor) -> Start:
    """Where ``loader``, with its number of processes and batch size, continues."""
    position, batches, samples, world = (int(cursor[key]) for key in ("position", "batches", "samples", "world"))
    size, per_step, iterable = _batch_size(loader), loader.batches_per_step, isinstance(loader.dataset, IterableDataset)
    known = samples != _UNKNOWN and size is not None
    if world == loader.num_processes and not known:
        return Start(steps=position)
    if iterable and not known:
        raise InvalidArgument(
            f"the cursor of an iterable dataset was made by {world} processes and cannot be continued by "
            f"{loader.num_processes}, because it is not known how many samples each has read: start {world}, or start "
            "the epoch again"
        )
    rest = 0
    if known:
        batches, rest = divmod(samples, size)  # type: ignore[operator]
    if rest == 0 and batches % per_step == 0:
        return Start(steps=batches // per_step)
    if iterable and loader.num_workers > 1 and (rest or not loader.dispatches):
        raise InvalidArgument(
            f"the cursor of an iterable dataset is at sample {samples}, which is not the start of a step of {per_step} "
            f"batches of {size}, and only the dataset knows which parts its {loader.num_workers} workers read: use "
            "num_workers=1, choose a batch size and a number of processes that reach it, or start the epoch again"
        )
    return Start(batches=batches) if rest == 0 and (loader.dispatches or not iterable) else Start(samples=samples)


def _seed_of(loader: Any, inside: bool) -> int:
    sampler = loader.get_sampler()
    if isinstance(sampler, SeedableRandomSampler):
        return sampler.initial_seed
    if isinstance(sampler, RepeatableRandomSampler) and sampler.generator is None:
        seed = sampler.seed if sampler.next_seed is None else sampler.next_seed
        return seed if inside and seed is not None else _UNKNOWN
    return _UNKNOWN


def _order_of(loader: Any) -> str:
    sampler = loader.get_sampler()
    return _COMPUTED if isinstance(sampler, SeedableRandomSampler) and sampler.computed else "torch"


def _generator_of_order(loader: Any) -> torch.Generator | None:
    """The generator whose state decides the order of the samples; ``None`` if a seed does, or nothing."""
    if isinstance(loader.dataset, IterableDatasetShard):
        return None
    source = loader.dataset if isinstance(loader.dataset, IterableDataset) else loader.get_sampler()
    generator = None if isinstance(source, SeedableRandomSampler) else getattr(source, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def _decoded(state: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8)


def _restore_order(loader: Any, cursor: Cursor) -> None:
    sampler, seed, state = loader.get_sampler(), int(cursor["seed"]), cursor.get("generator")
    if isinstance(sampler, SeedableRandomSampler):
        if seed != _UNKNOWN:
            sampler.initial_seed = seed
            # Cursors without an order are older than the choice: at that time seedable samplers computed it.
            sampler.computed = cursor.get("order", _COMPUTED) == _COMPUTED
        return
    generator = _generator_of_order(loader)
    if isinstance(state, str):
        if generator is None and isinstance(sampler, RepeatableRandomSampler):
            generator = sampler.generator = torch.Generator()
        if generator is not None:
            generator.set_state(_decoded(state))
    elif seed != _UNKNOWN and generator is not None:
        generator.manual_seed(seed)
    elif seed != _UNKNOWN and isinstance(sampler, RepeatableRandomSampler):
        sampler.next_seed = seed
