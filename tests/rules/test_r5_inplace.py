"""R5: where an op writes into its first input, the others become that input's dtype and it is itself never cast, listed or not."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import hmp
from oracle import BF16, F16, F32, F64, assert_identical, assert_same, outcome
from strategies import INTEGER, Leaf, build

NAMES = """add iadd sub isub mul imul div truediv itruediv floor_divide floordiv ifloordiv fmod remainder mod imod pow ipow atan2
hypot copysign xlogy addcmul addcdiv clamp addmm addmv addbmm baddbmm lerp index_add index_copy index_put scatter
scatter_add scatter_reduce masked_scatter put relu leaky_relu dropout dropout1d dropout2d dropout3d log log2 sigmoid
exp neg abs t masked_fill relu6 selu silu mish hardswish hardsigmoid elu celu alpha_dropout feature_alpha_dropout
hardtanh threshold rrelu""".split()


@functools.cache
def every(rule: str) -> hmp.Policy:
    lists = {"bf16": frozenset(), "fp32": frozenset(), "promote": frozenset()}
    return hmp.Policy(name=f"all {rule}", **(lists if rule == "none" else lists | {rule: frozenset(NAMES)}))


POLICIES = {"habana": lambda: "habana", **{rule: (lambda rule=rule: every(rule)) for rule in ("bf16", "fp32", "promote", "none")}}
policies = st.sampled_from(sorted(POLICIES))


def on_a_copy(op, first, *others):
    """`op` writes into a copy of the leaf, so that the leaf gets a gradient; the written tensor itself must come back."""
    written = first.clone() if first.requires_grad else first
    alias, dtype, storage = written, written.dtype, written.data_ptr()
    result = op(written, *others)
    assert result is alias, "the op must return the tensor that it wrote"
    assert result.dtype is dtype and result.data_ptr() == storage
    return result


def statement(op):
    """`x op= y` as the statement that users write."""

    def run(x, y):
        alias = x
        x = op(x, y)
        assert x is alias, "an augmented assignment must not rebind the name to a new tensor"
        return x

    return run


# torch computes these with mixed inputs by itself: one rounding, and to the bit what plain torch gives.
MIXED = {
    "add_": lambda x, y: x.add_(y, alpha=2),
    "sub_": lambda x, y: x.sub_(y),
    "mul_": lambda x, y: x.mul_(y),
    "multiply_": lambda x, y: x.multiply_(y),
    "div_": lambda x, y: x.div_(y),
    "true_divide_": lambda x, y: x.true_divide_(y),
    "floor_divide_": lambda x, y: x.floor_divide_(y),
    "remainder_": lambda x, y: x.remainder_(y),
    "pow_": lambda x, y: x.pow_(y),
    "atan2_": lambda x, y: x.atan2_(y),
    "xlogy_": lambda x, y: torch.xlogy_(x, y),
    "clamp_": lambda x, y: x.clamp_(max=y),
    "addcmul_": lambda x, y: x.addcmul_(y, y),
    "addcdiv_": lambda x, y: x.addcdiv_(y, y, value=0.5),
    "copy_": lambda x, y: x.copy_(y),
    "+=": statement(operator.iadd),
    "-=": statement(operator.isub),
    "*=": statement(operator.imul),
    "/=": statement(operator.itruediv),
    "//=": statement(operator.ifloordiv),
    "%=": statement(operator.imod),
    "**=": statement(operator.ipow),
    "mul(out=x)": lambda x, y: torch.mul(x, y, out=x),
    "div(out=x)": lambda x, y: torch.div(x, y, out=x),
    "add(out=x)": lambda x, y: torch.add(x, y, out=x),
}


ROWS, ONE_ROW = torch.tensor([2, 0]), torch.tensor([[2, 0, 1]])
MASK = torch.tensor([[True, False, True], [False, False, True], [True, True, False]])


def assign(index, value_shape):
    def run(x, y):
        x[index] = y
        return x

    return run, [(3, 3), value_shape]


# torch refuses mixed inputs here: the others become the first one's dtype.
REFUSED = {
    "addmm_": (lambda x, a, b: x.addmm_(a, b), [(3, 3), (3, 2), (2, 3)]),
    "addmv_": (lambda x, a, b: x.addmv_(a, b), [(3,), (3, 2), (2,)]),
    "torch.addmv_": (lambda x, a, b: torch.addmv_(x, a, b), [(3,), (3, 2), (2,)]),
    "addbmm_": (lambda x, a, b: x.addbmm_(a, b), [(3, 3), (2, 3, 2), (2, 2, 3)]),
    "baddbmm_": (lambda x, a, b: x.baddbmm_(a, b), [(2, 3, 3), (2, 3, 2), (2, 2, 3)]),
    "addmm(out=x)": (lambda x, a, b: torch.addmm(x, a, b, out=x), [(3, 3), (3, 2), (2, 3)]),
    "lerp_": (lambda x, a, b: x.lerp_(a, b), [(3,), (3,), (3,)]),
    "index_add_": (lambda x, y: x.index_add_(0, ROWS, y), [(3, 3), (2, 3)]),
    "index_copy_": (lambda x, y: x.index_copy_(0, ROWS, y), [(3, 3), (2, 3)]),
    "index_put_": (lambda x, y: x.index_put_((ROWS,), y), [(3, 3), (2, 3)]),
    "torch.index_put_": (lambda x, y: torch.index_put_(x, (ROWS,), y, accumulate=True), [(3, 3), (2, 3)]),
    "scatter_": (lambda x, y: x.scatter_(0, ONE_ROW, y), [(3, 3), (1, 3)]),
    "scatter_add_": (lambda x, y: x.scatter_add_(0, ONE_ROW, y), [(3, 3), (1, 3)]),
    "scatter_reduce_": (lambda x, y: x.scatter_reduce_(0, ONE_ROW, y, "sum"), [(3, 3), (1, 3)]),
    "masked_scatter_": (lambda x, y: x.masked_scatter_(MASK, y), [(3, 3), (5,)]),
    "put_": (lambda x, y: x.put_(ROWS, y), [(3, 3), (2,)]),
    "x[mask]=": assign(MASK, (5,)),
    "x[tensor]=": assign(ROWS, (2, 3)),
    "x[tensor,slice]=": assign((ROWS, slice(0, 2)), (2, 2)),
    "x[list]=": assign([0, 2], (3,)),
    "x[int]=": assign(1, (3,)),
    "x[slice]=": assign(slice(0, 2), (2, 3)),
    "x[...]=": assign(..., (3, 3)),
    "x[mask]=0dim": assign(MASK, ()),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["add_", "mul_", "+=", "*=", "/=", "pow_", "mul(out=x)"])
@given(policy=policies, dtype=st.sampled_from(INTEGER))
def test_r5_an_integer_first_input_gets_torchs_own_error(name, dtype, policy) -> None:
    """Never truncated in silence (trap U3)."""
    tree = [Leaf((3,), dtype, seed=1), Leaf((3,), F32, values="positive", grad=False)]
    expected = outcome(MIXED[name], build(tree))
    assert expected.error is RuntimeError
    with hmp.casts(POLICIES[policy]()):
        got = outcome(MIXED[name], build(tree))
    assert_same(got, expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("first", "others"), [(torch.int64, F32), (F64, F32), (BF16, F64)], ids=str)
@pytest.mark.parametrize("name", ["addmm_", "index_add_", "x[mask]=", "x[int]=", "scatter_", "lerp_"])
def test_r5_what_has_an_input_that_is_no_castable_tensor_is_left_to_torch(name, first, others) -> None:
    op, shapes = REFUSED[name]
    tree = [Leaf(shapes[0], first, grad=False), *[Leaf(s, others, grad=False) for s in shapes[1:]]]
    expected = outcome(op, build(tree))
    for policy in POLICIES.values():
        with hmp.casts(policy()):
            got = outcome(op, build(tree))
        assert_same(got, expected)


def test_r5_a_leaf_that_needs_a_gradient_gets_torchs_own_error() -> None:
    for op in (lambda x: x.mul_(2.0), lambda x: F.relu(x, True), lambda x: x.__setitem__(0, 1.0)):
        with hmp.casts("habana"), pytest.raises(RuntimeError, match="leaf Variable"):
            op(torch.ones(3, requires_grad=True))


def test_r5_a_product_in_place_is_rounded_once() -> None:
    """Casting y first would round twice."""
    x, y = torch.rand(1000).to(BF16) + 1, torch.rand(1000) + 1
    once = (x.float() * y).to(BF16)
    assert not torch.equal(once, x * y.to(BF16))
    with hmp.casts("habana"):
        assert torch.equal(x.clone().mul_(y), once)


ADDED_IN_PLACE = {
    "add_": lambda x, y: x.add_(y),
    "add_(other=)": lambda x, y: x.add_(other=y),
    "add_(alpha=)": lambda x, y: x.add_(y, alpha=2),
    "sub_": lambda x, y: x.sub_(y),
    "subtract_": lambda x, y: x.subtract_(y),
    "+=": statement(operator.iadd),
    "-=": statement(operator.isub),
    "add(out=x)": lambda x, y: torch.add(x, y, out=x),
    "sub(out=x)": lambda x, y: torch.sub(x, y, out=x),
    "copy_": lambda x, y: x.copy_(y),
    "x[...]=": lambda x, y: assign(..., ())[0](x, y),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rule", ["none", "bf16", "fp32", "promote"])
@pytest.mark.parametrize("name", ADDED_IN_PLACE)
def test_r5_an_operand_beyond_the_low_dtype_is_not_clamped_before_a_sum_in_place(name: str, rule: str) -> None:
    """A GradScaler looks for the infinity; and what float32 adds to less than the limit is no infinity."""
    lists = {} if rule == "none" else {rule: set(NAMES) | {"setitem", "subtract"}}
    for dtype, start, values in (
        (F16, -60000.0, [1e5, -1e6, 3e38]),
        (F16, 60000.0, [1e5, -1e5, 7e4]),
        (BF16, -3e38, [3.395e38, 1.0, -3e38]),
    ):
        y = torch.tensor(values)
        want = ADDED_IN_PLACE[name](torch.full((3,), start, dtype=dtype), y)
        with hmp.casts(hmp.Policy("mine", dtype=F16, **lists)):
            got = ADDED_IN_PLACE[name](torch.full((3,), start, dtype=dtype), y)
        assert_identical(got, want, f"{start} and {values}")


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("name", ["add_", "+=", "x[...]="])
def test_r5_a_mask_of_the_lowest_float32_stays_finite_in_place(name: str, dtype: torch.dtype) -> None:
    """R12: that number is what masks are filled with. It is no result of a sum."""
    mask = torch.tensor([0.0, torch.finfo(F32).min, float("-inf")])
    with hmp.casts("habana"):
        got = ADDED_IN_PLACE[name](torch.zeros(3, dtype=dtype), mask)
    assert got.tolist() == [0.0, torch.finfo(dtype).min, float("-inf")]
