"""R7: an unlisted op runs in the precision of its first castable input, and is left alone where torch accepts the mixture."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import hmp
from low_kernels_kit import products_as_computed
from oracle import BF16, F16, F32, F64, Outcome, outcome
from strategies import Leaf

NOTHING = hmp.Policy(name="nothing listed", bf16=frozenset(), fp32=frozenset(), promote=frozenset())


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


def by_torch(module: torch.nn.Module, *inputs) -> Outcome:
    """The same of a module of a low dtype as torch computes it by itself."""
    with products_as_computed():
        return trained(module, *inputs)


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
    expected = by_torch(narrow, x.build())
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
    with products_as_computed():
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
    with products_as_computed():
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


def test_r7_numpys_names_of_parameters_are_torchs() -> None:
    x, w, c, ones, zeros = torch.randn(2, 3), torch.randn(4, 3).bfloat16(), torch.randn(2, 3, 4), torch.ones(3), torch.zeros(3)
    with hmp.casts(hmp.Policy("n", bf16={"native_group_norm"}, fp32={"native_batch_norm"})):
        assert F.linear(a=x, weight=w, bias=None).dtype is F.linear(input=x, weight=w, bias=None).dtype is torch.float32
        assert torch.linalg.cross(x=x.bfloat16(), x2=x).dtype is torch.linalg.cross(input=x.bfloat16(), other=x).dtype is torch.bfloat16
        batch = {"weight": ones, "bias": zeros, "running_mean": zeros, "running_var": ones, "training": False, "momentum": 0.1, "eps": 1e-5}
        assert torch.native_batch_norm(x=c.bfloat16(), **batch)[0].dtype is torch.float32
        group = {"weight": ones, "bias": zeros, "N": 2, "C": 3, "HxW": 4, "group": 1, "eps": 1e-5}
        assert torch.native_group_norm(x=c, **group)[0].dtype is torch.bfloat16
