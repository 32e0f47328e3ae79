"""More architectures of transformers, made tiny by one rule instead of by hand: what their configurations call a size becomes small.

That says little about what is special in each of them, and the zoo's own models are chosen for that. It says that an architecture nobody
looked at trains. Those of which float32's step fails with such sizes are not here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from .batches import Batch, causal, images, masked, seq2seq
from .kit import LOUD, Model


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
_HEAD_WIDTHS = _sizes(8, "head_dim d_kv kv_channels qk_rope_head_dim qk_nope_head_dim v_head_dim")
_INNER_WIDTHS = _sizes(48, "intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner ffn_hidden_size dff")
_EXPERTS = _sizes(16, "moe_intermediate_size shared_expert_intermediate_size kv_lora_rank q_lora_rank") | _sizes(
    4, "num_experts num_local_experts n_routed_experts moe_num_experts"
)
_LENGTHS = _sizes(64, "max_position_embeddings n_positions max_seq_len n_ctx")
_CHOSEN = {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "vocab_size": 99, "image_size": 32, "patch_size": 8}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = _WIDTHS | _LAYERS | _HEADS | _HEAD_WIDTHS | _INNER_WIDTHS | _EXPERTS | _LENGTHS | _CHOSEN | _TOKENS | LOUD | {"use_cache": False}


def _read(config: Any) -> Batch:
    batch = causal(config)
    del batch["labels"]
    return batch


# By family: what its models are fed, and their classes.
_TABLE: dict[str, tuple[Callable[[Any], Batch], str]] = {
    "more decoders": (
        causal,
        """
        AXK1ForCausalLM AXK2ForCausalLM AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM AriaTextForCausalLM
        BailingHybridForCausalLM BeamForCausalLM BertGenerationDecoder BitNetForCausalLM BlenderbotSmallForCausalLM
        CamembertForCausalLM Cohere2MoeForCausalLM CpmAntForCausalLM CwmForCausalLM DeepseekV32ForCausalLM DeepseekV4ForCausalLM
        DiffLlamaForCausalLM DogeForCausalLM Emu3ForCausalLM Ernie4_5ForCausalLM ErnieForCausalLM Exaone4ForCausalLM
        ExaoneMoeForCausalLM FlintForCausalLM FuyuForCausalLM GPTNeoXJapaneseForCausalLM Gemma3ForConditionalGeneration
        Glm4MoeLiteForCausalLM GlmForCausalLM GlmMoeDsaForCausalLM GotOcr2ForConditionalGeneration GraniteForCausalLM
        GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM GraniteSWAForCausalLM HYV3ForCausalLM HYV4ForCausalLM
        HeliumForCausalLM HrmTextForCausalLM HyperCLOVAXForCausalLM Inkling2ForCausalLM InklingForCausalLM Jais2ForCausalLM
        Kolibri1ForCausalLM LagunaForCausalLM Lfm3ForCausalLM LongcatFlashForCausalLM MegatronBertForCausalLM MellumForCausalLM
        MiniCPM3ForCausalLM MiniMaxM2ForCausalLM MiniMaxM3VLForCausalLM Ministral3ForCausalLM MllamaForCausalLM
        ModernBertDecoderForCausalLM MoshiForCausalLM MossTranscribeDiarizeForConditionalGeneration NanoChatForCausalLM
        Olmo3ForCausalLM OlmoForCausalLM Phi4MultimodalForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM Qwen4ExpForCausalLM
        RobertaPreLayerNormForCausalLM SeedOssForCausalLM SolarOpenForCausalLM TrOCRForCausalLM VaultGemmaForCausalLM
        XLMRobertaForCausalLM XLMRobertaXLForCausalLM YoutuForCausalLM xLSTMForCausalLM
        """,
    ),
    "more encoders": (
        masked,
        """
        EsmcForMaskedLM FlaubertWithLMHeadModel GteForMaskedLM JinaEmbeddingsV3ForMaskedLM ModernVBertForMaskedLM MraForMaskedLM
        NomicBertForMaskedLM UltraVBertForMaskedLM UltrabertForMaskedLM
        """,
    ),
    "vision and language, fed with text": (
        causal,
        """
        AriaForConditionalGeneration AyaVisionForConditionalGeneration Cohere2VisionForConditionalGeneration
        Cosmos3OmniForConditionalGeneration DeepseekVLForConditionalGeneration DeepseekVLHybridForConditionalGeneration
        EvollaForProteinText2Text Exaone4_5_ForConditionalGeneration HyperCLOVAXVisionV2ForConditionalGeneration
        Idefics2ForConditionalGeneration Idefics3ForConditionalGeneration InklingForConditionalGeneration
        InternVLForConditionalGeneration Kimi_K25ForConditionalGeneration Kosmos2_5ForConditionalGeneration
        Lfm2VlForConditionalGeneration Lfm3VlForConditionalGeneration LightOnOcrForConditionalGeneration
        LlavaNextForConditionalGeneration LlavaNextVideoForConditionalGeneration LlavaOnevisionForConditionalGeneration
        MiniCPMOcrForConditionalGeneration MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration
        MiniMaxM3SparseForConditionalGeneration Mistral3ForConditionalGeneration MistralLarge4ForConditionalGeneration
        MllamaForConditionalGeneration Ovis2ForConditionalGeneration QianfanOCRForConditionalGeneration
        Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration Qwen3_5ForConditionalGeneration
        Qwen3_5MoeForConditionalGeneration Qwen4ExpForConditionalGeneration SmolVLMForConditionalGeneration
        T5Gemma2ForConditionalGeneration UnlimitedOcrForConditionalGeneration VideoLlama3ForConditionalGeneration
        VideoLlavaForConditionalGeneration VipLlavaForConditionalGeneration
        """,
    ),
    "more encoder-decoders": (seq2seq, "SeamlessM4TForTextToText SeamlessM4Tv2ForTextToText T5GemmaForConditionalGeneration"),
    "more vision": (
        images(),
        """
        Dinov2WithRegistersForImageClassification FocalNetForImageClassification IJepaForImageClassification
        MetaClip2ForImageClassification PvtV2ForImageClassification ViTMSNForImageClassification
        """,
    ),
    # Their batch norms are over few values at the end, and far from float32's whoever casts, where images are smaller than these.
    "convolutions": (
        images(128, 4),
        """
        MobileNetV1ForImageClassification MobileNetV2ForImageClassification PPLCNetForImageClassification
        SwiftFormerForImageClassification
        """,
    ),
    "convolutions without a head": (images(128, 4, labels=False), "PPLCNetV4Backbone"),
    "vision without a head": (
        images(labels=False),
        """
        Aimv2VisionModel DINOv3ViTModel MLCDVisionModel PixioModel RfDetrDinov2Backbone Sapiens2Backbone SiglipVisionModel
        Tipsv2VisionModel VitDetModel
        """,
    ),
    "text encoders": (_read, "CLIPTextModel Molmo2TextModel Tipsv2TextModel"),
}
FAMILIES: dict[str, tuple[str, ...]] = {family: tuple(classes.split()) for family, (_, classes) in _TABLE.items()}
_FEEDERS = {cls: _TABLE[family][0] for family, classes in FAMILIES.items() for cls in classes}


def shrunk(cls: str) -> Model:
    """The model of that class, tiny. Imports the class's own module, which is why all of them are not made at once."""
    return Model(cls, cls, _small(getattr(transformers, cls).config_class), _FEEDERS[cls])


def _small(config_class: Any) -> dict[str, Any]:
    """The arguments that make a configuration tiny, those of the configurations inside it too."""
    usual = config_class()
    found = {name: size for name, size in SMALL.items() if _is_number(usual, name) or (name in _TOKENS and hasattr(usual, name))}
    for name, part in vars(usual).items():
        if isinstance(part, transformers.PretrainedConfig):
            found[name] = _small(type(part)) | {"model_type": part.model_type}
    return found


def _is_number(config: Any, name: str) -> bool:
    """Whether the configuration has that number, and as an attribute of its own: what follows from others cannot be set."""
    return not isinstance(getattr(type(config), name, None), property) and isinstance(getattr(config, name, None), (int, float))
