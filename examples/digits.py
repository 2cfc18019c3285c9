"""Trains a small network on scikit-learn's 1,797 handwritten digits, on any number of processes."""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split
from tqdm import tqdm

from accelerate_cpp import Accelerator, DataLoaderConfiguration


def load_data():
    """Training and test set: images of shape (1, 8, 8) in 0…1, fp32, with their labels 0…9."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    return random_split(dataset, [1437, 360], generator=torch.Generator().manual_seed(0))


def build_model():
    """A small convolutional network; without batch norm and dropout, it trains alike on any number of processes."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def train(args):
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    torch.manual_seed(args.seed)
    train_set, test_set = load_data()
    order = torch.Generator().manual_seed(args.seed)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True, generator=order)
    test_loader = DataLoader(test_set, batch_size=args.batch_size)
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr, total_steps=args.epochs * len(train_loader)
    )
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )
    history = []
    for epoch in range(1, args.epochs + 1):
        model.train()
        started = time.perf_counter()
        for images, labels in tqdm(train_loader, f"epoch {epoch}", disable=not accelerator.is_local_main_process):
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
        seconds = time.perf_counter() - started
        model.eval()
        test_loss, correct = 0.0, 0
        for images, labels in test_loader:
            with torch.no_grad():
                logits, labels = accelerator.gather_for_metrics((model(images), labels))
            test_loss += cross_entropy(logits, labels, reduction="sum").item()
            correct += (logits.argmax(dim=1) == labels).sum().item()
        history.append(
            {
                "epoch": epoch,
                "loss": test_loss / len(test_set),
                "accuracy": correct / len(test_set),
                "samples_per_second": len(train_loader) * args.batch_size / seconds,
                "seconds": seconds,
                "steps": len(train_loader),
            }
        )
        accelerator.print(f"epoch {epoch}: loss {history[-1]['loss']:.4f}, accuracy {history[-1]['accuracy']:.4f}")
    if args.metrics and accelerator.is_main_process:
        run = {"processes": int(os.environ.get("WORLD_SIZE", "1")), "threads": torch.get_num_threads()}
        args.metrics.write_text(json.dumps({**run, "epochs": history}, indent=1))


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per optimizer step")
    parser.add_argument("--lr", type=float, default=5e-3, help="peak of the learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--metrics", type=Path, help="JSON file for the figures of every epoch")
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_args())
