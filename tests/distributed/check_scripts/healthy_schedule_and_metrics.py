# expects: nothing
import torch
from parts import loader, loss_of, network

from accelerate_cpp import Accelerator

accelerator = Accelerator()
model, batches = network(), loader(60)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3 * len(batches))
model, optimizer, batches, evaluation, scheduler = accelerator.prepare(model, optimizer, batches, loader(27), scheduler)
for _ in range(3):
    for batch in batches:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        scheduler.step()
    model.eval()
    right = 0
    for inputs, labels in evaluation:
        with torch.no_grad():
            guesses, labels = accelerator.gather_for_metrics((model(inputs).argmax(1), labels))
        right += (guesses == labels).sum().item()
