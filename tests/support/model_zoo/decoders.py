"""Decoders: position by rotation, by table, by sine, by ALiBi."""

from __future__ import annotations

from .batches import causal
from .kit import DECODER, TEXT, Model

LEARNED = TEXT | {"n_positions": 64}
SLIDING = DECODER | {"sliding_window": 6}

DECODERS = (
    Model("gpt2", "GPT2LMHeadModel", LEARNED, causal, "eager"),
    Model("gpt-neox", "GPTNeoXForCausalLM", DECODER | {"rotary_pct": 0.5}, causal),
    Model("gptj", "GPTJForCausalLM", LEARNED | {"rotary_dim": 4}, causal),
    Model("bloom", "BloomForCausalLM", TEXT, causal),
    Model("opt", "OPTForCausalLM", TEXT | {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2}, causal),
    Model("llama", "LlamaForCausalLM", DECODER, causal, "eager"),
    Model("gemma2", "Gemma2ForCausalLM", SLIDING | {"query_pre_attn_scalar": 8}, causal, "eager"),
    Model("qwen3", "Qwen3ForCausalLM", DECODER, causal),
    Model("falcon", "FalconForCausalLM", TEXT | {"multi_query": False, "new_decoder_architecture": False}, causal),
    Model("xglm", "XGLMForCausalLM", TEXT | {"ffn_dim": 48, "init_std": 0.2}, causal),
)
