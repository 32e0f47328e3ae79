"""R7: an unlisted op runs in the precision of its first castable input, and is left alone where torch accepts the mixture."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import hmp
from oracle import BF16, F16, F32, F64, Outcome, assert_same, by_explicit_casts, outcome, target
from strategies import Leaf, any_dtypes, build, castable_dtypes, leaves, pairs

NOTHING = hmp.Policy(name="nothing listed", bf16=frozenset(), fp32=frozenset(), promote=frozenset())

_ROW = torch.tensor([[2, 0, 1]])
_MASK = torch.tensor([[True, False, True], [False, False, True], [True, True, False]])

# torch refuses mixed inputs here (torch-surface.md, 2A): the others become the first one's dtype.
REFUSED = {
    "matmul": (lambda a, b: a @ b, [(2, 3), (3, 4)]),
    "mm": (lambda a, b: torch.mm(input=a, mat2=b), [(2, 3), (3, 4)]),
    "bmm": (lambda a, b: a.bmm(b), [(2, 2, 3), (2, 3, 2)]),
    "addmm": (lambda a, b, c: torch.addmm(a, b, c), [(2, 4), (2, 3), (3, 4)]),
    "baddbmm": (lambda a, b, c: torch.baddbmm(a, b, c), [(2, 2, 2), (2, 2, 3), (2, 3, 2)]),
    "mv": (lambda a, b: a.mv(b), [(2, 3), (3,)]),
    "dot": (lambda a, b: torch.dot(a, b), [(3,), (3,)]),
    "inner": (lambda a, b: torch.inner(a, b), [(2, 3), (4, 3)]),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), [(2, 3), (3, 4)]),
    "einsum_of_a_list": (lambda a, b: torch.einsum("ij,jk->ik", [a, b]), [(2, 3), (3, 4)]),
    "tensordot": (lambda a, b: torch.tensordot(a, b, 1), [(2, 3), (3, 4)]),
    "multi_dot": (lambda a, b, c: torch.linalg.multi_dot([a, b, c]), [(2, 3), (3, 4), (4, 2)]),
    "linear": (lambda a, b, c: F.linear(a, b, c), [(2, 3), (4, 3), (4,)]),
    "conv1d": (lambda a, b: F.conv1d(a, b), [(1, 2, 5), (3, 2, 3)]),
    "conv_transpose2d": (lambda a, b: F.conv_transpose2d(a, b), [(1, 2, 3, 3), (2, 3, 2, 2)]),
    "bilinear": (lambda a, b, c: F.bilinear(a, b, c), [(2, 3), (2, 4), (5, 3, 4)]),
    "lerp": (lambda a, b, c: torch.lerp(a, b, c), [(3,), (3,), (3,)]),
    "lerp_by_a_0dim_weight": (lambda a, b, c: torch.lerp(a, b, c), [(3,), (3,), ()]),
    "prelu": (lambda a, b: F.prelu(a, b), [(2, 3), (3,)]),
    "huber_loss": (lambda a, b: F.huber_loss(a, b), [(4,), (4,)]),
    "index_add": (lambda a, b: a.index_add(0, torch.tensor([2, 0]), b), [(3, 3), (2, 3)]),
    "index_copy": (lambda a, b: torch.index_copy(a, 0, torch.tensor([2, 0]), b), [(3, 3), (2, 3)]),
    "index_put": (lambda a, b: torch.index_put(a, (torch.tensor([2, 0]),), b), [(3, 3), (2, 3)]),
    "scatter": (lambda a, b: a.scatter(0, _ROW, b), [(3, 3), (1, 3)]),
    "scatter_add": (lambda a, b: torch.scatter_add(a, 0, _ROW, b), [(3, 3), (1, 3)]),
    "scatter_reduce": (lambda a, b: a.scatter_reduce(0, _ROW, b, "sum"), [(3, 3), (1, 3)]),
    "masked_scatter": (lambda a, b: a.masked_scatter(_MASK, b), [(3, 3), (5,)]),
    "meshgrid": (lambda a, b: torch.meshgrid(a, b, indexing="ij"), [(2,), (3,)]),
    "allclose": (lambda a, b: torch.allclose(a, b, rtol=0.5), [(3,), (3,)]),
    "cross": (lambda a, b: torch.cross(a, b, dim=-1), [(2, 3), (2, 3)]),
    "linalg.cross": (lambda a, b: torch.linalg.cross(a, b), [(2, 3), (2, 3)]),
    "grid_sample": (lambda a, b: F.grid_sample(a, b, align_corners=False), [(1, 2, 4, 4), (1, 3, 3, 2)]),
    "sdpa": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), [(1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)]),
}
# these are on no list of the "habana" policy either
UNDER_HABANA = """index_add index_copy index_put scatter scatter_add scatter_reduce masked_scatter
grid_sample sdpa huber_loss""".split()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", REFUSED)
@given(data=st.data())
def test_r7_what_torch_refuses_runs_in_the_first_inputs_dtype(name: str, data: st.DataObject) -> None:
    call, shapes = REFUSED[name]
    # no float16 first where torch has no kernel for it on CPU
    dtypes = castable_dtypes if name not in ("grid_sample", "cross", "linalg.cross") else st.sampled_from([F32, BF16])
    tree = [data.draw(leaves(shape, dtypes)) for shape in shapes]
    args = build(tree)
    expected = by_explicit_casts(call, args, {}, target("first", args))
    for policy in [NOTHING, *(["habana"] if name in UNDER_HABANA else [])]:
        with hmp.casts(policy):
            got = outcome(call, build(tree))
        assert_same(got, expected)


# torch accepts the mixture (2C, and 2B's "first input" group): nothing is done, to the bit.
ACCEPTED = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: torch.mul(a, b),
    "div": lambda a, b: a / b,
    "rtruediv": lambda a, b: b.__rtruediv__(a),
    "sub": lambda a, b: torch.sub(a, b),
    "pow": lambda a, b: a**b,
    "maximum": lambda a, b: torch.maximum(a, b),
    "eq": lambda a, b: a == b,
    "gt": lambda a, b: torch.gt(a, b),
    "equal": lambda a, b: torch.equal(a, b),
    "where": lambda a, b: torch.where(a > 1, a, b),
    "cat": lambda a, b: torch.cat([a.reshape(-1), b.reshape(-1)]),
    "ldexp": lambda a, b: torch.ldexp(a, b),
    "cosine_similarity": lambda a, b: F.cosine_similarity(a, b, dim=-1),
    "logaddexp": lambda a, b: torch.logaddexp(a, b),
    "clamp": lambda a, b: torch.clamp(a, min=b),
    "outer": lambda a, b: torch.outer(a.reshape(-1), b.reshape(-1)),
    "float_power": lambda a, b: torch.float_power(a, b),
    "searchsorted": lambda a, b: torch.searchsorted(a.reshape(-1).sort().values, b.reshape(-1)),
    "isin": lambda a, b: torch.isin(a, b),
    "soft_margin_loss": lambda a, b: F.soft_margin_loss(a, b),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ACCEPTED)
@given(tree=pairs(values="positive"))
def test_r7_what_torch_accepts_is_left_alone(name: str, tree) -> None:
    """No eq that flips because one side was narrowed (trap U1); integers, float64 and complex included."""
    expected = outcome(ACCEPTED[name], build(tree))
    for policy in [NOTHING, *(["habana"] if name in ("eq", "gt", "equal", "isin", "searchsorted", "logaddexp", "float_power") else [])]:
        with hmp.casts(policy):
            got = outcome(ACCEPTED[name], build(tree))
        assert_same(got, expected)


# Ops whose meaning is a dtype.
DTYPE_OPS = {
    "to(other)": lambda a, b: a.to(b),
    "to(dtype)": lambda a, b: a.to(b.dtype),
    "type_as": lambda a, b: a.type_as(b),
    "copy_": lambda a, b: a.detach().copy_(b),
    "result_type": lambda a, b: torch.result_type(a, b),
    "can_cast": lambda a, b: torch.can_cast(a.dtype, b.dtype),
    "promote_types": lambda a, b: torch.promote_types(a.dtype, b.dtype),
    "view_as": lambda a, b: a.view_as(b),
    "expand_as": lambda a, b: a.expand_as(b),
    "reshape_as": lambda a, b: a.reshape_as(b),
    "set_": lambda a, b: a.detach().set_(b.detach()),
    "float": lambda a, b: a.float() if b.is_floating_point() else a.half(),
}


EVERYTHING = hmp.Policy(name="*", bf16=frozenset({"*"}), fp32=frozenset(), promote=frozenset())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", DTYPE_OPS)
@given(tree=st.tuples(*[leaves((2, 3), any_dtypes, subclass=False)] * 2))
def test_r7_ops_whose_meaning_is_a_dtype_are_never_touched(name: str, tree) -> None:
    expected = outcome(DTYPE_OPS[name], build(tree))
    for policy in ("habana", NOTHING, EVERYTHING):
        with hmp.casts(policy):
            got = outcome(DTYPE_OPS[name], build(tree))
        assert_same(got, expected)


@pytest.mark.parametrize("name", ["cross", "index_add", "matmul", "scatter", "sdpa"])
def test_r7_a_float64_or_an_integer_in_the_mixture_keeps_torchs_error(name: str) -> None:
    call, shapes = REFUSED[name]
    for odd in (F64, torch.int64):
        tree = [Leaf(shape, odd if i else F32, seed=i) for i, shape in enumerate(shapes)]
        expected = outcome(call, build(tree))
        assert expected.error is not None
        with hmp.casts(NOTHING):
            got = outcome(call, build(tree))
        assert_same(got, expected)


def test_r7_an_error_that_is_not_about_dtypes_stays_torchs() -> None:
    low, full = torch.ones(2, 3).to(BF16), torch.ones(2, 3)
    with pytest.raises(RuntimeError) as plain:
        torch.mm(full, full)
    with hmp.casts(NOTHING), pytest.raises(RuntimeError) as mixed:
        torch.mm(full, low)
    assert str(mixed.value) == str(plain.value)


RECURRENT = {
    "LSTM": lambda: torch.nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "LSTM_projected": lambda: torch.nn.LSTM(3, 4, proj_size=2, batch_first=True),
    "GRU": lambda: torch.nn.GRU(3, 4, num_layers=2),
    "RNN_tanh": lambda: torch.nn.RNN(3, 4),
    "RNN_relu": lambda: torch.nn.RNN(3, 4, nonlinearity="relu", bidirectional=True),
    "LSTMCell": lambda: torch.nn.LSTMCell(3, 4),
    "GRUCell": lambda: torch.nn.GRUCell(3, 4),
    "RNNCell": lambda: torch.nn.RNNCell(3, 4),
}


def trained(module: torch.nn.Module, *inputs) -> Outcome:
    """The module's outcome; gradients are those of its parameters and of its inputs."""
    parameters = list(module.parameters())
    return outcome(lambda *args: module(*args[: len(inputs)]), [*inputs, *parameters])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", ["habana", NOTHING], ids=["habana", "nothing"])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("name", RECURRENT)
