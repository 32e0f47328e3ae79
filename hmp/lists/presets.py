"""The presets that ship with hmp: their names, and the folder of each, which may depend on the release of torch and on the device."""

from __future__ import annotations

import difflib
import functools
import sys
from pathlib import Path
from typing import Any

import torch

from ..observing import log
from ..torch_dispatcher import dispatch_key, operators
from ..torch_private import release

# torch.autocast's lists for a device: the release whose folder is kept → the releases that have the same lists, as each of them answered
# when it was asked, by `hmp lists PRESET --ask FOLDER`. The name without a release is that of the torch that is installed.
_KEPT: dict[str, dict[str, str]] = {
    "torch-cpu": {"2.7": "2.7 2.8 2.9 2.10 2.11 2.12", "2.13": "2.13", "2.15": "2.14 2.15"},
    "torch-cuda": {"2.7": "2.7 2.8 2.9 2.10 2.11", "2.12": "2.12", "2.13": "2.13", "2.15": "2.14 2.15"},
    "torch-xla": {"2.9": "2.7 2.8 2.9"},
}
_FOLDER = {f"{preset}@{same}": f"{preset}@{kept}" for preset, of in _KEPT.items() for kept, equal in of.items() for same in equal.split()}
_OF_THIS_DEVICE = "autocast"
# The accelerator → the preset that "autocast" means there. XPU's lists are CUDA's without cuDNN's own ops.
# on Gaudi: torch.hpu.is_available() is true once the bridge is imported, as torch does by itself where it finds the bridge; what is asked
# before then is answered for the CPU. torch.autocast("hpu") casts what the lists of "gaudi" name, which are those of Habana's pages.
_ACCELERATORS = {"hpu": "gaudi", "cuda": "torch-cuda", "xpu": "torch-cuda", "xla": "torch-xla"}


def unknown(name: str) -> str:
    """What to say of a name that is neither a preset nor a folder: the nearest presets, and all."""
    near = difflib.get_close_matches(name, policies(), n=3, cutoff=0.6)
    meant = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return f"{name!r} is no policy; {meant}presets are {names()}, or name a folder of list files"


def names() -> str:
    """The names of the presets for an error: of those of a release, one."""
    plain = ", ".join(name for name in policies() if "@" not in name)
    return f"{plain}, those of one release (torch-cpu@{list(_KEPT['torch-cpu'])[-1]}, `hmp lists` shows all)"


def home() -> Path:
    """The folder that contains a folder for each preset: inside the package where hmp was installed from a wheel, else beside it."""
    inside = Path(__file__).parents[1] / "op_lists"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "op_lists"


def policies() -> list[str]:
    """The names of the presets that ship with hmp, sorted."""
    return sorted({*_folders(), *_KEPT, *_FOLDER, _OF_THIS_DEVICE}, key=_by_release)


def meaning(preset: str) -> str:
    """The preset's folder for this torch and device: "torch-cpu@2.13" for "torch-cpu" and, without an accelerator, for "autocast"."""
    if preset == _OF_THIS_DEVICE:
        preset = device_preset()
    return _frozen(preset, _installed(preset)) if preset in _KEPT else _FOLDER.get(preset, preset)


def device_preset() -> str:
    """What "autocast" stands for on the device in use: "torch-cpu" without an accelerator, "gaudi" on HPU, "torch-xla" where torch_xla is
    imported, else "torch-cuda"."""
    known = next((lists for kind, lists in _ACCELERATORS.items() if _available(kind)), None)
    accelerator = torch.accelerator.current_accelerator() if known is None and torch.accelerator.is_available() else None
    return known or ("torch-cpu" if accelerator is None else _of_another(accelerator.type))


def folder(preset: str) -> Path:
    """The folder with the lists of a preset."""
    return home() / meaning(preset)


def is_in_one(file: str | None) -> bool:
    """Whether it is a file of a preset's."""
    return file is not None and Path(file).parents[1] == home()


def _by_release(name: str) -> tuple[str, tuple[int, ...]]:
    """Sorts torch-cpu@2.9 before torch-cpu@2.10."""
    return name.partition("@")[0], release(name)


def _folders() -> list[str]:
    return [path.name for path in home().iterdir() if (path / "bf16.txt").is_file()]


def _available(kind: str) -> bool:
    if kind == "xla":
        return "torch_xla" in sys.modules  # torch has no module for it, and its package brings the device
    found = getattr(getattr(torch, kind, None), "is_available", None)
    return found is not None and bool(found())


def newest(preset: str) -> Path | None:
    """The folder of the newest lists that hmp keeps of torch.autocast for a device; None where it keeps none."""
    kept = _KEPT.get(preset)
    return None if kept is None else home() / f"{preset}@{list(kept)[-1]}"


def _installed(preset: str) -> str:
    """The release that says what autocast casts on the preset's device: torch's, or torch_xla's; the newest known where that is absent."""
    if preset != "torch-xla":
        return torch.__version__
    brought: Any = sys.modules.get("torch_xla")
    return list(_KEPT[preset])[-1] if brought is None else str(brought.__version__)


@functools.cache
def _of_another(kind: str) -> str:
    """The preset for an accelerator that is none of _ACCELERATORS: CUDA's, with a warning where its backend has not those lists."""
    theirs, cudas = (operators(dispatch_key("Autocast", each)) for each in (kind, "xpu"))  # XPU's are CUDA's without cuDNN's own ops
    if theirs != cudas:
        log.warning("hmp keeps no autocast lists of %s; those of CUDA, torch-cuda, stand for them here", kind)
    return "torch-cuda"


@functools.cache
def _frozen(preset: str, version: str) -> str:
    """The folder of the lists of that torch release. Where they are not known: the next older release's, else the oldest, and a warning."""
    folders = {release(name): folder for name, folder in _FOLDER.items() if name.startswith(f"{preset}@")}
    wanted = release(version)
    if wanted not in folders:
        nearest = folders[max((known for known in folders if known < wanted), default=min(folders))]
        said = "hmp keeps no autocast lists of torch %s; %s stands for %s here. This torch's own: hmp lists %s --ask FOLDER"
        log.warning(said, version, preset, nearest, preset)
        return nearest
    return folders[wanted]
