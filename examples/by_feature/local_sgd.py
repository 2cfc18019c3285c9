"""Local SGD: processes train independently, and average their parameters every few steps instead of all gradients."""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accelerate_cpp import Accelerator
from accelerate_cpp.local_sgd import LocalSGD
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


def difference(accelerator, model):
    """The largest difference between parameters of the processes."""
    own = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyones = accelerator.gather(own.unsqueeze(0))
    return (everyones.amax(dim=0) - everyones.amin(dim=0)).max().item()


def train(args):
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)
    train_loader = DataLoader(load_data(1600, seed=0), args.batch_size, shuffle=True)
    test_loader = DataLoader(load_data(500, seed=1), batch_size=50)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    for epoch in range(1, args.num_epochs + 1):
        model.train()
        # The feature: the block keeps gradients local, and its end averages the parameters once more.
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=args.local_sgd_steps) as local_sgd:
            for tokens, labels in train_loader:
                with accelerator.accumulate(model):
                    accelerator.backward(cross_entropy(model(tokens), labels))
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    local_sgd.step()  # counts a step; every local_sgd_steps-th one averages
            inside = difference(accelerator, model)
        after = difference(accelerator, model)
        loss, accuracy = evaluate(accelerator, model, test_loader)
        accelerator.print(
            f"epoch {epoch}: loss {loss:.6f}, accuracy {accuracy:.3f}; "
            f"processes differ by {inside:.2e} before the last average, by {after:.2e} after it"
        )
    accelerator.end_training()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local_sgd_steps", type=int, default=8, help="optimizer steps between averages")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1, help="batches per optimizer step")
    parser.add_argument("--batch_size", type=int, default=32, help="samples per batch and process")
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_args())
