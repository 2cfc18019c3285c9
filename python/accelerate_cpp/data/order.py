"""The order of the samples in a pass: what decides it, so that a later pass can repeat it."""

from __future__ import annotations

import base64
import inspect
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from accelerate_cpp.data import loaders
from accelerate_cpp.data.samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    RepeatableRandomSampler,
    SeedableRandomSampler,
    SkipBatchSampler,
)
from accelerate_cpp.data.skipping import drawn_seed
from accelerate_cpp.errors import InvalidArgument

UNKNOWN = -1
_COMPUTED = "computed"

# Samplers that draw nothing from torch's global generator, or only a seed that they remember.
_DRAW_NOTHING = (
    BatchSampler,
    BatchSamplerShard,
    SkipBatchSampler,
    SequentialSampler,
    SeedableRandomSampler,
    RepeatableRandomSampler,
    list,
    tuple,
    range,
)

_CPU = torch.device("cpu")
_WORDS = 624  # of the state of a Mersenne Twister


@dataclass(frozen=True)
class Order:
    """What decides the order of a pass; each part is ``None`` where there is no such thing.

    ``seed`` is that of a :class:`RepeatableRandomSampler`. ``generator`` is the state of the sampler's generator when
    the pass began. ``drawn_from`` is the state of torch's global generator when a sampler without generator draws.
    """

    seed: int | None = None
    generator: torch.Tensor | None = None
    drawn_from: torch.Tensor | None = None

    @classmethod
    def of_next_pass(cls, loader: Any, keeps_seed: bool) -> Order:
        """That of the pass over prepared ``loader`` that begins now; its seed is not drawn yet.

        Args:
            keeps_seed: no seed is drawn for workers.
        """
        generator = generator_of(loader)
        return cls(
            generator=None if generator is None else generator.get_state(),
            drawn_from=_drawn_from(loader, keeps_seed) if draws(loader) else None,
        )

    @classmethod
    def of_cursor(cls, cursor: Mapping[str, int | str], loader: Any) -> Order:
        """What a cursor has of it, for prepared ``loader``.

        Raises:
            InvalidArgument: a state is not one of torch's generators.
        """
        seed = int(cursor["seed"])
        return cls(
            None if seed == UNKNOWN else seed,
            state_in_cursor(cursor, "generator", generator_of(loader)),
            state_in_cursor(cursor, "drawn_from"),
        )

    def for_cursor(self) -> dict[str, int | str]:
        """The entries of a cursor that :meth:`of_cursor` reads."""
        states = {"generator": self.generator, "drawn_from": self.drawn_from}
        return {
            "seed": UNKNOWN if self.seed is None else self.seed,
            **{name: encoded(state) for name, state in states.items() if state is not None},
        }

    def apply(self, loader: Any) -> None:
        """Makes the next pass over prepared ``loader`` have this order.

        Except that what is drawn from torch's global generator is drawn from ``drawn_from`` by a
        :class:`RedrawnSampler`.
        """
        sampler, generator = loader.get_sampler(), generator_of(loader)
        if isinstance(sampler, SeedableRandomSampler):
            return
        if self.generator is not None:
            if generator is None and getattr(sampler, "generator", ...) is None:
                generator = sampler.generator = torch.Generator()
            if generator is not None:
                generator.set_state(self.generator)
        elif self.seed is not None and generator is not None:
            generator.manual_seed(self.seed)
        elif self.seed is not None and isinstance(sampler, RepeatableRandomSampler):
            # What is drawn from drawn_from begins with this seed.
            sampler.next_seed = self.seed if self.drawn_from is None else None
        elif self.drawn_from is not None and generator is not None and not isinstance(sampler, RandomSampler):
            generator.set_state(self.drawn_from)


def seed_in_use(loader: Any) -> int | None:
    """The seed that orders the pass over prepared ``loader`` that is running, or that was restored."""
    sampler = loader.get_sampler()
    if isinstance(sampler, RepeatableRandomSampler) and sampler.generator is None:
        return sampler.seed if sampler.next_seed is None else sampler.next_seed
    return None


def forget_seed(sampler: Any) -> None:
    """The next pass draws a seed of its own."""
    if isinstance(sampler, RepeatableRandomSampler):
        sampler.next_seed = None


