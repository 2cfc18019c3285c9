# expects: prepared-model-unused unprepared-loader unprepared-optimizer
import torch
from parts import loader, loss_of, network

from accelerate_cpp import Accelerator

accelerator = Accelerator()
model, batches = network(), loader()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
accelerator.prepare(model, optimizer, batches)
for _ in range(2):
    for batch in batches:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
