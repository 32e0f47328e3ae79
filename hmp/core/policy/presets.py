"""The presets that ship with hmp: their names, and the folder of each, which may depend on the release of torch and on the device."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from pathlib import Path
from typing import Any

import torch

from ..compiler_stance import untraced
from ..log import log
from ..torch_private import release

# torch.autocast's lists for a device: the release whose folder is kept → the releases that have the same lists, as each of them answered
# when it was asked, by `.ci/autocast-lists`. The name without a release is that of the torch that is installed.
_KEPT: dict[str, dict[str, str]] = {
    "torch-cpu": {"2.7": "2.7 2.8 2.9 2.10 2.11 2.12", "2.13": "2.13", "2.15": "2.14 2.15"},
    "torch-cuda": {"2.7": "2.7 2.8 2.9 2.10 2.11", "2.12": "2.12", "2.13": "2.13", "2.15": "2.14 2.15"},
    "torch-xla": {"2.9": "2.7 2.8 2.9"},
}
_FOLDER = {f"{preset}@{same}": f"{preset}@{kept}" for preset, of in _KEPT.items() for kept, equal in of.items() for same in equal.split()}
OF_DEVICE = "autocast"  # the lists of the device that the model is on, see `Policy.load()`
# The accelerator → the preset that "autocast" means there. XPU's lists are CUDA's without cuDNN's own ops.
# on Gaudi: torch.hpu.is_available() is true once the bridge is imported, as torch does by itself where it finds the bridge; what is asked
# before then is answered for the CPU. torch.autocast("hpu") casts what the lists of "gaudi" name, which are those of Habana's pages.
_ACCELERATORS = {"hpu": "gaudi", "cuda": "torch-cuda", "xpu": "torch-cuda", "xla": "torch-xla"}


def names() -> str:
    """Return the names of the presets for an error: of those of a release, one."""
    plain = ", ".join(name for name in policies() if "@" not in name)
    return f"{plain}, those of one release (torch-cpu@{list(_KEPT['torch-cpu'])[-1]}, `hmp lists` shows all)"


def home() -> Path:
    """Return the folder that contains a folder for each preset: inside the package where hmp was installed from a wheel, else by it."""
    inside = Path(__file__).parents[2] / "op_lists"
    return inside if inside.is_dir() else Path(__file__).parents[3] / "op_lists"


@untraced
def policies() -> list[str]:
    """Return the names of the presets that ship with hmp.

    Returns:
        The names, sorted, also those of single releases of torch ("torch-cpu@2.13").

    Example:
        >>> {"autocast", "habana"} <= set(hmp.policies())
        True
    """
    found = {path.name for path in home().iterdir() if (path / "bf16.txt").is_file()}
    return sorted({*found, *_KEPT, *_FOLDER, OF_DEVICE}, key=lambda name: (name.partition("@")[0], release(name)))  # @2.9 before @2.10


def meaning(preset: str) -> str:
    """Return the preset's folder for this torch: "torch-cpu@2.13" for "torch-cpu"."""
    return _frozen(preset, _installed(preset)) if preset in _KEPT else _FOLDER.get(preset, preset)


def device_preset(device: torch.device) -> str:
    """Return the preset whose lists "autocast" means on `device`."""
    return "torch-cpu" if device.type == "cpu" else _ACCELERATORS.get(device.type, "torch-cuda")


def device_in_use(model: torch.nn.Module | None = None) -> torch.device:
    """Return the device that `model` computes on: that of its parameters and buffers, where they are on several the accelerator.

    Without a model, and for one that has none or has them on "meta": the accelerator that there is, else the CPU.
    """
    tensors = () if not isinstance(model, torch.nn.Module) else itertools.chain(model.parameters(), model.buffers())
    found = {tensor.device.type: torch.device(tensor.device) for tensor in tensors if tensor.device.type != "meta"}
    cpu = found.pop("cpu", None)
    if found or cpu is not None:
        return next(iter(found.values()), None) or torch.device("cpu")
    known = next((kind for kind in _ACCELERATORS if _available(kind)), None)
    if known is not None:
        return torch.device(known)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if accelerator is None else accelerator


def computes_in_bfloat16(device: torch.device) -> bool | None:
    """Return True if the accelerator has instructions for bfloat16, None where its backend does not say."""
    module: Any = getattr(torch, device.type, None)
    asked = getattr(module, "is_bf16_supported", None)
    # on Gaudi: its lists are for bfloat16, which it computes in.
    if device.type in ("cpu", "hpu") or asked is None:
        return None
    with module.device(device) if device.index is not None and module.device_count() > 1 else contextlib.nullcontext():
        try:
            return bool(asked(including_emulation=False))
        except TypeError:  # a backend that has one answer
            return bool(asked())


@functools.cache
def has_base(preset: str) -> bool:
    """Return True for a preset whose lists are laid over those of another one, which may be "autocast"."""
    return (home() / preset / "base.txt").is_file()


def folder(preset: str) -> Path:
    """Return the folder with the lists of a preset."""
    return home() / meaning(preset)


def title(preset: str) -> str | None:
    """Return the name of a preset's policy: with the release that is asked for, or torch's own; None for what isn't a preset."""
    asked = f"{preset}@{'.'.join(_installed(preset).split('.')[:2])}" if preset in _KEPT else preset
    return asked if asked in _FOLDER else meaning(preset) if preset in policies() else None


def is_in_one(file: str | None) -> bool:
    """Return True if it is a file of a preset's."""
    return file is not None and Path(file).parent.parent == home()  # a relative path has few parents


def _available(kind: str) -> bool:
    if kind == "xla":
        return "torch_xla" in sys.modules  # torch has no module for it, and its package brings the device
    found = getattr(getattr(torch, kind, None), "is_available", None)
    return found is not None and bool(found())


def _installed(preset: str) -> str:
    """Return the release that says what autocast casts there: torch's, or torch_xla's; the newest known if that is missing."""
    if preset != "torch-xla":
        return torch.__version__
    brought: Any = sys.modules.get("torch_xla")
    return list(_KEPT[preset])[-1] if brought is None else str(brought.__version__)


@functools.cache
def _frozen(preset: str, version: str) -> str:
    """Return the folder of the lists of that torch release.

    Where they are not known: the next older release's, else the oldest, and a warning.
    """
    folders = {release(name): folder for name, folder in _FOLDER.items() if name.startswith(f"{preset}@")}
    wanted = release(version)
    if wanted not in folders:
        nearest = folders[max((known for known in folders if known < wanted), default=min(folders))]
        said = "no autocast lists are known for torch %s; using %s. To write this torch's own: .ci/autocast-lists %s FOLDER"
        log.warning(said, version, nearest, preset)
        return nearest
    return folders[wanted]
