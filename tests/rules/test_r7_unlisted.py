"""R7: an unlisted op runs in the precision of its first castable input, and is left alone where torch accepts the mixture.

Single ops P1 asks (tests/properties); here are recurrent modules, which check dtypes themselves, and products of nothing.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import hmp
from low_kernels_kit import products_as_computed
from oracle import BF16, F16, F32, Outcome, outcome
from strategies import Leaf
from trap_kit import same

NOTHING = hmp.Policy(name="nothing listed")


def test_r7_an_error_that_is_not_about_dtypes_stays_torchs() -> None:
    low, full = torch.ones(2, 3).to(BF16), torch.ones(2, 3)
    with pytest.raises(RuntimeError) as plain:
        torch.mm(full, full)
    with hmp.casts(NOTHING), pytest.raises(RuntimeError) as mixed:
        torch.mm(full, low)
    assert str(mixed.value) == str(plain.value)


def test_r7_inner_of_a_number_and_a_vector_takes_a_mixture_as_torch_does() -> None:
    number, vector = torch.tensor(2.0).to(BF16), torch.ones(3)
    plain = torch.inner(number, vector)
    with hmp.casts(NOTHING):
        assert torch.inner(number, vector).dtype is plain.dtype is F32
        assert torch.inner(vector.to(BF16), vector).dtype is BF16  # torch refuses that mixture


def test_r7_the_first_input_is_the_ops_whatever_the_order_of_keywords() -> None:
    wide, low = torch.rand(3, 3), torch.rand(3, 3).to(BF16)
    with hmp.casts(NOTHING):
        found = (
            F.linear(weight=wide, input=low),
            torch.mm(mat2=wide, input=low),
            torch.dsmm(low, wide),  # torch.mm under another name
            torch.addmm(mat2=wide, mat1=wide, input=low),
            torch.lerp(weight=wide, end=wide, input=low),
        )
    assert {result.dtype for result in found} == {BF16}


@pytest.mark.parametrize("lists", [NOTHING, hmp.Policy("listed", bf16={"addr", "mse_loss"})], ids=["unlisted", "listed"])
def test_r7_a_mixture_that_only_backward_refuses_is_widened_before(lists: hmp.Policy) -> None:
    """torch computes it, and raises in the middle of a training step; on a list it is the list's dtype."""
    dtype = F32 if lists is NOTHING else BF16
    for call, shapes in ((lambda *given: torch.addr(*given), [(3, 3), (3,), (3,)]), (lambda *given: F.mse_loss(*given), [(3, 3), (3, 3)])):
        given = [torch.rand(shape, dtype=F32 if i else BF16, requires_grad=True) for i, shape in enumerate(shapes)]
        expected = call(*(t.to(dtype) for t in given))
        with hmp.casts(lists):
            found = call(*given)
        assert found.dtype is expected.dtype is dtype and torch.equal(found, expected)
        same(torch.autograd.grad(found.sum(), given), torch.autograd.grad(expected.sum(), given))


RECURRENT = {
    "LSTM": lambda: torch.nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "LSTM_projected": lambda: torch.nn.LSTM(3, 4, proj_size=2, batch_first=True),
    "GRU": lambda: torch.nn.GRU(3, 4, num_layers=2),
    "RNN_relu": lambda: torch.nn.RNN(3, 4, nonlinearity="relu", bidirectional=True),
    "LSTMCell": lambda: torch.nn.LSTMCell(3, 4),
    "GRUCell": lambda: torch.nn.GRUCell(3, 4),
}


def trained(module: torch.nn.Module, x: torch.Tensor) -> Outcome:
    """The module's outcome; gradients are those of its parameters and of its input."""
    return outcome(lambda *args: module(args[0]), [x, *module.parameters()])


