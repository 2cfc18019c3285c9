"""Trains a small network on images, with mixed precision, gradient accumulation, checkpoints and a tracker."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from accelerate_cpp import Accelerator, DataLoaderConfiguration
from accelerate_cpp.utils import set_seed


def load_data():
    """Training and test set: images of shape (1, 8, 8) in 0…1, fp32, with their labels 0…9."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    return random_split(dataset, [1437, 360], generator=torch.Generator().manual_seed(0))


def build_model():
    """A convolution and a linear layer."""
    return nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10))


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


def make_accelerator(args):
    return Accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),  # goes on within an epoch
        log_with="tensorboard" if args.with_tracking else None,
        project_dir=args.output_dir,
    )


def train(args):
    accelerator = make_accelerator(args)
    accelerator.init_trackers("complete_cv_example", config={"lr": args.lr, "batch_size": args.batch_size})
    set_seed(args.seed)
    train_set, test_set = load_data()
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=50)
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    steps = args.num_epochs * len(train_loader) // args.gradient_accumulation_steps  # as one process counts them
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=steps)
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
    for epoch in range(train_loader.iteration, args.num_epochs):
        model.train()
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    progress.steps += 1
                    accelerator.log({"train_loss": loss.item()}, step=progress.steps)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and progress.steps % args.checkpointing_steps == 0:
                accelerator.save_state(f"{args.output_dir}/step_{progress.steps}")
        loss, accuracy = evaluate(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch + 1}: loss {loss:.9f}, accuracy {accuracy:.3f}, steps {progress.steps}")
        accelerator.log({"loss": loss, "accuracy": accuracy}, step=progress.steps)
    accelerator.end_training()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16", "fp8"], help="default: as launched")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2, help="batches per optimizer step")
    parser.add_argument("--checkpointing_steps", type=int, default=10, help="optimizer steps between checkpoints")
    parser.add_argument("--resume_from_checkpoint", help="folder of a checkpoint: <output_dir>/step_<n>")
    parser.add_argument("--output_dir", default="out/complete_cv_example", help="for all files")
    parser.add_argument("--with_tracking", action="store_true", help="log to TensorBoard")
    parser.add_argument("--batch_size", type=int, default=16, help="samples per batch and process")
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_args())
