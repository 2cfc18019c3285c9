# expects: schedule-too-long
import torch
from parts import loader, loss_of, network

from accelerate_cpp import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=2)
model, batches = network(), loader()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3 * len(batches))
model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)
for _ in range(3):
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
