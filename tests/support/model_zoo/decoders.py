"""Decoders: position by rotation, by table, by sine, by ALiBi."""

from __future__ import annotations

from .batches import causal
from .kit import DECODER, LOUD, TEXT, Model

LEARNED = TEXT | {"n_positions": 64}
SLIDING = DECODER | {"sliding_window": 6}

DECODERS = (
    Model("gpt2", "GPT2LMHeadModel", LEARNED, causal, "eager"),
    Model("openai-gpt", "OpenAIGPTLMHeadModel", LEARNED, causal),
    Model(
        "gpt-neo",
        "GPTNeoForCausalLM",
        TEXT | {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4},
        causal,
    ),
    Model("gpt-neox", "GPTNeoXForCausalLM", DECODER | {"rotary_pct": 0.5}, causal),
    Model("gptj", "GPTJForCausalLM", LEARNED | {"rotary_dim": 4}, causal),
    Model("codegen", "CodeGenForCausalLM", LEARNED | {"rotary_dim": 4}, causal),
    Model("gpt-bigcode", "GPTBigCodeForCausalLM", LEARNED, causal),
    Model("bloom", "BloomForCausalLM", TEXT, causal),
    Model("opt", "OPTForCausalLM", TEXT | {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2}, causal),
    Model("llama", "LlamaForCausalLM", DECODER, causal, "eager"),
    Model("mistral", "MistralForCausalLM", SLIDING, causal),
    Model("gemma", "GemmaForCausalLM", DECODER, causal),
    Model("gemma2", "Gemma2ForCausalLM", SLIDING | {"query_pre_attn_scalar": 8}, causal, "eager"),
    Model("gemma3", "Gemma3ForCausalLM", SLIDING | {"query_pre_attn_scalar": 8}, causal),
    Model("phi", "PhiForCausalLM", DECODER, causal),
    Model("phi3", "Phi3ForCausalLM", DECODER, causal, "eager"),
    Model("qwen2", "Qwen2ForCausalLM", DECODER, causal),
    Model("qwen3", "Qwen3ForCausalLM", DECODER, causal),
    Model("stablelm", "StableLmForCausalLM", DECODER, causal),
    Model("cohere", "CohereForCausalLM", DECODER, causal),
    Model("cohere2", "Cohere2ForCausalLM", SLIDING, causal),
    Model("olmo2", "Olmo2ForCausalLM", DECODER, causal),
    Model("falcon", "FalconForCausalLM", TEXT | {"multi_query": False, "new_decoder_architecture": False}, causal),
    Model("falcon-alibi", "FalconForCausalLM", TEXT | {"alibi": True, "multi_query": False}, causal, "eager"),
    Model(
        "mpt",
        "MptForCausalLM",
        LOUD | {"d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 64, "vocab_size": 99},
        causal,
    ),
    Model("ctrl", "CTRLLMHeadModel", LEARNED | {"dff": 48}, causal),
    Model("xglm", "XGLMForCausalLM", TEXT | {"ffn_dim": 48, "init_std": 0.2}, causal),
    Model("biogpt", "BioGptForCausalLM", TEXT, causal),
    Model("starcoder2", "Starcoder2ForCausalLM", DECODER, causal),
    Model("glm4", "Glm4ForCausalLM", DECODER, causal),
    Model("nemotron", "NemotronForCausalLM", DECODER, causal),
    Model("persimmon", "PersimmonForCausalLM", DECODER, causal),
    Model("smollm3", "SmolLM3ForCausalLM", DECODER | {"no_rope_layers": [1, 0]}, causal),
)
