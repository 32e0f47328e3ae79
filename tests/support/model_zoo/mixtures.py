"""Mixtures of experts: routers, scatters and grouped products."""

from __future__ import annotations

from .batches import causal
from .kit import DECODER, Model

EXPERTS = DECODER | {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 16, "decoder_sparse_step": 1}
GROUPED = EXPERTS | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "topk_method": "greedy"}
LATENT = GROUPED | {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}

MIXTURES = (
    Model("mixtral", "MixtralForCausalLM", EXPERTS, causal, seed=3),
    Model("qwen2-moe", "Qwen2MoeForCausalLM", SHARED, causal),
    Model("deepseek-v3", "DeepseekV3ForCausalLM", LATENT, causal, seed=3),
    Model("gpt-oss", "GptOssForCausalLM", EXPERTS, causal),
    Model(
        "llama4",
        "Llama4ForCausalLM",
        EXPERTS | {"intermediate_size_mlp": 48, "interleave_moe_layer_step": 1, "attention_chunk_size": 8, "no_rope_layers": [1, 0]},
        causal,
    ),
    Model("minimax", "MiniMaxForCausalLM", EXPERTS | {"block_size": 8}, causal),
)
