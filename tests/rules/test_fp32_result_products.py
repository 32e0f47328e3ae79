"""Products on the fp32_result list: values, gradients, what is saved, and which calls cannot run so."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import hmp
from dispatch_kit import Trace
from fp8_oracle import function
from torch_has import TORCH

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
LOWS = (BF16, F16)
NEEDS_OUT_DTYPE = pytest.mark.skipif(TORCH < (2, 10), reason="before 2.10 torch computes mm(out_dtype=) of no fake tensors")


def t(*shape: int, dtype: torch.dtype = F32, **kwargs: Any) -> torch.Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(kwargs.get("grad", False))


def rounded(tensor: torch.Tensor, low: torch.dtype) -> torch.Tensor:
    return tensor.to(low).float()


def found(op: str, *args: Any, low: torch.dtype = BF16, **kwargs: Any) -> torch.Tensor:
    with hmp.casts(hmp.Policy(fp32_result={op}, dtype=low)):
        result = function(op)(*args, **kwargs)
        assert hmp.fallbacks() == {}
    return result


# Op, shapes of what is rounded.
SHAPES: list[tuple[str, tuple[tuple[int, ...], ...]]] = [
    ("linear", ((5, 70), (6, 70))),
    ("linear", ((70,), (6, 70))),
    ("linear", ((0, 70), (6, 70))),
    ("linear", ((5, 70), (70,))),
    ("matmul", ((70,), (70, 6))),
    ("matmul", ((5, 70), (70,))),
    ("matmul", ((70,), (70,))),
    ("matmul", ((2, 1, 5, 70), (3, 70, 6))),
    ("matmul", ((5, 70), (3, 70, 6))),
    ("mm", ((5, 0), (0, 6))),
]


@pytest.mark.parametrize("low", LOWS)
def test_the_result_is_torchs_own_of_rounded_inputs_in_float32(low: torch.dtype) -> None:
    for op, shapes in SHAPES:
        for dtypes in ((F32, F32), (BF16, F32), (F16, BF16)):
            args = [t(*shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
            wanted = function(op)(*(rounded(each, low) for each in args))
            result = found(op, *args, low=low)
            assert result.dtype is F32
            if result.is_cpu:
                assert torch.equal(result, wanted), (op, shapes, dtypes)
            else:
                torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("low", LOWS)
def test_what_is_added_is_added_in_float32_and_not_rounded(low: torch.dtype) -> None:
    x, w, bias = t(2, 5, 70), t(6, 70), t(6)
    plain = rounded(x, low) @ rounded(w, low).T
    assert torch.equal(found("linear", x, w, bias=bias, low=low), plain + bias)
    assert torch.equal(found("addmm", bias, x[0], w.T, beta=0.5, alpha=3, low=low), torch.add(bias * 0.5, plain[0], alpha=3))
    batch = w.T.expand(2, 70, 6)
    assert torch.equal(found("baddbmm", input=bias[:1], batch1=x, batch2=batch, low=low), bias[:1] + rounded(x, low) @ rounded(batch, low))
    nan = torch.full((6,), float("nan"), requires_grad=True)
    without = found("addmm", nan, x[0], w.T, beta=0, low=low)
    without.sum().backward()
    assert torch.allclose(without, plain[0], atol=1e-4) and torch.equal(nan.grad, torch.zeros(6))


EQUATIONS: list[tuple[str, tuple[tuple[int, ...], ...]]] = [
    ("bqhd,bkhd->bhqk", ((2, 3, 4, 8), (2, 5, 4, 8))),
    ("bhqk,bkhd->bqhd", ((2, 4, 3, 5), (2, 5, 4, 8))),
    ("...d,ed->...e", ((2, 3, 8), (4, 8))),
    ("... i j, ... j k -> ... i k", ((7, 2, 3, 4), (2, 4, 5))),
    ("ij,jk", ((3, 4), (4, 5))),
    ("kj,ji", ((3, 4), (4, 5))),
    ("abc,cbd->ad", ((3, 4, 5), (5, 4, 6))),
    ("i,j->ij", ((3,), (4,))),
    ("i,i->", ((3,), (3,))),
    ("bqk,bkd->dqb", ((3, 5, 40), (3, 40, 6))),
    ("...ij,...jk->ik", ((2, 3, 4), (2, 4, 5))),
    ("bi,bi->b", ((3, 1), (3, 4))),
    ("...ij,...jk", ((1, 3, 4), (2, 4, 5))),
    ("iij,jk->ik", ((3, 3, 4), (4, 5))),
    ("ijk,jl->il", ((3, 4, 2), (4, 5))),
    ("ab,bc,cd->ad", ((3, 4), (4, 5), (5, 6))),
]


@pytest.mark.parametrize("low", LOWS)
def test_an_einsum_has_torchs_values_of_rounded_inputs(low: torch.dtype) -> None:
    for equation, shapes in EQUATIONS:
        args = [t(*shape) for shape in shapes]
        wanted = torch.einsum(equation, *(rounded(each, low) for each in args))
        for result in (found("einsum", equation, *args, low=low), found("einsum", equation, args, low=low)):
            assert result.dtype is F32
            # sums in another order, where torch multiplies matrices the other way around or as a batch of one
            torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)


def test_what_torch_refuses_is_refused() -> None:
    for op, shapes in (
        ("linear", ((5, 7), (6, 8))),
        ("linear", ((5, 7), (2, 6, 7))),
        ("mm", ((2, 5, 7), (7, 6))),
        ("mm", ((2, 5, 7), (2, 7, 6))),
        ("bmm", ((2, 5, 7), (1, 7, 6))),
        ("matmul", ((2, 5, 7), (3, 7, 6))),
        ("addmm", ((4,), (5, 7), (7, 6))),
    ):
        with pytest.raises(RuntimeError):
            found(op, *(t(*shape) for shape in shapes))
    for equation in ("ij,jk->il", "ij,jk->ii", "ij,jkl->il", "ij,j1->i1", "ij,jk->i.k", "ij,...jkl->il"):
        with pytest.raises(RuntimeError, match="einsum"):  # torch's own
            found("einsum", equation, t(3, 4), t(4, 5))


# --- any shapes, dtypes and spellings: values and gradients against float64 ------------------------------------------------

KEYWORDS = {
    "linear": ("input", "weight", "bias"),
    "matmul": ("input", "other"),
    "mm": ("input", "mat2"),
    "bmm": ("input", "mat2"),
    "addmm": ("input", "mat1", "mat2"),
    "baddbmm": ("input", "batch1", "batch2"),
}


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, list[torch.Tensor], int, torch.dtype]:
    """An op, its arguments by position, how many of them are to be given so, and the low-precision dtype."""
    op = draw(st.sampled_from(sorted(KEYWORDS)))
    size = functools.partial(draw, st.integers(1, 5))
    inner = draw(st.integers(1, 40))
    batch = (size(),) if "bmm" in op else tuple(size() for _ in range(draw(st.integers(0, 2)))) if op in ("linear", "matmul") else ()
    left, right = (*batch, size(), inner), (inner, size())
    if "bmm" in op or (op == "matmul" and draw(st.booleans())):
        right = (*(n if "bmm" in op or draw(st.booleans()) else 1 for n in batch), *right)
    added = [right[-1:]] if op == "linear" and draw(st.booleans()) else [(*batch, left[-2], right[-1])] if op.endswith("addmm") else []
    if op == "baddbmm":
        added = [(1, right[-1])]
    generator = torch.Generator(device="cpu").manual_seed(draw(st.integers(0, 99)))

    def tensor(shape: tuple[int, ...], transposed: bool) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device())
        values = values.mT.contiguous().mT if transposed and len(shape) > 1 else values
        return values.to(draw(st.sampled_from((F32, F32, BF16, F16)))).requires_grad_(draw(st.booleans()))

    operands = [tensor(left, draw(st.booleans())), tensor(right[::-1] if op == "linear" else right, draw(st.booleans()))]
    rest = [tensor(shape, False) for shape in added]
    args = [*operands, *rest] if op == "linear" else [*rest, *operands]
    return op, args, draw(st.integers(0, len(args))), draw(st.sampled_from(LOWS))


def close(result: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor) -> None:
    """`result` is what is left of `exact` by sums in float32 of terms whose magnitudes sum to `terms`, and one rounding to its dtype."""
    unit = torch.finfo(result.dtype).eps * exact.abs() + torch.finfo(result.dtype).tiny * 2
    assert ((result.double() - exact).abs() <= 64 * 2.0**-23 * terms + unit).all()


@settings(max_examples=30)
@given(calls())
def test_values_and_gradients(call: tuple[str, list[torch.Tensor], int, torch.dtype]) -> None:
    op, args, positional, low = call
    names = KEYWORDS[op]
    result = found(op, *args[:positional], **dict(zip(names[positional:], args[positional:], strict=False)), low=low)
    assert result.dtype is F32
    added = {"linear": 2, "addmm": 0, "baddbmm": 0}.get(op)

    def exact(magnitudes: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
        leaves = [(each if at == added else each.to(low)).detach().double() for at, each in enumerate(args)]
        leaves = [
            (each.abs() if magnitudes else each).requires_grad_(given.requires_grad) for each, given in zip(leaves, args, strict=True)
        ]
        return leaves, function(op)(*leaves)

    (leaves, wanted), (magnitude_leaves, magnitudes) = exact(False), exact(True)
    assert result.shape == wanted.shape
    close(result.detach(), wanted.detach(), magnitudes.detach())
    needing = [at for at, each in enumerate(args) if each.requires_grad]
    assert result.requires_grad == bool(needing)
    if needing:
        gradient = torch.randn(result.shape)
        gradients = torch.autograd.grad(result, [args[at] for at in needing], gradient)
        # products multiply the rounded one; what is added has the one that comes
        rounded_one, own = gradient.to(low).double(), gradient.double()
        wanted_gradients = [
            torch.autograd.grad(wanted, leaves[at], own if at == added else rounded_one, retain_graph=True)[0] for at in needing
        ]
        terms = torch.autograd.grad(magnitudes, [magnitude_leaves[at] for at in needing], rounded_one.abs())
        for at, one, other, more in zip(needing, gradients, wanted_gradients, terms, strict=True):
            assert one.dtype is args[at].dtype
            # a sum over broadcast dimensions is one of rounded gradients, in the input's dtype
            close(one, other, more * (1 + torch.finfo(one.dtype).eps * 2**17 if one.dtype is not F32 else 1))


# --- gradients -------------------------------------------------------------------------------------------------------------


def saved_by(op: str, *args: Any, low: torch.dtype = BF16) -> list[torch.Tensor]:
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda given: (saved.append(given), given)[1], lambda given: given):
        found(op, *args, low=low)
    return saved


def test_two_bytes_an_element_are_saved_of_what_a_gradient_needs() -> None:
    for needs in ((True, True), (True, False), (False, True)):
        x, w = (each.requires_grad_(need) for each, need in zip((t(20, 30), t(10, 30)), needs, strict=True))
        saved = saved_by("linear", x, w)
        assert all(each.dtype is BF16 for each in saved)
        assert sum(each.numel() for each in saved) == needs[0] * w.numel() + needs[1] * x.numel()
    x, w = t(20, 30, dtype=BF16, grad=True), t(10, 30, grad=True)
    assert x.data_ptr() in [each.data_ptr() for each in saved_by("linear", x, w)], "an input that is low already is no copy"


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="Tensor.grad_dtype is new in torch 2.12")
def test_a_low_weight_that_asks_for_a_float32_gradient_gets_it() -> None:
    x, w = t(20, 30), t(10, 30, dtype=BF16).requires_grad_()
    w.grad_dtype = F32
    found("linear", x, w).backward(torch.ones(20, 10))
    assert w.grad.dtype is F32
    assert torch.equal(w.grad, torch.ones(20, 10).T @ rounded(x, BF16))


# --- on a GPU: fake tensors, on which nothing is computed ------------------------------------------------------------------


@NEEDS_OUT_DTYPE
@pytest.mark.skipif(torch.version.hip is not None, reason="products with out_dtype= are asked for on CUDA alone")
def test_on_cuda_torch_computes_the_float32_result() -> None:
    with FakeTensorMode(), torch.no_grad():  # autograd asks for a real GPU's streams
        for op, args, overload in (
            ("linear", (t(2, 5, 16), t(6, 16), t(6)), "aten.mm.dtype"),
            ("baddbmm", (t(6), t(2, 5, 16), t(2, 16, 6)), "aten.bmm.dtype"),
        ):
            on_gpu = [torch.empty(a.shape, device="cuda") if isinstance(a, torch.Tensor) else a for a in args]
            with Trace() as seen:
                assert found(op, *on_gpu).dtype is F32
            assert seen.products() == [overload]


def test_without_values() -> None:
    y = found("linear", t(2, 5, 16).to("meta"), t(6, 16).to("meta"))
    assert y.is_meta and y.shape == (2, 5, 6) and y.dtype is F32


# --- the calls that cannot run so --------------------------------------------------------------------------------


ARGUMENTS = "arguments that fp32_result does not support"
REFUSED: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("linear", (t(3, 8), t(4, 8, dtype=F64)), {}, "a float64 input"),
    ("linear", (t(3, 8), t(4, 8), t(4, dtype=torch.complex64)), {}, "a complex64 input"),
    ("mm", (torch.ones(3, 3, dtype=torch.int64),) * 2, {}, "a int64 input"),
    ("mm", (t(4, 8).to_sparse(), t(8, 3)), {}, "a tensor that is not dense"),
    ("mm", (torch.quantize_per_tensor(t(4, 8), 0.1, 0, torch.qint8), t(8, 3)), {}, "a qint8 input"),
    ("linear", (torch.nested.nested_tensor([t(2, 8), t(3, 8)]), t(4, 8)), {}, "a tensor that is not dense"),
    ("linear", (t(3, 8), None), {}, ARGUMENTS),
    ("linear", (t(3, 8),), {}, ARGUMENTS),
    ("addmm", (1, t(3, 8), t(8, 4)), {}, ARGUMENTS),
    ("einsum", (t(3, 8), [0, 1], t(8, 4), [1, 2]), {}, ARGUMENTS),
    ("einsum", ("ij->ji", t(3, 8)), {}, "an einsum of one operand"),
    ("mm", (t(3, 8), t(8, 4)), {"out_dtype": F32}, "out_dtype is given"),
    ("addmm", (t(3, 4), t(3, 8), t(8, 4)), {"alpha": torch.tensor(2.0)}, "an alpha or beta that isn't a number"),
    ("mm", (t(3, 8), t(8, 4)), {"out": t(3, 4, dtype=BF16)}, "out= of another kind"),
    ("mm", (t(3, 8, grad=True), t(8, 4)), {"out": t(3, 4)}, "out= where a gradient is needed"),
    ("mm", (t(3, 8), t(8, 4)), {"out": t(3, 4, grad=True)}, "out= where a gradient is needed"),
]


def test_why_a_call_cannot_run_so() -> None:
    for op, args, kwargs, reason in REFUSED:
        with hmp.casts(hmp.Policy(fp32_result={op})):
            with contextlib.suppress(RuntimeError, TypeError):  # as torch refuses some
                function(op)(*args, **kwargs)
            assert hmp.fallbacks() == {f"{op}: its result not in float32, {reason}": 1}
        hmp.revert()
    with torch.no_grad():
        assert found("mm", t(3, 8, grad=True), t(8, 4), out=t(3, 4)).dtype is F32


def test_such_a_call_runs_as_on_the_bf16_list() -> None:
    x, w = t(3, 8), t(8, 4)
    wanted = x.bfloat16() @ w.bfloat16()
    with hmp.casts(hmp.Policy(fp32_result={"mm", "einsum"})):
        assert torch.equal(torch.mm(x, w, out=torch.empty(3, 4, dtype=BF16)), wanted)
        assert torch.einsum("ij->ji", x).dtype is BF16
        assert torch.mm(x.double(), w.double()).dtype is F64
