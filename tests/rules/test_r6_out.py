"""R6: the op runs under its rule and the result arrives in `out`, in `out`'s dtype, with torch's own semantics for `out`."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hmp
from oracle import BF16, CASTABLE, F16, F32, F64, assert_identical, cast, target, widest
from strategies import Leaf, build, castable_dtypes, leaves

# name: (call, shapes, rule under the "habana" lists)
OPS = {
    "mul": (lambda *a, **k: torch.mul(*a, **k), [(2, 3), (3,)], "bf16"),
    "multiply": (lambda *a, **k: torch.multiply(*a, **k), [(2, 3), (3,)], "bf16"),
    "mm": (lambda *a, **k: torch.mm(*a, **k), [(2, 3), (3, 4)], "bf16"),
    "matmul": (lambda *a, **k: torch.matmul(*a, **k), [(2, 3), (3, 4)], "bf16"),
    "linalg.matmul": (lambda *a, **k: torch.linalg.matmul(*a, **k), [(2, 3), (3, 4)], "bf16"),
    "addmm": (lambda *a, **k: torch.addmm(*a, **k), [(2, 4), (2, 3), (3, 4)], "bf16"),
    "bmm": (lambda *a, **k: torch.bmm(*a, **k), [(2, 2, 3), (2, 3, 2)], "bf16"),
    "mv": (lambda *a, **k: torch.mv(*a, **k), [(2, 3), (3,)], "bf16"),
    "dot": (lambda *a, **k: torch.dot(*a, **k), [(3,), (3,)], "bf16"),
    "leaky_relu": (lambda *a, **k: torch._C._nn.leaky_relu(*a, 0.3, **k), [(2, 3)], "bf16"),
    "div": (lambda *a, **k: torch.div(*a, **k), [(2, 3), (3,)], "fp32"),
    "true_divide": (lambda *a, **k: torch.true_divide(*a, **k), [(2, 3), (3,)], "fp32"),
    "log": (lambda *a, **k: torch.log(*a, **k), [(2, 3)], "fp32"),
    "log2": (lambda *a, **k: torch.log2(*a, **k), [(2, 3)], "fp32"),
    "softmax": (lambda *a, **k: torch.softmax(*a, -1, **k), [(2, 3)], "fp32"),
    "log_softmax": (lambda *a, **k: torch.log_softmax(*a, -1, **k), [(2, 3)], "fp32"),
    "add": (lambda *a, **k: torch.add(*a, **k), [(2, 3), (3,)], "promote"),
    "maximum": (lambda *a, **k: torch.maximum(*a, **k), [(2, 3), (3,)], "promote"),
    "cat": (lambda a, b, **k: torch.cat([a, b], **k), [(2, 3), (1, 3)], "join"),
    "stack": (lambda a, b, **k: torch.stack([a, b], **k), [(2, 3), (2, 3)], "join"),
    "lerp": (lambda *a, **k: torch.lerp(*a, **k), [(2, 3), (3,), (3,)], "promote"),
    "baddbmm": (lambda *a, **k: torch.baddbmm(*a, **k), [(2, 2, 2), (2, 2, 3), (2, 3, 2)], "promote"),
    "inner": (lambda *a, **k: torch.inner(*a, **k), [(2, 3), (4, 3)], "promote"),
}
INTO_ANY_FLOAT = ["mul", "multiply", "div", "true_divide", "log", "log2", "add", "maximum", "cat", "stack"]


def by_hand(name: str, tree) -> torch.Tensor:
    call, _, rule = OPS[name]
    args = build(tree)
    return call(*cast(args, target(rule, args)))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", OPS)
@given(data=st.data())
def test_r6_the_result_arrives_in_out_in_its_dtype(name: str, data: st.DataObject) -> None:
    call, shapes, _ = OPS[name]
    tree = [data.draw(leaves(shape, castable_dtypes, "positive", grad=False, subclass=False)) for shape in shapes]
    want = by_hand(name, tree)
    # what is no pointwise op of torch's takes out= in the dtype of its inputs or of its result, and torch refuses the rest
    dtypes = (*CASTABLE, F64) if name in INTO_ANY_FLOAT else sorted({want.dtype, widest(build(tree), join=True)}, key=str)
    out = torch.full(want.shape, 77.0, dtype=data.draw(st.sampled_from(dtypes)))
    storage, dtype, args = out.data_ptr(), out.dtype, build(tree)
    with hmp.casts("habana"):
        returned = call(*args, out=out)
    assert returned is out
    assert out.dtype is dtype and out.data_ptr() == storage
    assert_identical(out, want.to(dtype), "out")
    for before, after in zip(build(tree), args, strict=True):
        assert_identical(after, before, "an input")


@pytest.mark.sampled(10)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", OPS)
def test_r6_an_empty_out_is_resized(name: str, dtype: torch.dtype) -> None:
    call, shapes, _ = OPS[name]
    tree = [Leaf(shape, dtype, values="positive", grad=False, seed=i) for i, shape in enumerate(shapes)]
    want = by_hand(name, tree)
    out = torch.empty(0, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with hmp.casts("habana"):
            call(*build(tree), out=out)
    assert_identical(out, want.to(dtype), "out")


@pytest.mark.parametrize("name", ["mul", "mm", "div", "softmax", "log"])
def test_r6_an_out_of_another_shape_is_resized_with_torchs_warning(name: str) -> None:
    call, shapes, _ = OPS[name]
    tree = [Leaf(shape, F32, values="positive", grad=False, seed=i) for i, shape in enumerate(shapes)]
    with pytest.warns(UserWarning, match="resized"):
        call(*build(tree), out=torch.ones(7))
    out = torch.ones(7)
    with hmp.casts("habana"), pytest.warns(UserWarning, match="resized"):
        assert call(*build(tree), out=out) is out
    assert_identical(out, by_hand(name, tree).to(F32), "out")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["mul", "mm", "div", "softmax", "topk", "baddbmm"])
def test_r6_an_out_that_is_a_view_is_written_through(name: str) -> None:
    call, shapes, _ = OPS.get(name) or (lambda a, **k: torch.topk(a, 2, **k), [(2, 3)], "fp32")
    tree = [Leaf(shape, F32, values="positive", grad=False, seed=i) for i, shape in enumerate(shapes)]
    if name == "topk":
        base, index = torch.zeros(2, 4), torch.zeros(2, 2, dtype=torch.int64)
        with hmp.casts("habana"):
            torch.topk(build(tree)[0], 2, out=(base[:, ::2], index))
        assert_identical(base[:, ::2], build(tree)[0].topk(2).values, "out")
        return
    want = by_hand(name, tree).to(F32)
    base = torch.zeros(*want.shape[:-1], want.shape[-1] * 2)
    with hmp.casts("habana"):
        call(*build(tree), out=base[..., ::2])
    assert_identical(base[..., ::2], want, "the view")
    assert not base[..., 1::2].any()


def run(call, tree, out):
    """The error, or None; with hmp it must be plain torch's."""
    try:
        call(*build(tree), out=out)
    except (RuntimeError, TypeError) as error:
        return type(error), str(error).split("\n")[0]
    return None


