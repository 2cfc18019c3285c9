# expects: nothing
import torch
from parts import loader, loss_of, network

from accelerate_cpp import Accelerator

accelerator = Accelerator()
model, batches = network(), loader()
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
unread = iter(batches)
for _ in range(100):
    try:
        batch = next(unread)
    except StopIteration:
        unread = iter(batches)
        batch = next(unread)
    optimizer.zero_grad()
    accelerator.backward(loss_of(model, batch))
    optimizer.step()
