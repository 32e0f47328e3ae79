"""What backward gets where tensors are packed: forward's numbers, near or exact, whatever was written in between and whatever is around it.

What it compares comes back exactly: signs, zeros, thresholds. Of rows that differ by factors of a thousand, no scale spans two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import hmp
from saved_oracle import bytes_of, packs, quantised
from trap_kit import same

pytestmark = packs
Tensor = torch.Tensor
EVERYTHING = hmp.Policy("everything", saved={"*"})
LOW = hmp.Policy("low", bf16={"linear", "matmul", "conv2d"})
PACKED = LOW.replace(name="packed", saved={"*"}, saved_recipe="int8")


def swap(weight: Tensor) -> None:
    with contextlib.suppress(RuntimeError):  # a graph that keeps the weight itself forbids it
        torch.utils.swap_tensors(weight, nn.Parameter(torch.zeros_like(weight)))


def exchange(weight: Tensor) -> None:
    weight.data = weight.data * 0


def step(weight: Tensor) -> None:
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones_like(weight)
    optimizer.step()


WRITES: list[Callable[[Tensor], Any]] = [step, exchange, swap, torch.no_grad()(lambda weight: weight.zero_())]
OPS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...], int]] = {
    "linear": (lambda x, w: F.linear(x, w), (64, 64), (64, 64), len(WRITES)),
    "matmul": (lambda x, w: x @ w.t(), (64, 64), (64, 64), 2),
    "conv2d": (lambda x, w: F.conv2d(x, w), (4, 64, 4, 4), (64, 64, 1, 1), 3),
}


@pytest.mark.parametrize("op", OPS)
def test_r22_a_weight_that_is_written_is_forwards_or_an_error(op: str) -> None:
    call, shape, of_weight, writes = OPS[op]

    def gradient(policy: hmp.Policy, write: Callable[[Tensor], Any]) -> Tensor:
        torch.manual_seed(0)
        x, weight = torch.randn(shape, requires_grad=True), nn.Parameter(torch.randn(of_weight))
        with hmp.casts(policy):
            y = call(x * 2, weight)
        write(weight)
        return torch.autograd.grad(y.float().sum(), x)[0]

    exact = gradient(LOW, lambda weight: None)
    for write in WRITES[:writes]:
        try:
            found = gradient(PACKED, write)
        except RuntimeError as error:
            assert "since" in str(error) or "inplace operation" in str(error)
        else:
            assert (found - exact).norm() < 0.02 * exact.norm()


def test_r22_what_was_packed_is_not_found_again_after_a_write() -> None:
    def gradients(policy: Any, write: Callable[[Tensor], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        leaf = torch.randn(64, 256, requires_grad=True)
        x, found = leaf * 1.0, []
        for _ in range(3):
            with hmp.casts(policy):
                y = torch.square(x)
            found.append(torch.autograd.grad(y.sum(), leaf, retain_graph=True)[0])
            write(x)
        return found

    for write in (lambda x: x.data.mul_(3), lambda x: x.detach().numpy().__imul__(3), lambda x: torch.from_dlpack(x.detach()).mul_(3)):
        for found, exact in zip(gradients(EVERYTHING, write), gradients(hmp.Policy("none"), write), strict=True):
            assert (found - exact).norm() < 0.05 * exact.norm()


def test_r22_a_negated_view_is_not_taken_for_the_numbers_of_its_memory() -> None:
    torch.manual_seed(0)
    z = torch.view_as_complex(torch.rand(8192, 2) + 1)
    weights = [torch.ones(8192, requires_grad=True) for _ in range(3)]
    with hmp.casts(PACKED):
        y = z.imag * weights[0] + z.conj().imag * weights[1] + torch._neg_view(z.real) * weights[2]
    found = torch.autograd.grad(y.sum(), weights)
    for each, exact in zip(found, (z.imag, -z.imag, -z.real), strict=True):
        assert (each - exact).norm() < 0.05 * exact.norm()


def given(x: Tensor) -> Tensor:
    return x.clone().requires_grad_() * 1.0


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(given(x), x.shape[-1:]),
    "group_norm": lambda x: F.group_norm(given(x.view(128, 32, -1)), 32),
    "batch_norm": lambda x: F.batch_norm(given(x.view(2, 2048, -1)), None, None, training=True),
}


def test_r22_statistics_are_kept_as_they_are() -> None:
    torch.manual_seed(0)
    for name, norm in NORMS.items():
        for width in (4, 16):
            x = torch.randn(4096, width) * torch.exp(torch.randn(4096, 1))
            exact = norm(x).grad_fn
            with hmp.casts(PACKED):
                found = norm(x).grad_fn
            for attribute in ("_saved_result1", "_saved_result2"):
                assert torch.equal(getattr(found, attribute), getattr(exact, attribute)), name
    q = torch.randn(16, 4, 32, 16)
    exact = F.scaled_dot_product_attention(*(given(q) for _ in range(3))).grad_fn
    with hmp.casts(EVERYTHING):
        found = F.scaled_dot_product_attention(*(given(q) for _ in range(3))).grad_fn
    assert torch.equal(found._saved_logsumexp, exact._saved_logsumexp)  # type: ignore[union-attr]


def net(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(F.linear(F.layer_norm(x, x.shape[-1:]), w)).square().sum()


MODEL = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
STATE = dict(MODEL.named_parameters())


def loss(state: Any, x: Tensor) -> Tensor:
    return torch.func.functional_call(MODEL, state, (x,)).square().sum()


TRANSFORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "grad": lambda w, x, rows: torch.func.grad(net, argnums=(0, 1))(x, w),
    "vmap of grad": lambda w, x, rows: torch.func.vmap(torch.func.grad(net), in_dims=(0, None))(rows, w),
    "jacrev": lambda w, x, rows: torch.func.jacrev(lambda x: x @ w)(x[:2]),
    "jacfwd": lambda w, x, rows: torch.func.jacfwd(lambda x: F.gelu(x @ w))(x[:2]),
    "hessian": lambda w, x, rows: torch.func.hessian(lambda x: net(x, w[:4, :4]))(x[:2, :4]),
    "per-sample gradients": lambda w, x, rows: torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(STATE, rows),
}


@pytest.mark.parametrize("policy", [(LOW, PACKED), (hmp.Policy("none"), EVERYTHING)], ids=["low", "float32"])
def test_r22_inside_a_transform_ops_keep_what_torch_keeps(policy: tuple[hmp.Policy, hmp.Policy]) -> None:
    torch.manual_seed(0)
    given = (torch.randn(64, 64) / 8, torch.randn(64, 64), torch.randn(3, 64, 64))
    with hmp.casts(policy[0]):
        exact = {name: transform(*given) for name, transform in TRANSFORMS.items()}
    with hmp.casts(policy[1]):
        found = {name: transform(*given) for name, transform in TRANSFORMS.items()}
    for name in TRANSFORMS:
        same(found[name], exact[name], name)


def test_r22_a_dropout_inside_an_op_comes_back_exactly() -> None:
    torch.manual_seed(0)
    q, v = torch.randint(-4, 5, (2, 4, 4, 32, 16)).float()
    found = []
    for policy in (hmp.Policy("none"), EVERYTHING.replace(saved=frozenset({"scaled_dot_product_attention"}))):
        leaves = [torch.zeros_like(q).requires_grad_(), v.clone().requires_grad_()]
        torch.manual_seed(1)
        with hmp.casts(policy):
            y = F.scaled_dot_product_attention(q, *(leaf * 1.0 for leaf in leaves), dropout_p=0.1)
        found.append(torch.autograd.grad(y.sum(), leaves))
    # small integers and probabilities of 1/32 are exact in float8, and a mask of 0 and 1.11 in bits, by which the gradient of the keys goes
    (of_keys, of_values), (exact_of_keys, exact_of_values) = found
    torch.testing.assert_close(of_keys, exact_of_keys, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_values, exact_of_values, rtol=1 / 16, atol=1e-5)


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


@pytest.mark.parametrize("recipe", ["fp8", "bf16", "int8"])
def test_r22_no_gradient_is_on_the_wrong_side_of_zero(recipe: str) -> None:
    policy = EVERYTHING.replace(saved_recipe=recipe)
    for name, call in ASK_FOR_SIGNS.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = with_outliers(dtype)
            exact, found = (gradient(call, x, each) for each in (None, policy))
            if "elu" in name.replace("relu", ""):  # the exponential of a number that is rounded by a sixteenth
                assert bool(((found - exact).abs() <= 0.13 + exact.abs() / 16).all()), (name, dtype)
            else:
                assert torch.equal(found, exact), (name, dtype)


def test_r22_what_is_compared_with_a_threshold_or_another_number_is_kept_as_it_is() -> None:
    x, policy = with_outliers(torch.float32), EVERYTHING.replace(saved_recipe="int8")
    for name, call in COMPARE.items():
        exact, found = (gradient(call, x, each) for each in (None, policy))
        assert torch.equal(found, exact), name


def test_r22_a_power_is_packed_where_its_backward_divides_by_nothing() -> None:
    x, policy = torch.rand(64, 96) + 0.5, EVERYTHING
    for power in (lambda x, e: x**e, lambda x, e: torch.pow(x, e), lambda x, e: x.pow(exponent=e), lambda x, e: (x * 1.0).pow_(e)):
        for exponent, is_packed in ((3, True), (1.5, True), (0.5, False), (-1, False)):
            exact, found = (gradient(lambda x, e=exponent, power=power: power(x, e), x, each) for each in (None, policy))
            assert torch.equal(found, exact) is not is_packed
            torch.testing.assert_close(found, exact, rtol=0.2, atol=0)


def test_r22_a_dropouts_mask_is_kept_as_bits_and_exact() -> None:
    x = torch.randn(64, 256, requires_grad=True)
    for drop in (F.dropout, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout):
        found = []
        for policy in (hmp.Policy("nothing"), EVERYTHING.replace(saved_recipe="fp8")):
            torch.manual_seed(0)
            with hmp.casts(policy):
                y = drop(x * 1.0, 0.1, True)
            found.append(torch.autograd.grad(y.sum(), x)[0])
        assert torch.equal(*found)
    with hmp.casts(EVERYTHING):
        kept, _ = bytes_of(lambda: F.dropout(x * 1.0, 0.1))
    assert kept == 64 * 256 // 8 + 4


def test_r22_nan_and_inf_pass_where_torch_lets_them_pass() -> None:
    x = torch.randn(64, 128)
    x[0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan])
    for name in ("abs", "relu", "leaky_relu"):
        exact, found = (gradient(ASK_FOR_SIGNS[name], x, each) for each in (None, EVERYTHING))
        assert torch.equal(found, exact), name


def rows(*shape: int, dims: tuple[int, ...] = (0,)) -> Tensor:
    """Normal numbers, scaled along the dimensions by up to a thousand, which need a gradient."""
    scale = torch.ones(shape)
    for dim in dims:
        scale *= torch.logspace(0, 3, shape[dim])[torch.randperm(shape[dim])].view([-1 if at == dim else 1 for at in range(len(shape))])
    return (torch.randn(shape) * scale).requires_grad_()


def normed(x: Tensor, over: Tensor) -> Tensor:
    """The sum of what a layer norm gives, weighted: gradients at small rows are as much larger as these are smaller."""
    return (F.layer_norm(x, x.shape[-1:]) * over).sum()


ROWS = 128


def linear(width: int) -> Callable[[], tuple[Callable[[], Tensor], Tensor]]:
    def made() -> tuple[Callable[[], Tensor], Tensor]:
        x, weight, over = rows(ROWS, width), torch.randn(8, width, requires_grad=True), torch.randn(ROWS, 8)
        return lambda: normed(F.linear(x * 1.0, weight), over), weight

    return made


def conv(dims: tuple[int, ...], layout: torch.memory_format) -> Callable[[], tuple[Callable[[], Tensor], Tensor]]:
    def made() -> tuple[Callable[[], Tensor], Tensor]:
        x = rows(8, 8, 8, 8, dims=dims).contiguous(memory_format=layout)
        weight, over = torch.randn(4, 8, 3, 3, requires_grad=True), torch.randn(8, 8, 8, 4)
        return lambda: normed(F.conv2d(x * 1.0, weight, padding=1).permute(0, 2, 3, 1), over), weight

    return made


def transposed(of_what: str) -> Callable[[], tuple[Callable[[], Tensor], Tensor]]:
    def made() -> tuple[Callable[[], Tensor], Tensor]:
        x, weight, over = rows(ROWS, 32), torch.randn(8, 32, requires_grad=True), torch.randn(ROWS, 8)
        columns = x.t().contiguous()
        return {
            "second factor": lambda: normed((weight @ (x * 1.0).t()).t(), over),
            "second factor, contiguous": lambda: normed((weight @ (columns * 1.0)).t(), over),
            "batches": lambda: normed(torch.bmm((columns * 1.0)[None].mT, weight.t()[None])[0], over),
        }[of_what], weight

    return made


def channels() -> tuple[Callable[[], Tensor], Tensor]:
    x, weight, over = rows(256, 64, dims=(1,)), torch.ones(64, requires_grad=True), torch.randn(256, 64)
    return lambda: (F.batch_norm(x * 1.0, None, None, weight, None, True) * over).sum(), weight


CASES = {
    **{f"linear {width}": linear(width) for width in (131, 256)},
    **{f"conv {dims}": conv(dims, torch.contiguous_format) for dims in ((0,), (1,), (0, 2))},
    **{f"conv {dims}, channels last": conv(dims, torch.channels_last) for dims in ((1,), (3,))},
    **{f"transposed {name}": transposed(name) for name in ("second factor", "second factor, contiguous", "batches")},
    "channels of a batch norm": channels,
}


@pytest.mark.parametrize("recipe", ["fp8", "int8"])
def test_r22_a_gradient_is_near_where_rows_differ_by_a_thousand(recipe: str) -> None:
    for name, case in CASES.items():
        torch.manual_seed(0)
        call, leaf = case()
        exact = torch.autograd.grad(call(), leaf)[0]
        with hmp.casts(EVERYTHING.replace(saved_recipe=recipe)):
            loss = call()
        found = torch.autograd.grad(loss, leaf)[0]
        assert (found - exact).norm() < 0.05 * exact.norm(), name
        assert not torch.equal(found, exact)  # something was packed


@pytest.mark.parametrize("recipe", ["fp8", "int8"])
def test_r22_what_backward_gets_has_the_strides_that_the_op_kept_and_scales_of_its_rows(recipe: str) -> None:
    """Kernels of backward choose their way by the strides of what they get beside their gradient's."""
    x = rows(8, 16, 8, 8, dims=(2, 3)).contiguous(memory_format=torch.channels_last)
    for view in (x, x[:, :8], x.permute(0, 2, 1, 3), x[..., :5], rows(64, 96).t(), rows(64, 96)):
        leaf = view.clone(memory_format=torch.preserve_format).requires_grad_()
        with hmp.casts(EVERYTHING.replace(saved_recipe=recipe)):
            kept = F.gelu(leaf * 1.0)
        found = kept.grad_fn._saved_self  # type: ignore[union-attr]  # an attribute that torch's stubs don't have
        assert found.stride() == leaf.stride() and torch.equal(found, quantised(leaf, recipe)) and not torch.equal(found, leaf)