@pytest.mark.parametrize(("policy", "dtype"), [("habana", BF16), (NOTHING, F16)], ids=["habana", "nothing"])
def test_r7_recurrent_nets_run_in_their_inputs_dtype_with_float32_weights(policy, dtype: torch.dtype) -> None:
    """A bf16 input, as any listed op gives it, raises in torch (trap R1)."""
    modules = {name: make() for name, make in RECURRENT.items()}
    leaves = {name: Leaf((2, 3) if name.endswith("Cell") else (5, 2, 3), dtype, seed=3) for name in RECURRENT}
    expected = {}
    for name, module in modules.items():
        assert trained(module, leaves[name].build()).error in (ValueError, RuntimeError)
        with products_as_computed():
            expected[name] = trained(copy.deepcopy(module).to(dtype), leaves[name].build())
    with hmp.casts(policy):
        found = {name: trained(module, leaves[name].build()) for name, module in modules.items()}
    for name, got in found.items():
        assert got.error is None, got.message
        for one, other in zip(got.results, expected[name].results, strict=True):
            assert one.dtype is dtype and torch.equal(one, other), name
        for leaf, one, other in zip([leaves[name].build(), *modules[name].parameters()], got.grads, expected[name].grads, strict=True):
            assert one.dtype is leaf.dtype
            if leaf.dtype is dtype or name.endswith("Cell"):
                torch.testing.assert_close(one, other.to(one.dtype), rtol=0, atol=0)
            else:  # the steps' gradients are summed in float32 (R21), those of the oracle in its own dtype
                assert (one - other).norm() <= 4 * torch.finfo(dtype).eps * other.norm()


def test_r7_recurrent_nets_cast_a_float32_state_along_and_take_packed_sequences() -> None:
    for name, h in (("LSTM", torch.randn(4, 2, 4)), ("GRU", torch.randn(2, 2, 4)), ("LSTMCell", torch.randn(2, 4))):
        module = RECURRENT[name]()
        narrow, x = copy.deepcopy(module).to(BF16), torch.randn(2, 3) if name == "LSTMCell" else torch.randn(5, 2, 3)
        states = [h.to(d) if name == "GRU" else (h.to(d), (h * 2).to(d)) for d in (BF16, F32)]
        with products_as_computed():
            expected = outcome(narrow, [x.to(BF16), states[0]])
        with hmp.casts("habana"):
            got = outcome(module, [x.to(BF16), states[1]])
        assert got.error is None, got.message
        same(got.results, expected.results)
    module = torch.nn.GRU(3, 4)
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 3).to(BF16), [5, 3])
    with products_as_computed():
        want, _ = copy.deepcopy(module).to(BF16)(packed)
    with hmp.casts("habana"):
        found, _ = module(packed)
    assert found.data.dtype is BF16 and torch.equal(found.data, want.data)


def test_r7_a_product_of_nothing_has_the_dtype_of_a_product_of_something() -> None:
    """torch's kernels refuse a mixture of tensors that hold something, and give one of none the dtype of the one or the other."""
    shapes = [((0, 2, 3), (3, 2)), ((0, 2, 3), (0, 3, 2)), ((2, 3), (0, 3, 2)), ((0, 3), (3, 2)), ((2, 0), (0, 3))]
    with hmp.casts(hmp.Policy(bf16={"relu"})):
        for first, second in ((BF16, F32), (F32, BF16)):
            for one, other in shapes:
                a, b = torch.ones(one, dtype=first), torch.ones(other, dtype=second)
                result = torch.matmul(a, b)
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


@pytest.mark.skipif(not hasattr(torch, "hash_tensor"), reason="torch 2.9 and later")
@pytest.mark.parametrize("listed", ["hash_tensor", "*"])
def test_r7_a_hash_is_of_the_bits_whatever_lists_say(listed: str) -> None:
    wide = torch.linspace(-1, 1, 7)
    hashes = [torch.hash_tensor(x) for x in (wide, wide.to(BF16))]
    for policy in (hmp.Policy(bf16={listed}), hmp.Policy(fp32={listed})):
        with hmp.casts(policy):
            assert [torch.hash_tensor(x) for x in (wide, wide.to(BF16))] == hashes
