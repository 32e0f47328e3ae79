"""`habana_frameworks.mediapipe`: names that packages for Gaudi import; its media engine has no stand-in, and using one is an error."""

from __future__ import annotations

from typing import Any, NoReturn

from ... import HmpError

__all__ = [
    "HPUResnetPytorchIterator",
    "MediaPipe",
    "decoderStage",
    "dtype",
    "fn",
    "ftype",
    "imgtype",
    "media_function",
    "randomCropType",
]


def _refuse(name: str) -> NoReturn:
    raise HmpError(f"habana_frameworks.mediapipe: {name} decodes images on Gaudi, and there is none here; use torch's DataLoader")


class MediaPipe:
    """Cannot be made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse(type(self).__name__)


class media_function(MediaPipe):
    """Cannot be made."""


class HPUResnetPytorchIterator(MediaPipe):
    """Cannot be made."""


class _Names:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f"{self._name}.{name}")


fn, decoderStage, dtype, ftype, imgtype, randomCropType = map(_Names, ("fn", "decoderStage", "dtype", "ftype", "imgtype", "randomCropType"))
