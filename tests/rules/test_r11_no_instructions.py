"""R11, "No instructions": a product computes in float32 on its rounded inputs and is rounded, in backward too, and loses nothing by it.

The oracle is plain torch with the casts written out: `op(x.to(low).float(), ...).to(low)`. Results and gradients of single calls, programs
and graphs with such products P1, P2, P3 and P9 ask (tests/properties).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hmp
from autocast_kit import needs_autocasts_lstm
from dispatch_kit import Trace
from low_kernels_kit import in_float32
from oracle import BF16, F16, F32, assert_identical, cast, kept_for_backward
from saved_oracle import packs
from trap_kit import policy, same

pytestmark = pytest.mark.usefixtures("no_instructions")

Call = Callable[..., Any]
NAMES = "linear matmul mm addmm einsum conv2d".split()


def listed(low: torch.dtype = BF16) -> hmp.Policy:
    return policy(bf16=NAMES, dtype=low, name=f"products in {low}")


def by_hand(op: Call) -> Call:
    """`op` on rounded inputs in float32, rounded; gradients are those of the inputs as they were given."""
    wide = in_float32(op)
    return lambda *args, **kwargs: wide(*cast(args, BF16), **cast(kwargs, BF16))


def random(*shape: int, dtype: torch.dtype = F32, grad: bool = True, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).mul(scale).to(dtype).requires_grad_(grad)


def gradients(end: torch.Tensor, of: Any, **kwargs: Any) -> list[torch.Tensor]:
    """The gradients of a fixed combination of what `end` holds."""
    weights = torch.linspace(-1.0, 1.5, end.numel()).reshape(end.shape).to(end.dtype)
    return list(torch.autograd.grad(end, list(of), weights, **kwargs))


def computed_in(call: Callable[[], Any]) -> set[torch.dtype]:
    """The dtypes of the first tensor of every product that torch's kernels compute."""
    with Trace() as trace:
        call()
    return {seen[0] for seen in trace.of("mm", "addmm", "bmm", "convolution")}


# --- values and gradients


def test_r11_float16_overflows_to_infinity_where_it_is_rounded() -> None:
    x = torch.full((4, 64), 60.0)
    with hmp.casts(listed(F16)):
        large, small = torch.mm(x, 1000 * x[0, 0] * torch.ones(64, 4)), torch.mm(x, torch.ones(64, 4))
    assert large.dtype is F16 and bool(large.isposinf().all())
    same(small, torch.full((4, 4), 3840.0, dtype=F16))


def test_r11_at_most_twice_torch_autocasts_bytes_are_kept_for_backward() -> None:
    """Inputs in float32: four bytes a number for two."""
    products = {
        "linear": (lambda x, w: F.linear(x, w), (random(2, 33, 64), random(80, 64))),
        "conv2d": (lambda x, w: F.conv2d(x, w), (random(4, 8, 16, 16), random(8, 8, 3, 3))),
    }
    for name, (product, args) in products.items():
        call = functools.partial(product, *args)
        with torch.autocast("cpu", cache_enabled=False):
            autocast, _ = kept_for_backward(call, besides=args)
        with hmp.casts(listed()):
            ours, _ = kept_for_backward(call, besides=args)
        assert 0 < ours <= 2 * autocast, name


def test_r11_the_uses_of_a_weight_in_a_call_keep_one_float32_copy() -> None:
    weight, inputs = torch.nn.Parameter(random(64, 64)), [random(2, 64, seed=number) for number in range(6)]
    for _ in range(2):  # that the weight is used again is learnt
        with hmp.casts(listed()):
            kept, results = kept_for_backward(lambda: torch.cat([F.linear(x, weight) for x in inputs]), besides=[weight, *inputs])
    assert kept == 4 * (weight.numel() + 6 * 2 * 64)
    (found,) = gradients(results, [weight])
    each = [weight.detach().clone().requires_grad_() for _ in inputs]
    by_use = gradients(torch.cat([by_hand(F.linear)(x, w) for x, w in zip(inputs, each, strict=True)]), each)
    torch.testing.assert_close(found, sum(by_use[::-1]), rtol=1e-6, atol=1e-7)  # each rounded, and summed in float32


