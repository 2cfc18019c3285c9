# expects: nothing
import torch
from parts import loader, loss_of, network

from accelerate_cpp import Accelerator
from accelerate_cpp.utils import ProjectConfiguration

accelerator = Accelerator(project_config=ProjectConfiguration("project", automatic_checkpoint_naming=True))
model, batches = network(), loader()
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
accelerator.resume()
for _ in range(2):
    for batch in batches:

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, batch)  # noqa: B023 - called before the next batch
            accelerator.backward(loss)
            return loss

        optimizer.step(closure)
    accelerator.save_state()
