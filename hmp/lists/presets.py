"""The presets that ship with hmp: their names, and the folder of each, which may depend on the release of torch and on the device."""

from __future__ import annotations

import difflib
import functools
from pathlib import Path

import torch

from ..observing import log
from ..torch_dispatcher import dispatch_key, operators
from ..torch_private import release

# Presets without a folder of that name: torch.autocast's lists for a device, of the torch release that is installed.
_OF_THIS_TORCH = ("torch-cpu", "torch-cuda")
_OF_THIS_DEVICE = "autocast"
# The accelerator → the preset that "autocast" means there. XPU's lists are CUDA's without cuDNN's own ops.
# on Gaudi: torch.hpu.is_available() is true once the bridge is imported, as torch does by itself where it finds the bridge; what is asked
# before then is answered for the CPU. torch.autocast("hpu") casts what the lists of "gaudi" name, which are those of Habana's pages.
_ACCELERATORS = {"hpu": "gaudi", "cuda": "torch-cuda", "xpu": "torch-cuda"}


def unknown(name: str) -> str:
    """What to say of a name that is neither a preset nor a folder: the nearest presets, and all."""
    near = difflib.get_close_matches(name, policies(), n=3, cutoff=0.6)
    meant = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return f"{name!r} is no policy; {meant}presets are {', '.join(policies())}, or name a folder of list files"


def home() -> Path:
    """The folder that contains a folder for each preset: inside the package where hmp was installed from a wheel, else beside it."""
    inside = Path(__file__).parents[1] / "op_lists"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "op_lists"


def policies() -> list[str]:
    """The names of the presets that ship with hmp, sorted."""
    return sorted([*_folders(), *_OF_THIS_TORCH, _OF_THIS_DEVICE])


def meaning(preset: str) -> str:
    """The preset's folder for this torch and device: "torch-cpu@2.13" for "torch-cpu" and, without an accelerator, for "autocast"."""
    if preset == _OF_THIS_DEVICE:
        preset = device_preset()
    return _frozen(preset, torch.__version__) if preset in _OF_THIS_TORCH else preset


def device_preset() -> str:
    """What "autocast" stands for on the device in use: "torch-cpu" without an accelerator, "gaudi" on HPU, else "torch-cuda"."""
    known = next((lists for kind, lists in _ACCELERATORS.items() if _available(kind)), None)
    accelerator = torch.accelerator.current_accelerator() if known is None and torch.accelerator.is_available() else None
    return known or ("torch-cpu" if accelerator is None else _of_another(accelerator.type))


def folder(preset: str) -> Path:
    """The folder with the lists of a preset."""
    return home() / meaning(preset)


def is_in_one(file: str | None) -> bool:
    """Whether it is a file of a preset's."""
    return file is not None and Path(file).parents[1] == home()


def _folders() -> list[str]:
    return [path.name for path in home().iterdir() if (path / "bf16.txt").is_file()]


def _available(kind: str) -> bool:
    found = getattr(getattr(torch, kind, None), "is_available", None)
    return found is not None and bool(found())


@functools.cache
def _of_another(kind: str) -> str:
    """The preset for an accelerator that is none of _ACCELERATORS: CUDA's, with a warning where its backend has not those lists."""
    theirs, cudas = (operators(dispatch_key("Autocast", each)) for each in (kind, "xpu"))  # XPU's are CUDA's without cuDNN's own ops
    if theirs != cudas:
        log.warning("hmp keeps no autocast lists of %s; those of CUDA, torch-cuda, stand for them here", kind)
    return "torch-cuda"


@functools.cache
def _frozen(preset: str, version: str) -> str:
    """The folder of the lists of that torch release. Where there is none: the next older release's, else the oldest, with a warning."""
    kept = sorted((release(name), name) for name in _folders() if name.startswith(preset + "@"))
    wanted = release(version)
    found, name = max((entry for entry in kept if entry[0] <= wanted), default=kept[0])
    if found != wanted:
        log.warning("hmp keeps no autocast lists of torch %s; %s stands for %s here", version, preset, name)
    return name
