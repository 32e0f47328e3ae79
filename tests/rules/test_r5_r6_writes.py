"""R5 and R6: what an op writes in place or into `out=` keeps its dtype and identity; errors are torch's; nothing overflows on the way.

What mixtures of dtypes give in place and into out, P1 and P2 ask (tests/properties).
"""

from __future__ import annotations

import itertools
import operator

import pytest
import torch
import torch.nn.functional as F

import hmp
from oracle import BF16, F16, F32, F64, assert_identical, assert_same, outcome, saturated
from strategies import INTEGER, Leaf, build

EVERY = "add iadd sub subtract isub mul imul div itruediv pow ipow lerp addmm index_add scatter setitem log exp".split()
POLICIES = ["habana", *(hmp.Policy(f"all {kind}", **{kind: set(EVERY)}) for kind in ("bf16", "fp32", "promote")), hmp.Policy("none")]


def assigned(x, y):
    x[...] = y
    return x


def by_statement(op):
    """`x op= y` as the statement that users write."""

    def run(x, y):
        alias = x
        x = op(x, y)
        assert x is alias, "an augmented assignment must not rebind the name to a new tensor"
        return x

    return run


IN_PLACE = {
    "add_": lambda x, y: x.add_(y),
    "mul_": lambda x, y: x.mul_(y),
    "+=": by_statement(operator.iadd),
    "/=": by_statement(operator.itruediv),
    "pow_": lambda x, y: x.pow_(y),
    "mul(out=x)": lambda x, y: torch.mul(x, y, out=x),
    "addmm_": lambda x, y: x.addmm_(y, y),
    "index_add_": lambda x, y: x.index_add_(0, torch.tensor([2, 0, 1]), y),
    "lerp_": lambda x, y: x.lerp_(y, y),
    "x[...] =": assigned,
}


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: getattr(p, "name", p))
def test_r5_what_has_an_input_that_is_no_castable_tensor_is_left_to_torch(policy) -> None:
    """Never truncated in silence (trap U3): an integer first input gets torch's own error."""
    mixtures = [*((dtype, F32) for dtype in INTEGER), (F64, F32), (BF16, F64)]
    trees = {
        (name, mixture): [Leaf((3, 3), mixture[0], seed=1, grad=False), Leaf((3, 3), mixture[1], values="positive", grad=False)]
        for name in IN_PLACE
        for mixture in mixtures
    }
    expected = {key: outcome(IN_PLACE[key[0]], build(tree)) for key, tree in trees.items()}
    assert expected["mul_", (torch.int64, F32)].error is RuntimeError
    with hmp.casts(policy):
        for key, tree in trees.items():
            assert_same(outcome(IN_PLACE[key[0]], build(tree)), expected[key])


def test_r5_a_leaf_that_needs_a_gradient_gets_torchs_own_error() -> None:
    for op in (lambda x: x.mul_(2.0), lambda x: F.relu(x, True), lambda x: x.__setitem__(0, 1.0)):
        with hmp.casts("habana"), pytest.raises(RuntimeError, match="leaf Variable"):
            op(torch.ones(3, requires_grad=True))


@pytest.mark.parametrize("listed", [set(), {"mm"}], ids=["unlisted", "listed"])
def test_r5_a_product_into_its_first_input_has_that_inputs_dtype(listed: set[str]) -> None:
    x, y = torch.randn(3, 3), torch.randn(3, 3).bfloat16()
    wanted = x.clone()
    torch.mm(wanted, y.float(), out=wanted)  # some processors' kernels clear `out` before they read it
    with hmp.casts(hmp.Policy("of a test", bf16=listed)):
        assert torch.mm(x, y, out=x) is x
    assert torch.equal(x, wanted)


def test_r5_a_product_in_place_is_rounded_once() -> None:
    """Casting y first would round twice."""
    x, y = torch.rand(1000).to(BF16) + 1, torch.rand(1000) + 1
    once = (x.float() * y).to(BF16)
    assert not torch.equal(once, x * y.to(BF16))
    with hmp.casts("habana"):
        assert torch.equal(x.clone().mul_(y), once)


ADDED_IN_PLACE = {
    "add_(other=, alpha=)": lambda x, y: x.add_(other=y, alpha=2),
    "subtract_": lambda x, y: x.subtract_(y),
    "+=": by_statement(operator.iadd),
    "-=": by_statement(operator.isub),
    "x[...] =": assigned,
}


@pytest.mark.parametrize("rule", ["none", "bf16", "fp32", "promote"])
def test_r5_an_operand_beyond_the_low_dtype_is_added_in_float32_in_place(rule: str) -> None:
    """What float32 adds to less than the limit is that sum, and what is beyond the limit saturates (R12)."""
    lists = {} if rule == "none" else {rule: set(EVERY)}
    cases = ((F16, -60000.0, [1e5, -1e6, 3e38]), (F16, 60000.0, [1e5, -1e5, 7e4]), (BF16, -3e38, [3.395e38, 1.0, -3e38]))
    with hmp.casts(hmp.Policy("mine", dtype=F16, **lists)):
        for (name, add), (dtype, start, values) in itertools.product(ADDED_IN_PLACE.items(), cases):
            want = saturated(add(torch.full((3,), start, dtype=dtype).double(), torch.tensor(values)), dtype)
            got = add(torch.full((3,), start, dtype=dtype), torch.tensor(values))
            assert_identical(got, want, f"{name}, {start}, {values}")


