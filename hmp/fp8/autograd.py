"""One product of matrices in FP8 that autograd differentiates, its gradients being such products too."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..core.casting import Tensor, cast, dtype_name
from ..core.torch_private import in_plain_autograd
from ..errors import HmpError
from .kernels import matmul_as_given, multiply
from .quantization import E4M3, Layout, Observer, Quantised, Recipe, Role, quantise, statistics_of, transposed

# torch's own, taken before anything is patched
_compiling = torch.compiler.is_dynamo_compiling
_grad_enabled = torch.is_grad_enabled
_transpose = torch.transpose


class Settings(NamedTuple):
    """What a product is computed with. `right_is_transposed`: right is given as (outer, inner), as a linear layer's weight is."""

    op: str
    recipe: Recipe
    low_dtype: torch.dtype
    real: bool
    observer: Observer | None
    right_is_transposed: bool


def product(left: Tensor, right: Tensor, settings: Settings) -> Tensor:
    """Return `left @ right` in the low-precision dtype, for two matrices or two batches of as many."""
    if not _compiling() and not in_plain_autograd():
        raise HmpError(
            f"{settings.op} in FP8 does not support torch.func, forward-mode differentiation and torch.jit.trace; run it in "
            f"{dtype_name(settings.low_dtype)} there"
        )
    if _grad_enabled() and (left.requires_grad or right.requires_grad):
        result: Tensor = _Product.apply(left, right, settings)  # type: ignore[no-untyped-call]
        return result
    return _multiplied(*_operands(left, right, settings), settings)


def _layout(settings: Settings, axis: int) -> Layout:
    return Layout(E4M3, settings.recipe.scaling, settings.recipe.power_of_two, axis)


def _operands(left: Tensor, right: Tensor, settings: Settings) -> tuple[Quantised, Quantised]:
    """Both operands of the forward product, each as it is given."""
    inner = _inner_of_right(settings)
    return _observed("input", left, _layout(settings, -1), settings), _observed("weight", right, _layout(settings, inner), settings)


def _observed(role: Role, tensor: Tensor, layout: Layout, settings: Settings) -> Quantised:
    """Return `tensor` in FP8, and report it to the observer."""
    in_fp8 = quantise(tensor, layout)
    if settings.observer is not None:
        settings.observer(statistics_of(role, tensor, in_fp8))
    return in_fp8


def _inner_of_right(settings: Settings) -> int:
    return -1 if settings.right_is_transposed else -2


def _multiplied(left: Quantised, right: Quantised, settings: Settings) -> Tensor:
    inner_by_outer = transposed(right) if settings.right_is_transposed else right
    return multiply(left, inner_by_outer, settings.low_dtype, real=settings.real, fast=True)


class _Product(torch.autograd.Function):
    """Saves for backward one byte an element and the scales, of each operand whose partner needs a gradient.

    Backward multiplies along another axis. So scales of rows and blocks are others there: both copies are made in forward, while the tensor
    is at hand. Where the gradient of right is computed in the low-precision dtype, left is saved in the low-precision dtype.
    """

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, settings: Settings) -> Tensor:
        recipe = settings.recipe
        ctx.settings, ctx.dtypes = settings, (left.dtype, right.dtype)
        for_left: Quantised | None = None
        for_right: Quantised | None = None
        in_fp8 = _operands(left, right, settings)
        if ctx.needs_input_grad[0]:
            outer = -3 - _inner_of_right(settings)
            layout = Layout(E4M3, recipe.scaling_of_right, recipe.power_of_two, outer)
            for_left = in_fp8[1] if recipe.scaling == "tensor" else _observed("weight", right, layout, settings)
        if ctx.needs_input_grad[1] and not recipe.right_gradient_low:
            for_right = in_fp8[0] if recipe.scaling == "tensor" else _observed("input", left, _layout(settings, -2), settings)
        low_left = cast(left, settings.low_dtype) if ctx.needs_input_grad[1] and recipe.right_gradient_low else None
        ctx.save_for_backward(*_parts(for_left), *_parts(for_right), low_left)
        return _multiplied(*in_fp8, settings)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        settings: Settings = ctx.settings
        if _grad_enabled():
            raise HmpError(
                f"{settings.op} in FP8 cannot be differentiated twice, and create_graph=True asks for that; take {settings.op} off the FP8 "
                "list, or call it inside hmp.disable_casts()"
            )
        # read once: the hooks of a checkpoint give each saved tensor a single time
        right_data, right_scale, left_data, left_scale, low_left = ctx.saved_tensors
        recipe = settings.recipe
        of_left = of_right = along_outer = None
        if ctx.needs_input_grad[0]:
            along_outer = _gradient(gradient, settings, -1)
            right = _copy(right_data, right_scale, recipe.scaling_of_right, -3 - _inner_of_right(settings))
            of_left = cast(_gradient_of_left(along_outer, right, settings), ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            if recipe.right_gradient_low:
                of_right = _low_gradient_of_right(gradient, low_left, settings)
            else:
                # one scale for the whole tensor serves both products
                shared = along_outer if recipe.scaling == "tensor" else None
                along_rows = _gradient(gradient, settings, -2) if shared is None else shared
                of_right = _gradient_of_right(along_rows, _copy(left_data, left_scale, recipe.scaling, -2), settings)
            of_right = cast(of_right, ctx.dtypes[1])
        return of_left, of_right, None


def _gradient(gradient: Tensor, settings: Settings, axis: int) -> Quantised:
    recipe = settings.recipe
    return _observed("grad", gradient, Layout(recipe.gradient, recipe.scaling, recipe.power_of_two, axis), settings)


def _parts(copy: Quantised | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if copy is None else (copy.data, copy.scale)


def _copy(data: Tensor, scale: Tensor, scaling: str, axis: int) -> Quantised:
    return Quantised(data, scale, None if scaling == "tensor" else axis)


def _gradient_of_left(gradient: Quantised, right: Quantised, settings: Settings) -> Tensor:
    outer_by_inner = right if settings.right_is_transposed else transposed(right)
    return multiply(gradient, outer_by_inner, settings.low_dtype, real=settings.real)


def _gradient_of_right(gradient: Quantised, left: Quantised, settings: Settings) -> Tensor:
    """In the layout that right was given in."""
    first, second = (gradient, left) if settings.right_is_transposed else (left, gradient)
    return multiply(transposed(first), second, settings.low_dtype, real=settings.real)


def _low_gradient_of_right(gradient: Tensor, left: Tensor, settings: Settings) -> Tensor:
    first, second = (gradient, left) if settings.right_is_transposed else (left, gradient)
    return matmul_as_given(_transpose(first, -2, -1), second)
