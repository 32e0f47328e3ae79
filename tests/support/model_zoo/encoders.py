"""Encoders, with dense, sparse, hashed, low-rank, Fourier and convolutional mixing of tokens."""

from __future__ import annotations

from .batches import classified, masked, masked_of, unmasked
from .kit import LOUD, TEXT, Model

DISENTANGLED = TEXT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0}


ENCODERS = (
    Model("bert", "BertForMaskedLM", TEXT, masked, "eager"),
    Model("albert", "AlbertForMaskedLM", TEXT | {"embedding_size": 16}, masked),
    Model(
        "deberta-v2",
        "DebertaV2ForMaskedLM",
        DISENTANGLED | {"position_buckets": 4, "share_att_key": True, "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3},
        masked,
    ),
    Model("fnet", "FNetForMaskedLM", TEXT, unmasked),
    Model(
        "funnel",
        "FunnelForMaskedLM",
        {
            "vocab_size": 99,
            "block_sizes": [1, 1],
            "num_decoder_layers": 1,
            "d_model": 32,
            "n_head": 4,
            "d_head": 8,
            "d_inner": 48,
            "initializer_std": 0.2,
            "pad_token_id": 0,
        },
        masked,
    ),
    Model("longformer", "LongformerForMaskedLM", TEXT | {"attention_window": [4, 4]}, masked),
    # its pooled attention cannot take a mask in transformers 5.23
    Model("nystromformer", "NystromformerForMaskedLM", TEXT | {"segment_means_seq_len": 12, "num_landmarks": 4}, unmasked),
    Model(
        "reformer",
        "ReformerForMaskedLM",
        TEXT
        | {
            "is_decoder": False,
            "attn_layers": ["local", "lsh"],
            "attention_head_size": 8,
            "axial_pos_shape": [8, 8],
            "axial_pos_embds_dim": [16, 16],
            "lsh_attn_chunk_length": 4,
            "local_attn_chunk_length": 4,
            "num_buckets": 4,
            "feed_forward_size": 48,
            "hash_seed": 0,
        },
        masked_of(64),
        seed=2,
    ),
    Model(
        "perceiver",
        "PerceiverForMaskedLM",
        LOUD
        | {
            "vocab_size": 99,
            "num_latents": 6,
            "d_latents": 32,
            "d_model": 32,
            "num_blocks": 1,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 2,
            "num_cross_attention_heads": 2,
            "qk_channels": 32,
            "v_channels": 32,
            "max_position_embeddings": 12,
        },
        masked,
    ),
    Model("xlnet", "XLNetLMHeadModel", LOUD | {"vocab_size": 99, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}, masked),
    Model("convbert", "ConvBertForMaskedLM", TEXT | {"embedding_size": 32, "head_ratio": 2, "conv_kernel_size": 3}, masked),
    Model(
        "canine",
        "CanineForSequenceClassification",
        TEXT
        | {
            "num_hash_functions": 2,
            "num_hash_buckets": 64,
            "local_transformer_stride": 4,
            "upsampling_kernel_size": 3,
            "downsampling_rate": 2,
        },
        classified,
    ),
    Model("esm", "EsmForMaskedLM", TEXT | {"mask_token_id": 4, "position_embedding_type": "rotary"}, masked),
    Model(
        "modernbert",
        "ModernBertForMaskedLM",
        TEXT | {"local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
        masked,
    ),
)
