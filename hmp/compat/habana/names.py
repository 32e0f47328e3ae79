"""Every name that programs for Gaudi import, and what it is here: the modules are made of this table, and the page that lists them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .nothing import DOES_NOTHING, ERROR, WORKS


@dataclasses.dataclass(frozen=True)
class Module:
    """A module of Habana's.

    What works are the public names of hmp's modules `source`, or of these those in `names`. `nothing` has names that do nothing,
    by the reason, "*" for whatever is asked for; `errors` those that are ImportErrors, by what to use in their place, modules too.
    `itself` is the state, and the reason, of a module that is imported for nothing in it. `on_request`: its import does something, and
    waits until a program imports it.
    """

    source: str = ""
    names: str = ""
    nothing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    errors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    itself: tuple[str, str] | None = None
    on_request: bool = False

    def why_nothing(self) -> dict[str, str]:
        """Each name that does nothing, with the reason."""
        return {name: why for why, names in self.nothing.items() for name in names.split()}

    def instead(self) -> dict[str, str]:
        """Each name that is an ImportError, with what to use."""
        return {name: words for words, names in self.errors.items() for name in names.split()}


_NO_GAUDI = "there is no Gaudi here"
_SETTINGS = "hpu_set_env hpu_reset_env hpu_initialize hpu_set_inference_env hpu_inference_set_env hpu_inference_initialize"
_INFERENCE = f"{_SETTINGS} hpu_teardown_inference_env"
_PROFILER = {"use torch.profiler, or hmp.record()": "*"}
_MEDIA_WORDS = "it decodes on Gaudi; use torch's DataLoader, or what the program has for other devices"

TREE = {
    "habana_dataloader": Module("dataloader", "HabanaDataLoader fetch_habana_unet_loader"),
    "habana_dataloader.habana_dataset": Module("dataloader", "ImageFolderWithManifest"),
    "habana_frameworks": Module(errors={_MEDIA_WORDS: "mediapipe medialoaders"}),
    "habana_frameworks.torch": Module(),
    "habana_frameworks.torch._hpex_C": Module("normalization", "fused_lamb_norm"),
    "habana_frameworks.torch.activity_profiler": Module(nothing=_PROFILER),
    "habana_frameworks.torch.core": Module(
        "installation",
        "hpu is_lazy",
        nothing={"ops run when they are called, and no graph waits to be started": "mark_step", _NO_GAUDI: _INFERENCE},
    ),
    "habana_frameworks.torch.core.hccl": Module("hccl", on_request=True),
    "habana_frameworks.torch.core.quantization": Module(nothing={_NO_GAUDI: f"{_INFERENCE} _mark_params_as_const _check_params_as_const"}),
    "habana_frameworks.torch.core.weight_sharing": Module(itself=(DOES_NOTHING, "weights that a model shares are shared here")),
    "habana_frameworks.torch.distributed": Module(),
    "habana_frameworks.torch.distributed.hccl": Module("hccl", on_request=True),
    "habana_frameworks.torch.dynamo": Module(),
    "habana_frameworks.torch.dynamo.compile_backend": Module(
        itself=(WORKS, 'torch.compile(backend="hpu_backend") is torch\'s own default backend')
    ),
    "habana_frameworks.torch.gpu_migration": Module(
        "gpu_migration",
        itself=(ERROR, "write the device 'hpu' in the script; where CUDA stands for 'hpu', does nothing: calls for CUDA run as they are"),
        on_request=True,
    ),
    "habana_frameworks.torch.hpex": Module(),
    "habana_frameworks.torch.hpex.experimental": Module(
        errors={"name the ops in hmp's fp8.txt, which the page on FP8 shows, or leave FP8 out": "transformer_engine"}
    ),
    "habana_frameworks.torch.hpex.hmp": Module("hmp"),
    "habana_frameworks.torch.hpex.kernels": Module(
        "kernels",
        errors={
            "use the model's own rotary embedding": "RotaryPosEmbeddingHelperV1 RotaryPosEmbeddingHelperV2 RotaryPosEmbeddingHelperV3 "
            "RotaryPosEmbeddingMode apply_rotary_pos_emb",
            "use torch.nn.functional.ctc_loss": "CTCLoss",
            "use torch.softmax": "CustomSoftmax",
            "use FusedSDPA, and hmp's fp8.txt for FP8": "fp8_fused_sdpa",
        },
    ),
    "habana_frameworks.torch.hpex.movingavrg": Module("movingavrg"),
    "habana_frameworks.torch.hpex.normalization": Module("normalization", "FusedClipNorm FusedRMSNorm"),
    "habana_frameworks.torch.hpex.optimizers": Module("optimizers"),
    "habana_frameworks.torch.hpu": Module(
        "hpu",
        nothing={
            "shapes may always change": "enable_dynamic_shape disable_dynamic_shape",
            "use torch.use_deterministic_algorithms": "setDeterministic",
        },
    ),
    "habana_frameworks.torch.hpu.amp": Module("amp", "GradScaler autocast"),
    "habana_frameworks.torch.hpu.events": Module("streams", "Event"),
    "habana_frameworks.torch.hpu.graphs": Module("graphs"),
    "habana_frameworks.torch.hpu.hpu": Module("memory"),
    "habana_frameworks.torch.hpu.memory": Module("memory"),
    "habana_frameworks.torch.hpu.metrics": Module("metrics", "metric_global metric_localcontext"),
    "habana_frameworks.torch.hpu.profiler": Module(nothing=_PROFILER),
    "habana_frameworks.torch.hpu.random": Module("random"),
    "habana_frameworks.torch.hpu.streams": Module("streams", "Stream current_stream default_stream set_stream stream"),
    "habana_frameworks.torch.utils": Module(),
    "habana_frameworks.torch.utils.debug": Module(nothing={"it looks into Habana's graph compiler": "*"}),
    "habana_frameworks.torch.utils.distributed_utils": Module("hccl"),
    "habana_frameworks.torch.utils.experimental": Module("installation", "_get_device_type synDeviceType"),
    "habana_frameworks.torch.utils.internal": Module("installation", "is_lazy"),
    "habana_frameworks.torch.utils.lib_utils": Module(itself=(DOES_NOTHING, "there are no libraries of Habana's to look for")),
    "habana_frameworks.torch.utils.library_loader": Module("installation", "is_habana_avaialble is_habana_available load_habana_module"),
    "habana_frameworks.torch.utils.profiler": Module(nothing=_PROFILER),
}
# What lightning_habana itself cannot be imported without, and cannot use here. A script that looks whether it is there is to find nothing.
MEDIA = {
    "habana_frameworks.mediapipe": Module("mediapipe"),
    "habana_frameworks.mediapipe.media_types": Module("mediapipe"),
    "habana_frameworks.mediapipe.mediapipe": Module("mediapipe"),
    "habana_frameworks.mediapipe.operators": Module(),
    "habana_frameworks.mediapipe.operators.cpu_nodes": Module(),
    "habana_frameworks.mediapipe.operators.cpu_nodes.cpu_nodes": Module("mediapipe"),
    "habana_frameworks.mediapipe.plugins": Module(),
    "habana_frameworks.mediapipe.plugins.iterator_pytorch": Module("mediapipe"),
}
