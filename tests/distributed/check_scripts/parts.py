"""What the scripts that are checked train: a small network on random numbers."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def dataset(samples: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(samples, 4, generator=generator), torch.arange(samples) % 2)


def loader(samples: int = 32, batch_size: int = 4, **options: object) -> DataLoader:
    return DataLoader(dataset(samples), batch_size=batch_size, **options)


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs).float(), labels)
