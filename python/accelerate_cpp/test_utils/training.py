"""Small models and data to train on: a line through points, and sentences that are made up here."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from accelerate_cpp.alias.borrowed_names import lending

if TYPE_CHECKING:
    from accelerate_cpp import Accelerator

__all__ = [
    "RegressionDataset",
    "RegressionModel",
    "mocked_dataloaders",
    "mocked_dataloaders_for_autoregressive_models",
]

__getattr__ = lending("test_utils.training")


class RegressionDataset:
    """Points near the line ``y = a * x + b``, with a noise of standard deviation 0.1.

    Args:
        a: slope.
        b: where the line meets the axis.
        length: number of points.
        seed: gives the same points again; ``None`` gives others each time.

    Attributes:
        x, y: arrays of shape (length,), float32.
    """

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
        generator = np.random.default_rng(seed)
        self.length = length
        self.x = generator.normal(size=(length,)).astype(np.float32)
        self.y = a * self.x + b + generator.normal(scale=0.1, size=(length,)).astype(np.float32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: Any) -> dict[str, Any]:
        return {"x": self.x[i], "y": self.y[i]}


class RegressionModel(torch.nn.Module):
    """The line ``a * x + b``.

    Args:
        a, b: what the two parameters, of no dimension and in fp32, begin with.
        double_output: changes nothing; it is there for code that passes it.
    """

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor(a).float())
        self.b = torch.nn.Parameter(torch.tensor(b).float())

    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        """The line at ``x``, of any shape, which has to be given."""
        if x is None:
            raise TypeError("RegressionModel: expected the tensor x")
        return x * self.a + self.b


class Batch(dict[str, torch.Tensor]):
    """A batch by the names of its tensors, which can be moved as a whole, as those of tokenizers can."""

    def to(self, device: torch.device | str) -> Batch:
        """This batch on ``device``."""
        return Batch({name: tensor.to(device) for name, tensor in self.items()})


_TRAINING, _EVALUATION, _EVALUATION_BATCH = 64, 32, 1
_BEGIN, _END, _FIRST_WORD, _WORDS = 101, 102, 200, 600  # few enough for every vocabulary
_IGNORED = -100
_MULTIPLES = {"fp8": 16, "fp16": 8, "bf16": 8}


def mocked_dataloaders(accelerator: Accelerator, batch_size: int = 16) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders for training and evaluation of pairs of sentences, which are the same or not; nothing is downloaded.

    The sentences are random, but the same each time. The batches are dicts of int64 tensors: ``input_ids``,
    ``token_type_ids`` and ``attention_mask`` of shape (batch, length), ``labels`` of shape (batch,), 1 for pairs of one
    sentence. Training is shuffled; evaluation has batches of one.

    Args:
        accelerator: its precision says of which number lengths are multiples, so that products of matrices are fast.
        batch_size: of training.
    """
    return _loaders(_pairs, accelerator, batch_size)


def mocked_dataloaders_for_autoregressive_models(
    accelerator: Accelerator, batch_size: int = 16
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """The same for models that continue texts: ``labels`` are the ``input_ids``, and -100 where there is none."""
    return _loaders(_texts, accelerator, batch_size)


def _loaders(samples: Any, accelerator: Accelerator, batch_size: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    collate = partial(_padded, multiple=_MULTIPLES.get(accelerator.mixed_precision, 1))
    training: Any = list(samples(0, _TRAINING))
    evaluation: Any = list(samples(1, _EVALUATION))
    return (
        DataLoader(training, shuffle=True, batch_size=batch_size, collate_fn=collate, drop_last=True),
        DataLoader(evaluation, shuffle=False, batch_size=_EVALUATION_BATCH, collate_fn=collate),
    )


def _sentence(generator: random.Random) -> list[int]:
    return [_FIRST_WORD + generator.randrange(_WORDS) for _ in range(generator.randint(5, 20))]


def _pairs(seed: int, count: int) -> Iterator[dict[str, Any]]:
    generator = random.Random(seed)
    for _ in range(count):
        first, same = _sentence(generator), generator.random() < 0.5
        second = first if same else _sentence(generator)
        yield {
            "input_ids": [_BEGIN, *first, _END, *second, _END],
            "token_type_ids": [0] * (len(first) + 2) + [1] * (len(second) + 1),
            "labels": int(same),
        }


def _texts(seed: int, count: int) -> Iterator[dict[str, Any]]:
    generator = random.Random(seed)
    for _ in range(count):
        words = _sentence(generator)
        yield {"input_ids": words, "labels": words}


def _padded(samples: Sequence[dict[str, Any]], multiple: int) -> Batch:
    longest = max(len(sample["input_ids"]) for sample in samples)
    length = -(-longest // multiple) * multiple
    columns: dict[str, list[Any]] = {"attention_mask": [[1] * len(sample["input_ids"]) for sample in samples]}
    columns |= {name: [sample[name] for sample in samples] for name in samples[0]}
    for name, column in columns.items():
        filler = _IGNORED if name == "labels" else 0
        columns[name] = [[*row, *[filler] * (length - len(row))] if isinstance(row, list) else row for row in column]
    return Batch({name: torch.tensor(column) for name, column in columns.items()})
