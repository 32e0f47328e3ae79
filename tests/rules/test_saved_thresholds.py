"""What a backward compares comes back exactly: signs, zeros, thresholds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import hmp
from saved_oracle import bytes_of, packs

Tensor = torch.Tensor


# --- the numbers --------------------------------------------------------------------------------------------------------------------------

ASK_FOR_SIGNS: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": lambda x: torch.abs(x),
    "relu": lambda x: F.relu(x),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "leaky_relu in place": lambda x: F.leaky_relu_(x + 0, 0.1),
    "elu": lambda x: F.elu(x, 2.0),
    "selu": lambda x: F.selu(x),
    "celu": lambda x: F.celu(x, 3.0),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.25], dtype=x.dtype)),
    "max_pool": lambda x: F.max_pool1d(x, 4),
}
# whose numbers are compared with others than zero, or with each other
COMPARE = {
    "hardswish": lambda x: F.hardswish(x),
    "hardsigmoid": lambda x: F.hardsigmoid(x),
    "hardtanh": lambda x: F.hardtanh(x),
    "relu6": lambda x: F.relu6(x),
    "threshold": lambda x: F.threshold(x, 0.5, 0.0),
    "hardshrink": lambda x: F.hardshrink(x),
    "softshrink": lambda x: F.softshrink(x),
    "clamp": lambda x: x.clamp(-1, 1),
    "maximum": lambda x: torch.maximum(x, x.roll(1, 0)),
    "amax": lambda x: x.round().amax(1),
    "cummax": lambda x: x.cummax(1)[0],
    "smooth_l1": lambda x: F.smooth_l1_loss(x, x.detach().roll(1, 0)),
}


def with_outliers(dtype: torch.dtype) -> Tensor:
    """Rows with one large number, numbers of all magnitudes beside it, zeros of both signs."""
    torch.manual_seed(0)
    x = torch.randn(64, 256) * torch.logspace(-12, 0, 256)
    x[:, 0], x[:, 7], x[:, 100] = 1000.0, 0.0, -0.0
    return x.to(dtype)


def gradient(call: Callable[[Tensor], Tensor], x: Tensor, policy: hmp.Policy | None) -> Tensor:
    leaf = x.clone().requires_grad_()
    with hmp.casts(policy) if policy is not None else torch.enable_grad():
        result = call(leaf * 1.0)
    return torch.autograd.grad(result.float().sum(), leaf)[0]


@packs
@pytest.mark.parametrize("recipe", ["fp8", "bf16", "int8"])
def test_r22_no_gradient_is_on_the_wrong_side_of_zero(recipe: str) -> None:
    policy = hmp.Policy("everything", saved={"*"}, saved_recipe=recipe)
    for name, call in ASK_FOR_SIGNS.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = with_outliers(dtype)
            exact, found = (gradient(call, x, each) for each in (None, policy))
            if "elu" in name.replace("relu", ""):  # the exponential of a number that is rounded by a sixteenth
                assert bool(((found - exact).abs() <= 0.13 + exact.abs() / 16).all()), (name, dtype)
            else:
                assert torch.equal(found, exact), (name, dtype)


@packs
def test_r22_what_is_compared_with_a_threshold_or_another_number_is_kept_as_it_is() -> None:
    x, policy = with_outliers(torch.float32), hmp.Policy("everything", saved={"*"}, saved_recipe="int8")
    for name, call in COMPARE.items():
        exact, found = (gradient(call, x, each) for each in (None, policy))
        assert torch.equal(found, exact), name


@packs
def test_r22_a_power_is_packed_where_its_backward_divides_by_nothing() -> None:
    x, policy = torch.rand(64, 96) + 0.5, hmp.Policy("everything", saved={"*"})
    for power in (lambda x, e: x**e, lambda x, e: torch.pow(x, e), lambda x, e: x.pow(exponent=e), lambda x, e: (x * 1.0).pow_(e)):
        for exponent, is_packed in ((3, True), (1.5, True), (0.5, False), (-1, False)):
            exact, found = (gradient(lambda x, e=exponent, power=power: power(x, e), x, each) for each in (None, policy))
            assert torch.equal(found, exact) is not is_packed
            torch.testing.assert_close(found, exact, rtol=0.2, atol=0)


@packs
def test_r22_a_dropouts_mask_is_kept_as_bits_and_exact() -> None:
    x = torch.randn(64, 256, requires_grad=True)
    for drop in (F.dropout, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout):
        found = []
        for policy in (hmp.Policy("nothing"), hmp.Policy("everything", saved={"*"}, saved_recipe="fp8")):
            torch.manual_seed(0)
            with hmp.casts(policy):
                y = drop(x * 1.0, 0.1, True)
            found.append(torch.autograd.grad(y.sum(), x)[0])
        assert torch.equal(*found)
    with hmp.casts(hmp.Policy("everything", saved={"*"})):
        kept, _ = bytes_of(lambda: F.dropout(x * 1.0, 0.1))
    assert kept == 64 * 256 // 8 + 4


@packs
def test_r22_nan_and_inf_pass_where_torch_lets_them_pass() -> None:
    x = torch.randn(64, 128)
    x[0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan])
    for name in ("abs", "relu", "leaky_relu"):
        exact, found = (gradient(ASK_FOR_SIGNS[name], x, each) for each in (None, hmp.Policy("everything", saved={"*"})))
        assert torch.equal(found, exact), name
