# expects: no-accelerator
import torch
from parts import loader, loss_of, network

model, batches = network(), loader()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in batches:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()
