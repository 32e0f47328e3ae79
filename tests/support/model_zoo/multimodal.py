"""Models of images and text together."""

from __future__ import annotations

from typing import Any

import torch

from .batches import Batch, right_padded
from .kit import DECODER, TEXT, VISION, Model

IMAGE_TOKEN = 98


def pairs(config: Any) -> Batch:
    return {"input_ids": torch.randint(5, 90, (2, 12)), "attention_mask": right_padded(2, 12), "pixel_values": torch.randn(2, 3, 32, 32)}


def matched(config: Any) -> Batch:
    return pairs(config) | {"return_loss": True}


def described(config: Any) -> Batch:
    return pairs(config) | {"labels": torch.randint(5, 90, (2, 12))}


def captions(config: Any) -> Batch:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(5, 90, (2, 8))}


def interleaved(config: Any) -> Batch:
    """Text in which sixteen places stand for the sixteen patches of an image."""
    tokens = torch.randint(5, 90, (2, 24))
    tokens[:, 1:17] = IMAGE_TOKEN
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": torch.randn(2, 3, 32, 32),
        "labels": tokens.clamp(max=90),
    }


MULTIMODAL = (
    Model(
        "clip",
        "CLIPModel",
        {"projection_dim": 16},
        matched,
        "eager",
        parts={"text_config": ("CLIPTextConfig", TEXT | {"eos_token_id": 98}), "vision_config": ("CLIPVisionConfig", VISION)},
    ),
    Model(
        "blip",
        "BlipForConditionalGeneration",
        {"image_text_hidden_size": 16, "projection_dim": 16},
        described,
        parts={"text_config": ("BlipTextConfig", TEXT | {"encoder_hidden_size": 32}), "vision_config": ("BlipVisionConfig", VISION)},
    ),
    Model("vilt", "ViltForMaskedLM", TEXT | VISION | {"max_image_length": -1}, described),
    Model(
        "llava",
        "LlavaForConditionalGeneration",
        {"image_token_id": IMAGE_TOKEN, "vision_feature_select_strategy": "default", "vision_feature_layer": -1},
        interleaved,
        parts={"text_config": ("LlamaConfig", DECODER), "vision_config": ("CLIPVisionConfig", VISION)},
    ),
    Model(
        "vision-encoder-decoder",
        "VisionEncoderDecoderModel",
        {"pad_token_id": 0, "decoder_start_token_id": 1},
        captions,
        parts={
            "encoder": ("ViTConfig", VISION),
            "decoder": ("GPT2Config", TEXT | {"n_positions": 64, "add_cross_attention": True, "is_decoder": True}),
        },
    ),
)
