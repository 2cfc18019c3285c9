# expects: hard-coded-device
import torch
from parts import loader, network

from accelerate_cpp import Accelerator

accelerator = Accelerator()
model, batches = network(), loader()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
for _ in range(2):
    for batch in batches:
        inputs = batch[0].to("cuda")
        optimizer.zero_grad()
        accelerator.backward(model(inputs).sum())
        optimizer.step()
