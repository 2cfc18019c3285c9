"""Stops early: one process that has seen enough stops all of them, at the same step."""

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


class EarlyStopping:
    """Whether the loss has not improved by ``min_delta`` for ``patience`` steps."""

    def __init__(self, min_delta, patience):
        self.min_delta, self.patience = min_delta, patience
        self.best, self.steps_since = float("inf"), 0

    def has_seen_enough(self, loss):
        better = loss < self.best - self.min_delta
        self.best, self.steps_since = (loss, 0) if better else (self.best, self.steps_since + 1)
        return self.steps_since >= self.patience


def train(args):
    accelerator = Accelerator()
    set_seed(args.seed)
    train_loader = DataLoader(load_data(2048, seed=0), args.batch_size, shuffle=True)
    test_loader = DataLoader(load_data(500, seed=1), batch_size=50)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    stopping = EarlyStopping(args.min_delta, args.patience)
    step, stopped = 0, False
    for _ in range(args.num_epochs):
        model.train()
        for tokens, labels in train_loader:
            loss = cross_entropy(model(tokens), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            # The feature: losses differ between processes, so one of them raises the flag …
            if stopping.has_seen_enough(loss.item()):
                accelerator.set_trigger()
            # … and all of them look at it together.
            if stopped := accelerator.check_trigger():
                break
        if stopped:
            break
    steps = accelerator.gather(torch.tensor(step, device=accelerator.device)).tolist()
    waited = accelerator.gather(torch.tensor(stopping.steps_since, device=accelerator.device)).tolist()
    loss, accuracy = evaluate(accelerator, model, test_loader)
    accelerator.print(f"processes stopped after steps {steps}, since the best loss {waited}")
    accelerator.print(
        f"loss {loss:.6f}, accuracy {accuracy:.3f}, of at most {args.num_epochs * len(train_loader)} steps"
    )
    accelerator.end_training()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--min_delta", type=float, default=0.01, help="smallest improvement of the loss that counts")
    parser.add_argument("--patience", type=int, default=8, help="steps without improvement before stopping")
    parser.add_argument("--batch_size", type=int, default=64, help="samples per batch and process")
    parser.add_argument("--num_epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_args())