MISUSES = {
    "a result that does not fit an integer": lambda: torch.zeros(2, 3, dtype=torch.int64),
    "a result that does not fit a bool": lambda: torch.zeros(2, 3, dtype=torch.bool),
    "one place for many values": lambda: torch.zeros(1).expand(2, 3),
    "no tensor": lambda: "out",
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["mul", "div", "log", "add"])
@pytest.mark.parametrize("misuse", MISUSES)
def test_r6_errors_are_torchs_and_out_is_untouched(misuse: str, name: str) -> None:
    call = OPS[name][0]
    tree = [Leaf((2, 3), F32, values="positive", grad=False, seed=i) for i, _ in enumerate(OPS[name][1])]
    expected = run(call, tree, MISUSES[misuse]())
    assert expected is not None
    out = MISUSES[misuse]()
    with hmp.casts("habana"):
        got = run(call, tree, out)
    assert got is not None and got[0] is expected[0], (got, expected)
    assert not isinstance(out, torch.Tensor) or not out.any()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["mul", "mm", "div", "add", "baddbmm"])
@pytest.mark.parametrize("who", ["an input", "out"])
def test_r6_out_has_no_gradient_as_in_torch(name: str, who: str) -> None:
    call, shapes, _ = OPS[name]
    tree = [Leaf(shape, F32, values="positive", grad=who == "an input", seed=i) for i, shape in enumerate(shapes)]

    def out():
        return torch.zeros(by_hand(name, tree).shape, requires_grad=who == "out")

    expected = run(call, tree, out())
    assert expected is not None
    with hmp.casts("habana"):
        got = run(call, tree, out())
    assert got == expected


