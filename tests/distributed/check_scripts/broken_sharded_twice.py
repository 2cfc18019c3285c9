# expects: sharded-twice
import torch
from parts import dataset, loss_of, network
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from accelerate_cpp import Accelerator

accelerator = Accelerator()
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = DataLoader(dataset(64), batch_size=4, sampler=DistributedSampler(dataset(64)))
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
for _ in range(2):
    for batch in batches:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
