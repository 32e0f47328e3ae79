"""The models of the zoo by family. The rule of `sizes.py` makes them tiny; what stands here is what the rule does not know of."""

from __future__ import annotations

from typing import Any

import torch

from .batches import Batch, causal, ids, images, masked, right_padded, seq2seq, waves
from .kit import Model

ENCODERS = (
    Model("bert", "BertForMaskedLM", masked, attention="eager"),
    Model(
        "deberta-v2", "DebertaV2ForMaskedLM", masked,
        {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4, "share_att_key": True,
         "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3},
    ),
    Model("longformer", "LongformerForMaskedLM", masked, {"attention_window": [4, 4]}),
    Model(
        "modernbert", "ModernBertForMaskedLM", masked,
        {"local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
)  # fmt: skip

GROUPED = {"num_key_value_heads": 2}
# Position by rotation, by table, by sine, by ALiBi.
DECODERS = (
    Model("gpt2", "GPT2LMHeadModel", causal, attention="eager"),
    Model("bloom", "BloomForCausalLM", causal),
    Model("opt", "OPTForCausalLM", causal),
    Model("llama", "LlamaForCausalLM", causal, GROUPED, attention="eager"),
    Model("gemma2", "Gemma2ForCausalLM", causal, GROUPED | {"sliding_window": 6, "query_pre_attn_scalar": 8}, attention="eager"),
    Model("falcon", "FalconForCausalLM", causal, {"multi_query": False, "ffn_hidden_size": 128}),
)

# Routers, scatters and grouped products.
MIXTURES = (
    Model("mixtral", "MixtralForCausalLM", causal, GROUPED, seed=3),
    Model("qwen2-moe", "Qwen2MoeForCausalLM", causal, GROUPED),
    Model("gpt-oss", "GptOssForCausalLM", causal, GROUPED),
    Model(
        "llama4", "Llama4ForCausalLM", causal,
        GROUPED | {"intermediate_size_mlp": 48, "attention_chunk_size": 8, "no_rope_layers": [1, 0]},
    ),
)  # fmt: skip

# State spaces and other recurrences, alone and with attention.
RECURRENT = (
    Model("mamba2", "Mamba2ForCausalLM", causal, {"state_size": 8, "num_heads": 8, "n_groups": 1, "chunk_size": 4}),
    Model(
        "recurrent-gemma", "RecurrentGemmaForCausalLM", causal,
        GROUPED | {"initializer_range": 0.2, "block_types": ["recurrent", "attention"], "attention_window_size": 8},
    ),
    Model(
        "jamba", "JambaForCausalLM", causal,
        GROUPED | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
        seed=1,
    ),
)  # fmt: skip

T5 = {"eos_token_id": 1, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
SEQ2SEQ = (
    Model("t5", "T5ForConditionalGeneration", seq2seq, T5),
    Model("bart", "BartForConditionalGeneration", seq2seq, {"forced_eos_token_id": None}, attention="eager"),
)  # fmt: skip


RESIDUAL = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
# Patches, windows, convolutions, batch statistics and detection.
VISIONS = (
    Model("vit", "ViTForImageClassification", images(), attention="eager"),
    Model("resnet", "ResNetForImageClassification", images(64, 8), RESIDUAL),
    Model(
        "swinv2", "Swinv2ForImageClassification", images(),
        {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 4},
    ),
    Model(
        "detr", "DetrForObjectDetection", images(64, labels=False),
        {"num_hidden_layers": 1, "decoder_layers": 1, "num_queries": 5, "init_std": 0.02, "use_timm_backbone": False,
         "use_pretrained_backbone": False, "backbone": None},
        parts={"backbone_config": ("ResNetConfig", RESIDUAL | {"out_features": ["stage2"]})},
    ),
)  # fmt: skip


def mel(config: Any) -> Batch:
    return {"input_features": torch.randn(2, 16, 64), "labels": ids(config, 2, 8)}


WAVE = {
    "vocab_size": 20, "conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False, "ctc_zero_infinity": True,
}  # fmt: skip
# Convolutional front ends, CTC, an encoder-decoder.
AUDIO = (
    Model("wav2vec2", "Wav2Vec2ForCTC", waves, WAVE, attention="eager"),
    Model(
        "whisper", "WhisperForConditionalGeneration", mel,
        {"decoder_start_token_id": 1, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32},
    ),
)  # fmt: skip

IMAGE_TOKEN = 98


def matched(config: Any) -> Batch:
    tokens = {"input_ids": torch.randint(5, 90, (2, 12)), "attention_mask": right_padded(2, 12)}
    return tokens | {"pixel_values": torch.randn(2, 3, 32, 32), "return_loss": True}


def interleaved(config: Any) -> Batch:
    """Text in which sixteen places stand for the sixteen patches of an image."""
    tokens = torch.randint(5, 90, (2, 24))
    tokens[:, 1:17] = IMAGE_TOKEN
    found = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "pixel_values": torch.randn(2, 3, 32, 32)}
    return found | {"labels": tokens.clamp(max=90)}


MULTIMODAL = (
    Model(
        "clip", "CLIPModel", matched, {"projection_dim": 16}, attention="eager",
        parts={"text_config": ("CLIPTextConfig", {"eos_token_id": 98}), "vision_config": ("CLIPVisionConfig", {})},
    ),
    Model(
        "llava", "LlavaForConditionalGeneration", interleaved,
        {"image_token_id": IMAGE_TOKEN, "vision_feature_select_strategy": "default", "vision_feature_layer": -1},
        parts={"text_config": ("LlamaConfig", GROUPED), "vision_config": ("CLIPVisionConfig", {})},
    ),
)  # fmt: skip

FAMILIES: dict[str, tuple[Model, ...]] = {
    "encoders": ENCODERS,
    "decoders": DECODERS,
    "mixtures of experts": MIXTURES,
    "state spaces and recurrences": RECURRENT,
    "encoder-decoders": SEQ2SEQ,
    "vision": VISIONS,
    "audio": AUDIO,
    "multi-modal": MULTIMODAL,
}
MODELS: dict[str, Model] = {model.name: model for family in FAMILIES.values() for model in family}
