# expects: nothing
import torch
from parts import loader, loss_of, network

from accelerate_cpp import Accelerator, DeepSpeedPlugin

accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2), gradient_accumulation_steps=2)
model, batches = network(), loader()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
for _ in range(2):
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
