"""Trains one network for each fold of the data in plain PyTorch, on one process."""

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold, train_test_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def build_model():
    """Two layers, from the 64 pixels of an image to the logits of the ten digits."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def predict(model, loader):
    """Logits and labels of every sample of ``loader``."""
    model.eval()
    with torch.no_grad():
        batches = [(model(pixels), labels) for pixels, labels in loader]
    logits, labels = zip(*batches, strict=True)
    return torch.cat(logits), torch.cat(labels)


def train_fold(args, train_set, held_out, test_set):
    """Trains on ``train_set``; returns the accuracy on ``held_out``, and logits and labels of ``test_set``."""
    torch.manual_seed(args.seed)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for _ in range(args.num_epochs):
        model.train()
        for pixels, labels in train_loader:
            cross_entropy(model(pixels), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    logits, labels = predict(model, DataLoader(held_out, 100))
    return (logits.argmax(dim=1) == labels).float().mean().item(), *predict(model, DataLoader(test_set, 100))


def cross_validate(args):
    pixels, labels = load_digits(return_X_y=True)
    pixels, test_pixels, labels, test_labels = train_test_split(
        np.float32(pixels / 16), labels, test_size=297, stratify=labels, random_state=args.seed
    )

    def dataset(pixels, labels):
        return TensorDataset(torch.from_numpy(pixels), torch.from_numpy(labels))

    test_set, votes = dataset(test_pixels, test_labels), []
    folds = StratifiedKFold(args.num_folds, shuffle=True, random_state=args.seed).split(pixels, labels)
    for number, (chosen, left_out) in enumerate(folds, start=1):
        accuracy, logits, references = train_fold(
            args,
            dataset(pixels[chosen], labels[chosen]),
            dataset(pixels[left_out], labels[left_out]),
            test_set,
        )
        print(f"fold {number}: accuracy {accuracy:.3f} on {len(left_out)} samples that were left out")
        votes.append(logits.softmax(dim=1))
    accuracies = [(vote.argmax(dim=1) == references).float().mean().item() for vote in votes]
    together = (torch.stack(votes).mean(dim=0).argmax(dim=1) == references).float().mean().item()
    print(f"test accuracy: {np.mean(accuracies):.3f} by one network on average, {together:.3f} by all together")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num_folds", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=32, help="samples per batch")
    parser.add_argument("--num_epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    cross_validate(parse_args())
