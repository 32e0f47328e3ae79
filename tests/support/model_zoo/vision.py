"""Vision models: patches, windows, convolutions, batch statistics, detection, segmentation, and a recurrent decoder."""

from __future__ import annotations

from typing import Any

import torch

from .batches import Batch, images, segments, videos
from .kit import LOUD, VISION, Model, redraw

STAGES = LOUD | {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}
PYRAMID = STAGES | {"num_attention_heads": [1, 2, 2, 4]}
WINDOWS = LOUD | {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "image_size": 32, "patch_size": 4}
RESIDUAL = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}
FRAMES = VISION | {"num_frames": 4}


def softened(model: torch.nn.Module) -> None:
    """SAM's random Fourier features turn as often over the image as those of the released weights, not sixteen times as often."""
    redraw(model)
    model.shared_image_embedding.positional_embedding.div_(16)


def points(config: Any) -> Batch:
    return {"pixel_values": torch.randn(1, 3, 32, 32), "input_points": torch.rand(1, 1, 2, 2) * 32}


VISIONS = (
    Model("vit", "ViTForImageClassification", VISION, images(), "eager"),
    Model("beit", "BeitForImageClassification", VISION | {"use_relative_position_bias": True}, images()),
    Model(
        "vit-mae",
        "ViTMAEForPreTraining",
        VISION
        | {"decoder_hidden_size": 16, "decoder_num_attention_heads": 2, "decoder_num_hidden_layers": 1, "decoder_intermediate_size": 32},
        images(labels=False),
    ),
    Model("videomae", "VideoMAEForVideoClassification", FRAMES | {"tubelet_size": 2}, videos),
    Model("convnextv2", "ConvNextV2ForImageClassification", STAGES, images()),
    Model("segformer", "SegformerForSemanticSegmentation", PYRAMID | {"decoder_hidden_size": 16}, segments),
    Model(
        "mobilevit",
        "MobileViTForImageClassification",
        LOUD | {"hidden_sizes": [32, 32, 32], "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32], "num_attention_heads": 4, "image_size": 64},
        images(64, 8),
    ),
    Model("resnet", "ResNetForImageClassification", RESIDUAL | {"layer_type": "basic"}, images(64, 8)),
    Model("swinv2", "Swinv2ForImageClassification", WINDOWS, images()),
    Model(
        "cvt",
        "CvtForImageClassification",
        LOUD | {"embed_dim": [8, 16, 32], "num_heads": [1, 2, 2], "depth": [1, 2, 3], "drop_path_rate": [0.0, 0.0, 0.0]},
        images(64, 8),
    ),
    Model(
        "detr",
        "DetrForObjectDetection",
        {
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_queries": 5,
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
        },
        images(64, labels=False),
        parts={"backbone_config": ("ResNetConfig", RESIDUAL | {"layer_type": "basic", "out_features": ["stage2"]})},
    ),
    Model(
        "dpt",
        "DPTForSemanticSegmentation",
        VISION
        | {
            "image_size": 64,
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [16, 16, 16, 16],
            "fusion_hidden_size": 16,
            "is_hybrid": False,
        },
        segments,
    ),
    Model(
        "sam",
        "SamModel",
        {},
        points,
        parts={
            "vision_config": (
                "SamVisionConfig",
                VISION | {"output_channels": 16, "mlp_dim": 48, "window_size": 2, "global_attn_indexes": [1], "num_pos_feats": 8},
            ),
            "prompt_encoder_config": (
                "SamPromptEncoderConfig",
                {"hidden_size": 16, "image_size": 32, "patch_size": 8, "image_embedding_size": 4},
            ),
            "mask_decoder_config": (
                "SamMaskDecoderConfig",
                {"hidden_size": 16, "mlp_dim": 32, "num_attention_heads": 2, "iou_head_hidden_dim": 16, "num_hidden_layers": 1},
            ),
        },
        tweak=softened,
    ),
    # a GRU cell reads the image's features and writes a table's structure
    Model(
        "slanet",
        "SLANetForTableRecognition",
        {"post_conv_out_channels": 16, "out_channels": 10, "hidden_size": 16, "max_text_length": 4},
        images(64, 4, labels=False),
        parts={"backbone_config": ("PPLCNetConfig", {"scale": 0.25, "out_features": ["stage2", "stage3", "stage4", "stage5"]})},
    ),
)
