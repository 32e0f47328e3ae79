"""Each product of the FP8 list and its gradients, against quantised operands multiplied in float64.

Inside autograd: what is saved, what is refused, and what trains around them. What cannot run in FP8, and the reason that is counted.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hmp
from fp8_oracle import RECIPES, function, gradients, in_fp8, policy, product, roundings
from oracle import kept_for_backward
from strategies import Tagged
from trap_kit import same

BF16 = torch.bfloat16


def tensor(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, grad: bool = False) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(dtype).requires_grad_(grad)


def close(found: torch.Tensor, wanted: torch.Tensor, terms: float = 1e4, most: float = 0.51) -> None:
    assert found.shape == wanted.shape
    assert roundings(found, wanted, terms) <= most


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# --- linear: forward, every gradient, the leaf's dtype ---------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("low", "dtypes", "rows"),
    [
        (BF16, (torch.float32, torch.float32), 33),
        (BF16, (BF16, BF16), 1),
        (torch.float16, (torch.float32, BF16), 7),
        (torch.float16, (torch.float16, torch.float32), 64),
    ],
)
def test_r20_linear_and_its_gradients(recipe: str, low: torch.dtype, dtypes: tuple[torch.dtype, torch.dtype], rows: int) -> None:
    x, w, b = tensor(rows, 64, dtype=dtypes[0], grad=True), tensor(96, 64, dtype=dtypes[1], grad=True), tensor(96, grad=True)
    y = in_fp8("linear", x, w, recipe=recipe, low=low)
    assert y.dtype is low
    close(y, product(x, w.T, recipe))
    grad = torch.randn(rows, 96).to(low)
    y.backward(grad)
    of_x, of_w = gradients(x, w.T, grad, recipe)
    assert (x.grad.dtype, w.grad.dtype) == dtypes
    # rounded to the low-precision dtype, and to the leaf's where that is coarser
    close(x.grad if dtypes[0] is BF16 else x.grad.to(low), of_x, most=0.6)
    close(w.grad if dtypes[1] is BF16 else w.grad.to(low), of_w.T, most=0.6)
    with_bias = in_fp8("linear", x, w, b, recipe=recipe, low=low)
    assert torch.equal(with_bias, y + b.to(low))
    with_bias.backward(grad)
    assert b.grad.dtype is torch.float32
    assert torch.equal(b.grad, grad.sum(0).float())


@pytest.mark.parametrize("recipe", RECIPES)
def test_neither_dimensions_nor_strides_matter(recipe: str) -> None:
    x, w = tensor(48, 64), tensor(32, 64)
    wanted = in_fp8("linear", x, w, recipe=recipe)
    for shape in ((2, 24, 64), (2, 1, 24, 64)):
        assert torch.equal(in_fp8("linear", x.view(shape), w, recipe=recipe), wanted.view(*shape[:-1], 32))
    assert in_fp8("linear", x[0], w, recipe=recipe).shape == (32,)
    for strided_x, strided_w in (
        (x.T.contiguous().T, w),
        (x, w.T.contiguous().T),
        (torch.stack([x, x], -1)[..., 0], torch.cat([w, w])[:32]),
        (torch.cat([x, x], 1)[:, :64], torch.cat([w, w], 1)[:, 64:]),
    ):
        assert torch.equal(in_fp8("linear", strided_x, strided_w, recipe=recipe), wanted)
    expanded = x[:1].expand(48, 64).requires_grad_()
    in_fp8("linear", expanded, w, recipe=recipe).sum().backward()


# --- the other ops: each is built from products of matrices ---------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_mm_and_addmm(recipe: str) -> None:
    low = BF16 if recipe == "rowwise" else torch.float16
    a, b, c = tensor(24, 64, grad=True), tensor(64, 32, grad=True), tensor(32, grad=True)
    found = in_fp8("mm", a, b, recipe=recipe, low=low)
    close(found, product(a, b, recipe))
    grad = torch.randn(24, 32).to(low)
    found.backward(grad)
    of_a, of_b = gradients(a, b, grad, recipe)
    close(a.grad.to(low), of_a)
    close(b.grad.to(low), of_b)
    assert torch.equal(in_fp8("addmm", c, a, b, recipe=recipe, low=low), found + c.to(low))
    scaled = in_fp8("addmm", c, a, b, beta=0.5, alpha=-2, recipe=recipe, low=low)
    close(scaled, 0.5 * c.detach().to(low).double() - 2 * found.double(), most=1.01)
    scaled.backward(grad)
    close(c.grad.to(low), 0.5 * grad.double().sum(0), most=1.01)
    poisoned = torch.full((32,), float("nan"))
    assert torch.equal(in_fp8("addmm", poisoned, a, b, beta=0, recipe=recipe, low=low), found)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "tensorwise"])
def test_a_batch_is_its_matrices(recipe: str) -> None:
    a, b, c = tensor(3, 24, 64, grad=True), tensor(3, 64, 32, grad=True), tensor(3, 24, 32)
    grad = torch.randn(3, 24, 32).to(BF16)
    for op, found in (("bmm", in_fp8("bmm", a, b, recipe=recipe)), ("matmul", in_fp8("matmul", a, b, recipe=recipe))):
        of_a, of_b = torch.autograd.grad(found, (a, b), grad)
        for i in range(3):
            close(found[i], product(a[i], b[i], recipe))
            if recipe == "rowwise_with_gw_hp":  # there the second operand has one scale in its gradient's product, the batch's
                continue
            wanted = gradients(a[i], b[i], grad[i], recipe)
            close(of_a[i].to(BF16), wanted[0])
            close(of_b[i].to(BF16), wanted[1])
        assert op
    assert torch.equal(in_fp8("baddbmm", c, a, b, recipe=recipe), in_fp8("bmm", a, b, recipe=recipe) + c.to(BF16))


def test_one_scale_is_that_of_the_whole_batch() -> None:
    a, b = tensor(3, 16, 32), tensor(3, 32, 16)
    a[0] *= 100
    wanted = [product(torch.cat([a[i], a[0]]), torch.cat([b[i], *list(b)], 1), "tensorwise")[:16, :16] for i in range(3)]
    close(in_fp8("bmm", a, b, recipe="tensorwise"), torch.stack(wanted))


@pytest.mark.parametrize("recipe", RECIPES)
def test_addbmm_is_one_sum(recipe: str) -> None:
    a, b, c = tensor(2, 24, 32, grad=True), tensor(2, 32, 64, grad=True), tensor(24, 64)
    side_by_side, below = torch.cat(list(a), 1), torch.cat(list(b), 0)
    found = in_fp8("addbmm", c, a, b, recipe=recipe)
    summed = product(side_by_side, below, recipe).to(BF16)
    close(found, summed.double() + c.to(BF16).double(), most=1.51, terms=1e5)
    grad = torch.randn(24, 64).to(BF16)
    found.backward(grad)
    of_a, of_b = gradients(side_by_side, below, grad, recipe)
    close(a.grad.to(BF16), torch.stack(of_a.split(32, 1)))
    close(b.grad.to(BF16), torch.stack(of_b.split(32, 0)))


SHAPES = [((24, 64), (64, 32)), ((5, 24, 64), (64, 32)), ((2, 5, 24, 64), (2, 5, 64, 32)), ((2, 1, 24, 64), (5, 64, 32)),
          ((24, 64), (5, 64, 32)), ((1, 24, 64), (1, 64, 32))]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_matmul_broadcasts(recipe: str) -> None:
    for left, right in SHAPES:
        a, b = tensor(*left, grad=True), tensor(*right, grad=True)
        found = in_fp8("matmul", a, b, recipe=recipe)
        exact = torch.matmul(a, b)
        assert found.shape == exact.shape
        assert float((found.float() - exact).norm() / exact.norm()) < 0.05
        grad = torch.randn(found.shape)
        for mine, plain in zip(torch.autograd.grad(found, (a, b), grad.to(BF16)), torch.autograd.grad(exact, (a, b), grad), strict=True):
            assert mine.shape == plain.shape
            assert float((mine - plain).norm() / plain.norm()) < 0.1


# --- what is not finite ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_number_that_is_not_finite_is_seen_where_it_counts_and_nowhere_else(recipe: str) -> None:
    for special in (float("inf"), float("nan")):
        x, w = tensor(48, 64), tensor(32, 64)
        x[5, 7] = 0
        wanted = in_fp8("linear", x, w, recipe=recipe)
        x[5, 7] = special
        found = in_fp8("linear", x, w, recipe=recipe)
        assert found[5].isnan().all()
        found[5] = wanted[5]
        assert torch.equal(found, wanted)
        w[3, 0] = special
        assert in_fp8("linear", tensor(48, 64), w, recipe=recipe)[:, 3].isnan().all()
        x, w = tensor(48, 64, grad=True), tensor(32, 64, grad=True)
        grad = torch.randn(48, 32).to(BF16)
        grad[2, 3] = special
        in_fp8("linear", x, w, recipe=recipe).backward(grad)
        assert not x.grad[2].isfinite().any() and x.grad[[0, 1, 3]].isfinite().all()
        assert not w.grad[3].isfinite().any() and w.grad[[0, 1, 2]].isfinite().all()


def grads(net: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in net.parameters()]


# rows 40 (48 or 64 for blocks), inner 64, outer 32
@pytest.mark.parametrize(
    ("recipe", "nbytes"),
    [
        # both operands as they are, and one scale each
        ("tensorwise", 40 * 64 + 64 * 32 + 2 * 4),
        # both along the other axis, a scale for each of the 64 columns of either
        ("rowwise", 40 * 64 + 64 * 32 + 2 * 64 * 4),
        # the input in bfloat16, the weight with one scale
        ("rowwise_with_gw_hp", 2 * 40 * 64 + 64 * 32 + 4),
        # 40 rows are two blocks of 32; a byte for the scale of each
        ("mxfp8", 64 * 64 + 2 * 64 + 64 * 32 + 64),
    ],
)
def test_one_byte_an_element_is_saved(recipe: str, nbytes: int) -> None:
    for dtype in (torch.float32, BF16):
        x, w = torch.randn(40, 64, dtype=dtype, requires_grad=True), torch.randn(32, 64, dtype=dtype, requires_grad=True)
        kept, y = kept_for_backward(lambda x=x, w=w: in_fp8("linear", x, w, recipe=recipe))
        assert kept == nbytes
        y.sum().backward()
        assert x.grad is not None and w.grad is not None


@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_is_saved_for_a_gradient_that_nobody_needs(recipe: str) -> None:
    x, w = torch.randn(32, 64), torch.randn(32, 64)
    for first, second in ((x.clone().requires_grad_(), w), (x, w.clone().requires_grad_())):
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda given, to=saved: (to.append(given), given)[1], lambda given: given):
            y = in_fp8("linear", first, second, recipe=recipe)
        assert len(saved) == (1 if recipe == "rowwise_with_gw_hp" and second.requires_grad else 2)
        y.sum().backward()
        assert (first.grad is None) != (second.grad is None)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_around_a_product_leaves_its_gradients_as_they_are(recipe: str) -> None:
    """A graph that is used twice, checkpoints, and saved tensors that are kept elsewhere."""
    net, x = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)), torch.randn(16, 32, requires_grad=True)
    hmp.apply(net, policy("linear", recipe))
    y = net(x)
    y.sum().backward(retain_graph=True)
    plain = [each.clone() for each in grads(net)]
    y.sum().backward()
    same(grads(net), [2 * each for each in plain])
    assert x.grad.dtype is torch.float32

    def pack(given: torch.Tensor) -> bytes:
        buffer = io.BytesIO()
        torch.save(given, buffer)
        return buffer.getvalue()

    def elsewhere() -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda given: torch.load(io.BytesIO(given))):
            return net(x)

    for forward in (elsewhere, *(lambda each=each: checkpoint(net, x, use_reentrant=each) for each in (True, False))):
        net.zero_grad()
        forward().sum().backward()
        same(grads(net), plain)


MULTIPLES = "dimensions that aren't multiples of 16"
BLOCKS = "dimensions that aren't multiples of 32"
REFUSED_SHAPES = "shapes that torch refuses"
ARGUMENTS = "arguments that FP8 does not support"


class SubclassOfParameter(torch.nn.Parameter):
    pass


def t(*shape: int, dtype: torch.dtype = torch.float32, **kwargs: Any) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, **kwargs)


def leaf(*shape: int) -> torch.Tensor:
    return torch.ones(shape, requires_grad=True)


CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("linear", (t(3, 16), t(32, 16)), {}, ""),
    ("linear", (t(3, 17), t(32, 17)), {}, MULTIPLES),
    ("linear", (t(3, 16), t(16)), {}, "a vector"),
    ("linear", (t(3, 16), t(2, 32, 16)), {}, REFUSED_SHAPES),
    ("linear", (t(3, 16), t(32, 16), t(3, 32)), {}, ""),
    ("linear", (t(0, 16), t(32, 16)), {}, "an empty tensor"),
    ("mm", (t(3, 16), t(16, 0)), {}, "an empty tensor"),
    ("matmul", (t(2, 1, 3, 16), t(5, 16, 32)), {}, ""),
    ("matmul", (t(2, 3, 16), t(5, 16, 32)), {}, REFUSED_SHAPES),
    ("mm", (t(3, 16), t(16, 32)), {"out": t(3, 32, dtype=BF16)}, ""),
    ("mm", (t(3, 16), t(16, 32)), {"out": t(3, 32, dtype=torch.float64)}, "out= of another kind"),
    ("mm", (leaf(3, 16), t(16, 32)), {"out": t(3, 32)}, "out= where a gradient is needed"),
    ("mm", (t(3, 16), t(16, 32)), {"out_dtype": torch.float32}, "out_dtype is given"),
    ("bmm", (t(2, 3, 16), t(2, 16, 32)), {}, ""),
    ("bmm", (t(2, 3, 16), t(3, 16, 32)), {}, REFUSED_SHAPES),
    ("addmm", (t(32), t(3, 16), t(16, 32)), {"beta": 2, "alpha": 0.5}, ""),
    ("addmm", (leaf(32), t(3, 16), t(16, 32)), {"beta": 0}, "beta=0 with an input that needs a gradient"),
    ("addmm", (t(32), t(3, 16), t(16, 32)), {"beta": torch.tensor(2.0)}, "an alpha or beta that isn't a number"),
    ("addmm", (0.5, t(32), 2, t(3, 16), t(16, 32)), {}, ARGUMENTS),  # a signature of old
    ("baddbmm", (t(2, 3, 32), t(2, 3, 16), t(2, 16, 32)), {}, ""),
    ("addbmm", (t(3, 32), t(2, 3, 8), t(2, 8, 32)), {}, ""),  # 2 times 8 terms
    ("addbmm", (t(3, 32), t(2, 3, 4), t(2, 4, 32)), {}, MULTIPLES),
    *((op, (t(2, 3, 16), t(16, 32)), {}, REFUSED_SHAPES) for op in ("mm", "bmm")),
    *((op, (t(3, 32), t(2, 3, 16), t(16, 32)), {}, REFUSED_SHAPES) for op in ("addmm", "baddbmm", "addbmm")),
    ("linear", (t(3, 16), [[1.0]]), {}, ARGUMENTS),
    ("linear", (t(3, 16, dtype=torch.float64), t(32, 16)), {}, "a float64 input"),
    ("mm", (t(3, 16).to(torch.float8_e4m3fn), t(16, 32)), {}, "a float8_e4m3fn input"),
    ("mm", (t(16, 16).to_sparse(), t(16, 32)), {}, "a tensor that is not dense"),
    ("linear", (t(3, 16).as_subclass(Tagged), t(32, 16)), {}, "a tensor subclass"),
    ("linear", (t(3, 16), SubclassOfParameter(t(32, 16))), {}, "a tensor subclass"),
    ("linear", (t(3, 16), torch.empty(32, 16, device="meta")), {}, "several devices"),
    ("linear", (torch.empty(3, 16, device="meta"), torch.empty(32, 16, device="meta")), {}, ""),
]  # fmt: skip


def reason_of(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], recipe: str = "rowwise") -> str:
    """What the call is counted for as one that did not run in FP8; nothing where it did."""
    before = hmp.fallbacks()
    with hmp.casts(policy(op, recipe)), contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError):  # torch's own errors
        function(op)(*args, **kwargs)
    reasons = [name.partition(": not in FP8, ")[2] for name, count in hmp.fallbacks().items() if count > before.get(name, 0)]
    assert len(reasons) < 2
    return "".join(reasons)


def test_the_reason() -> None:
    for op, args, kwargs, reason in CALLS:
        assert reason_of(op, args, kwargs) == reason, (op, [getattr(each, "shape", each) for each in args])
    for shapes, reason in ((((3, 16), (32, 16)), BLOCKS), (((3, 32), (48, 32)), BLOCKS), (((3, 32), (32, 32)), "")):
        assert reason_of("linear", tuple(t(*shape) for shape in shapes), {}, "mxfp8") == reason
    nested = torch.nested.nested_tensor([t(2, 16), t(3, 16)])
    assert reason_of("linear", (nested, t(32, 16)), {}) == "a tensor that is not dense"
    jagged = torch.nested.nested_tensor([t(2, 16), t(3, 16)], layout=torch.jagged)
    assert reason_of("linear", (jagged, t(32, 16)), {}) == "a tensor subclass"


def test_where_there_is_none_the_product_has_torchs_shape() -> None:
    for op, args, kwargs, reason in CALLS:
        if reason == "":
            cast = [a.to(BF16) for a in args]
            wanted = function(op)(*cast, **{name: v.to(BF16) if isinstance(v, torch.Tensor) else v for name, v in kwargs.items()})
            found = in_fp8(op, *args, **kwargs, recipe="rowwise")
            assert found.shape == wanted.shape
            assert found.dtype is (kwargs["out"].dtype if "out" in kwargs else BF16)
        elif reason == REFUSED_SHAPES and op != "linear":  # there a bias may broadcast, and a weight have three dimensions
            with pytest.raises((RuntimeError, IndexError)):
                function(op)(*args, **kwargs)
