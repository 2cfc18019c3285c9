"""Small models of many kinds, which our wrapper and torch's are to train alike, and what they are trained on.

Only the processes that train them import this file: it needs torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from scenarios import Ranks

CLASSES, WIDTH, WORDS = 5, 32, 50
Loss = Callable[[nn.Module, int], Tensor]  # called with a model and the number of a step


def words(ranks: Ranks, step: int, *shape: int) -> Tensor:
    """Random numbers of words, others on every rank and in every step."""
    return (torch.as_tensor(ranks.batch(step, *shape)).abs() * 1e4).long() % WORDS


def images(ranks: Ranks, step: int) -> Tensor:
    """Four random images, others on every rank and in every step."""
    return torch.as_tensor(ranks.batch(step, 4, 3, 12, 12))


def classification(ranks: Ranks, data: Callable[[int], Tensor]) -> Loss:
    """How badly a model tells the classes of ``data(step)``."""

    def loss(model: nn.Module, step: int) -> Tensor:
        inputs = data(step)
        return functional.cross_entropy(model(inputs), words(ranks, step, len(inputs)) % CLASSES)

    return loss


def prediction(ranks: Ranks) -> Loss:
    """How badly a model foretells the next word. Dropout is the same in every model."""

    def loss(model: nn.Module, step: int) -> Tensor:
        inputs = words(ranks, step, 3, 12)
        torch.manual_seed(step)
        return functional.cross_entropy(model(inputs[:, :-1]).flatten(0, 1), inputs[:, 1:].flatten())

    return loss


def convolutions_with_batch_norm() -> nn.Module:
    """From [N, 3, 12, 12] to [N, CLASSES]."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, CLASSES)),
    )


def convolutions_in_channels_last() -> nn.Module:
    """From [N, 3, 12, 12] to [N, CLASSES], with group norm."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.SiLU()),
        *(nn.Conv2d(16, 32, 3, stride=2), nn.GroupNorm(8, 32), nn.SiLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(32, CLASSES)),
    )
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


class Residual(nn.Module):
    """A block of two convolutions, and a third where the skip connection changes its shape."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()),
            *(nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)),
        )
        same = stride == 1 and channels == out
        self.skip = nn.Identity() if same else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, data: Tensor) -> Tensor:
        return functional.relu(self.body(data) + self.skip(data))


def residual_network() -> nn.Module:
    """From [N, 3, 12, 12] to [N, CLASSES]."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(Residual(16, 16, 1), Residual(16, 32, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES)),
    )


class TiedEncoder(nn.Module):
    """A transformer whose output layer has the weights of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(WIDTH, WORDS)
        self.output.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, words: Tensor) -> Tensor:
        result: Tensor = self.output(self.body(self.embedding(words)))
        return result


class DecoderBlock(nn.Module):
    """Causal attention and a gated layer, each around a skip connection."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)])
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, data: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norms[0](data)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = attended.transpose(1, 2).flatten(2)
        data = data + functional.dropout(self.projection(attended), self.dropout, self.training)
        normed = self.norms[1](data)
        result: Tensor = data + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return result


class Decoder(nn.Module):
    """A language model with learnt positions, which may compute its activations again on the way back."""

    def __init__(self, again: bool = False, reentrant: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.again, self.reentrant = again, reentrant
        self.embedding, self.positions = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(16, WIDTH))
        self.blocks = nn.ModuleList([DecoderBlock(dropout) for _ in range(2)])
        self.output = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        data = self.embedding(words) + self.positions[: words.shape[1]]
        for block in self.blocks:
            data = checkpoint(block, data, use_reentrant=self.reentrant) if self.again else block(data)
        result: Tensor = self.output(data)
        return result


class Recurrent(nn.Module):
    """``nn.LSTM`` or ``nn.GRU`` over an embedding; classifies the last state."""

    def __init__(self, cell: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.body = cell(16, WIDTH, num_layers=2, batch_first=True, bidirectional=True)
        self.output = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        result: Tensor = self.output(self.body(self.embedding(words))[0][:, -1])
        return result


class MixtureOfExperts(nn.Module):
    """Called with the numbers of the experts that may be used; the others, and their gates, take no part."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList([nn.Linear(8, 1) for _ in range(4)])
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(4)])
        self.output = nn.Linear(8, CLASSES)

    def forward(self, data: Tensor, used: list[int]) -> Tensor:
        shares = torch.cat([self.gates[index](data) for index in used], -1).softmax(-1)
        parts = torch.stack([self.experts[index](data) for index in used], -1)
        result: Tensor = self.output((parts * shares.unsqueeze(-2)).sum(-1))
        return result


