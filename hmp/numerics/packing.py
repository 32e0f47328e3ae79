"""How far gradients move by packing what is kept for backward: one step, and the same step once more where nothing is packed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks

from .distance import as_real, ratio

Tensor = torch.Tensor
_NAMED = 3


@dataclass(frozen=True)
class Packing:
    """What packing alone does to the gradients of a step: ||packed - as it is|| / ||as it is||, all else being the same.

    `gradient` is that of all parameters' gradients as one vector, `by_parameter` and `by_module` are (name, error) of each parameter and
    of the parameters that a module itself has, the largest first. `recipe` is what was packed into.
    """

    recipe: str
    gradient: float
    by_parameter: tuple[tuple[str, float], ...]
    by_module: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        most = ", ".join(f"{name or 'the model itself'} {error:.2g}" for name, error in self.by_module[:_NAMED] if error)
        return f"packing alone ({self.recipe}): gradient {self.gradient:.2g}" + (f"; most in {most}" if most else "")


def packing_of(gradients: Callable[[], Mapping[str, Tensor]], recipe: str) -> Packing:
    """The errors of `gradients()`, which runs a step under a policy that packs and gives them by the parameter's name."""
    packed = gradients()
    with saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):  # inside of other hooks ops keep what torch keeps
        exact = gradients()
    by_parameter: dict[str, _Squares] = {}
    by_module: dict[str, _Squares] = {}
    whole = _Squares()
    with torch.no_grad():
        for name, gradient in exact.items():
            found = _Squares(_squares(_dense(packed[name]) - _dense(gradient)), _squares(_dense(gradient)))
            by_parameter[name] = found
            for sums in (whole, by_module.setdefault(name.rpartition(".")[0], _Squares())):
                sums.error += found.error
                sums.norm += found.norm
    return Packing(recipe, whole.relative, _ranked(by_parameter), _ranked(by_module))


@dataclass
class _Squares:
    """Sums of squares: of what packing changed, and of the numbers."""

    error: float = 0.0
    norm: float = 0.0

    @property
    def relative(self) -> float:
        return ratio(math.sqrt(self.error), math.sqrt(self.norm))


def _ranked(found: Mapping[str, _Squares]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(((name, sums.relative) for name, sums in found.items()), key=lambda each: (-each[1], each[0])))


def _dense(gradient: Tensor) -> Tensor:
    return as_real(gradient if gradient.layout is torch.strided else gradient.to_dense()).double()


def _squares(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor)) ** 2