def remembered(loader: Any) -> Callable[[], None]:
    """Sets what orders the samples of prepared ``loader`` back to what it is now."""
    sampler, generator = loader.get_sampler(), generator_of(loader)
    state = None if generator is None else generator.get_state()
    names = ("generator", "initial_seed", "computed", "next_seed")
    attributes = {name: vars(sampler)[name] for name in names if name in getattr(sampler, "__dict__", {})}

    def undo() -> None:
        if attributes:
            vars(sampler).update(attributes)
        if generator is not None and state is not None:
            generator.set_state(state)

    return undo


def seedable_in_cursor(loader: Any) -> dict[str, int | str]:
    """The entries of a cursor for a seedable sampler, of which other samplers only say that torch decides."""
    sampler = loader.get_sampler()
    if not isinstance(sampler, SeedableRandomSampler):
        return {"order": "torch"}
    return {"seed": sampler.initial_seed, "order": _COMPUTED if sampler.computed else "torch"}


def restore_seedable(loader: Any, cursor: Mapping[str, int | str]) -> None:
    """Gives a seedable sampler the seed and the kind of order that a cursor has."""
    sampler, seed = loader.get_sampler(), int(cursor["seed"])
    if isinstance(sampler, SeedableRandomSampler) and seed != UNKNOWN:
        sampler.initial_seed = seed
        # Cursors without an order are older than the choice: at that time seedable samplers computed it.
        sampler.computed = cursor.get("order", _COMPUTED) == _COMPUTED


def workers_persist(loader: Any) -> bool:
    """Whether the workers of prepared ``loader`` run on between passes, for which they draw no seeds."""
    return bool(loader.num_workers > 0 and loader.persistent_workers and loader.base_dataloader._iterator is not None)


def generator_of(loader: Any) -> torch.Generator | None:
    """The generator whose state decides the order of the samples; ``None`` if a seed does, or nothing."""
    if isinstance(loader.dataset, IterableDatasetShard):
        return None
    source = loader.dataset if isinstance(loader.dataset, IterableDataset) else loader.get_sampler()
    generator = None if isinstance(source, SeedableRandomSampler) else getattr(source, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def check_generator_state(state: torch.Tensor) -> None:
    """Raises unless ``state`` is one of torch's generator on the CPU, which reads there without a look."""
    torch.Generator().set_state(state)
    left, _, following = struct.unpack_from("<iiQ", state.numpy().tobytes(), 8)
    if left != 1 and not 1 < left <= _WORDS + 1 - following:
        raise ValueError(f"{left} words left of {_WORDS}, from word {following} on")


def encoded(state: torch.Tensor) -> str:
    """A state of a generator in base64, as cursors have it."""
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def state_in_cursor(
    cursor: Mapping[str, int | str], name: str, generator: torch.Generator | None = None
) -> torch.Tensor | None:
    """The state that a cursor has under ``name``, of a kind of ``generator`` (or the CPU's); ``None`` if it has none.

    Raises:
        InvalidArgument: it is not such a state.
    """
    if name not in cursor:
        return None
    text, device = str(cursor[name]), _CPU if generator is None else generator.device
    try:
        state = torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
        if device == _CPU:
            check_generator_state(state)
        else:
            torch.Generator(device).set_state(state)
    except (ValueError, RuntimeError, struct.error) as error:
        raise InvalidArgument(
            f"{name!r} of a loader's cursor: expected the state of a generator of {device} in base64, found "
            f"{text[:20]!r}, which is none ({error}); restore what cursor_of or state_dict returned"
        ) from error
    return state


def draws(loader: Any) -> bool:
    """Whether a sampler of ``loader`` may draw from torch's global generator, in a way that it does not remember."""
    return not isinstance(loader.dataset, IterableDataset) and any(
        type(sampler) not in _DRAW_NOTHING and not isinstance(getattr(sampler, "generator", None), torch.Generator)
        for sampler in loaders.samplers_of(loader)
    )


def _drawn_from(loader: Any, keeps_seed: bool) -> torch.Tensor:
    """The state of torch's global generator when a sampler of ``loader`` draws, in a pass that begins now.

    Torch's loaders ask the outermost one for an iterator, draw a seed for workers, and ask for the first item. What a
    generator function draws comes after that.
    """
    begun = torch.get_rng_state()
    outermost = next(one for one in loaders.samplers_of(loader) if not isinstance(one, SkipBatchSampler))
    at_once = not isinstance(outermost, BatchSamplerShard) and not inspect.isgeneratorfunction(type(outermost).__iter__)
    if at_once or keeps_seed or loader.generator is not None:
        return begun
    generator = torch.Generator()
    generator.set_state(begun)
    drawn_seed(generator)
    return generator.get_state()
