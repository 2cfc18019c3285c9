# expects: mismatched-collective ranks-diverge
# flags: --wait 8
import torch
from parts import loader, loss_of, network

from accelerate_cpp import Accelerator

accelerator = Accelerator()
model, batches = network(), loader()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
for _ in range(2):
    for batch in batches:
        loss = loss_of(model, batch)
        if accelerator.is_main_process:
            print(accelerator.gather(loss.detach()).mean())
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
