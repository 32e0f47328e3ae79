"""torch's scaled product and the emulated one: the same numbers, and which runs where.

No public call reaches the way of a GPU where there is none.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autocast_kit import needs_scaled_product
from fp8_oracle import roundings
from hmp.fp8 import PRODUCTS, RECIPES, is_real, kernels, refusals, why_not
from hmp.fp8.quantization import Layout, quantise, transposed
from torch_has import TORCH

NAMES = list(RECIPES)
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
NEEDS_REFERENCE = pytest.mark.skipif(TORCH < (2, 8), reason="torch 2.7 has no scaled product on CPUs")


def gradients(op: str, args: tuple[torch.Tensor, ...], recipe: str, low: torch.dtype, kernel: str) -> list[torch.Tensor]:
    leaves = [each.clone().requires_grad_() for each in args]
    y = PRODUCTS[op](*leaves, recipe=RECIPES[recipe], low_dtype=low, kernel=kernel)
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape).to(low))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@NEEDS_REFERENCE
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize(("low", "rows"), [(BF16, 19), (torch.float16, 1)])
def test_the_real_and_the_emulated_product_agree(recipe: str, low: torch.dtype, rows: int) -> None:
    """On a CPU torch's is a slow reference; 19 rows are no multiple of 16, which the weight's gradient is summed over."""
    needs_scaled_product()
    for op, args in (
        ("linear", (torch.randn(rows, 32), torch.randn(48, 32), torch.randn(48))),
        ("bmm", (torch.randn(2, rows, 32), torch.randn(2, 32, 16))),
    ):
        pairs = zip(*(gradients(op, args, recipe, low, kernel) for kernel in ("real", "emulate")), strict=True)
        # a rounding the other way, and in the sum with a bias once more
        assert all(roundings(real.to(low), emulated.to(low), 1e4, 4.0) <= 1.01 for real, emulated in pairs)


@pytest.mark.parametrize("recipe", NAMES)
@pytest.mark.parametrize("shape", [(128, 64), (32, 32)])
def test_the_real_product_is_asked_for_as_torch_wants_it_on_a_gpu(
    recipe: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed here: torch's own checks of a fake GPU's tensors say whether strides, shapes and dtypes of scales are right."""
    if recipe == "mxfp8" and TORCH < (2, 13):
        pytest.skip("such a torch has no kernel for blocks, or none that hmp knows of: they are emulated")
    given: list[tuple[Any, ...]] = []
    own = kernels.scaled_mm
    assert own is not None

    def seen(left: torch.Tensor, right: torch.Tensor, *scales: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        given.append((left.dtype, right.dtype, scales[0].dtype, kwargs["use_fast_accum"]))
        return own(left, right, *scales, **kwargs)

    monkeypatch.setattr(kernels, "scaled_mm", seen)
    how = RECIPES[recipe]
    with FakeTensorMode(), torch.no_grad():  # autograd asks for a real GPU's streams
        x, w = torch.empty(shape, device="cuda"), torch.empty(160, shape[1], device="cuda")
        y = PRODUCTS["linear"](x, w, recipe=how, low_dtype=BF16, kernel="real")
        # the operands of backward, laid out as kernels take them: no copy can be made on a GPU that is none
        grad, grad_t = torch.empty(shape[0], 160, device="cuda", dtype=BF16), torch.empty(160, shape[0], device="cuda", dtype=BF16)
        along_outer = quantise(grad, Layout(how.gradient, how.scaling, how.power_of_two))
        along_rows = quantise(grad_t, Layout(how.gradient, how.scaling, how.power_of_two))
        right = transposed(quantise(torch.empty(shape[1], 160, device="cuda"), Layout(E4M3, how.scaling_of_right, how.power_of_two)))
        left = transposed(quantise(torch.empty(shape[1], shape[0], device="cuda"), Layout(E4M3, how.scaling, how.power_of_two)))
        of_x = kernels.multiply(along_outer, right, BF16, real=True)
        of_w = kernels.multiply(along_rows, left, BF16, real=True)
    assert y.shape == (shape[0], 160) and y.dtype is BF16
    assert (of_x.shape, of_w.shape) == (x.shape, w.shape)
    of_gradient = torch.float8_e5m2 if recipe == "tensorwise" else E4M3
    scales = torch.float8_e8m0fnu if recipe == "mxfp8" else torch.float32
    assert given == [(E4M3, E4M3, scales, True), (of_gradient, E4M3, scales, False), (of_gradient, E4M3, scales, False)]


@pytest.mark.skipif(TORCH < (2, 11), reason="torchao 0.18 imports names that torch 2.7 lacks")
def test_scales_of_blocks_are_laid_out_as_torchao_lays_them_out() -> None:
    from torchao.prototype.mx_formats.utils import to_blocked

    for shape in ((128, 4), (19, 3), (300, 9), (1, 1)):
        scale = torch.randint(0, 255, shape, dtype=torch.uint8)
        assert torch.equal(kernels._swizzled(scale).view(torch.uint8), to_blocked(scale))


DEVICES: list[tuple[tuple[int, int], str | None, str, set[str]]] = [
    ((8, 0), None, "", set()),
    ((8, 9), None, "", set(NAMES) - {"mxfp8"}),
    ((10, 0), None, "", set(NAMES)),
    ((9, 4), "6.2", "gfx942:sramecc+:xnack-", set()),
    ((9, 0), "6.2", "gfx90a", set()),
    ((9, 5), "6.4", "gfx950:sramecc+:xnack-", set(NAMES) - {"mxfp8"}),
    ((12, 0), "6.4", "gfx1201", set(NAMES) - {"mxfp8"}),
]


def test_the_kernel_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for (major, minor), hip, arch, real in DEVICES:
        properties = SimpleNamespace(major=major, minor=minor, gcnArchName=arch)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_properties", lambda device, properties=properties: properties)
            patch.setattr(torch.version, "hip", hip)
            found = {name for name in NAMES if is_real("auto", torch.device("cuda", 0), RECIPES[name])}
        assert found == (real if TORCH >= (2, 13) else real - {"mxfp8"}), (major, minor, arch)
    assert not any(is_real("auto", torch.device(kind), RECIPES[name]) for name in NAMES for kind in ("cpu", "meta", "xpu", "mps"))
    monkeypatch.setattr(kernels, "scaled_mm", None)  # without torch's kernel every device is emulated
    assert not is_real("auto", torch.device("cuda", 0), RECIPES["tensorwise"])


@pytest.mark.parametrize("kernel", ["auto", "emulate"])
def test_a_cpu_emulates(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "scaled_mm", lambda *args, **kwargs: pytest.fail("torch's kernel was called"))
    x, w = torch.randn(16, 32), torch.randn(16, 32)
    left, right = quantise(x, Layout()), quantise(w, Layout())
    found = PRODUCTS["linear"](x, w, recipe=RECIPES["tensorwise"], low_dtype=BF16, kernel=kernel)
    wanted = (left.data.double() * left.scale.double()) @ (right.data.double() * right.scale.double()).T
    assert roundings(found, wanted, 1e3) <= 0.51


def test_a_device_without_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "_WITHOUT_FLOAT8", frozenset({"cpu"}))
    assert why_not("linear", (torch.ones(3, 16), torch.ones(32, 16)), {}, RECIPES["rowwise"], BF16) == "no float8 on this device"
