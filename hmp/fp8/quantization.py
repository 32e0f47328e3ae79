"""Tensors in FP8 with the scales that their own values ask for.

A scale is the factor that gives the values back: value = data * scale. It maps the largest finite magnitude of what shares it to the
largest number of the format, so nothing overflows; a magnitude of 0 has the scale 1. What is not finite does not count for the scale and
becomes NaN: every result that it takes part in is NaN, and the others are what they would be without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from ..core.casting import Tensor
from ..plug_in_math import BIAS, exponent_for, with_exponent
from . import fused_kernels

# torch's own, taken before anything is patched
_abs, _add, _amax, _div, _mul, _reciprocal = torch.abs, torch.add, torch.amax, torch.div, torch.mul, torch.reciprocal
_clamp, _eq, _full_like, _nan_to_num, _where = torch.clamp, torch.eq, torch.full_like, torch.nan_to_num, torch.where
_and, _max, _mean, _min, _pad, _sub = torch.logical_and, torch.max, torch.mean, torch.min, torch.constant_pad_nd, torch.sub
_narrow, _ne, _stack = torch.narrow, torch.ne, torch.stack
_reshape, _transpose = torch.reshape, torch.transpose
_squeeze, _unsqueeze = torch.squeeze, torch.unsqueeze
_float, _double, _to = Tensor.float, Tensor.double, Tensor.to

_compiling = torch.compiler.is_dynamo_compiling

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK = 32  # elements that share a scale in MXFP8
_NAN = float("nan")
_LARGEST_FACTOR = 2.0**126  # of those whose reciprocal is a normal float32


class Layout(NamedTuple):
    """How a tensor is quantised: the format, what shares a scale (Recipe.scaling), and the inner axis, -1 or -2, of the product."""

    form: torch.dtype = E4M3
    scaling: str = "tensor"
    power_of_two: bool = False
    axis: int = -1


class Quantised(NamedTuple):
    """A tensor in FP8: value = data * scale.

    `scale` is 0-dim float32 for the whole tensor; float32 with size 1 in the inner axis for rows; for blocks uint8 with 1 for each 32
    elements of the inner axis, the exponent alone as float8_e8m0fnu has it (a dtype that compiled code for CPUs lacks). `axis` is that
    inner axis, -1 or -2, and None where the scale is the whole tensor's.
    """

    data: Tensor
    scale: Tensor
    axis: int | None


def transposed(quantised: Quantised) -> Quantised:
    """Return the same matrices transposed: views of the same memory."""
    data, scale, axis = quantised
    data = _transpose(data, -2, -1)
    return Quantised(data, scale, None) if axis is None else Quantised(data, _transpose(scale, -2, -1), -3 - axis)


def values(quantised: Quantised) -> Tensor:
    """Return the values in float32, each rounded once."""
    data, scale, axis = quantised
    if scale.dtype is torch.float32:
        return _mul(_float(data), scale)
    if axis == -2:
        return _transpose(values(transposed(quantised)), -2, -1)
    factors = with_exponent(_to(scale, torch.int32))
    return _reshape(_mul(_reshape(_float(data), (*scale.shape, BLOCK)), _unsqueeze(factors, -1)), data.shape)


def quantise(tensor: Tensor, layout: Layout) -> Quantised:
    """Return `tensor`, of matrices or batches of them, in FP8, as `layout` says. Takes no part in autograd where the caller has it off.

    For blocks, an inner axis other than a multiple of 32 gets zeros at its end: they add nothing to the product.
    """
    form, scaling, power_of_two, axis = layout
    if scaling == "block":
        return _in_blocks(tensor, form) if axis == -1 else transposed(_in_blocks(_transpose(tensor, -2, -1), form))
    run = _WITH_ONE_SCALE[None if scaling == "tensor" else axis]
    data, scale = fused_kernels.fused(run, tensor, form, power_of_two) if fused_kernels.fuses(tensor) else run(tensor, form, power_of_two)
    return Quantised(data, scale, None if scaling == "tensor" else axis)


def _whole(tensor: Tensor, form: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    # amax() of everything reduces nothing on XLA. Row by row first: a maximum over everything at once, compiled for any shape, is the
    # work of one block of threads
    return _with_scale_for(tensor, _max(_amax(_finite_magnitudes(tensor), -1)), form, power_of_two)


def _rows(tensor: Tensor, form: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    return _with_scale_for(tensor, _amax(_finite_magnitudes(tensor), -1, keepdim=True), form, power_of_two)


def _columns(tensor: Tensor, form: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    return _with_scale_for(tensor, _amax(_finite_magnitudes(tensor), -2, keepdim=True), form, power_of_two)


# By inner axis, None for one scale of the whole tensor: a function each, as torch.compile counts recompilations by function.
_WITH_ONE_SCALE = {None: _whole, -1: _rows, -2: _columns}


def _with_scale_for(tensor: Tensor, largest: Tensor, form: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Return `tensor` in the format and its scale, which maps the magnitude `largest` to the format's largest number."""
    largest = _float(largest)
    if power_of_two:
        exponent = exponent_for(largest, form)
        factor, scale = with_exponent(_sub(2 * BIAS, exponent)), with_exponent(exponent)
    else:
        factor = _factor(largest, form)
        scale = _float(_reciprocal(_exact(factor)))
    return _scaled(tensor, factor, form), scale


