"""Evaluates on several processes as on one, even if the samples cannot be divided evenly."""

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


def train(args):
    accelerator = Accelerator()
    set_seed(args.seed)
    test_set = load_data(args.test_samples, seed=1)
    train_loader = DataLoader(load_data(2048, seed=0), args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=50)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    for _ in range(args.num_epochs):
        model.train()
        for tokens, labels in train_loader:
            accelerator.backward(cross_entropy(model(tokens), labels))
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    gathered, predictions, references, words = 0, [], [], []
    for tokens, labels in test_loader:
        with torch.no_grad():
            predicted = model(tokens).argmax(dim=1)
        gathered += len(accelerator.gather(predicted))
        # The feature: samples that were repeated to complete the last batch are removed again, from tensors …
        predicted, labels = accelerator.gather_for_metrics((predicted, labels))
        predictions.append(predicted)
        references.append(labels)
        # … and from anything else with one entry per sample.
        words += accelerator.gather_for_metrics([f"{first}-{last}" for first, *_, last in tokens.tolist()])
    correct = (torch.cat(predictions) == torch.cat(references)).sum().item()
    everything, everyones_labels = (tensor.to(accelerator.device) for tensor in test_set.tensors)
    with torch.no_grad():
        alone = (accelerator.unwrap_model(model)(everything).argmax(dim=1) == everyones_labels).sum().item()
    accelerator.print(f"gather: {gathered} samples; gather_for_metrics: {len(torch.cat(references))} and {len(words)}")
    accelerator.print(
        f"correct: {correct} on all processes, {alone} on one; accuracy {correct / args.test_samples:.3f}"
    )
    accelerator.end_training()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--test_samples", type=int, default=507, help="of the test set, which is read in batches of 50")
    parser.add_argument("--batch_size", type=int, default=64, help="samples per batch and process")
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_args())