class LowRank(nn.Module):
    """A frozen layer and a product of two small matrices that is learnt beside it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(inputs, 3) * 0.1)
        self.up = nn.Parameter(torch.randn(3, outputs) * 0.1)

    def forward(self, data: Tensor) -> Tensor:
        result: Tensor = self.base(data) + data @ self.down @ self.up
        return result


def low_rank_adaptation() -> nn.Module:
    """From [N, 8] to [N, CLASSES]."""
    return nn.Sequential(LowRank(8, 64), nn.GELU(), LowRank(64, 64), nn.GELU(), LowRank(64, CLASSES))


def bag_of_words(sparse: bool) -> nn.Module:
    """From words [N, L] to [N, CLASSES]."""
    return nn.Sequential(nn.EmbeddingBag(WORDS, WIDTH, sparse=sparse), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def word_classifier() -> nn.Module:
    """From words [N, L] to [N, L, CLASSES], with an embedding whose gradient is sparse."""
    return nn.Sequential(nn.Embedding(WORDS, WIDTH, sparse=True), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


class Autoencoder(nn.Module):
    """Of [N, 3, 8, 8], with a scalar parameter and layers of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 7, 3, 2, 1), nn.ELU(), nn.Flatten(), nn.Linear(112, 13))
        self.decoder = nn.Sequential(
            *(nn.Linear(13, 112), nn.Unflatten(1, (7, 4, 4)), nn.ELU(), nn.ConvTranspose2d(7, 3, 4, 2, 1)),
        )
        self.temperature, self.code = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(13))

    def forward(self, data: Tensor) -> Tensor:
        result: Tensor = self.decoder(self.encoder(data) * self.temperature + self.code)
        return result


class FourDtypes(nn.Module):
    """From float32 [N, 8] to float64 [N, 1], through layers of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 24), nn.Linear(24, 17, dtype=torch.bfloat16)
        self.third, self.fourth = nn.Linear(17, 9, dtype=torch.float16), nn.Linear(9, 1, dtype=torch.float64)

    def forward(self, data: Tensor) -> Tensor:
        data = self.second(self.first(data).tanh().bfloat16()).tanh()
        result: Tensor = self.fourth(self.third(data.half()).tanh().double())
        return result


class Softplus(nn.Module):
    """A parametrization: weights above zero."""

    def forward(self, weight: Tensor) -> Tensor:
        return functional.softplus(weight)


def parametrized() -> nn.Module:
    """From [N, 8] to [N, CLASSES]. Spectral norm has buffers that its forward pass changes."""
    positive = nn.Linear(24, 16)
    parametrize.register_parametrization(positive, "weight", Softplus())
    return nn.Sequential(
        *(parametrizations.weight_norm(nn.Linear(8, 24)), nn.Tanh(), positive, nn.Tanh()),
        *(parametrizations.spectral_norm(nn.Linear(16, 16)), parametrizations.orthogonal(nn.Linear(16, CLASSES))),
    )


class Complex(nn.Module):
    """Filters [N, 16] with complex factors of its frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.randn(9, dtype=torch.complex64))
        self.output = nn.Linear(16, CLASSES)

    def forward(self, data: Tensor) -> Tensor:
        result: Tensor = self.output(torch.fft.irfft(torch.fft.rfft(data) * self.factors, n=16))
        return result


class Siamese(nn.Module):
    """The distances between two batches [N, 3, 12, 12] after one and the same network."""

    def __init__(self) -> None:
        super().__init__()
        self.body = convolutions_in_channels_last()

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        difference: Tensor = self.body(first) - self.body(second)
        return difference.square().sum(1)


class RunningScale(nn.Module):
    """From [N, 8] to [N, CLASSES]; divides by a running mean in training, too, so that its gradient depends on it."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.output = nn.Linear(8, 24), nn.Linear(24, CLASSES)
        self.register_buffer("mean", torch.ones(24))

    def forward(self, data: Tensor) -> Tensor:
        data = self.body(data)
        if self.training:
            self.mean.lerp_(data.detach().abs().mean(0), 0.3)
        result: Tensor = self.output(data / self.mean.clone())
        return result


class TwoHeads(nn.Module):
    """From [N, 8] to a dict of results of one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 48), nn.Tanh(), nn.Linear(48, 24), nn.Tanh())
        self.classes, self.value = nn.Linear(24, CLASSES), nn.Linear(24, 1)

    def forward(self, data: Tensor) -> dict[str, Tensor]:
        data = self.body(data)
        return {"classes": self.classes(data), "value": self.value(data)}


def generator() -> nn.Module:
    """From noise [N, 4] to images [N, 1, 8, 8]."""
    return nn.Sequential(
        *(nn.Linear(4, 64), nn.Unflatten(1, (16, 2, 2)), nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.BatchNorm2d(8)),
        *(nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Tanh()),
    )


def critic() -> nn.Module:
    """From images [N, 1, 8, 8] to [N, 1]: how much they look generated."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 4, 2, 1), nn.BatchNorm2d(16)),
        *(nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64, 1)),
    )
