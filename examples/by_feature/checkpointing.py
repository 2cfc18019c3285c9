"""Saves the whole state of a run. A restarted run continues from it, and ends as if it had not been interrupted."""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accelerate_cpp import Accelerator, DataLoaderConfiguration
from accelerate_cpp.utils import ProjectConfiguration, set_seed


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


class Progress:
    """The steps of the optimizer so far: anything that has these two methods can be part of a checkpoint."""

    def __init__(self):
        self.steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def train(args):
    # The feature: checkpoints are numbered in <project_dir>/checkpoints; a stateful loader continues within an epoch.
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
        project_config=ProjectConfiguration(
            project_dir=args.output_dir, automatic_checkpoint_naming=True, total_limit=args.total_limit
        ),
    )
    set_seed(args.seed)
    train_loader = DataLoader(load_data(2048, seed=0), args.batch_size, shuffle=True)
    test_loader = DataLoader(load_data(500, seed=1), batch_size=50)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=args.num_epochs * len(train_loader))
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
    else:
        accelerator.resume()  # from the newest whole checkpoint; a run that has none yet starts from the beginning
    if progress.steps:
        accelerator.print(f"resumed after {progress.steps} steps, in epoch {train_loader.iteration + 1}")
    for epoch in range(train_loader.iteration, args.num_epochs):  # complete passes, as the checkpoint knows them
        model.train()
        for tokens, labels in train_loader:
            accelerator.backward(cross_entropy(model(tokens), labels))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress.steps += 1
            if args.checkpointing_steps.isdigit() and progress.steps % int(args.checkpointing_steps) == 0:
                accelerator.save_state()
        loss, accuracy = evaluate(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch + 1}: loss {loss:.9f}, accuracy {accuracy:.3f}, steps {progress.steps}")
        if args.checkpointing_steps == "epoch":
            accelerator.save_state()
    accelerator.end_training()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpointing_steps", default="10", help='steps between checkpoints, or "epoch"')
    parser.add_argument("--output_dir", type=Path, default=Path("out/checkpointing"), help="folder of the checkpoints")
    parser.add_argument("--total_limit", type=int, help="how many checkpoints are kept; default: all")
    parser.add_argument("--resume_from_checkpoint", help="folder of a checkpoint; default: the newest")
    parser.add_argument("--batch_size", type=int, default=64, help="samples per batch and process")
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_args())
