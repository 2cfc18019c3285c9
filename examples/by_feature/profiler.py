"""Profiles some steps of training: a table of where the time goes, and a trace of every process."""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accelerate_cpp import Accelerator, ProfileKwargs
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
    # The feature: options of torch.profiler, and the folder where each process writes profile_<rank>.json, for
    # chrome://tracing or ui.perfetto.dev. Without activities, the profiler records all devices that there are.
    profiling = ProfileKwargs(record_shapes=args.record_shapes, output_trace_dir=args.output_trace_dir)
    accelerator = Accelerator(kwargs_handlers=[profiling])
    set_seed(args.seed)
    train_loader = DataLoader(load_data(2048, seed=0), args.batch_size, shuffle=True)
    test_loader = DataLoader(load_data(500, seed=1), batch_size=50)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    model.train()
    with accelerator.profile() as profiler:
        for step, (tokens, labels) in enumerate(train_loader, start=1):
            accelerator.backward(cross_entropy(model(tokens), labels))
            optimizer.step()
            optimizer.zero_grad()
            if step == args.steps:
                break
    by = "cpu_time_total" if accelerator.device.type == "cpu" else "device_time_total"
    accelerator.print(profiler.key_averages().table(sort_by=by, row_limit=args.rows))
    loss, accuracy = evaluate(accelerator, model, test_loader)
    accelerator.print(f"loss {loss:.6f}, accuracy {accuracy:.3f} after {step} profiled steps")
    accelerator.end_training()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5, help="training steps, all of which are profiled")
    parser.add_argument("--rows", type=int, default=8, help="rows of the table")
    parser.add_argument("--record_shapes", action="store_true", help="record the shapes of operators' inputs")
    parser.add_argument("--output_trace_dir", default="out/profiler", help="folder of the traces")
    parser.add_argument("--batch_size", type=int, default=64, help="samples per batch and process")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_args())
