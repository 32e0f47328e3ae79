"""The models of the zoo by family. The rule of `sizes.py` makes them tiny; what stands here is what the rule does not know of."""

from __future__ import annotations

from typing import Any

import torch

from .batches import (
    Batch,
    causal,
    classified,
    ids,
    images,
    masked,
    masked_of,
    mono,
    right_padded,
    segments,
    seq2seq,
    unmasked,
    videos,
    waves,
)
from .kit import Model, redraw

ENCODERS = (
    Model("bert", "BertForMaskedLM", masked, attention="eager"),
    Model("albert", "AlbertForMaskedLM", masked, {"embedding_size": 16}),
    Model(
        "deberta-v2", "DebertaV2ForMaskedLM", masked,
        {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4, "share_att_key": True,
         "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3},
    ),
    Model("fnet", "FNetForMaskedLM", unmasked),
    Model(
        "funnel", "FunnelForMaskedLM", masked,
        {"block_sizes": [1, 1], "num_decoder_layers": 1, "initializer_range": 0.1, "initializer_std": 0.2},
    ),
    Model("longformer", "LongformerForMaskedLM", masked, {"attention_window": [4, 4]}),
    # its pooled attention cannot take a mask in transformers 5.23
    Model("nystromformer", "NystromformerForMaskedLM", unmasked, {"segment_means_seq_len": 12, "num_landmarks": 4}),
    Model(
        "reformer", "ReformerForMaskedLM", masked_of(64),
        {"is_decoder": False, "attn_layers": ["local", "lsh"], "attention_head_size": 8, "axial_pos_shape": [8, 8],
         "axial_pos_embds_dim": [16, 16], "lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4, "num_buckets": 4,
         "feed_forward_size": 48, "hash_seed": 0},
        seed=2,
    ),
    Model(
        "perceiver", "PerceiverForMaskedLM", masked,
        {"num_latents": 6, "d_latents": 32, "num_blocks": 1, "num_self_attends_per_block": 2, "num_self_attention_heads": 2,
         "num_cross_attention_heads": 2, "qk_channels": 32, "v_channels": 32, "max_position_embeddings": 12},
    ),
    Model("xlnet", "XLNetLMHeadModel", masked, {"pad_token_id": 5}),
    Model("convbert", "ConvBertForMaskedLM", masked, {"conv_kernel_size": 3}),
    Model(
        "canine", "CanineForSequenceClassification", classified,
        {"vocab_size": 99, "num_hash_functions": 2, "num_hash_buckets": 64, "local_transformer_stride": 4,
         "upsampling_kernel_size": 3, "downsampling_rate": 2},
    ),
    Model("esm", "EsmForMaskedLM", masked, {"vocab_size": 99, "mask_token_id": 4, "position_embedding_type": "rotary"}),
    Model(
        "modernbert", "ModernBertForMaskedLM", masked,
        {"local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
)  # fmt: skip

GROUPED = {"num_key_value_heads": 2}
# Position by rotation, by table, by sine, by ALiBi.
DECODERS = (
    Model("gpt2", "GPT2LMHeadModel", causal, attention="eager"),
    Model("gpt-neox", "GPTNeoXForCausalLM", causal, {"rotary_pct": 0.5}),
    Model("gptj", "GPTJForCausalLM", causal, {"rotary_dim": 4}),
    Model("bloom", "BloomForCausalLM", causal),
    Model("opt", "OPTForCausalLM", causal),
    Model("llama", "LlamaForCausalLM", causal, GROUPED, attention="eager"),
    Model("gemma2", "Gemma2ForCausalLM", causal, GROUPED | {"sliding_window": 6, "query_pre_attn_scalar": 8}, attention="eager"),
    Model("qwen3", "Qwen3ForCausalLM", causal, GROUPED),
    Model("falcon", "FalconForCausalLM", causal, {"multi_query": False, "ffn_hidden_size": 128}),
    Model("xglm", "XGLMForCausalLM", causal),
)

# Routers, scatters and grouped products.
MIXTURES = (
    Model("mixtral", "MixtralForCausalLM", causal, GROUPED, seed=3),
    Model("qwen2-moe", "Qwen2MoeForCausalLM", causal, GROUPED),
    Model("deepseek-v3", "DeepseekV3ForCausalLM", causal, {"first_k_dense_replace": 1, "topk_method": "greedy"}, seed=3),
    Model("gpt-oss", "GptOssForCausalLM", causal, GROUPED),
    Model(
        "llama4", "Llama4ForCausalLM", causal,
        GROUPED | {"intermediate_size_mlp": 48, "attention_chunk_size": 8, "no_rope_layers": [1, 0]},
    ),
    Model("minimax", "MiniMaxForCausalLM", causal, GROUPED | {"block_size": 8}),
)  # fmt: skip

# State spaces, gated delta nets, linear attention and other recurrences, alone and beside attention.
RECURRENT = (
    Model("mamba", "MambaForCausalLM", causal, {"state_size": 8, "time_step_rank": 4}),
    Model("mamba2", "Mamba2ForCausalLM", causal, {"state_size": 8, "num_heads": 8, "n_groups": 1, "chunk_size": 4}),
    Model("rwkv", "RwkvForCausalLM", unmasked, {"pad_token_id": 0}, tweak=redraw),
    Model(
        "recurrent-gemma", "RecurrentGemmaForCausalLM", causal,
        GROUPED | {"initializer_range": 0.2, "block_types": ["recurrent", "attention"], "attention_window_size": 8},
    ),
    Model(
        "falcon-h1", "FalconH1ForCausalLM", causal,
        GROUPED | {"mamba_n_heads": 8, "mamba_d_state": 8, "mamba_chunk_size": 4, "mamba_d_ssm": 64},
    ),
    Model(
        "qwen3-next", "Qwen3NextForCausalLM", causal,
        GROUPED | {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                   "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    ),
    Model(
        "jamba", "JambaForCausalLM", causal,
        GROUPED | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
        seed=1,
    ),
    Model("lfm2", "Lfm2ForCausalLM", causal, GROUPED | {"layer_types": ["conv", "full_attention"]}),
)  # fmt: skip

T5 = {"eos_token_id": 1, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
SEQ2SEQ = (
    Model("t5", "T5ForConditionalGeneration", seq2seq, T5),
    Model(
        "longt5", "LongT5ForConditionalGeneration", seq2seq,
        T5 | {"encoder_attention_type": "transient-global", "local_radius": 3, "global_block_size": 4},
    ),
    Model("bart", "BartForConditionalGeneration", seq2seq, {"forced_eos_token_id": None}, attention="eager"),
    Model(
        "led", "LEDForConditionalGeneration", seq2seq,
        {"attention_window": [4, 4], "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    ),
    Model("m2m-100", "M2M100ForConditionalGeneration", seq2seq, seed=2),
    Model(
        "prophetnet", "ProphetNetForConditionalGeneration", seq2seq,
        {"num_buckets": 8, "relative_max_distance": 16, "decoder_start_token_id": 1},
    ),
    Model(
        "nllb-moe", "NllbMoeForConditionalGeneration", seq2seq,
        {"encoder_sparse_step": 2, "decoder_sparse_step": 2, "router_jitter_noise": 0.0},
    ),
)  # fmt: skip


def softened(model: torch.nn.Module) -> None:
    """SAM's random Fourier features turn as often over the image as those of the released weights, not sixteen times as often."""
    redraw(model)
    model.shared_image_embedding.positional_embedding.div_(16)


def points(config: Any) -> Batch:
    return {"pixel_values": torch.randn(1, 3, 32, 32), "input_points": torch.rand(1, 1, 2, 2) * 32}


STAGES = {"num_hidden_layers": 4, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}
RESIDUAL = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
# Patches, windows, convolutions, batch statistics, detection, segmentation, and a recurrent decoder.
VISIONS = (
    Model("vit", "ViTForImageClassification", images(), attention="eager"),
    Model("beit", "BeitForImageClassification", images(), {"use_relative_position_bias": True}),
    Model(
        "vit-mae", "ViTMAEForPreTraining", images(labels=False),
        {"decoder_hidden_size": 16, "decoder_num_attention_heads": 2, "decoder_num_hidden_layers": 1, "decoder_intermediate_size": 32},
    ),
    Model("videomae", "VideoMAEForVideoClassification", videos, {"num_frames": 4}),
    Model("convnextv2", "ConvNextV2ForImageClassification", images(), STAGES | {"patch_size": 4}),
    Model(
        "segformer", "SegformerForSemanticSegmentation", segments,
        STAGES | {"num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 16},
    ),
    Model(
        "mobilevit", "MobileViTForImageClassification", images(64, 8),
        {"hidden_sizes": [32, 32, 32], "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32], "image_size": 64, "patch_size": 2},
    ),
    Model("resnet", "ResNetForImageClassification", images(64, 8), RESIDUAL),
    Model(
        "swinv2", "Swinv2ForImageClassification", images(),
        {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 4},
    ),
    Model(
        "cvt", "CvtForImageClassification", images(64, 8),
        {"embed_dim": [8, 16, 32], "num_heads": [1, 2, 2], "depth": [1, 2, 3], "drop_path_rate": [0.0, 0.0, 0.0]},
    ),
    Model(
        "detr", "DetrForObjectDetection", images(64, labels=False),
        {"num_hidden_layers": 1, "decoder_layers": 1, "num_queries": 5, "init_std": 0.02, "use_timm_backbone": False,
         "use_pretrained_backbone": False, "backbone": None},
        parts={"backbone_config": ("ResNetConfig", RESIDUAL | {"out_features": ["stage2"]})},
    ),
    Model(
        "dpt", "DPTForSemanticSegmentation", segments,
        {"num_hidden_layers": 4, "image_size": 64, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16, 16, 16, 16],
         "fusion_hidden_size": 16},
    ),
    Model(
        "sam", "SamModel", points, {"initializer_range": 0.02},
        parts={
            "vision_config": (
                "SamVisionConfig", {"output_channels": 16, "mlp_dim": 48, "window_size": 2, "global_attn_indexes": [1], "num_pos_feats": 8}
            ),
            "prompt_encoder_config": ("SamPromptEncoderConfig", {"hidden_size": 16}),
            "mask_decoder_config": (
                "SamMaskDecoderConfig",
                {"hidden_size": 16, "mlp_dim": 32, "num_attention_heads": 2, "iou_head_hidden_dim": 16, "num_hidden_layers": 1},
            ),
        },
        tweak=softened,
    ),
    # a GRU cell reads the image's features and writes a table's structure
    Model(
        "slanet", "SLANetForTableRecognition", images(64, 4, labels=False),
        {"post_conv_out_channels": 16, "out_channels": 10, "hidden_size": 16, "max_text_length": 4},
        parts={"backbone_config": ("PPLCNetConfig", {"scale": 0.25, "out_features": ["stage2", "stage3", "stage4", "stage5"]})},
    ),
)  # fmt: skip


def mel(config: Any) -> Batch:
    return {"input_features": torch.randn(2, 16, 64), "labels": ids(config, 2, 8)}


def spoken(config: Any) -> Batch:
    return {"input_ids": ids(config, 2, 10), "attention_mask": right_padded(2, 10), "labels": torch.randn(2, 12, 16)}


WAVE = {
    "vocab_size": 20, "conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False, "ctc_zero_infinity": True,
}  # fmt: skip
# Convolutional front ends, CTC, encoder-decoders, an LSTM inside a codec, synthesis.
AUDIO = (
    Model("wav2vec2", "Wav2Vec2ForCTC", waves, WAVE, attention="eager"),
    Model("sew-d", "SEWDForCTC", waves, WAVE | {"position_buckets": 8}),
    Model("wavlm", "WavLMForCTC", waves, WAVE | {"num_buckets": 16, "max_bucket_distance": 32}, seed=1),
    Model("wav2vec2-conformer", "Wav2Vec2ConformerForCTC", waves, WAVE),
    Model(
        "whisper", "WhisperForConditionalGeneration", mel,
        {"decoder_start_token_id": 1, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32},
    ),
    Model(
        "speecht5", "SpeechT5ForTextToSpeech", spoken,
        {"vocab_size": 20, "num_mel_bins": 16, "speech_decoder_prenet_units": 16, "speech_decoder_postnet_units": 16,
         "speech_decoder_postnet_layers": 2, "speaker_embedding_dim": 0, "encoder_max_relative_position": 16,
         "use_guided_attention_loss": False},
        seed=1,
    ),
    Model(
        "encodec", "EncodecModel", mono,
        {"num_filters": 4, "hidden_size": 16, "codebook_size": 16, "upsampling_ratios": [4, 2], "num_lstm_layers": 1,
         "sampling_rate": 640, "target_bandwidths": [1.0]},
    ),
    Model(
        "dac", "DacModel", mono,
        {"encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "decoder_hidden_size": 32, "n_codebooks": 2, "codebook_size": 16,
         "codebook_dim": 4},
    ),
)  # fmt: skip

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
    found = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "pixel_values": torch.randn(2, 3, 32, 32)}
    return found | {"labels": tokens.clamp(max=90)}


MULTIMODAL = (
    Model(
        "clip", "CLIPModel", matched, {"projection_dim": 16}, attention="eager",
        parts={"text_config": ("CLIPTextConfig", {"eos_token_id": 98}), "vision_config": ("CLIPVisionConfig", {})},
    ),
    Model(
        "blip", "BlipForConditionalGeneration", described, {"image_text_hidden_size": 16, "projection_dim": 16},
        parts={"text_config": ("BlipTextConfig", {}), "vision_config": ("BlipVisionConfig", {})},
    ),
    Model("vilt", "ViltForMaskedLM", described, {"max_image_length": -1}),
    Model(
        "llava", "LlavaForConditionalGeneration", interleaved,
        {"image_token_id": IMAGE_TOKEN, "vision_feature_select_strategy": "default", "vision_feature_layer": -1},
        parts={"text_config": ("LlamaConfig", GROUPED), "vision_config": ("CLIPVisionConfig", {})},
    ),
    Model(
        "vision-encoder-decoder", "VisionEncoderDecoderModel", captions, {"pad_token_id": 0, "decoder_start_token_id": 1},
        parts={"encoder": ("ViTConfig", {}), "decoder": ("GPT2Config", {"add_cross_attention": True, "is_decoder": True})},
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
