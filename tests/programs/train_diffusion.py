"""The idioms of the training scripts of Diffusers, one task each, on models that are made on the spot.

As there: everything frozen is moved by hand and not prepared; hooks write and read the models; the main process alone
saves, and takes old checkpoints away; a run continues from the latest one. Prints the losses as JSON.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import shutil
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.state import is_initialized
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration, set_seed
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from diffusers.utils.torch_utils import is_compiled_module
from diffusion_models import (
    VOCABULARY,
    Pictures,
    autoencoder,
    conditional_unet,
    control_net,
    noise_scheduler,
    text_encoder,
    unconditional_unet,
)
from program import parser, report

logger = get_logger(__name__)
CHECKPOINT = "checkpoint"


class Task:
    """Models, of which ``trained`` are prepared, and the loss of a batch."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.scheduler = noise_scheduler()
        self.unet: Any = unconditional_unet() if name == "unconditional" else conditional_unet()
        self.frozen: dict[str, Any] = {}
        self.trained: dict[str, Any] = {"unet": self.unet}
        if name != "unconditional":
            self.frozen = {"vae": autoencoder(), "text_encoder": text_encoder()}
        if name == "lora":
            from peft import LoraConfig

            self.unet.requires_grad_(False)
            self.unet.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
        elif name == "dreambooth":
            self.trained["text_encoder"] = self.frozen.pop("text_encoder")
        elif name == "textual_inversion":
            self.trained = {"text_encoder": self.frozen.pop("text_encoder")}
            self.frozen["unet"] = self.unet
            self.trained["text_encoder"].requires_grad_(False)
            self.trained["text_encoder"].get_input_embeddings().requires_grad_(True)
        elif name == "controlnet":
            self.trained = {"controlnet": control_net(self.unet)}
            self.frozen["unet"] = self.unet
        for model in self.frozen.values():
            model.requires_grad_(False)
            model.to(device)

    def parameters(self) -> list[torch.nn.Parameter]:
        if self.name == "textual_inversion":
            return list(self.trained["text_encoder"].get_input_embeddings().parameters())
        return [weight for model in self.trained.values() for weight in model.parameters() if weight.requires_grad]

    def loss(self, models: dict[str, Any], batch: dict[str, torch.Tensor]) -> torch.Tensor:
        models = self.frozen | models
        steps = batch["timestep"].long()
        if self.name == "unconditional":
            noise = batch["pixel_noise"]
            noisy = self.scheduler.add_noise(batch["pixel_values"], noise, steps)
            return F.mse_loss(models["unet"](noisy, steps).sample, noise)
        noise = batch["latent_noise"]
        latents = models["vae"].encode(batch["pixel_values"]).latent_dist.mode() * 0.18
        noisy = self.scheduler.add_noise(latents, noise, steps)
        words = models["text_encoder"](batch["input_ids"], return_dict=False)[0]
        extra = {}
        if self.name == "controlnet":
            down, middle = models["controlnet"](
                noisy, steps, encoder_hidden_states=words, controlnet_cond=batch["conditioning"], return_dict=False
            )
            extra = {"down_block_additional_residuals": list(down), "mid_block_additional_residual": middle}
        return F.mse_loss(models["unet"](noisy, steps, words, return_dict=False, **extra)[0].float(), noise.float())