# --- who decides


def test_r11_disable_casts_and_native_leave_products_to_torchs_kernel() -> None:
    x = random(8, 16, dtype=BF16, grad=False)

    product = lambda: torch.mm(x, x.t())  # noqa: E731
    with hmp.casts(listed()):
        for inside, wanted in (
            (contextlib.nullcontext(), F32),
            (hmp.disable_casts(), BF16),
            (torch.autocast("cpu", enabled=False), BF16),  # R17: as disable_casts()
            (hmp.casts(policy(fp32=["mm"])), F32),
        ):
            with inside:
                assert computed_in(product) == {wanted}
        for choice, before, wanted in (("native", "float32", BF16), ("float32", "native", F32)):
            assert hmp.low_kernels.set_low_kernels(choice) == before
            assert computed_in(product) == {wanted}
    assert computed_in(product) == {BF16}  # no policy is active


def test_r11_a_region_of_torch_autocast_inside_has_the_last_word() -> None:
    """R17: the results have the dtype of the region."""
    x, w = random(8, 16), random(16, 16)
    for lists, dtype, has in itertools.product((listed(), policy(), "torch-cpu"), (BF16, F16), (F32, BF16)):
        with hmp.casts(lists), torch.autocast("cpu", dtype=dtype):
            found = F.linear(x.to(has), w.to(has))
            assert torch.mm(x.to(has), w.to(has)).dtype is found.dtype is dtype
        assert [g.dtype for g in gradients(found, [x, w])] == [F32, F32]
    with torch.autocast("cpu", dtype=F16), hmp.casts(listed()):
        same(F.linear(x, w), by_hand(F.linear)(x, w))


@pytest.mark.usefixtures("unpatched")
def test_r11_a_wrong_value_names_the_three_and_patches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    names = torch.mm, torch.Tensor.matmul, F.linear
    monkeypatch.setenv("HMP_LOW_KERNELS", "fast")
    for use in (hmp.convert, lambda: hmp.casts("habana").__enter__(), lambda: hmp.low_kernels.set_low_kernels("float32")):
        with pytest.raises(hmp.HmpError) as caught:
            use()
        assert all(repr(each) in str(caught.value) for each in ("auto", "native", "float32", "fast"))
    assert (torch.mm, torch.Tensor.matmul, F.linear) == names and not hmp.is_converted()
    monkeypatch.setenv("HMP_LOW_KERNELS", "")
    with pytest.raises(hmp.HmpError, match="'fast'"):
        hmp.low_kernels.set_low_kernels("fast")
    assert [hmp.low_kernels.set_low_kernels(each) for each in ("native", "float32", "auto")] == ["auto", "native", "float32"]


# --- layouts, compiled code, a saved list, recurrent layers


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_r11_nested_tensors_compute_in_float32() -> None:
    parts, w = [random(n, 64, grad=False, seed=n) for n in (30, 50)], random(70, 64)
    expected = by_hand(F.linear)(torch.cat(parts), w)
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
        with hmp.casts(listed()):
            found = torch.cat(F.linear(nested, w).unbind())
        same(found, expected)
        same(gradients(found, [w]), gradients(expected, [w], retain_graph=True))


@packs  # else no call that needs a gradient is tried again in float32
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_r11_sparse_operands() -> None:
    """COO computes in float32 and is rounded; for CSR the CPU has no low-precision kernel: R11's first half."""
    dense = random(9, 16, grad=False) * (random(9, 16, grad=False, seed=1) > 0)
    other = random(16, 7)
    for call in (lambda a, b: torch.mm(a, b), lambda a, b: torch.sparse.mm(a, b), lambda a, b: a @ b):
        expected = by_hand(lambda b, call=call: call(dense.to(BF16).float().to_sparse(), b))(other)
        with hmp.casts(policy(bf16=["mm", "sparse.mm", "matmul"])):
            found = call(dense.to_sparse(), other)
            rows = call(dense.to(BF16).to_sparse_csr(), other)
        same(found, expected)
        same(gradients(found, [other]), gradients(expected, [other]))
        assert rows.dtype is F32


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_r11_compiled_code_computes_what_eager_code_does(backend: str, fresh_compiler: None) -> None:
    """It follows set_low_kernels(), and weights that are written between calls."""
    layer, given = torch.nn.Linear(24, 24), random(8, 24, grad=False)
    model = torch.compile(layer, backend=backend, fullgraph=True)
    for _ in range(2):
        with hmp.casts(listed()):
            found = model(given)
        expected = by_hand(F.linear)(given, layer.weight, layer.bias)
        same(found, expected)
        same(gradients(found, layer.parameters()), gradients(expected, layer.parameters()))
        with torch.no_grad():
            layer.weight.mul_(1.5)
    with torch.no_grad(), hmp.casts(listed()):
        hmp.low_kernels.set_low_kernels("native")
        assert computed_in(lambda: layer(given)) == {BF16}
        same(model(given), layer(given))