SOME = hmp.Policy("packed", saved=frozenset({"linear", "gelu", "relu", "mul", "layer_norm"}))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def grads(model: nn.Module, x: Tensor, policy: Any = None, call: Any = None) -> list[Tensor]:
    model.zero_grad()
    with hmp.casts(policy) if policy is not None else torch.enable_grad():
        result = (call or model)(x)
    result.square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_r22_after_an_in_place_write_backward_has_forwards_numbers() -> None:
    x = torch.randn(64, 128, requires_grad=True)

    def gradient(write: bool) -> Tensor:
        y = x * 2
        z = F.gelu(y)
        if write:
            y.add_(1)
        return torch.autograd.grad(z.sum(), x)[0]

    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        gradient(True)  # torch has no other copy
    with hmp.casts(SOME):
        assert torch.equal(gradient(True), gradient(False))


def test_r22_a_write_into_what_is_saved_as_it_is_raises_as_torch_does() -> None:
    batch, weight = torch.randn(64, 128), torch.randn(8, 128, requires_grad=True)
    with hmp.casts(SOME):
        y = F.linear(batch, weight)
    batch.add_(1)
    with pytest.raises(RuntimeError, match=r"inplace operation: .*linear .* at version 1; expected version 0"):
        y.sum().backward()


def test_r22_hooks_around_it_see_what_torch_keeps() -> None:
    hmp.revert()  # which forgets what earlier tests fell back on
    model, x = mlp(), torch.randn(64, 64)
    exact = grads(model, x)
    seen: list[Tensor] = []

    def hooked(x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda t: seen.append(t) or t.detach(), lambda t: t):
            return model(x)

    def offloaded(x: Tensor) -> Tensor:
        with save_on_cpu():
            return model(x)

    for call in (hooked, offloaded):
        same(grads(model, x, SOME, call), exact)
    assert {tuple(each.shape) for each in seen} >= {(64, 64)}
    assert {name.partition(":")[0]: count for name, count in hmp.fallbacks().items()} == {"linear": 4, "gelu": 2}