class Run:
    """One run of a script: what it makes, prepares, saves and loads."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.folder = arguments.output_dir
        self.accelerator = Accelerator(
            gradient_accumulation_steps=arguments.gradient_accumulation_steps,
            log_with=None,
            project_config=ProjectConfiguration(project_dir=self.folder, logging_dir=self.folder),
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        )
        assert is_initialized()
        logging.basicConfig(level=logging.INFO)
        logger.info(self.accelerator.state, main_process_only=False)
        set_seed(0)
        if self.accelerator.is_main_process:
            os.makedirs(self.folder, exist_ok=True)
        self.task = Task(arguments.task, self.accelerator.device)
        self.names = list(self.task.trained)
        self.ema = EMAModel(self.task.unet.parameters()) if arguments.task == "text_to_image" else None
        self.accelerator.register_save_state_pre_hook(self.save_models)
        self.accelerator.register_load_state_pre_hook(self.load_models)
        self.prepare()

    def prepare(self) -> None:
        processes, steps = self.accelerator.num_processes, self.arguments.max_train_steps
        optimizer = torch.optim.AdamW(self.task.parameters(), lr=1e-2)
        data = torch.utils.data.DataLoader(Pictures(24), batch_size=self.arguments.train_batch_size)
        schedule = get_scheduler("linear", optimizer, num_warmup_steps=processes, num_training_steps=steps * processes)
        *models, self.optimizer, self.data, self.schedule = self.accelerator.prepare(
            *self.task.trained.values(), optimizer, data, schedule
        )
        self.models = dict(zip(self.names, models, strict=True))
        if self.ema is not None:
            self.ema.to(self.accelerator.device)
        if self.accelerator.is_main_process:
            self.accelerator.init_trackers(self.task.name, config=vars(self.arguments))

    def unwrap(self, model: Any) -> Any:
        model = self.accelerator.unwrap_model(model)
        return model._orig_mod if is_compiled_module(model) else model

    def save_models(self, models: list[Any], weights: list[Any], output_dir: str) -> None:
        if self.accelerator.is_main_process:
            if self.ema is not None:
                torch.save(self.ema.state_dict(), os.path.join(output_dir, "ema.bin"))
            for name, model in zip(reversed(self.names), reversed(list(models)), strict=True):
                torch.save(self.unwrap(model).state_dict(), os.path.join(output_dir, f"{name}.bin"))
                weights.pop()  # so that they are not saved again

    def load_models(self, models: list[Any], input_dir: str) -> None:
        if self.ema is not None:
            self.ema.load_state_dict(torch.load(os.path.join(input_dir, "ema.bin")))
        for name in reversed(self.names):
            self.unwrap(models.pop()).load_state_dict(torch.load(os.path.join(input_dir, f"{name}.bin")))

    def checkpoints(self) -> list[str]:
        found = [name for name in os.listdir(self.folder) if name.startswith(CHECKPOINT)]
        return sorted(found, key=lambda name: int(name.split("-")[1]))

    def save(self, step: int) -> None:
        """On the main process alone."""
        old = self.checkpoints()
        for name in old[: max(0, len(old) - self.arguments.checkpoints_total_limit + 1)]:
            shutil.rmtree(os.path.join(self.folder, name))
        self.accelerator.save_state(os.path.join(self.folder, f"{CHECKPOINT}-{step}"))

    def resume(self) -> int:
        latest = self.checkpoints()[-1]
        self.accelerator.print(f"resuming from {latest}")
        self.accelerator.load_state(os.path.join(self.folder, latest))
        return int(latest.split("-")[1])

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """The mean of the losses of all processes."""
        accelerator, inverts = self.accelerator, self.task.name == "textual_inversion"
        with accelerator.accumulate(*self.models.values()):
            loss = self.task.loss(self.models, batch)
            average = accelerator.gather(loss.repeat(self.arguments.train_batch_size)).mean()
            accelerator.backward(loss)
            if inverts:
                kept = torch.arange(VOCABULARY, device=accelerator.device) < VOCABULARY // 2
                words = self.unwrap(self.models["text_encoder"]).get_input_embeddings().weight
                before = words.data.clone()
            elif accelerator.sync_gradients:
                accelerator.clip_grad_norm_(chain(*(model.parameters() for model in self.models.values())), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            if inverts:
                with torch.no_grad():
                    words[kept] = before[kept]
        return average.item() / self.arguments.gradient_accumulation_steps

    def epoch(self, number: int, step: int, losses: list[float]) -> int:
        """Trains from ``step`` to the end of the epoch, or of the run; returns the step then."""
        micro_batches = self.arguments.gradient_accumulation_steps
        steps_per_epoch = math.ceil(len(self.data) / micro_batches)
        done = step - number * steps_per_epoch
        data = self.accelerator.skip_first_batches(self.data, done * micro_batches) if done else self.data
        sum_of_losses = 0.0
        for batch in data:
            sum_of_losses += self.step(batch)
            if not self.accelerator.sync_gradients:
                continue
            if self.ema is not None:
                self.ema.step(self.models["unet"].parameters())
            step += 1
            self.accelerator.log({"train_loss": sum_of_losses, "lr": self.schedule.get_last_lr()[0]}, step=step)
            losses.append(sum_of_losses)
            sum_of_losses = 0.0
            if self.accelerator.is_main_process and step % self.arguments.checkpointing_steps == 0:
                self.save(step)
            if step >= self.arguments.max_train_steps:
                break
        return step

    def finish(self, losses: list[float]) -> None:
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            for name, model in self.models.items():
                self.unwrap(model).save_pretrained(os.path.join(self.folder, name))
        report(self.folder, losses, self.accelerator)
        self.accelerator.end_training()


def train(arguments: argparse.Namespace) -> None:
    run = Run(arguments)
    step = run.resume() if arguments.resume_from_checkpoint else 0
    steps_per_epoch = math.ceil(len(run.data) / arguments.gradient_accumulation_steps)
    losses: list[float] = []
    for number in range(step // steps_per_epoch, math.ceil(arguments.max_train_steps / steps_per_epoch)):
        for model in run.models.values():
            model.train()
        step = run.epoch(number, step, losses)
    run.finish(losses)


if __name__ == "__main__":
    options = parser()
    options.add_argument("--gradient_accumulation_steps", type=int, default=1)
    train(options.parse_args())
