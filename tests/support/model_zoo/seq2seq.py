"""Encoder-decoders."""

from __future__ import annotations

from typing import Any

from .batches import seq2seq
from .kit import Model

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "init_std": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
BOTH = SIZES | {"max_position_embeddings": 64}
T5 = {
    "vocab_size": 99,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
}

SEQ2SEQ = (
    Model("t5", "T5ForConditionalGeneration", T5, seq2seq),
    Model(
        "longt5",
        "LongT5ForConditionalGeneration",
        T5 | {"encoder_attention_type": "transient-global", "local_radius": 3, "global_block_size": 4},
        seq2seq,
    ),
    Model("bart", "BartForConditionalGeneration", BOTH, seq2seq, "eager"),
    Model(
        "led",
        "LEDForConditionalGeneration",
        SIZES | {"attention_window": [4, 4], "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
        seq2seq,
    ),
    Model("m2m-100", "M2M100ForConditionalGeneration", BOTH, seq2seq, seed=2),
    Model(
        "prophetnet",
        "ProphetNetForConditionalGeneration",
        {
            "vocab_size": 99,
            "hidden_size": 32,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "max_position_embeddings": 64,
            "init_std": 0.2,
            "ngram": 2,
            "num_buckets": 8,
            "relative_max_distance": 16,
            "pad_token_id": 0,
            "decoder_start_token_id": 1,
        },
        seq2seq,
    ),
    Model(
        "nllb-moe",
        "NllbMoeForConditionalGeneration",
        BOTH | {"num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2, "expert_capacity": 64, "router_jitter_noise": 0.0},
        seq2seq,
    ),
)
