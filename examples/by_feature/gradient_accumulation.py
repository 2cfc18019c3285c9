"""Accumulates gradients: the optimizer steps once for several batches, as if they were one large batch."""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accelerate_cpp import Accelerator
from accelerate_cpp.utils import set_seed


def load_data(samples, seed):
    """Sequences of 16 tokens 0…63, int64, with label 1 if more than half of the tokens are even, else 0."""
    tokens = torch.randint(0, 64, (samples, 16), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(tokens, (tokens % 2 == 0).sum(dim=1).gt(8).long())


def build_model():
    """Two layers that classify the mean of the embedded tokens."""
    return nn.Sequential(nn.EmbeddingBag(64, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def evaluate(accelerator, model, loader):
    """Mean loss and accuracy over every sample of ``loader``, the same on all processes."""
    model.eval()
    loss, correct, samples = 0.0, 0, 0
    for inputs, labels in loader:
        with torch.no_grad():
            logits, labels = accelerator.gather_for_metrics((model(inputs), labels))
        loss += cross_entropy(logits, labels, reduction="sum").item()
        correct += (logits.argmax(dim=1) == labels).sum().item()
        samples += len(labels)
    return loss / samples, correct / samples


def train(args):
    # The feature, first part: how many batches make a step.
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)
    train_loader = DataLoader(load_data(2048, seed=0), args.batch_size, shuffle=True)
    test_loader = DataLoader(load_data(500, seed=1), batch_size=50)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    steps = 0
    for epoch in range(1, args.num_epochs + 1):
        model.train()
        for tokens, labels in train_loader:
            # Second part: within this block, gradients stay on their process, and step and zero_grad do nothing, until
            # the block that completes a step. The loss is divided by the number of batches.
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(tokens), labels))
                optimizer.step()
                optimizer.zero_grad()
            steps += accelerator.sync_gradients  # true in the blocks that complete a step
        loss, accuracy = evaluate(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch}: loss {loss:.6f}, accuracy {accuracy:.3f}, optimizer steps {steps}")
    accelerator.end_training()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4, help="batches per optimizer step")
    parser.add_argument("--batch_size", type=int, default=16, help="samples per batch and process")
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_args())
