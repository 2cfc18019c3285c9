"""Logs loss and accuracy of a run to TensorBoard, or to any other tracker, and to a tracker of your own."""

import argparse
import csv
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accelerate_cpp import Accelerator
from accelerate_cpp.tracking import GeneralTracker
from accelerate_cpp.utils import set_seed


def load_data(samples, seed):
    """Sequences of 16 tokens 0…63, int64, with label 1 if more than half of the tokens are even, else 0."""
    tokens = torch.randint(0, 64, (samples, 16), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(tokens, (tokens % 2 == 0).sum(dim=1).gt(8).long())


def build_model():
    """Two layers that classify the mean of the embedded tokens."""
    return nn.Sequential(nn.EmbeddingBag(64, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


class TableTracker(GeneralTracker):
    """A custom tracker: a file with a row for each value. Accelerator calls it on the main process only."""

    name = "table"
    requires_logging_directory = False

    def __init__(self, path):
        super().__init__()
        self.path = path

    @property
    def tracker(self):
        return self.rows

    def start(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.path.open("w", newline="")
        self.rows = csv.writer(self.file)

    def store_init_configuration(self, values):
        self.rows.writerows(["", name, value] for name, value in values.items())

    def log(self, values, step=None, **kwargs):
        self.rows.writerows([step, name, float(value)] for name, value in values.items())

    def finish(self):
        self.file.close()


def train(args):
    # The feature: what to log with, and where. Names of trackers and custom trackers can be mixed.
    accelerator = Accelerator(
        log_with=[*args.log_with, TableTracker(args.project_dir / "table.csv")], project_dir=args.project_dir
    )
    accelerator.init_trackers("tracking", config={"lr": args.lr, "batch_size": args.batch_size, "seed": args.seed})
    set_seed(args.seed)
    train_loader = DataLoader(load_data(2048, seed=0), args.batch_size, shuffle=True)
    test_loader = DataLoader(load_data(500, seed=1), batch_size=50)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    step = 0
    for epoch in range(1, args.num_epochs + 1):
        model.train()
        for tokens, labels in train_loader:
            loss = cross_entropy(model(tokens), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % args.logging_steps == 0:
                accelerator.log({"train/loss": accelerator.reduce(loss.detach(), "mean")}, step=step)
        model.eval()
        correct, samples = 0, 0
        for tokens, labels in test_loader:
            with torch.no_grad():
                logits, labels = accelerator.gather_for_metrics((model(tokens), labels))
            correct += (logits.argmax(dim=1) == labels).sum().item()
            samples += len(labels)
        accelerator.log({"test/accuracy": correct / samples, "epoch": epoch}, step=step)
        accelerator.print(f"epoch {epoch}: accuracy {correct / samples:.3f}")
        # A single tracker, on every process: where it does not log, this does nothing.
        if "tensorboard" in args.log_with:
            weights = model.state_dict().popitem()[1]
            accelerator.get_tracker("tensorboard", unwrap=True).add_histogram("bias", weights, step)
    accelerator.end_training()  # trackers write what they have, and end


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log_with", nargs="*", default=["tensorboard"], help="names of trackers, or all")
    parser.add_argument("--project_dir", type=Path, default=Path("out/tracking"))
    parser.add_argument("--logging_steps", type=int, default=10)
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=32, help="samples per process and step")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_args())
