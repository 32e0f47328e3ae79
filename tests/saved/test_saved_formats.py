"""The formats: what comes back of a number, of NaN and Inf, of what is tiny, huge or constant."""

from __future__ import annotations

import math

import pytest
import torch

from hmp.saved import formats
from hmp.saved.formats import FORMATS, pack, unpack

INF, NAN = math.inf, math.nan
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
PAIRS = [(recipe, dtype) for recipe in FORMATS for dtype in FLOATS if dtype in FORMATS[recipe].takes]


def there_and_back(tensor: torch.Tensor, recipe: str) -> torch.Tensor:
    return unpack(pack(tensor, FORMATS[recipe]))


@pytest.mark.parametrize(("recipe", "dtype"), PAIRS)
@pytest.mark.parametrize("elsewhere", [False, True], ids=["cpu", "as elsewhere"])
def test_r22_each_number_comes_back_within_its_formats_error(
    recipe: str, dtype: torch.dtype, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if elsewhere:  # the way of devices that would have to be waited for: nothing is asked of the numbers
        monkeypatch.setattr(formats, "_is_usual", lambda flat: False)
    x = (torch.randn(300_000) * torch.logspace(-3, 3, 300_000)).to(dtype)  # several pieces, and a rest
    y = there_and_back(x, recipe)
    assert y.dtype is dtype and torch.equal(y[-(300_000 % 128) :], x[-(300_000 % 128) :])
    blocks, error = x.double()[:299_904].view(-1, 128), (x.double() - y.double()).abs()[:299_904].view(-1, 128)
    step = torch.finfo(dtype).eps / 2 * blocks.abs()  # the rounding to the tensor's own dtype
    most = {
        "fp8": (blocks.abs() / 16).maximum(blocks.abs().amax(1, keepdim=True) * 2**-16),
        "bf16": blocks.abs() / 256,
        "int8": (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / 509 + step,
    }[recipe]
    assert bool((error <= most).all())
    assert pack(x, FORMATS[recipe]).nbytes <= {"fp8": 1.045, "bf16": 2.001, "int8": 1.08}[recipe] * 300_000


@pytest.mark.parametrize(("recipe", "dtype"), PAIRS)
def test_r22_nan_and_inf_come_back_and_what_is_finite_stays_finite(recipe: str, dtype: torch.dtype) -> None:
    largest, least = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    for special in ([INF, -INF, NAN], [INF] * 128, [NAN] * 128, [largest, -largest], [largest] * 128, [0.0] * 128, [least, -least], [-0.0]):
        x = torch.randn(4096 + 5).to(dtype)
        x[: len(special)] = torch.tensor(special, dtype=dtype)
        y = there_and_back(x, recipe)
        odd = ~x.isfinite()
        assert torch.equal(y[odd].nan_to_num(7), x[odd].nan_to_num(7)) and bool(y[~odd].isfinite().all()), special
        plain = x[128:4096]  # the blocks beside it know nothing of it
        assert torch.equal(y[128:4096], there_and_back(plain, recipe)) or (y[128:4096] - plain).abs().max() < 0.2


@pytest.mark.parametrize("recipe", ["fp8", "int8"])
def test_r22_tiny_numbers_are_numbers(recipe: str) -> None:
    x = torch.randn(8192) * 1e-20
    assert (there_and_back(x, recipe) - x).norm() < 0.03 * x.norm()
