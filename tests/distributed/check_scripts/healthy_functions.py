# expects: nothing
import torch
from parts import loader, loss_of, network

from accelerate_cpp import Accelerator


def train(accelerator, model, optimizer, scheduler, batches):
    model.train()
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def main(epochs=4, accumulation=2):
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    model, batches = network(), loader(64, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters())
    steps = epochs * len(batches) // accumulation
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=steps)
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)
    for _ in range(epochs):
        train(accelerator, model, optimizer, scheduler, batches)
    accelerator.save_model(model, "model")
    accelerator.save({"epochs": epochs}, "run.bin")


if __name__ == "__main__":
    main()
