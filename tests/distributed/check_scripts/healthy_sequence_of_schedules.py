# expects: nothing
import torch
from parts import loader, loss_of, network
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from accelerate_cpp import Accelerator

accelerator = Accelerator()
model, batches = network(), loader(64)
optimizer = torch.optim.AdamW(model.parameters())
steps = 3 * len(batches)
warmup, decay = LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, T_max=steps - 4)
scheduler = SequentialLR(optimizer, [warmup, decay], milestones=[4])
model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)
for _ in range(3):
    for batch in batches:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        scheduler.step()
    accelerator.save_state("state")
