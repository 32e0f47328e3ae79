"""The table of every name that programs for Gaudi import: the modules are made from it, and the page that lists them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .no_ops import DOES_NOTHING, WORKS


@dataclasses.dataclass(frozen=True)
class Module:
    """A module of Habana's.

    Attributes:
        source: The module of hmp that has the names that work.
        names: Which of its names these are; "" for all in its `__all__`.
        nothing: Names that do nothing, by the reason; "*" stands for every other name.
        errors: Names and modules that are ImportErrors, by what to use instead.
        itself: The state of a module that is imported for nothing in it, and the reason.
        on_import: A function of hmp's to call when a program imports the module, which is not imported before.
    """

    source: str = ""
    names: str = ""
    nothing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    errors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    itself: tuple[str, str] | None = None
    on_import: str = ""


def by_name(words: Mapping[str, str]) -> dict[str, str]:
    """Return the words for each name, of a table of names by their words."""
    return {name: said for said, names in words.items() for name in names.split()}


_NO_GAUDI = "there is no Gaudi here"
_SETTINGS = "hpu_set_env hpu_reset_env hpu_initialize hpu_set_inference_env hpu_inference_set_env hpu_inference_initialize"
_INFERENCE = f"{_SETTINGS} hpu_teardown_inference_env"
_PROFILER = {"use torch.profiler, or hmp.record()": "*"}
_MEDIA = "it decodes on Gaudi; use torch's DataLoader, or what the program has for other devices"

TREE = {
    "habana_dataloader": Module(
        "dataloader",
        "HabanaDataLoader",
        errors={"use the script's loader for other devices, or torch's DataLoader": "fetch_habana_unet_loader"},
    ),
    "habana_dataloader.habana_dataset": Module("dataloader", "ImageFolderWithManifest"),
    "habana_frameworks": Module(errors={_MEDIA: "mediapipe medialoaders"}),
    "habana_frameworks.torch": Module(),
    "habana_frameworks.torch._hpex_C": Module("kernels", "fused_lamb_norm"),
    "habana_frameworks.torch.activity_profiler": Module(nothing=_PROFILER),
    "habana_frameworks.torch.core": Module(
        "software",
        "hpu is_lazy",
        nothing={"ops run when they are called, and no graph waits to be started": "mark_step", _NO_GAUDI: _INFERENCE},
    ),
    "habana_frameworks.torch.core.hccl": Module("backends", on_import="backends.register_hccl"),
    "habana_frameworks.torch.core.quantization": Module(nothing={_NO_GAUDI: f"{_INFERENCE} _mark_params_as_const _check_params_as_const"}),
    "habana_frameworks.torch.core.weight_sharing": Module(itself=(DOES_NOTHING, "weights that a model shares are shared here")),
    "habana_frameworks.torch.distributed": Module(),
    "habana_frameworks.torch.distributed.hccl": Module("backends", on_import="backends.register_hccl"),
    "habana_frameworks.torch.dynamo": Module(),
    "habana_frameworks.torch.dynamo.compile_backend": Module(
        itself=(WORKS, 'torch.compile(backend="hpu_backend") is torch\'s own default backend')
    ),
    "habana_frameworks.torch.gpu_migration": Module(
        itself=(WORKS, "'cuda' is the device that 'hpu' is mapped to; where that is CUDA, nothing is changed"),
        on_import="gpu_migration.migrate",
    ),
    "habana_frameworks.torch.hpex": Module(),
    "habana_frameworks.torch.hpex.experimental": Module(
        errors={"name the ops in hmp's fp8.txt, which the page on FP8 shows, or leave FP8 out": "transformer_engine"}
    ),
    "habana_frameworks.torch.hpex.hmp": Module("hmp"),
    "habana_frameworks.torch.hpex.kernels": Module(
        "kernels",
        "FusedSDPA",
        errors={
            "use the model's own rotary embedding": "RotaryPosEmbeddingHelperV1 RotaryPosEmbeddingHelperV2 RotaryPosEmbeddingHelperV3 "
            "RotaryPosEmbeddingMode apply_rotary_pos_emb",
            "use torch.nn.functional.ctc_loss": "CTCLoss",
            "use torch.softmax": "CustomSoftmax",
            "use FusedSDPA, and hmp's fp8.txt for FP8": "fp8_fused_sdpa",
        },
    ),
    "habana_frameworks.torch.hpex.movingavrg": Module("optimizers", "FusedEMA"),
    "habana_frameworks.torch.hpex.normalization": Module("kernels", "FusedClipNorm FusedRMSNorm"),
    "habana_frameworks.torch.hpex.optimizers": Module(
        "optimizers", "FusedAdagrad FusedAdamW FusedLamb FusedLars FusedResourceApplyMomentum FusedSGD"
    ),
    "habana_frameworks.torch.hpu": Module(
        "hpu",
        nothing={
            "shapes may always change": "enable_dynamic_shape disable_dynamic_shape",
            "use torch.use_deterministic_algorithms": "setDeterministic",
        },
    ),
    "habana_frameworks.torch.hpu.amp": Module("hpu", "GradScaler autocast"),
    "habana_frameworks.torch.hpu.events": Module("streams", "Event"),
    "habana_frameworks.torch.hpu.graphs": Module("graphs"),
    "habana_frameworks.torch.hpu.hpu": Module("memory"),
    "habana_frameworks.torch.hpu.memory": Module("memory"),
    "habana_frameworks.torch.hpu.metrics": Module("software", "metric_global metric_localcontext"),
    "habana_frameworks.torch.hpu.profiler": Module(nothing=_PROFILER),
    "habana_frameworks.torch.hpu.random": Module("random"),
    "habana_frameworks.torch.hpu.streams": Module("streams", "Stream current_stream default_stream set_stream stream"),
    "habana_frameworks.torch.utils": Module(),
    "habana_frameworks.torch.utils.debug": Module(nothing={"it looks into Habana's graph compiler": "*"}),
    "habana_frameworks.torch.utils.distributed_utils": Module("backends"),
    "habana_frameworks.torch.utils.experimental": Module("software", "_get_device_type synDeviceType"),
    "habana_frameworks.torch.utils.internal": Module("software", "is_lazy"),
    "habana_frameworks.torch.utils.lib_utils": Module(itself=(DOES_NOTHING, "there are no libraries of Habana's to look for")),
    "habana_frameworks.torch.utils.library_loader": Module("software", "is_habana_avaialble is_habana_available load_habana_module"),
    "habana_frameworks.torch.utils.profiler": Module(nothing=_PROFILER),
}
