# expects: nothing
import torch
from parts import loader, loss_of, network

from accelerate_cpp import Accelerator
from accelerate_cpp.local_sgd import LocalSGD

accelerator = Accelerator()
model, batches = network(), loader()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
with LocalSGD(accelerator, model, local_sgd_steps=2) as local_sgd:
    for batch in batches:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        local_sgd.step()