@pytest.mark.parametrize("shape", [(2, 2), (0,)], ids=["", "empty"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_r6_several_outs_come_back_in_torchs_tuple(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(2, 5).to(dtype)
    values, indices = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=torch.int64)
    want = torch.topk(x.float(), 2)
    kind = type(torch.topk(x, 2, out=(values.clone(), indices.clone())))
    with hmp.casts("habana"):
        got = torch.topk(x, 2, out=(values, indices))
    assert type(got) is kind
    assert got[0] is values and got[1] is indices
    assert_identical(values, want.values.to(dtype), "values")
    assert_identical(indices, want.indices, "indices")


def test_r6_out_none_is_no_out() -> None:
    x = torch.randn(3)
    with hmp.casts("habana"):
        assert torch.mul(x, x, out=None).dtype is BF16
        assert torch.log(x.to(BF16).abs(), out=None).dtype is F32


@pytest.mark.parametrize("inputs", [F64, torch.complex64, torch.int64])
def test_r6_what_is_left_to_torch_keeps_torchs_out(inputs: torch.dtype) -> None:
    tree = [Leaf((3,), inputs, grad=False, seed=i) for i in range(2)]
    expected, got = (torch.zeros(3, dtype=inputs) for _ in range(2))
    torch.mul(*build(tree), out=expected)
    with hmp.casts("habana"):
        torch.mul(*build(tree), out=got)
    assert_identical(got, expected, "out")


@pytest.mark.parametrize("name", ["exp", "sort", "gather", "where"])
def test_r6_an_unlisted_op_keeps_torchs_out(name: str) -> None:
    x = torch.randn(2, 3).to(BF16)
    call = {
        "exp": lambda out: torch.exp(x, out=out),
        "sort": lambda out: torch.sort(x, out=(out, torch.zeros(2, 3, dtype=torch.int64)))[0],
        "gather": lambda out: torch.gather(x, 1, torch.tensor([[0, 2, 1], [1, 1, 0]]), out=out),
        "where": lambda out: torch.where(x > 0, x, x, out=out),
    }[name]
    expected, got = (torch.zeros(2, 3, dtype=BF16) for _ in range(2))
    call(expected)
    with hmp.casts("habana"):
        assert call(got) is got
    assert_identical(got, expected, "out")


# Ops whose `out` torch takes in one dtype alone.
STRICT = {
    "mm": (lambda *a, **k: torch.mm(*a, **k), [(2, 3), (3, 4)]),
    "matmul": (lambda *a, **k: torch.matmul(*a, **k), [(2, 3), (3, 4)]),
    "addmm": (lambda *a, **k: torch.addmm(*a, **k), [(2, 4), (2, 3), (3, 4)]),
    "addmv": (lambda *a, **k: torch.addmv(*a, **k), [(2,), (2, 3), (3,)]),
    "bmm": (lambda *a, **k: torch.bmm(*a, **k), [(2, 2, 3), (2, 3, 2)]),
    "baddbmm": (lambda *a, **k: torch.baddbmm(*a, **k), [(2, 2, 2), (2, 2, 3), (2, 3, 2)]),
    "cross": (lambda *a, **k: torch.cross(*a, dim=1, **k), [(2, 3), (2, 3)]),
    "floor": (lambda *a, **k: torch.floor(*a, **k), [(2, 3)]),
    "log_softmax": (lambda *a, **k: torch.log_softmax(*a, -1, **k), [(2, 3)]),
    "kthvalue": (lambda *a, out, **k: torch.kthvalue(*a, 2, out=(out, torch.empty(0, dtype=torch.int64)), **k).values, [(2, 3)]),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("rule", ["bf16", "fp32", "promote"])
@pytest.mark.parametrize("name", STRICT)
@pytest.mark.parametrize("inputs", [(F32, F32, F32), (BF16, BF16, BF16), (BF16, F32, BF16), (F32, BF16, F16)], ids=str)
def test_r6_a_listed_op_takes_an_out_of_any_castable_dtype(inputs, name: str, rule: str) -> None:
    """Whether an input is low depends on what ran before it: the same program has run in float32 without an error."""
    call, shapes = STRICT[name]
    args = [Leaf(shape, dtype, grad=False, seed=i).build() for i, (shape, dtype) in enumerate(zip(shapes, inputs, strict=False))]
    high = call(*cast(args, target(rule, args)), out=torch.empty(0, dtype=target(rule, args)))
    for dtype in (F32, BF16, F16):
        out = torch.empty(0, dtype=dtype)
        with hmp.casts(hmp.Policy("mine", **{rule: {name}})):
            assert call(*args, out=out) is out
        assert_identical(out, high.to(dtype), f"{dtype}")


def test_r6_an_unlisted_op_takes_an_out_of_one_of_its_inputs_dtypes() -> None:
    a, b = torch.randn(2, 3, dtype=BF16), torch.randn(3, 4)
    with hmp.casts(hmp.Policy("none")):
        assert_identical(torch.mm(a, b, out=torch.empty(0)), (a @ b.to(BF16)).float(), "out")
        with pytest.raises(RuntimeError, match="dtype"):
            torch.mm(b.t(), a.t().float(), out=torch.empty(0, dtype=BF16))
