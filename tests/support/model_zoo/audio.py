"""Audio models: convolutional front ends, CTC, encoder-decoders, an LSTM inside a codec, synthesis."""

from __future__ import annotations

from typing import Any

import torch

from .batches import Batch, ids, mono, right_padded, waves
from .kit import LOUD, TEXT, Model
from .seq2seq import SIZES

WAVE = TEXT | {
    "vocab_size": 20,
    "conv_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "feat_extract_norm": "group",
    "ctc_zero_infinity": True,
}
SQUEEZED = WAVE | {"squeeze_factor": 2}


def mel(config: Any) -> Batch:
    return {"input_features": torch.randn(2, 16, 64), "labels": ids(config, 2, 8)}


def frames(config: Any) -> Batch:
    return {"input_features": torch.randn(2, 32, 16), "attention_mask": right_padded(2, 32, 8), "labels": ids(config, 2, 8)}


def spoken(config: Any) -> Batch:
    return {"input_ids": ids(config, 2, 10), "attention_mask": right_padded(2, 10), "labels": torch.randn(2, 12, 16)}


AUDIO = (
    Model("wav2vec2", "Wav2Vec2ForCTC", WAVE, waves, "eager"),
    Model(
        "sew-d",
        "SEWDForCTC",
        SQUEEZED
        | {
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8,
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
        },
        waves,
    ),
    Model("wavlm", "WavLMForCTC", WAVE | {"num_buckets": 16, "max_bucket_distance": 32}, waves, seed=1),
    Model("wav2vec2-conformer", "Wav2Vec2ConformerForCTC", WAVE | {"position_embeddings_type": "relative"}, waves),
    Model(
        "whisper",
        "WhisperForConditionalGeneration",
        SIZES
        | {
            "num_mel_bins": 16,
            "max_source_positions": 32,
            "max_target_positions": 32,
            "decoder_start_token_id": 1,
            "apply_spec_augment": False,
        },
        mel,
    ),
    Model(
        "speecht5",
        "SpeechT5ForTextToSpeech",
        SIZES
        | LOUD
        | {
            "vocab_size": 20,
            "hidden_size": 32,
            "num_mel_bins": 16,
            "speech_decoder_prenet_units": 16,
            "speech_decoder_postnet_units": 16,
            "speech_decoder_postnet_layers": 2,
            "speaker_embedding_dim": 0,
            "encoder_max_relative_position": 16,
            "use_guided_attention_loss": False,
        },
        spoken,
        seed=1,
    ),
    Model(
        "encodec",
        "EncodecModel",
        {
            "num_filters": 4,
            "hidden_size": 16,
            "codebook_dim": 16,
            "codebook_size": 16,
            "num_residual_layers": 1,
            "upsampling_ratios": [4, 2],
            "num_lstm_layers": 1,
            "sampling_rate": 640,
            "target_bandwidths": [1.0],
        },
        mono,
    ),
    Model(
        "dac",
        "DacModel",
        {
            "encoder_hidden_size": 8,
            "downsampling_ratios": [2, 4],
            "decoder_hidden_size": 32,
            "n_codebooks": 2,
            "codebook_size": 16,
            "codebook_dim": 4,
            "hidden_size": 32,
            "upsampling_ratios": [4, 2],
        },
        mono,
    ),
)
