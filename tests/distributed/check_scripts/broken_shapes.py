# expects: script-failed
import torch
from parts import loader, loss_of

from accelerate_cpp import Accelerator

accelerator = Accelerator()
model, batches = torch.nn.Linear(3, 2), loader()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
for _ in range(2):
    for batch in batches:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
