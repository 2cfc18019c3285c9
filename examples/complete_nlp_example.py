"""Trains a small transformer with mixed precision, gradient accumulation and clipping, checkpoints and a tracker."""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accelerate_cpp import Accelerator, DataLoaderConfiguration
from accelerate_cpp.utils import set_seed


def load_data(samples, seed):
    """Sequences of 16 tokens 0…63, int64, with label 1 if more than half of the tokens are even, else 0."""
    tokens = torch.randint(0, 64, (samples, 16), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(tokens, (tokens % 2 == 0).sum(dim=1).gt(8).long())


def build_model():
    """A transformer layer over the embedded tokens, with a classifier on its outputs."""
    return nn.Sequential(
        nn.Embedding(64, 32),
        nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=64, dropout=0.1, batch_first=True),
        nn.Flatten(),
        nn.Linear(16 * 32, 2),
    )


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
    accelerator.init_trackers("complete_nlp_example", config={"lr": args.lr, "batch_size": args.batch_size})
    set_seed(args.seed, device_specific=True)  # dropout differs between processes
    train_loader = DataLoader(load_data(2048, seed=0), args.batch_size, shuffle=True)
    test_loader = DataLoader(load_data(500, seed=1), batch_size=50)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    steps = args.num_epochs * len(train_loader) // args.gradient_accumulation_steps  # as one process counts them
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
    for epoch in range(train_loader.iteration, args.num_epochs):
        model.train()
        for tokens, labels in train_loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(tokens), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
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
    parser.add_argument("--output_dir", default="out/complete_nlp_example", help="for all files")
    parser.add_argument("--with_tracking", action="store_true", help="log to TensorBoard")
    parser.add_argument("--batch_size", type=int, default=32, help="samples per batch and process")
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_args())