def _in_blocks(tensor: Tensor, form: torch.dtype) -> Quantised:
    """Return `tensor` in blocks along its last axis, with scales as MXFP8 stores them: a power of two as its exponent alone."""
    count = (tensor.shape[-1] + BLOCK - 1) // BLOCK  # said to reshape, who cannot derive it from a size that is a symbol in a trace
    blocks = _reshape(_pad(tensor, (0, count * BLOCK - tensor.shape[-1])), (*tensor.shape[:-1], count, BLOCK))
    exponent = exponent_for(_float(_amax(_finite_magnitudes(blocks), -1, keepdim=True)), form)
    data = _scaled(blocks, with_exponent(_sub(2 * BIAS, exponent)), form)
    return Quantised(_reshape(data, (*tensor.shape[:-1], count * BLOCK)), _to(_squeeze(exponent, -1), torch.uint8), -1)


def _finite_magnitudes(tensor: Tensor) -> Tensor:
    # inductor's C++ does not compile where one bfloat16 tensor is reduced along both of its axes; in float32 it is the same maximum
    return _nan_to_num(_abs(_float(tensor) if _compiling() else tensor), 0.0, 0.0, 0.0)


def _scaled(tensor: Tensor, factor: Tensor, form: torch.dtype) -> Tensor:
    """Return `tensor * factor` in the format, rounded to the nearest, ties to even.

    Inf becomes NaN: torch's releases differ in its cast.
    """
    scaled = _mul(_float(tensor), factor)
    if tensor.device.type == "xla":  # whose nan_to_num() refuses NaN
        return _to(_add(scaled, _sub(scaled, scaled)), form)
    return _to(_nan_to_num(scaled, _NAN, _NAN, _NAN), form)


def _factor(largest: Tensor, form: torch.dtype) -> Tensor:
    """Return the factor that makes `largest` the format's largest number."""
    most = torch.finfo(form).max
    largest = _clamp(_where(_eq(largest, 0), _full_like(largest, most), largest), min=most / _LARGEST_FACTOR)
    exact = _exact(largest)
    return _float(_div(_full_like(exact, most), exact))


def _exact(divisor: Tensor) -> Tensor:
    """Return `divisor` in the dtype in which its division is rounded right.

    A compiled kernel's division in float32 is not on every GPU; by way of float64 the same float32 comes out.
    """
    return _double(divisor) if divisor.is_cuda else divisor


# --- recipes: which format, which scales, and which of the three products of a training step run in FP8 ---


class Recipe(NamedTuple):
    """How the three products of `left @ right` run: the result, the gradient of left, and the gradient of right.

    `scaling` says what shares one scale: "tensor", "row" (a row of a product's left operand, a column of its right operand) or "block"
    (32 elements of such a row or column). `scaling_of_right` is that of the right operand in the gradient of left. `power_of_two` rounds
    scales up to powers of two, `gradient` is the format of the result's gradient (left and right are float8_e4m3fn), and
    `right_gradient_low` leaves the gradient of right, the weight in most products, to the low-precision dtype.
    """

    name: str
    scaling: str
    scaling_of_right: str
    power_of_two: bool
    gradient: torch.dtype
    right_gradient_low: bool = False

    @property
    def multiple(self) -> int:
        """Return what the inner and the outer dimension must be multiples of: kernels ask for 16, and both are cut into blocks in turn."""
        return BLOCK if self.scaling == "block" else 16


# The first three are torchao's of these names (Float8LinearConfig.from_recipe_name), the fourth is its MXFP8Linear.
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("tensorwise", "tensor", "tensor", power_of_two=False, gradient=E5M2),
        Recipe("rowwise", "row", "row", power_of_two=True, gradient=E4M3),
        Recipe("rowwise_with_gw_hp", "row", "tensor", power_of_two=True, gradient=E4M3, right_gradient_low=True),
        Recipe("mxfp8", "block", "block", power_of_two=True, gradient=E4M3),
    )
}


# --- what an observer of FP8 products gets of every tensor that is quantised ---

Role = Literal["input", "weight", "grad"]


class Statistics(NamedTuple):
    """Of one quantised tensor; tensors, so that the device is not waited for. `role` is that of the tensor in the product.

    A tensor that is quantised twice, along the rows and along the columns for a product of backward, has two of these.

    `amax` is the largest finite magnitude and `scale` what Quantised.scale is. `saturated` is the share of elements at the format's largest
    number, the nearest they can be to more, and `flushed` the share that are 0 in the format and were not before.
    """

    role: Role
    amax: Tensor
    scale: Tensor
    saturated: Tensor
    flushed: Tensor

    def figures(self) -> Tensor:
        """Five float32 numbers: amax, the least and the greatest scale, the shares saturated and flushed."""
        scale = self.scale if self.scale.dtype is torch.float32 else with_exponent(_to(self.scale, torch.int32))
        return _stack([self.amax, _min(scale), _max(scale), self.saturated, self.flushed])


Observer = Callable[[Statistics], None]


def statistics_of(role: Role, tensor: Tensor, quantised: Quantised) -> Statistics:
    """Return what quantising `tensor` did to it."""
    with torch.no_grad():
        # without the zeros that blocks are filled up with
        codes = _float(_narrow(_narrow(quantised.data, -2, 0, tensor.shape[-2]), -1, 0, tensor.shape[-1]))
        amax = _float(_max(_nan_to_num(_abs(tensor), 0.0, 0.0, 0.0)))
        saturated = _mean(_float(_eq(_abs(codes), torch.finfo(quantised.data.dtype).max)))
        flushed = _mean(_float(_and(_eq(codes, 0), _ne(tensor, 0))))
    return Statistics(role, amax, quantised.scale, saturated, flushed)
