"""State spaces, gated delta nets, linear attention and other recurrences, alone and beside attention."""

from __future__ import annotations

from .batches import causal, unmasked
from .kit import DECODER, TEXT, Model, redraw
from .mixtures import EXPERTS, SHARED

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
    Model("rwkv", "RwkvForCausalLM", TEXT | {"attention_hidden_size": 32, "context_length": 64}, unmasked, tweak=redraw),
    Model(
        "recurrent-gemma",
        "RecurrentGemmaForCausalLM",
        DECODER | {"lru_width": 32, "block_types": ["recurrent", "attention"], "attention_window_size": 8},
        causal,
    ),
    Model("falcon-h1", "FalconH1ForCausalLM", DECODER | MAMBA2 | {"mamba_d_ssm": 64}, causal),
    Model("qwen3-next", "Qwen3NextForCausalLM", DELTA, causal),
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
    Model("lfm2", "Lfm2ForCausalLM", DECODER | {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48}, causal),
)
