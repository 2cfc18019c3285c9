"""Accumulates gradients in plain PyTorch, on one process."""

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
    """Two layers that classify the mean of the embedded tokens."""
    return nn.Sequential(nn.EmbeddingBag(64, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def evaluate(model, loader):
    """Mean loss and accuracy over every sample of ``loader``."""
    model.eval()
    loss, correct, samples = 0.0, 0, 0
    for inputs, labels in loader:
        with torch.no_grad():
            logits = model(inputs)
        loss += cross_entropy(logits, labels, reduction="sum").item()
        correct += (logits.argmax(dim=1) == labels).sum().item()
        samples += len(labels)
    return loss / samples, correct / samples


def train(args):
    torch.manual_seed(args.seed)
    train_loader = DataLoader(load_data(2048, seed=0), args.batch_size, shuffle=True)
    test_loader = DataLoader(load_data(500, seed=1), batch_size=50)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    steps = 0
    for epoch in range(1, args.num_epochs + 1):
        model.train()
        for index, (tokens, labels) in enumerate(train_loader, start=1):
            loss = cross_entropy(model(tokens), labels) / args.gradient_accumulation_steps
            loss.backward()
            if index % args.gradient_accumulation_steps == 0 or index == len(train_loader):
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
        loss, accuracy = evaluate(model, test_loader)
        print(f"epoch {epoch}: loss {loss:.6f}, accuracy {accuracy:.3f}, optimizer steps {steps}")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4, help="batches per optimizer step")
    parser.add_argument("--batch_size", type=int, default=16, help="samples per batch")
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_args())
