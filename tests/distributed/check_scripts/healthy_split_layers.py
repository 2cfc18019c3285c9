# expects: nothing
import torch
from parts import loader, loss_of, network

from accelerate_cpp import Accelerator, ParallelismConfig

accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
model, batches = network(), loader()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
for batch in batches:
    accelerator.backward(loss_of(model, batch))
    optimizer.step()
    optimizer.zero_grad()
accelerator.save_state("checkpoint")
