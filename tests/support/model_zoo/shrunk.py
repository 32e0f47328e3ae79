"""More architectures of transformers, made tiny by one rule instead of by hand: what their configurations call a size becomes small.

That says little about what is special in each of them, and the zoo's own models are chosen for that. It says that an architecture nobody
looked at trains. Those of which float32's step fails with such sizes are not here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .batches import Batch, causal, images, masked, seq2seq
from .kit import Model


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
    return Model(cls, cls, _FEEDERS[cls])
