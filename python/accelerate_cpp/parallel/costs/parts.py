"""What the communication of a decoder depends on, stage by stage."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.pipeline.cut import balanced_starts

__all__ = ["Decoder", "Part", "Weight"]


@dataclass(frozen=True)
class Weight:
    """A parameter.

    Attributes:
        shape: of the whole.
        split: the dimension that tensor parallelism splits; ``None`` if each of its processes has the whole.
    """

    shape: tuple[int, ...]
    split: int | None = None

    def here(self, tp: int) -> tuple[int, ...]:
        """The shape on each of ``tp`` processes."""
        return tuple(length // tp if dim == self.split else length for dim, length in enumerate(self.shape))

    def elements(self, tp: int = 1) -> int:
        return math.prod(self.here(tp))

    def padded_shard(self, tp: int, shards: int) -> int:
        """The elements that each of ``shards`` processes has, with those that fill up the rows of the last one."""
        rows, *others = self.here(tp) or (1,)
        return -(-rows // shards) * math.prod(others)


@dataclass(frozen=True)
class Part:
    """A stage of a decoder, or all of it. Numbers are those of the whole, before tensor parallelism splits them.

    Attributes:
        hidden: features of a token between layers.
        kv_features: features of the keys of a token, and as many of its values.
        heads, kv_heads: of attention.
        attentions: calls of attention in a forward pass.
        columns: inputs of ``nn.Linear`` layers within blocks that are split by their outputs; those of one module, such
            as queries, keys and values, share theirs.
        rows: those that are split by their inputs.
        gathering: modules that get all tokens where sequence parallelism cuts them.
        in_parts: elements of each parameter that processes use for their heads alone.
        of_tokens: elements of each parameter that processes use for their tokens alone, with sequence parallelism.
        split_embedding: whether the entries of the embedding are split.
        gathered_features: features of the output layer, if it is split and its outputs are gathered; else 0.
        units: parameters by units of ``fully_shard``; the last one is the root, with what is left.
        tied: elements of each parameter that another stage has, too.
        first, last: whether it takes tokens, and whether it returns logits.
    """

    hidden: int
    heads: int
    kv_heads: int
    kv_features: int
    attentions: int
    columns: int
    rows: int
    gathering: int
    in_parts: tuple[int, ...]
    of_tokens: tuple[int, ...]
    split_embedding: bool
    gathered_features: int
    units: tuple[tuple[Weight, ...], ...]
    tied: tuple[int, ...] = ()
    first: bool = True
    last: bool = True

    @property
    def weights(self) -> list[Weight]:
        return [weight for unit in self.units for weight in unit]


@dataclass(frozen=True)
class Decoder:
    """A causal transformer of the kind of Llama: two norms, attention and a gated feed-forward layer, without biases.

    Attributes:
        layers: how many.
        hidden: features of a token between layers.
        heads, kv_heads: of queries, and of keys and values.
        intermediate: features within the feed-forward layer.
        vocabulary: entries of the embedding, and outputs of the head.
        head_dim: features of a head; ``None`` is ``hidden / heads``.
        tied: whether the embedding is also the head.

    Raises:
        InvalidArgument: a number is not positive, or heads cannot be shared out.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    head_dim: int | None = None
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "intermediate", "vocabulary"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"Decoder: {name}={getattr(self, name)}; expected 1 or more")
        if self.heads % self.kv_heads or (self.head_dim is None and self.hidden % self.heads):
            raise InvalidArgument(
                f"Decoder: heads={self.heads} with hidden={self.hidden} and kv_heads={self.kv_heads}; expected heads "
                "that divide hidden and are a multiple of kv_heads, or pass head_dim"
            )

    @property
    def parameters(self) -> int:
        """How many elements all weights have."""
        return sum(weight.elements() for weight in self.parts()[0].weights)

    def parts(self, stages: int = 1) -> list[Part]:
        """The stages, cut where ``cut_model`` cuts such a decoder.

        Raises:
            InvalidArgument: there are more stages than layers, embedding and head.
        """
        blocks = self.layers + 2
        if not 1 <= stages <= blocks:
            raise InvalidArgument(
                f"Decoder: {stages} stages of {self.layers} layers; expected 1 to {blocks}, as embedding and head can "
                "be stages of their own"
            )
        layer = sum(weight.elements() for weight in self._layer())
        table, norm = self.vocabulary * self.hidden, self.hidden
        # As in cut_model: bytes in float32, and twice where each token is multiplied with them.
        costs = [4 * table, *[8 * layer] * self.layers, 8 * (table + norm)]
        starts = [*balanced_starts(costs, stages), blocks]
        return [self._part(begin, end) for begin, end in pairwise(starts)]

    def _layer(self) -> tuple[Weight, ...]:
        h, wide = self.hidden, self.intermediate
        dim = self.head_dim or h // self.heads
        q, kv = self.heads * dim, self.kv_heads * dim
        attention = (Weight((q, h), 0), Weight((kv, h), 0), Weight((kv, h), 0), Weight((h, q), 1))
        return (
            *attention,
            Weight((wide, h), 0),
            Weight((wide, h), 0),
            Weight((h, wide), 1),
            Weight((h,)),
            Weight((h,)),
        )

    def _part(self, begin: int, end: int) -> Part:
        first, last = begin == 0, end == self.layers + 2
        count = end - begin - first - last
        table = (self.vocabulary, self.hidden)
        embedding = [Weight(table, None if self.tied else 0)] if first else []
        head = [Weight(table, None if self.tied else 0)] if last and not (self.tied and first) else []
        norm = [Weight((self.hidden,))] if last else []
        return Part(
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            kv_features=self.kv_heads * (self.head_dim or self.hidden // self.heads),
            attentions=count,
            columns=2 * count,
            rows=2 * count,
            gathering=2 * count,
            in_parts=(),
            of_tokens=(self.hidden,) * (2 * count),
            split_embedding=first and not self.tied,
            gathered_features=self.vocabulary if last and not self.tied else 0,
            units=(*(self._layer() for _ in range(count)), (*embedding, *norm, *head)),
            tied=(math.prod(table),) if self.tied and first != last else (),
            first=first,
            last=last,
        )
