"""The position of a prepared loader in its data. It can be saved, and any number of processes can continue there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset

from accelerate_cpp.config.text import shortened
from accelerate_cpp.data import loaders, stateful
from accelerate_cpp.data.order import (
    UNKNOWN,
    Order,
    draws,
    encoded,
    forget_seed,
    generator_of,
    remembered,
    restore_seedable,
    seed_in_use,
    seedable_in_cursor,
    state_in_cursor,
    workers_persist,
)
from accelerate_cpp.data.samplers import BatchSamplerShard, IterableDatasetShard, SkipBatchSampler
from accelerate_cpp.errors import InvalidArgument

Cursor = dict[str, int | str]

_KEYS = frozenset({"epoch", "seed", "position", "samples", "batches", "world"})
_MOST = 2**63 - 1
_RANGES = {
    "epoch": (0, _MOST),
    "seed": (-(2**63), 2**64 - 1),
    "position": (0, _MOST),
    "samples": (UNKNOWN, _MOST),
    "batches": (0, _MOST),
    "world": (1, _MOST),
    "left": (0, 1),
    "ended": (0, _MOST),
    "seeded": (0, 2),
}
_SOURCE = "restore what cursor_of or state_dict returned"


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


@dataclass(frozen=True)
class Restored:
    """A pass restored from ``cursor``: its order, and whether its loop had been left, or its last batch was out.

    The next pass is the rest of it; in the second case only if it skips the batches that had been given out. Otherwise
    it is a new one, as it would have been if the run had gone on. ``ended_batches`` of the user's sampler were all
    those of the pass, 0 if it had not ended. It drew no seed for workers if ``keeps_seed``. The first steps of the rest
    were read with torch's global generator in the states ``read_from``.
    """

    cursor: Cursor
    order: Order
    read_from: tuple[torch.Tensor, ...] = ()

    @property
    def was_left(self) -> bool:
        """See above."""
        return bool(self.cursor.get("left", 0))

    @property
    def ended_batches(self) -> int:
        """See above."""
        return int(self.cursor.get("ended", 0))

    @property
    def keeps_seed(self) -> bool:
        """See above."""
        return int(self.cursor.get("seeded", 0)) > 1


@dataclass
class Pass:
    """One pass over a loader: where it starts, whether it is the rest of one that was restored, and how it advances.

    Each step takes ``batches_per_step`` of the user's sampler over all processes, each of ``batch_size`` samples,
    ``None`` if that varies or is unknown. The process that reads takes ``read_per_step``, and keeps the states of a
    loader of torchdata in ``recorded``. Samplers draw from torch's global generator in state ``drawn_from``, if it is
    not ``None``. No seed is drawn for workers if ``keeps_seed``. Its first steps are read with that generator in the
    states ``first_read_from``; ``read_from`` are the states before those that are read, but not out yet.
    """

    start: Start
    resumes: bool
    batches_per_step: int
    batch_size: int | None
    read_per_step: int
    drawn_from: torch.Tensor | None = None
    keeps_seed: bool = False
    first_read_from: tuple[torch.Tensor, ...] = ()
    read_from: list[torch.Tensor] = field(default_factory=list)
    recorded: stateful.Recorded | None = None


@dataclass
class Interrupted:
    """The ``progress`` in a pass during which another position was restored, and how to undo what orders samples."""

    progress: Progress
    undo: Callable[[], None]


@dataclass
class Progress:
    """The progress of a loader, which it shares with the loaders that ``skip_first_batches`` creates from it.

    ``epoch`` counts complete passes. ``steps`` of the training loop, and over all processes ``batches`` of the user's
    sampler and ``samples``, have been given out since the latest pass began, which had ``order``; ``in_pass`` until its
    last batch is out, even if the loop ``was_left``; it drew no seed for workers if it ``keeps_seed``. ``next_start``,
    ``resumes`` and ``restored`` are for the next pass. Workers that persist were ``seeded`` in the run that was
    restored. ``source`` is the state of torchdata's loader after the returned batches, ``None`` if there is none.
    ``interrupted`` is what was so before, if something was restored while a loop was reading: it may go on.
    """

    epoch: int = 0
    in_pass: bool = False
    was_left: bool = False
    last_is_out: bool = False
    steps: int = 0
    batches: int = 0
    samples: int = 0
    order: Order = field(default_factory=Order)
    keeps_seed: bool = False
    seeded: bool = False
    next_start: Start | None = None
    resumes: bool = False
    restored: Restored | None = None
    latest: Pass | None = None
    source: stateful.State | None = None
    interrupted: Interrupted | None = None

    def begin(self, loader: Any) -> Pass:
        """A pass over ``loader`` begins."""
        start, resumes = self._start_of(loader), self.continues(loader)
        size, per_step = _batch_size(loader), loader.batches_per_step
        restored = self.restored if resumes else None
        if restored is not None:
            # Unless the program has set the epoch that it goes on with.
            self.epoch -= restored.ended_batches > 0 and self.epoch == restored.cursor["epoch"]
            if restored.was_left:
                restored.order.apply(loader)
        drawn_from = restored.order.drawn_from if restored is not None and draws(loader) else None
        keeps_seed = self.seeded and loader.skipped_steps == 0 if restored is None else restored.keeps_seed
        read_from = () if restored is None else restored.read_from
        self.latest = Pass(start, resumes, per_step, size, read_in(loader, 1), drawn_from, keeps_seed, read_from)
        self.keeps_seed = keeps_seed or workers_persist(loader)
        self.order = Order.of_next_pass(loader, self.keeps_seed)
        if drawn_from is not None:
            self.order = replace(self.order, drawn_from=drawn_from)
        self.next_start, self.resumes, self.restored, self.interrupted = None, False, None, None
        self.in_pass, self.was_left, self.last_is_out = True, False, False
        self._count(loader, start)
        return self.latest

    def _start_of(self, loader: Any) -> Start:
        return Start() if loader.skipped_steps or self.next_start is None else self.next_start

    def continues(self, loader: Any) -> bool:
        """Whether a pass over ``loader`` that begins now is the rest of one that was restored."""
        if not self.resumes or self.restored is None or not self.restored.was_left:
            return self.resumes
        if self.restored.ended_batches:
            return bool(loader.skipped_steps * loader.batches_per_step >= self.restored.ended_batches)
        return loader.skipped_steps > 0 or self._start_of(loader) != Start()

    def interrupt(self, loader: Any) -> None:
        """Another position is about to be restored, perhaps in a loop that goes on all the same."""
        if self.latest is not None and (self.in_pass or self.last_is_out) and not self.was_left:
            self.interrupted = Interrupted(copy.copy(self), remembered(loader))

    def go_on(self, reading: Pass) -> None:
        """The loop over pass ``reading`` goes on: if another position has been restored meanwhile, it is not used."""
        interrupted = self.interrupted
        if interrupted is None or interrupted.progress.latest is not reading:
            return
        vars(self).update(vars(interrupted.progress))
        self.interrupted = None
        interrupted.undo()

    def restart(self, loader: Any, start: Start | None, restored: Restored | None, resumes: bool) -> None:
        """The next pass begins at ``start``; ``resumes`` if it is the rest of one that was ``restored``."""
        self.latest = None
        self.in_pass = self.was_left = self.last_is_out = False
        self.next_start, self.restored, self.resumes, self.source = start, restored, resumes, None
        self._count(loader, start or Start())

    def _count(self, loader: Any, start: Start) -> None:
        """Counts the batches before ``start`` as returned."""
        size, per_step = _batch_size(loader), loader.batches_per_step
        self.batches = start.batches + (loader.skipped_steps + start.steps) * per_step
        if start.samples and size:
            self.batches = start.samples // size
        self.samples = (start.samples or self.batches * size) if size else UNKNOWN
        self.steps = self.batches // per_step

    def advance(self, reading: Pass, is_last: bool, repeated: bool = False) -> None:
        """One more batch of the training loop has been returned; without effect if another pass has begun since.

        Args:
            repeated: only other processes have read one.
        """
        self.go_on(reading)
        if reading is not self.latest:
            return
        del reading.read_from[:1]
        self.steps += 1
        self.batches += reading.batches_per_step
        self.samples = self.samples + reading.batches_per_step * reading.batch_size if reading.batch_size else UNKNOWN
        self.last_is_out, self.in_pass = is_last, not is_last
        recorded = reading.recorded
        if repeated and not is_last:
            return  # the source has been read to its end
        self.source = None if recorded is None else recorded.after(self.steps * reading.read_per_step, is_last)

    def end(self, reading: Pass, complete: bool) -> None:
        """The loop over a pass has ended, after its last batch if ``complete``."""
        if complete:
            self.go_on(reading)
        self.epoch += complete
        if reading is self.latest:
            self.last_is_out, self.in_pass = False, self.in_pass and not complete
            self.was_left = self.in_pass


def cursor_of(loader: Any) -> Cursor:
    """The position of prepared ``loader``; that of rank 0 is valid for all ranks.

    Returns:
        ``epoch``; ``seed`` of the order, -1 if there is none yet; ``position``, the batches of the training loop that
        are out in the pass in progress, 0 between passes and while the last batch is out; over all ranks the
        ``samples`` (-1 if unknown) and the ``batches`` of the user's sampler that they hold; ``world``, the number of
        processes; ``order``, ``"computed"`` if that of a seedable sampler is, else ``"torch"``. In base64, if there is
        such a thing, ``generator``, the state when the pass began of the generator that orders the samples, and
        ``drawn_from``, that of torch's global one when other samplers drew. For a loop that was left before its end,
        ``left`` is 1, as it is while the last batch is out, when ``ended``, otherwise 0, counts the batches of the
        pass; and ``generator_after`` is the state with which the next pass goes on, unless that continues in this one.
        Where workers persist, ``seeded`` is 1, or 2 if the pass drew no seed for them.
    """
    progress: Progress = loader.progress
    if progress.restored is not None:  # and no pass has begun since
        return {**progress.restored.cursor, "epoch": progress.epoch}
    inside = progress.in_pass or progress.next_start is not None
    generator = generator_of(loader)
    order = Order(generator=None if generator is None else generator.get_state())
    if progress.in_pass or progress.last_is_out:
        order = replace(progress.order, seed=seed_in_use(loader))
    cursor: Cursor = {
        "epoch": progress.epoch + progress.last_is_out,
        "position": progress.steps if inside else 0,
        "samples": progress.samples if inside else 0,
        "batches": progress.batches if inside else 0,
        "world": loader.num_processes,
        **order.for_cursor(),
        **seedable_in_cursor(loader),
    }
    if progress.was_left or progress.last_is_out:
        cursor |= {"left": 1, "ended": _batches_of_pass(loader) if progress.last_is_out else 0}
        if generator is not None:
            cursor["generator_after"] = encoded(generator.get_state())
    if progress.seeded or workers_persist(loader):
        cursor["seeded"] = 2 if progress.keeps_seed and (progress.in_pass or progress.last_is_out) else 1
    return cursor


def _batches_of_pass(loader: Any) -> int:
    """The batches of the user's sampler in a pass whose last one is out, without those that completed its last step."""
    counted, size = int(loader.progress.batches), _batch_size(loader)
    try:
        if isinstance(loader.dataset, IterableDataset):
            return min(counted, -(-loader.total_dataset_length // size)) if size else counted
        return min(counted, len(_sampler_of_user(loader)))
    except TypeError:
        return counted


def restore_cursor(loader: Any, cursor: Cursor, continues: bool | None = None) -> None:
    """Makes the next pass over prepared ``loader`` use the epoch and the order of ``cursor``.

    After a loop that had been left, or with its last batch out, only if it skips what was already returned: as a run
    that goes on, it begins a new pass otherwise.

    Args:
        continues: the next pass also skips what was already returned, whatever the number of processes was. Default: if
            the loader was prepared with ``use_stateful_dataloader=True``; otherwise that is left to
            ``skip_first_batches``.

    Raises:
        InvalidArgument: ``cursor`` is not one, or its place does not exist for this loader.
    """
    start = check_cursor(loader, cursor, continues)
    progress: Progress = loader.progress
    progress.interrupt(loader)
    loader.set_epoch(cursor["epoch"])
    forget_seed(loader.get_sampler())
    restore_seedable(loader, cursor)
    order, after = Order.of_cursor(cursor, loader), _generator_after(loader, cursor)
    restored = Restored(cursor, order)
    if not restored.was_left:
        order.apply(loader)
    elif after is not None:
        Order(generator=after).apply(loader)
    resumes = _is_inside(cursor) or restored.ended_batches > 0
    former, source = progress.next_start, progress.source
    same = former is not None and former.restored and start == Start(steps=former.steps)
    progress.restart(loader, former if same else start, restored if resumes else None, resumes)
    progress.seeded = int(cursor.get("seeded", 0)) > 0
    progress.source = source if same else None


def read_ahead_from(loader: Any) -> tuple[torch.Tensor, ...]:
    """The states of torch's global generator before this process read, by itself, the steps after those that are out.

    For :func:`restore_read_ahead`; they differ between processes, unlike a cursor.
    """
    progress: Progress = loader.progress
    if progress.restored is not None:
        return progress.restored.read_from
    return tuple(progress.latest.read_from) if progress.in_pass and progress.latest is not None else ()


def restore_read_ahead(loader: Any, states: Iterable[torch.Tensor]) -> None:
    """Makes the rest of a pass that was restored begin with steps that are read with the generator in ``states``."""
    progress: Progress = loader.progress
    if progress.restored is not None:
        progress.restored = replace(progress.restored, read_from=tuple(states))


def _generator_after(loader: Any, cursor: Cursor) -> torch.Tensor | None:
    return state_in_cursor(cursor, "generator_after", generator_of(loader))


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
        progress.restart(loader, _start_of(loader, state), None, not stateful.is_finished(state))
    if restores:
        progress.source = state
        if progress.next_start is not None or stateful.holds_dataset(state):
            loader.base_dataloader.load_state_dict(state)
        if progress.next_start is not None:
            progress.next_start.restored = True


def check_source(loader: Any, state: stateful.State, cursor: Cursor | None) -> bool:
    """Whether torchdata's loader restores ``state`` by itself, instead of ``cursor``.

    That is so with as many processes, workers and samples in a batch as before, unless a sampler draws from torch's
    global generator and no dataset has a state.

    Raises:
        InvalidArgument: neither is possible.
    """
    if cursor is not None:
        start = check_cursor(loader, cursor)
        if start is not None and start != Start(steps=int(cursor["position"])):
            return False
        if "drawn_from" in cursor and not stateful.holds_dataset(state):
            return False  # torchdata draws another order
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
        generators = {generator_of(loader), loader.generator} - {None}
        progress.source = stateful.initial_state(loader.base_dataloader, generators)
    return progress.source


def check_cursor(loader: Any, cursor: Cursor, continues: bool | None = None) -> Start | None:
    """Raises ``InvalidArgument`` if :func:`restore_cursor` would; changes nothing.

    Returns:
        Where inside a pass the next one starts, if it does.
    """
    _check_numbers(cursor)
    Order.of_cursor(cursor, loader)
    _generator_after(loader, cursor)
    continues = loader.use_stateful_dataloader if continues is None else continues
    return _converted(loader, cursor) if continues and _is_inside(cursor) else None


def _check_numbers(cursor: Any) -> None:
    if not isinstance(cursor, Mapping):
        raise InvalidArgument(f"a cursor of a loader is a mapping, found {type(cursor).__name__}: {_SOURCE}")
    if missing := _KEYS - cursor.keys():
        raise InvalidArgument(
            f"a cursor of a loader has {', '.join(sorted(_KEYS))}; {', '.join(sorted(missing))} is missing: {_SOURCE}"
        )
    for name, (least, most) in _RANGES.items():
        number = cursor.get(name, least)
        if type(number) is not int or not least <= number <= most:
            raise InvalidArgument(
                f"{name!r} of a loader's cursor: expected an integer from {least} to {most}, found "
                f"{shortened(number)}: {_SOURCE}"
            )


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
    sampler = _sampler_of_user(loader)
    return sampler.batch_size if type(sampler) is BatchSampler else None


def _sampler_of_user(loader: Any) -> Any:
    """The sampler that ``loader`` was prepared with, of batches if it has those."""
    sampler = loaders.samplers_of(loader)[0]
    while isinstance(sampler, BatchSamplerShard | SkipBatchSampler):
        sampler = sampler.batch_sampler
    return sampler


def _converted(loader: Any, cursor: Cursor) -> Start:
    """Where ``loader``, with its number of processes and batch size, continues."""
    position, batches, samples, world = (int(cursor[key]) for key in ("position", "batches", "samples", "world"))
    size, per_step, iterable = _batch_size(loader), loader.batches_per_step, isinstance(loader.dataset, IterableDataset)
    known = samples != UNKNOWN and size is not None
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
