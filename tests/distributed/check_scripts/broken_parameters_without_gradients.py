# expects: parameters-without-gradients
import torch
from parts import loader
from torch import nn

from accelerate_cpp import Accelerator


class WithSpareHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.spare = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, inputs):
        return self.body(inputs)


accelerator = Accelerator()
model, batches = WithSpareHead(), loader()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
for _ in range(2):
    for batch in batches:
        inputs, labels = batch
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
        optimizer.step()
