"""Gives every token the same weight while gradients are accumulated, in plain PyTorch, on one process."""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

PADDING = 0


def load_sentences(samples, seed):
    """Sentences of 2 to 16 tokens 1…31, int64, padded at the end; most tokens follow from the previous one."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 32, (samples, 16), generator=generator)
    follows = torch.rand(tokens.shape, generator=generator) < 0.9
    for place in range(1, 16):
        tokens[:, place] = torch.where(follows[:, place], tokens[:, place - 1] * 5 % 31 + 1, tokens[:, place])
    lengths = torch.randint(2, 17, (samples, 1), generator=generator)
    return TensorDataset(tokens.masked_fill(torch.arange(16) >= lengths, PADDING))


class LanguageModel(nn.Module):
    """Reads a sentence from left to right, and returns the logits of the next token after each token."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 32)
        self.reader = nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, 32)

    def forward(self, tokens):
        return self.head(self.reader(self.embedding(tokens))[0])


def train(args):
    torch.manual_seed(args.seed)
    order = torch.Generator().manual_seed(args.seed)
    loader = DataLoader(load_sentences(1024, seed=0), args.batch_size, shuffle=True, generator=order)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for epoch in range(1, args.num_epochs + 1):
        total_loss, waiting = torch.zeros(2), torch.tensor(0)
        for index, (tokens,) in enumerate(loader, start=1):
            targets = tokens[:, 1:]
            logits = model(tokens[:, :-1])
            loss_sum = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum")
            num_tokens = (targets != PADDING).sum()
            loss_sum.backward()
            waiting += num_tokens
            if index % args.gradient_accumulation_steps == 0 or index == len(loader):
                for parameter in model.parameters():
                    parameter.grad /= waiting
                waiting.zero_()
                optimizer.step()
                optimizer.zero_grad()
            total_loss += torch.stack([loss_sum.detach(), num_tokens])
        loss, num_tokens = total_loss.tolist()
        print(f"epoch {epoch}: loss {loss / num_tokens:.6f} per token, {num_tokens:.0f} tokens")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4, help="batches per optimizer step")
    parser.add_argument("--batch_size", type=int, default=8, help="sentences per batch")
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_args())
