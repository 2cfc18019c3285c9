# expects: nothing
import torch
from parts import loader, loss_of, network

from accelerate_cpp import Accelerator, DataLoaderConfiguration

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
model, batches = network(), loader(20)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
with accelerator.join_uneven_inputs([model]):
    for batch in batches:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