@packs
def test_r11_a_saved_list_packs_what_a_float32_product_keeps_and_no_frozen_weight() -> None:
    """R22: forward has the same bits. What the product saves of a frozen weight is a copy in float32, which no gradient leads to."""
    frozen = random(64, 128, grad=False)
    for recipe, near in {"bf16": 0.02, "int8": 0.05, "fp8": 0.08}.items():
        x, w = random(64, 128), random(64, 128, scale=0.1)
        expected = by_hand(F.linear)(torch.tanh(x), w)
        with hmp.casts(hmp.Policy("saves", bf16={"linear"}, saved=frozenset({"linear"}), saved_recipe=recipe)):
            found, beside = F.linear(torch.tanh(x), w), F.linear(x, frozen)
        same(found, expected)
        for one, other in zip(gradients(found, [x, w]), gradients(expected, [x, w]), strict=True):
            assert float((one - other).norm() / other.norm()) <= near, recipe
        same(gradients(beside, [x]), gradients(by_hand(F.linear)(x, frozen), [x]))


RECURRENT = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM, "rnn": torch.nn.RNN, "gru_cell": torch.nn.GRUCell, "lstm_cell": torch.nn.LSTMCell}


def test_r11_recurrent_layers_under_torch_cpu_return_the_dtypes_of_torch_autocast() -> None:
    """What torch.autocast leaves in float32 (the state of a GRU, its result) stays so and is not rounded."""
    needs_autocasts_lstm()
    for name, kind in RECURRENT.items():
        layer, x = kind(12, 16), random(3, 12) if name.endswith("cell") else random(6, 3, 12)
        states = [random(1, 3, 16)] if name == "gru" else []
        with torch.autocast("cpu"):
            dtypes = [t.dtype for t in _values(layer(x, *states))]
        with hmp.casts("torch-cpu"):
            found = layer(x, *states)
        rounded = {n: p.to(BF16).float() for n, p in layer.named_parameters()}
        expected = torch.func.functional_call(layer, rounded, (x.to(BF16).float(), *states))
        for one, wide, dtype in zip(_values(found), _values(expected), dtypes, strict=True):
            assert_identical(one, wide.to(dtype), name)
        ends = [next(_values(found)), next(_values(expected)).to(next(_values(found)).dtype)]
        same(*(gradients(end, [x, *states, *layer.parameters()]) for end in ends))


def test_r11_what_multiplies_nothing_and_packed_batches_are_left_to_torch() -> None:
    x = random(4, 5, dtype=BF16, grad=False)
    with hmp.casts(listed()):
        assert torch.einsum("ij->ji", x)._base is x
    packed = torch.nn.utils.rnn.pack_padded_sequence(random(6, 3, 12), [6, 4, 1])
    for layer in (torch.nn.GRU(12, 16), torch.nn.RNN(12, 16)):
        with torch.autocast("cpu"):
            wanted = layer(packed)
        with hmp.casts("torch-cpu"):
            found = layer(packed)
        assert_identical(found[0].data.detach(), wanted[0].data.detach(), "a packed batch")


def _values(value: Any) -> Iterator[torch.Tensor]:
    for each in value if isinstance(value, tuple) else (value,):
        yield from each if isinstance(each, tuple) else (each,)