# --- R6: out=

# name: (call, shapes)
OUT = {
    "mul": (lambda *a, **k: torch.mul(*a, **k), [(2, 3), (3,)]),
    "mm": (lambda *a, **k: torch.mm(*a, **k), [(2, 3), (3, 4)]),
    "div": (lambda *a, **k: torch.div(*a, **k), [(2, 3), (3,)]),
    "add": (lambda *a, **k: torch.add(*a, **k), [(2, 3), (3,)]),
    "log": (lambda *a, **k: torch.log(*a, **k), [(2, 3)]),
}


def args_of(name: str, grad: bool = False) -> list[torch.Tensor]:
    return build([Leaf(shape, F32, values="positive", grad=grad, seed=i) for i, shape in enumerate(OUT[name][1])])


def test_r6_an_out_of_another_shape_is_resized_with_torchs_warning() -> None:
    for name, dtype in (("mul", BF16), ("mm", BF16), ("div", F32), ("log", F32)):
        call, out = OUT[name][0], torch.ones(7)
        want = call(*(t.to(dtype) for t in args_of(name))).to(F32)
        with hmp.casts("habana"), pytest.warns(UserWarning, match="resized"):
            assert call(*args_of(name), out=out) is out
        assert_identical(out, want, name)


MISUSES = {
    "a result that does not fit an integer": lambda: torch.zeros(2, 3, dtype=torch.int64),
    "one place for many values": lambda: torch.zeros(1).expand(2, 3),
    "no tensor": lambda: "out",
}


def test_r6_errors_are_torchs_and_out_is_untouched() -> None:
    def run(name: str, out) -> type | None:
        try:
            OUT[name][0](*args_of(name), out=out)
        except (RuntimeError, TypeError) as error:
            return type(error)
        return None

    cases = [(name, misuse) for name in ("mul", "div", "log", "add") for misuse in MISUSES]
    expected = [run(name, MISUSES[misuse]()) for name, misuse in cases]
    assert None not in expected
    with hmp.casts("habana"):
        for (name, misuse), error in zip(cases, expected, strict=True):
            out = MISUSES[misuse]()
            assert run(name, out) is error, (name, misuse)
            assert not isinstance(out, torch.Tensor) or not out.any()


def test_r6_out_none_is_no_out_and_what_is_left_to_torch_keeps_torchs_out() -> None:
    x = torch.randn(3)
    with hmp.casts("habana"):
        assert torch.mul(x, x, out=None).dtype is BF16
        assert torch.log(x.to(BF16).abs(), out=None).dtype is F32
        for dtype in (F64, torch.complex64, torch.int64):
            got, two = torch.zeros(3, dtype=dtype), torch.full((3,), 2, dtype=dtype)
            assert torch.mul(two, two, out=got) is got and got.tolist() == [4] * 3


def test_r6_an_unlisted_op_takes_an_out_of_one_of_its_inputs_dtypes() -> None:
    a, b = torch.randn(2, 3, dtype=BF16), torch.randn(3, 4)
    with hmp.casts(hmp.Policy("none")):
        assert_identical(torch.mm(a, b, out=torch.empty(0)), (a @ b.to(BF16)).float(), "out")
        with pytest.raises(RuntimeError, match="dtype"):
            torch.mm(b.t(), a.t().float(), out=torch.empty(0, dtype=BF16))


@pytest.mark.parametrize("kind", ["bf16", "fp32", "promote"])
@pytest.mark.parametrize("given", [F32, BF16])
def test_r6_a_listed_norm_takes_outs_of_any_dtypes(kind: str, given: torch.dtype) -> None:
    x, w, b = torch.randn(4, 3, 5).to(given), torch.rand(3), torch.rand(3)
    want = torch.native_batch_norm(x.to(BF16 if kind == "bf16" else F32), w, b, torch.zeros(3), torch.ones(3), True, 0.1, 1e-5)
    with hmp.casts(hmp.Policy("a norm", **{kind: {"native_batch_norm"}})):
        for dtypes in ((F32, F32, F32), (BF16, F32, F32), (F32, BF16, BF16), (F16, F16, F16)):
            mean, var = torch.zeros(3), torch.ones(3)
            outs = tuple(torch.empty(0, dtype=dtype) for dtype in dtypes)
            torch.native_batch_norm(x, w, b, mean, var, True, 0.1, 1e-5, out=outs)
            for out, value, dtype in zip(outs, want, dtypes, strict=True):
                assert_identical(out, value.to(dtype), "out")
            assert mean.any() and var.dtype is F32
        with pytest.raises(RuntimeError, match="support automatic differentiation"):
            torch.native_batch_norm(x, w.requires_grad_(), b, mean, var, True, 0.1, 1e-5, out=outs)
