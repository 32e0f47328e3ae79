"""R6: the op runs under its rule and the result arrives in `out`, in `out`'s dtype, with torch's own semantics for `out`."""

from __future__ import annotations

import pytest
import torch

import hmp
from oracle import BF16, F16, F32, F64, assert_identical, cast, target
from strategies import Leaf, build

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


def by_hand(name: str, tree) -> torch.Tensor:
    call, _, rule = OPS[name]
    args = build(tree)
    return call(*cast(args, target(rule, args)))


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


def test_r6_an_unlisted_op_takes_an_out_of_one_of_its_inputs_dtypes() -> None:
    a, b = torch.randn(2, 3, dtype=BF16), torch.randn(3, 4)
    with hmp.casts(hmp.Policy("none")):
        assert_identical(torch.mm(a, b, out=torch.empty(0)), (a @ b.to(BF16)).float(), "out")
        with pytest.raises(RuntimeError, match="dtype"):
            torch.mm(b.t(), a.t().float(), out=torch.empty(0, dtype=BF16))
