"""Trains a small transformer to classify sequences of tokens in plain PyTorch, on one process."""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def load_data(samples, seed):
    """Sequences of 16 tokens 0…63, int64, with label 1 if more than half of the tokens are even, else 0."""
    tokens = torch.randint(0, 64, (samples, 16), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(tokens, (tokens % 2 == 0).sum(dim=1).gt(8).long())


def build_model():
    """A transformer layer over the embedded tokens, with a classifier on its outputs."""
    return nn.Sequential(
        nn.Embedding(64, 32),
        nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=64, dropout=0.1, batch_first=True),
        nn.Flatten(),
        nn.Linear(16 * 32, 2),
    )


def train(args):
    torch.manual_seed(args.seed)
    train_loader = DataLoader(load_data(2048, seed=0), args.batch_size, shuffle=True)
    test_loader = DataLoader(load_data(500, seed=1), batch_size=50)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=args.num_epochs * len(train_loader))
    for epoch in range(1, args.num_epochs + 1):
        model.train()
        for tokens, labels in train_loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(tokens), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
        model.eval()
        correct, samples = 0, 0
        for tokens, labels in test_loader:
            with torch.no_grad():
                predicted = model(tokens).argmax(dim=1)
            correct += (predicted == labels).sum().item()
            samples += len(labels)
        print(f"epoch {epoch}: accuracy {correct / samples:.3f} on {samples} samples")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch_size", type=int, default=32, help="samples per batch")
    parser.add_argument("--num_epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_args())
