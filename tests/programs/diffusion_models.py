"""Diffusion models of a few thousand weights, made of configurations: what training scripts of Diffusers load."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKL, ControlNetModel, DDPMScheduler, UNet2DConditionModel, UNet2DModel
from transformers import CLIPTextConfig, CLIPTextModel

WIDTH, VOCABULARY, WORDS, PIXELS = 16, 40, 6, 16
_UNET = {
    "sample_size": PIXELS // 2,
    "layers_per_block": 1,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
}


def noise_scheduler() -> Any:
    return DDPMScheduler(num_train_timesteps=100)


def unconditional_unet() -> Any:
    blocks = {"down_block_types": ("DownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "UpBlock2D")}
    return UNet2DModel(**_UNET | {"sample_size": PIXELS}, **blocks)


def conditional_unet() -> Any:
    return UNet2DConditionModel(
        **_UNET,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=WIDTH,
        attention_head_dim=4,
    )


def autoencoder() -> Any:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        block_out_channels=(8, 8),
        latent_channels=4,
        norm_num_groups=4,
    )


def text_encoder() -> Any:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=WORDS,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    )


def control_net(unet: Any) -> Any:
    return ControlNetModel.from_unet(unet, conditioning_channels=3)


class Pictures(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Pictures with words, and for each its noise and its time step: equal on any number of ranks."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        chance = torch.Generator().manual_seed(index)
        return {
            "pixel_values": torch.randn(3, PIXELS, PIXELS, generator=chance),
            "conditioning": torch.rand(3, 4 * PIXELS, 4 * PIXELS, generator=chance),  # which the net takes down by 8
            "input_ids": torch.randint(2, VOCABULARY, (WORDS,), generator=chance),
            "pixel_noise": torch.randn(3, PIXELS, PIXELS, generator=chance),
            "latent_noise": torch.randn(4, PIXELS // 2, PIXELS // 2, generator=chance),
            "timestep": torch.randint(0, 100, (1,), generator=chance)[0],
        }
