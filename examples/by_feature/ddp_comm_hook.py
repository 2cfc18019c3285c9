"""Compresses gradients on their way between the processes, with a communication hook."""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accelerate_cpp import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs
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
    # The feature: a hook, and possibly fp16 or bf16 for what it sends. PowerSGD sends low-rank matrices, after some
    # steps without compression at the start; its options are those of torch's PowerSGDState.
    low_rank = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 4}
    compression = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType(args.ddp_comm_hook),
        comm_wrapper=DDPCommunicationHookType(args.ddp_comm_wrapper),
        comm_state_option=low_rank if args.ddp_comm_hook == "power_sgd" else {},
    )
    accelerator = Accelerator(kwargs_handlers=[compression])
    set_seed(args.seed)
    train_loader = DataLoader(load_data(2048, seed=0), args.batch_size, shuffle=True)
    test_loader = DataLoader(load_data(500, seed=1), batch_size=50)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    for epoch in range(1, args.num_epochs + 1):
        model.train()
        for tokens, labels in train_loader:
            accelerator.backward(cross_entropy(model(tokens), labels))
            optimizer.step()
            optimizer.zero_grad()
        loss, accuracy = evaluate(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch}: loss {loss:.9f}, accuracy {accuracy:.3f}")
    accelerator.end_training()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    hooks, wrappers = ["no", "fp16", "bf16", "power_sgd"], ["no", "fp16", "bf16"]
    parser.add_argument("--ddp_comm_hook", choices=hooks, default="bf16", help="how gradients are compressed")
    parser.add_argument("--ddp_comm_wrapper", choices=wrappers, default="no", help="compression of what the hook sends")
    parser.add_argument("--batch_size", type=int, default=64, help="samples per batch and process")
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_args())
