# expects: nothing
import torch
from parts import loader, loss_of, network

from accelerate_cpp import Accelerator

accelerator = Accelerator()
model, batches = network(), loader()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
average = torch.optim.swa_utils.AveragedModel(accelerator.unwrap_model(model))
accelerator.register_for_checkpointing(average)
for _ in range(2):
    for batch in batches:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        average.update_parameters(accelerator.unwrap_model(model))
    accelerator.save_state("state")
    accelerator.load_state("state")
