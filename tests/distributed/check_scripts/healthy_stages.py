# expects: nothing
import torch
from parts import loader, network
from torch.nn.functional import cross_entropy

from accelerate_cpp import Accelerator, ParallelismConfig

accelerator = Accelerator(parallelism_config=ParallelismConfig(pp_size=2))
model, batches = network(), loader()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
for inputs, targets in batches:
    accelerator.train_batch(inputs, cross_entropy, targets)
    optimizer.step()
    optimizer.zero_grad()
accelerator.save_state("checkpoint")
