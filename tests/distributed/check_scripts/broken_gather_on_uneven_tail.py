# expects: gather-on-uneven-tail
import torch
from parts import loader, loss_of, network

from accelerate_cpp import Accelerator

accelerator = Accelerator()
model, batches = network(), loader()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, batches, evaluation = accelerator.prepare(model, optimizer, batches, loader(27))
for _ in range(2):
    for batch in batches:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
    model.eval()
    right = 0
    for inputs, labels in evaluation:
        with torch.no_grad():
            guesses, labels = accelerator.gather((model(inputs).argmax(1), labels))
        right += (guesses == labels).sum().item()
