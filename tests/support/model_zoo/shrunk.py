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
        AXK1ForCausalLM ApertusForCausalLM BailingHybridForCausalLM BitNetForCausalLM Cohere2MoeForCausalLM
        DeepseekV32ForCausalLM DogeForCausalLM ErnieForCausalLM FlintForCausalLM Gemma3ForConditionalGeneration
        GlmMoeDsaForCausalLM GraniteMoeSWAForCausalLM HYV3ForCausalLM HrmTextForCausalLM InklingForCausalLM LagunaForCausalLM
        LongcatFlashForCausalLM MegatronBertForCausalLM MiniMaxM2ForCausalLM MllamaForCausalLM
        MossTranscribeDiarizeForConditionalGeneration OlmoForCausalLM Qwen3_5MoeForCausalLM SeedOssForCausalLM
        VaultGemmaForCausalLM YoutuForCausalLM xLSTMForCausalLM
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
        AriaForConditionalGeneration Cosmos3OmniForConditionalGeneration EvollaForProteinText2Text
        Idefics2ForConditionalGeneration InternVLForConditionalGeneration Lfm2VlForConditionalGeneration
        LlavaNextForConditionalGeneration MiniCPMOcrForConditionalGeneration MiniMaxM3SparseForConditionalGeneration
        MllamaForConditionalGeneration Qwen3VLForConditionalGeneration Qwen3_5MoeForConditionalGeneration
        T5Gemma2ForConditionalGeneration VideoLlavaForConditionalGeneration
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