@pytest.mark.parametrize("reentrant", [True, False])
def test_r22_a_checkpoint_recomputes_what_forward_computed(reentrant: bool) -> None:
    model, x = mlp(), torch.randn(64, 64, requires_grad=True)

    def inside(x: Tensor) -> Tensor:
        return checkpoint(model, F.gelu(model(x)), use_reentrant=reentrant)

    exact, found = grads(model, x, None, inside), grads(model, x, SOME, inside)
    assert all((a - b).norm() < 0.05 * b.norm() for a, b in zip(found, exact, strict=True))
    assert not all(map(torch.equal, found, exact))  # what is outside of the checkpoint is packed


def test_r22_float64_stays_and_so_does_what_is_small() -> None:
    x = torch.randn(64, 128, dtype=torch.float64)

    def gradient(policy: Any) -> Tensor:
        y = x.clone().requires_grad_()
        with hmp.casts(policy) if policy else torch.enable_grad():
            z = F.gelu(y * 2) + F.gelu(y[:30].float() * 2).sum()
        return torch.autograd.grad(z.sum(), y)[0]

    assert torch.equal(gradient(SOME), gradient(None))


@pytest.mark.slow
def test_r22_compiled_and_exported_code_keeps_what_the_compiler_keeps(fresh_compiler: None) -> None:
    model, x = mlp(), torch.randn(64, 64)
    exact = grads(model, x)
    with hmp.convert(policy=SOME):
        same(grads(model, x, None, torch.compile(model, backend="eager")), exact)
        assert "torch.compile" in str(hmp.fallbacks())
        torch.export.export(model, (x,), strict=True)
        exported = torch.export.export(model, (x,), strict=False).module()
        assert torch.equal(exported(x), model(x))
