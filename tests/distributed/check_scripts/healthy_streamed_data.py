# expects: nothing
import torch
from parts import loss_of, network
from torch.utils.data import DataLoader, IterableDataset

from accelerate_cpp import Accelerator


class Numbers(IterableDataset):
    def __iter__(self):
        return ((torch.full((4,), float(number)), number % 2) for number in range(40))


accelerator = Accelerator()
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = DataLoader(Numbers(), batch_size=4)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
for _ in range(2):
    for batch in batches:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