def test_r7_recurrent_nets_run_in_their_inputs_dtype_with_float32_weights(name: str, dtype: torch.dtype, policy) -> None:
    """A bf16 input, as any listed op gives it, raises in torch (trap R1)."""
    module = RECURRENT[name]()
    narrow = copy.deepcopy(module).to(dtype)
    shape = (2, 3) if name.endswith("Cell") else (5, 2, 3)
    x = Leaf(shape, dtype, seed=3)
    assert trained(module, x.build()).error in (ValueError, RuntimeError)
    expected = trained(narrow, x.build())
    with hmp.casts(policy):
        got = trained(module, x.build())
    assert got.error is None, got.message
    assert {r.dtype for r in got.results} == {dtype}
    for one, other in zip(got.results, expected.results, strict=True):
        assert torch.equal(one, other)
    for leaf, one, other in zip([x.build(), *module.parameters()], got.grads, expected.grads, strict=True):
        assert one.dtype is leaf.dtype
        if leaf.dtype is dtype or name.endswith("Cell"):
            torch.testing.assert_close(one, other.to(one.dtype), rtol=0, atol=0)
        else:  # the steps' gradients are summed in float32 (R21), those of `narrow` in its own dtype
            assert (one - other).norm() <= 4 * torch.finfo(dtype).eps * other.norm()


