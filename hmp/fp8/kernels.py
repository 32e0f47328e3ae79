"""The product of two quantised operands: torch's scaled product where the device computes in FP8, else the same product emulated."""

from __future__ import annotations

import functools

import torch

from ..core.casting import Tensor, cast
from ..core.rules.emulation import computed_in_float32
from ..core.torch_private import TORCH, scaled_mm
from ..errors import HmpError
from ..plug_in_math import outside_autocast
from . import fused_kernels
from .quantization import Quantised, Recipe, values

# torch's own, taken before anything is patched
_matmul, _pad, _select, _stack = torch.matmul, torch.constant_pad_nd, torch.select, torch.stack
_ones, _transpose = torch.ones, torch.transpose
_contiguous, _expand, _reshape, _permute, _view = Tensor.contiguous, Tensor.expand, torch.reshape, torch.permute, Tensor.view

_BLOCKS_FROM = (10, 0)  # the compute capability from which NVIDIA's GPUs take scales of blocks
# AMD's chips with these formats. gfx942 has others of its own (e4m3fnuz, with a largest number of 240 instead of 448), and is emulated.
_AMD = ("gfx950", "gfx1200", "gfx1201")
_KERNEL_INNER = 16
_TAKES_BLOCKS = TORCH >= (2, 13)  # torch 2.7 refuses their scales while it compiles; those between were not tried


def is_real(kernel: str, device: torch.device, recipe: Recipe) -> bool:
    """Return True if a product runs on torch's kernel.

    Args:
        kernel: "real", "emulate", or "auto": "real" where torch has a kernel of the recipe for the device.
        device: the device of the operands.
        recipe: the scales.
    """
    if kernel not in ("auto", "emulate", "real"):
        raise HmpError(f"kernel= expected 'auto', 'emulate' or 'real', got {kernel!r}")
    if kernel != "auto":
        return kernel == "real"
    in_blocks = recipe.scaling == "block"
    # on Gaudi: products in FP8 are emulated; the bridge's own kernels (torch.ops.hpu.fp8_gemm) are not called.
    if device.type != "cuda" or scaled_mm is None or (in_blocks and not _TAKES_BLOCKS):
        return False
    found = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return not in_blocks and found.gcnArchName.split(":")[0] in _AMD
    return (found.major, found.minor) >= (_BLOCKS_FROM if in_blocks else fused_kernels.FP8_FROM)


def multiply(left: Quantised, right: Quantised, low_dtype: torch.dtype, *, real: bool, fast: bool = False) -> Tensor:
    """Return `left @ right`, matrices or batches of them, summed in float32 and rounded to `low_dtype` once.

    The inner axis of `left` is its last and that of `right` its last but one. `fast` lets a real kernel keep fewer bits of the sums.
    """
    if not real:
        return cast(matmul_as_given(values(left), values(right)), low_dtype)
    if left.data.dim() == 2:
        return _scaled_product(left, right, low_dtype, fast)
    # torch has no kernel for batches that all recipes and GPUs share
    pairs = ((_matrix(left, i), _matrix(right, i)) for i in range(left.data.shape[0]))
    return _stack([_scaled_product(one, other, low_dtype, fast) for one, other in pairs])


def matmul_as_given(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right` in the dtype of the two: torch.autocast, where it is on, would take its own.

    On a CPU without instructions for the dtype computed in float32 and rounded.
    """
    if left.device.type == "cpu" and left.dtype in computed_in_float32():
        return cast(matmul_as_given(cast(left, torch.float32), cast(right, torch.float32)), left.dtype)
    return outside_autocast(left.device, _matmul, left, right)


def _matrix(batch: Quantised, i: int) -> Quantised:
    return Quantised(_select(batch.data, 0, i), batch.scale if batch.axis is None else _select(batch.scale, 0, i), batch.axis)


def _scaled_product(left: Quantised, right: Quantised, low_dtype: torch.dtype, fast: bool) -> Tensor:
    """Return the product of two matrices by torch's kernel."""
    assert scaled_mm is not None, "without such a kernel FP8 is emulated"
    # kernels take a row-major left and a column-major right matrix, and an inner dimension that is a multiple of 16: zeros add nothing
    rows = _with_whole_inner(fused_kernels.row_major(left.data))
    columns = _transpose(_with_whole_inner(fused_kernels.row_major(_transpose(right.data, 0, 1))), 0, 1)
    run = functools.partial(scaled_mm, rows, columns, use_fast_accum=fast)
    if left.scale.dtype is not torch.float32:
        return run(_swizzled(left.scale), _swizzled(_transpose(right.scale, 0, 1)), out_dtype=low_dtype)
    if left.axis is None and right.axis is None:
        return run(left.scale, right.scale, out_dtype=low_dtype)
    row_scale, column_scale = _expand(left.scale, (rows.shape[0], 1)), _expand(right.scale, (1, columns.shape[1]))
    if fast and low_dtype is torch.bfloat16:
        return run(_contiguous(row_scale), _contiguous(column_scale), out_dtype=low_dtype)
    # the kernel for scales of rows gives bfloat16 only, and is slow where its sums are exact
    one = _ones((), device=rows.device)
    return fused_kernels.cast_product(run(one, one, out_dtype=torch.float32), row_scale, column_scale, low_dtype)


def _with_whole_inner(matrix: Tensor) -> Tensor:
    missing = -matrix.shape[1] % _KERNEL_INNER
    return _view(_pad(_view(matrix, torch.uint8), (0, missing)), matrix.dtype) if missing else matrix


def _swizzled(scale: Tensor) -> Tensor:
    """Scales of blocks, a row of them for each row of the matrix, in the order that kernels take: tiles of 128 by 4, each as 32 by 16."""
    rows, columns = scale.shape
    whole = _pad(scale, (0, -columns % 4, 0, -rows % 128))
    tiles = _permute(_reshape(whole, (whole.shape[0] // 128, 4, 32, whole.shape[1] // 4, 4)), (0, 3, 2, 1, 4))
    return _view(_reshape(tiles, (-1,)), torch.float8_e8m0fnu)
