# expects: nothing
import torch
from parts import loader, network

from accelerate_cpp import Accelerator

accelerator = Accelerator()
model, critic, batches = network(), torch.nn.Linear(2, 1), loader()
optimizer, critics = torch.optim.Adam(model.parameters()), torch.optim.Adam(critic.parameters())
model, critic, optimizer, critics, batches = accelerator.prepare(model, critic, optimizer, critics, batches)
for inputs, _ in batches:
    critics.zero_grad()
    accelerator.backward(critic(model(inputs).detach()).mean())
    critics.step()
    optimizer.zero_grad()
    accelerator.backward(-critic(model(inputs)).mean())
    optimizer.step()
