"""Finds the batch size that fits into memory, and accumulates gradients so that steps have equal numbers of samples."""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accelerate_cpp import Accelerator, find_executable_batch_size
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
    accelerator = Accelerator()
    batch_size = args.observed_batch_size

    def half():
        nonlocal batch_size
        batch_size //= 2
        return batch_size

    # The feature: this function is called again with half the size, on all processes, when any of them runs out of
    # memory. So it creates whatever depends on the size or was changed by the last try.
    @find_executable_batch_size(starting_batch_size=args.observed_batch_size, reduce_batch_size_fn=half)
    def train_with(batch_size):
        accelerator.free_memory()
        accelerator.gradient_accumulation_steps = args.observed_batch_size // batch_size
        set_seed(args.seed)
        train_loader = DataLoader(load_data(2048, seed=0), batch_size, shuffle=True)
        test_loader = DataLoader(load_data(500, seed=1), batch_size=50)
        model = build_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
        for epoch in range(1, args.num_epochs + 1):
            model.train()
            for tokens, labels in train_loader:
                with accelerator.accumulate(model):
                    loss = cross_entropy(model(tokens), labels)
                    if len(tokens) > args.pretended_limit and accelerator.is_last_process:
                        raise torch.OutOfMemoryError(f"out of memory: pretended, for batches of {len(tokens)}")
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
            loss, accuracy = evaluate(accelerator, model, test_loader)
            accelerator.print(f"epoch {epoch}: loss {loss:.6f}, accuracy {accuracy:.3f}")
        return batch_size, accelerator.gradient_accumulation_steps

    size, steps = train_with()
    accelerator.print(f"batch size {size}, {steps} batches per step")
    accelerator.end_training()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--observed_batch_size", type=int, default=64, help="samples per optimizer step and process")
    parser.add_argument(
        "--pretended_limit",
        type=int,
        default=16,
        help="larger batches run out of memory, as if the last process had a small device",
    )
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_args())
