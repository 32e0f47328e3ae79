"""The one rule that makes a model tiny: what its configuration calls a size becomes small."""

from __future__ import annotations

from typing import Any

import transformers

# At the usual 0.02 layers as narrow as these compute next to nothing, and no check of them could fail.
LOUD = dict.fromkeys(("initializer_range", "initializer_std", "init_std"), 0.2)


def _sizes(size: int, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), size)


_WIDTHS = _sizes(32, "hidden_size d_model n_embd dim embed_dim embedding_size hidden_dim model_dim n_embed word_embed_proj_dim d_embed")
_LAYERS = _sizes(
    2, "num_hidden_layers n_layers n_layer num_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers depth num_blocks"
)
_HEADS = _sizes(
    4,
    "num_attention_heads n_heads n_head num_heads encoder_attention_heads decoder_attention_heads num_key_value_heads "
    "num_encoder_attention_heads num_decoder_attention_heads",
)
_HEAD_WIDTHS = _sizes(8, "head_dim d_head d_kv kv_channels qk_rope_head_dim qk_nope_head_dim v_head_dim")
_INNER_WIDTHS = _sizes(48, "intermediate_size d_ff d_inner ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner ffn_hidden_size dff")
_EXPERTS = _sizes(16, "moe_intermediate_size shared_expert_intermediate_size kv_lora_rank q_lora_rank") | _sizes(
    4, "num_experts num_local_experts n_routed_experts moe_num_experts"
)
_LENGTHS = _sizes(64, "max_position_embeddings n_positions max_seq_len n_ctx")
_CHOSEN = {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "vocab_size": 99, "image_size": 32, "patch_size": 8}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = _WIDTHS | _LAYERS | _HEADS | _HEAD_WIDTHS | _INNER_WIDTHS | _EXPERTS | _LENGTHS | _CHOSEN | _TOKENS | LOUD | {"use_cache": False}


def small(config_class: Any) -> dict[str, Any]:
    """The arguments that make a configuration tiny, those of the configurations inside it too."""
    usual = config_class()
    found = {name: size for name, size in SMALL.items() if _is_number(usual, name) or (name in _TOKENS and hasattr(usual, name))}
    for name, part in vars(usual).items():
        if isinstance(part, transformers.PretrainedConfig):
            found[name] = small(type(part)) | {"model_type": part.model_type}
    return found


def _is_number(config: Any, name: str) -> bool:
    """Whether the configuration has that number, and as an attribute of its own: what follows from others cannot be set."""
    return not isinstance(getattr(type(config), name, None), property) and isinstance(getattr(config, name, None), (int, float))
