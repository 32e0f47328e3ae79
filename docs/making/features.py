"""What the installed torch can do under hmp, tried on a small model."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # hmp of this checkout

import hmp

Tried = Callable[[torch.nn.Module, torch.Tensor], str]


def _said(result: Any) -> str:
    return "yes" if result.dtype is torch.bfloat16 else f"no: gives {result.dtype}"


def _eager(model: torch.nn.Module, x: torch.Tensor) -> str:
    return _said(model(x))


def _compiled(model: torch.nn.Module, x: torch.Tensor) -> str:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    said = _said(torch.compile(model, backend=backend)(x))
    return said if graphs else "run uncompiled, with a warning"


def _exported(strict: bool) -> Tried:
    def exported(model: torch.nn.Module, x: torch.Tensor) -> str:
        try:
            return _said(torch.export.export(model, (x,), strict=strict).module()(x))
        except hmp.HmpError:
            return "an error that says so"

    return exported


def _packed(model: torch.nn.Module, x: torch.Tensor) -> str:
    try:
        hmp.apply(hmp.remove(model), "saved8")
    except hmp.HmpError:
        return "an error that says so"
    return _said(model(x))


_TRIED: dict[str, Tried] = {
    "casts": _eager,
    "casts in compiled models": _compiled,
    "export": _exported(strict=False),
    "strict export": _exported(strict=True),
    "packing what ops keep for backward": _packed,
}


def found() -> dict[str, str]:
    """Each feature, and what came of it."""
    results = {}
    for feature, tried in _TRIED.items():
        model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.randn(2, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hmp.apply(model, "torch-cpu")
            results[feature] = tried(model, x)
        hmp.remove(model)
    return results
