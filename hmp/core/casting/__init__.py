"""Casts of tensors and of calls' arguments: which tensors are castable, and how each kind of cast treats what does not fit."""

from . import tensor_casts
from .out import deliver
from .powers_of_two import BIAS, exponent_for, with_exponent
from .tensor_casts import FINITE_MAX, Caster, Tensor, cast, cast_call, castable, each_castable, each_tensor, has_values, map_tensors

__all__ = [
    "BIAS",
    "FINITE_MAX",
    "Caster",
    "Tensor",
    "cast",
    "cast_call",
    "castable",
    "deliver",
    "each_castable",
    "each_tensor",
    "exponent_for",
    "has_values",
    "map_tensors",
    "tensor_casts",
    "with_exponent",
]