@pytest.mark.parametrize("name", ["LSTM", "GRU", "LSTMCell"])
def test_r7_recurrent_nets_cast_a_float32_state_along(name: str) -> None:
    module = RECURRENT[name]()
    narrow = copy.deepcopy(module).to(BF16)
    x = torch.randn(*((2, 3) if name == "LSTMCell" else (5, 2, 3)))
    h = torch.randn(*((2, 4) if name == "LSTMCell" else (4 if name == "LSTM" else 2, 2, 4)))
    state = (lambda d: h.to(d)) if name == "GRU" else (lambda d: (h.to(d), (h * 2).to(d)))
    expected = outcome(narrow, [x.to(BF16), state(BF16)])
    with hmp.casts("habana"):
        got = outcome(module, [x.to(BF16), state(F32)])
    assert got.error is None, got.message
    for one, other in zip(got.results, expected.results, strict=True):
        assert one.dtype is BF16 and torch.equal(one, other)


def test_r7_recurrent_nets_take_packed_sequences() -> None:
    module = torch.nn.GRU(3, 4)
    narrow = copy.deepcopy(module).to(BF16)
    x = torch.randn(5, 2, 3).to(BF16)
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, [5, 3])
    expected, _ = narrow(packed)
    with hmp.casts("habana"):
        got, _ = module(packed)
    assert got.data.dtype is BF16 and torch.equal(got.data, expected.data)


