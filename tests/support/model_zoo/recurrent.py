"""State spaces, gated delta nets, linear attention and other recurrences, alone and beside attention."""

from __future__ import annotations

from .batches import causal, unmasked
from .kit import DECODER, TEXT, Model, redraw
from .mixtures import EXPERTS, GROUPED, SHARED

MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4}
DELTA = SHARED | {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}

RECURRENT = (
    Model("mamba", "MambaForCausalLM", TEXT | {"state_size": 8, "conv_kernel": 4, "expand": 2, "time_step_rank": 4}, causal),
    Model(
        "mamba2",
        "Mamba2ForCausalLM",
        TEXT | {"state_size": 8, "num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1, "chunk_size": 4},
        causal,
    ),
    Model("falcon-mamba", "FalconMambaForCausalLM", TEXT | {"state_size": 8, "time_step_rank": 4}, causal),
    Model("rwkv", "RwkvForCausalLM", TEXT | {"attention_hidden_size": 32, "context_length": 64}, unmasked, tweak=redraw),
    Model(
        "recurrent-gemma",
        "RecurrentGemmaForCausalLM",
        DECODER | {"lru_width": 32, "block_types": ["recurrent", "attention"], "attention_window_size": 8},
        causal,
    ),
    Model("falcon-h1", "FalconH1ForCausalLM", DECODER | MAMBA2 | {"mamba_d_ssm": 64}, causal),
    Model(
        "nemotron-h",
        "NemotronHForCausalLM",
        GROUPED
        | {
            "layers_block_type": ["mamba", "attention", "moe"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 4,
            "moe_shared_expert_intermediate_size": 16,
        },
        causal,
    ),
    Model("olmo-hybrid", "OlmoHybridForCausalLM", DELTA | {"initializer_range": 0.1}, causal),
    Model("qwen3-next", "Qwen3NextForCausalLM", DELTA, causal),
    Model("bamba", "BambaForCausalLM", DECODER | MAMBA2 | {"attn_layer_indices": [1]}, causal),
    Model(
        "jamba",
        "JambaForCausalLM",
        EXPERTS
        | {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        causal,
        seed=1,
    ),
    Model(
        "zamba2",
        "Zamba2ForCausalLM",
        DECODER
        | {
            "num_key_value_heads": 4,
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "mamba_ngroups": 1,
            "chunk_size": 4,
            "layers_block_type": ["mamba", "hybrid"],
            "num_mem_blocks": 1,
            "attention_head_dim": 16,
            "use_mamba_kernels": False,
        },
        causal,
    ),
    Model("lfm2", "Lfm2ForCausalLM", DECODER | {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48}, causal),
    Model(
        "granite-moe-hybrid",
        "GraniteMoeHybridForCausalLM",
        EXPERTS | MAMBA2 | {"layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 16},
        causal,
    ),
)
