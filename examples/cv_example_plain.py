"""Trains a small convolutional network on the handwritten digits in plain PyTorch, on one process."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split


def load_data():
    """Training and test set: images of shape (1, 8, 8) in 0…1, fp32, with their labels 0…9."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    return random_split(dataset, [1437, 360], generator=torch.Generator().manual_seed(0))


def build_model():
    """A convolution and a linear layer."""
    return nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10))


def train(args):
    torch.manual_seed(args.seed)
    train_set, test_set = load_data()
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=50)
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr, total_steps=args.num_epochs * len(train_loader)
    )
    for epoch in range(1, args.num_epochs + 1):
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
        model.eval()
        correct, samples = 0, 0
        for images, labels in test_loader:
            with torch.no_grad():
                predicted = model(images).argmax(dim=1)
            correct += (predicted == labels).sum().item()
            samples += len(labels)
        print(f"epoch {epoch}: accuracy {correct / samples:.3f} on {samples} samples")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch_size", type=int, default=32, help="samples per batch")
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_args())