def test_r7_a_recurrent_net_with_matching_dtypes_is_plain_torch() -> None:
    module, x = torch.nn.LSTM(3, 4), torch.randn(5, 2, 3)
    expected, _ = module(x)
    with hmp.casts("habana"):
        got, _ = module(x)
    assert got.dtype is F32 and torch.equal(got, expected)
    double = module.double()
    with hmp.casts("habana"):
        assert double(x.double())[0].dtype is F64


def test_r7_unlisted_cross_entropy_with_probabilities_is_torchs_own() -> None:
    logits, target = torch.randn(2, 3).bfloat16(), torch.rand(2, 3)
    expected = F.cross_entropy(logits, target)
    with hmp.casts("bert"):
        got = F.cross_entropy(logits, target)
    assert got.dtype is torch.float32
    assert torch.equal(got, expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "shapes", [((0, 2, 3), (0, 3, 2)), ((2, 3), (0, 3, 2)), ((0, 2, 3), (3, 2)), ((0, 3), (3, 2)), ((2, 0), (0, 3))], ids=str
)
@pytest.mark.parametrize("first", [torch.bfloat16, torch.float32], ids=str)
def test_r7_a_product_of_nothing_has_the_dtype_of_a_product_of_something(shapes, first) -> None:
    """torch's kernels refuse a mixture of tensors that hold something, and give one of none the dtype of the one or the other."""
    _multiply_nothing(lambda a, b: torch.matmul(a, b), shapes, first)


@pytest.mark.slow
def test_r7_a_compiled_product_of_nothing_too(fresh_compiler) -> None:
    compiled = torch.compile(lambda a, b: torch.matmul(a, b), backend="aot_eager", fullgraph=True)
    for first in (torch.bfloat16, torch.float32):
        _multiply_nothing(compiled, ((0, 2, 3), (3, 2)), first)


def _multiply_nothing(matmul, shapes, first) -> None:
    second = torch.float32 if first is torch.bfloat16 else torch.bfloat16
    a, b = torch.ones(shapes[0], dtype=first), torch.ones(shapes[1], dtype=second)
    with hmp.casts(hmp.Policy(bf16={"relu"})):
        result = matmul(a, b)
        assert result.dtype is first and result.shape == torch.matmul(a.float(), b.float()).shape
