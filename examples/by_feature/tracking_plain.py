"""Logs loss and accuracy of a run to TensorBoard in plain PyTorch, on one process."""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter


def load_data(samples, seed):
    """Sequences of 16 tokens 0…63, int64, with label 1 if more than half of the tokens are even, else 0."""
    tokens = torch.randint(0, 64, (samples, 16), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(tokens, (tokens % 2 == 0).sum(dim=1).gt(8).long())


def build_model():
    """Two layers that classify the mean of the embedded tokens."""
    return nn.Sequential(nn.EmbeddingBag(64, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def train(args):
    writer = SummaryWriter(args.project_dir)
    writer.add_hparams({"lr": args.lr, "batch_size": args.batch_size, "seed": args.seed}, {})
    torch.manual_seed(args.seed)
    train_loader = DataLoader(load_data(2048, seed=0), args.batch_size, shuffle=True)
    test_loader = DataLoader(load_data(500, seed=1), batch_size=50)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    step = 0
    for epoch in range(1, args.num_epochs + 1):
        model.train()
        for tokens, labels in train_loader:
            loss = cross_entropy(model(tokens), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % args.logging_steps == 0:
                writer.add_scalar("train/loss", loss.item(), step)
        model.eval()
        correct, samples = 0, 0
        for tokens, labels in test_loader:
            with torch.no_grad():
                logits = model(tokens)
            correct += (logits.argmax(dim=1) == labels).sum().item()
            samples += len(labels)
        writer.add_scalar("test/accuracy", correct / samples, step)
        print(f"epoch {epoch}: accuracy {correct / samples:.3f}")
        writer.add_histogram("bias", model.state_dict().popitem()[1], step)
    writer.close()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project_dir", type=Path, default=Path("out/tracking_plain"))
    parser.add_argument("--logging_steps", type=int, default=10)
    parser.add_argument("--batch_size", type=int, default=32, help="samples per batch")
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_args())
