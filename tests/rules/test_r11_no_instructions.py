"""R11, "No instructions": a product computes in float32 on its rounded inputs and is rounded, in backward too, and loses nothing by it.

The oracle is plain torch with the casts written out: `op(x.to(low).float(), ...).to(low)`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import signal
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as checkpoints
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import hmp
from low_kernels_kit import in_float32
from oracle import BF16, F16, F32, assert_identical, assert_same, cast, flat, outcome
from process_kit import run_in_another_process
from products import ALL_NAMES, IN_PLACE, PRODUCTS, WRITING, Product
from strategies import Leaf, Tagged, build, leaves
from thread_kit import in_thread, in_threads
from trap_kit import policy, refused, same

LOW = st.sampled_from([BF16, F16])
Call = Callable[..., Any]


@pytest.fixture(autouse=True)
def no_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor that has none; what a test sets by hmp.set_low_kernels() ends with it."""
    monkeypatch.setattr("hmp.low_kernels._chosen", None)
    monkeypatch.setenv("HMP_LOW_KERNELS", "float32")


def listed(low: torch.dtype = BF16) -> hmp.Policy:
    """A policy with every product on its BF16 list."""
    return policy(bf16=ALL_NAMES, dtype=low, name=f"products in {low}")


def by_hand(op: Call, low: torch.dtype = BF16) -> Call:
    """`op` on rounded inputs in float32, rounded; gradients are those of the inputs as they were given."""
    wide = in_float32(op)
    return lambda *args, **kwargs: wide(*cast(args, low), **cast(kwargs, low))


def random(*shape: int, dtype: torch.dtype = F32, grad: bool = True, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).mul(scale).to(dtype).requires_grad_(grad)


def gradients(end: torch.Tensor, of: Any, **kwargs: Any) -> list[torch.Tensor]:
    """The gradients of a fixed combination of what `end` holds."""
    weights = torch.linspace(-1.0, 1.5, end.numel()).reshape(end.shape).to(end.dtype)
    return list(torch.autograd.grad(end, list(of), weights, **kwargs))


def all_same(found: Any, expected: Any) -> None:
    found, expected = flat(found), flat(expected)
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert_identical(one, other, f"tensor {number}")


class Kernels(TorchDispatchMode):
    """The dtypes of the first tensor of every product that torch's kernels compute."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in ("mm", "addmm", "bmm", "convolution"):
            self.dtypes.add(next(a.dtype for a in args if isinstance(a, torch.Tensor)))
        return func(*args, **(kwargs or {}))


# --- every op, every spelling


def drawn(product: Product, dtypes: Any, **kwargs: Any) -> st.SearchStrategy[list[Any]]:
    return st.sampled_from(product.shapes).flatmap(lambda shapes: st.tuples(*(leaves(s, dtypes, **kwargs) for s in shapes)).map(list))


def check_listed(product: Product, call: Call, args: list[Any], low: torch.dtype) -> None:
    with hmp.casts(listed(low)):
        got = outcome(call, build(args))
    assert_same(got, outcome(by_hand(call, low), build(args)))


@settings(max_examples=60)
@given(st.data())
def test_r11_a_product_on_the_bf16_list_is_the_rounded_float32_product_of_rounded_inputs(data: st.DataObject) -> None:
    """Any product, spelling, shape, stride, subclass, dtypes of the inputs, and any of them with a gradient."""
    product = data.draw(st.sampled_from(PRODUCTS))
    call = product.calls[data.draw(st.sampled_from(sorted(product.calls)))]
    check_listed(product, call, data.draw(drawn(product, st.sampled_from([F32, F32, BF16, F16]))), data.draw(LOW))


@pytest.mark.slow
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda p: p.name)
@settings(max_examples=8)
@given(st.data())
def test_r11_each_product_by_each_of_its_names(product: Product, data: st.DataObject) -> None:
    for name in product.calls:
        args = data.draw(drawn(product, st.sampled_from([F32, F32, BF16, F16])), label=name)
        check_listed(product, product.calls[name], args, data.draw(LOW))


@settings(max_examples=25)
@given(st.data())
def test_r11_an_unlisted_product_with_a_low_first_input_computes_in_float32(data: st.DataObject) -> None:
    """R7 gives the other inputs the dtype of the first one."""
    product = data.draw(st.sampled_from([p for p in PRODUCTS if p.by_first]))
    low = data.draw(LOW)
    shapes = data.draw(st.sampled_from([s for s in product.shapes if 0 not in sum(s, ())]))  # torch takes mixtures of empty tensors
    args = [data.draw(leaves(s, st.just(low) if i == 0 else st.sampled_from([F32, low]))) for i, s in enumerate(shapes)]
    call = next(iter(product.calls.values()))
    with hmp.casts(policy()):
        got = outcome(call, build(args))
    assert_same(got, outcome(by_hand(call, low), build(args)))


@settings(max_examples=25)
@given(st.data())
def test_r11_a_product_on_the_promote_list_computes_in_float32_anyway(data: st.DataObject) -> None:
    """All inputs low: in float32, rounded. One of them float32: the float32 product."""
    product = data.draw(st.sampled_from([p for p in PRODUCTS if p.by_first]))
    low = data.draw(LOW)
    args = data.draw(drawn(product, st.sampled_from([F32, low, low])))
    call = next(iter(product.calls.values()))
    expected = by_hand(call, low) if all(a.dtype is low for a in args) else lambda *given: call(*cast(given, F32))
    with hmp.casts(policy(promote=ALL_NAMES)):
        got = outcome(call, build(args))
    assert_same(got, outcome(expected, build(args)))


def test_r11_float16_overflows_to_infinity_where_it_is_rounded() -> None:
    x = torch.full((4, 64), 60.0)
    with hmp.casts(listed(F16)):
        large, small = torch.mm(x, 1000 * x[0, 0] * torch.ones(64, 4)), torch.mm(x, torch.ones(64, 4))
    assert large.dtype is F16 and bool(large.isposinf().all())
    same(small, torch.full((4, 4), 3840.0, dtype=F16))


@pytest.mark.slow
@pytest.mark.parametrize("low", [BF16, F16], ids=str)
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda p: p.name)
def test_r11_no_product_is_further_from_float64_than_torchs_kernel(
    product: Product, low: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = next(iter(product.calls.values()))
    errors = {}
    for kernels in ("native", "float32"):
        monkeypatch.setenv("HMP_LOW_KERNELS", kernels)
        error = total = 0.0
        calls = [build([Leaf(shape, low, seed=seed * 16 + i) for i, shape in enumerate(product.shapes[0])]) for seed in range(8)]
        try:
            with hmp.casts(listed(low)):
                outcomes = [outcome(call, args) for args in calls]
        finally:
            hmp.revert()
        for args, got in zip(calls, outcomes, strict=True):
            if got.error is not None:  # no kernel, or no backward: float32 has both
                assert kernels == "native"
                return
            exact = outcome(call, [a.detach().double().requires_grad_() for a in args])
            for one, other in zip((*got.results, *got.grads), (*exact.results, *exact.grads), strict=True):
                error += float((one.double() - other).square().sum())
                total += float(other.square().sum())
        errors[kernels] = (error / total) ** 0.5
    assert errors["float32"] <= errors["native"] * 1.02


# --- in place, and out=


@settings(max_examples=25)
@given(st.data())
def test_r11_in_place_products_write_into_the_tensor_itself(data: st.DataObject) -> None:
    """Plain, a view into a larger tensor, or transposed; with a gradient and without: the same object, memory and version count."""
    product = data.draw(st.sampled_from(IN_PLACE))
    low = data.draw(LOW)
    args = build(
        [Leaf(s, data.draw(st.sampled_from([F32, low])), grad=data.draw(st.booleans()), seed=i) for i, s in enumerate(product.shapes[0])]
    )
    kind = data.draw(st.sampled_from(["plain", "view", "transposed"]))

    def write(make: Call) -> Any:
        first = torch.stack([args[0].detach().to(low)] * 3)
        first = (first.mT.contiguous().mT if kind == "transposed" else first).requires_grad_(args[0].requires_grad)
        base = first * 1
        into = base[1] if kind == "view" else base[2].clone(memory_format=torch.preserve_format)
        found = make(into, *args[1:])
        return (base if kind == "view" else found), found, into, first

    call = product.calls["method"]
    with hmp.casts(listed(low)):
        end, found, into, first = write(call)
        assert found is into and into._version >= 1
    wide = by_hand(product.plain, low)
    expected, _, _, expected_first = write(lambda into, *rest: into.copy_(wide(into, *rest)))
    same(end, expected)
    of = [a for a in args[1:] if a.requires_grad]
    if end.requires_grad:
        one = gradients(end, [*of, *([first] if first.requires_grad else [])])
        other = gradients(expected, [*of, *([expected_first] if first.requires_grad else [])])
        all_same(one, other)


def test_r11_in_place_on_a_leaf_that_trains_is_torchs_error() -> None:
    leaf = random(3, 5, dtype=BF16)
    with hmp.casts(listed()), pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        leaf.addmm_(torch.ones(3, 4), torch.ones(4, 5))
    with hmp.casts(listed()), torch.no_grad():
        assert leaf.addmm_(torch.ones(3, 4), torch.ones(4, 5)) is leaf


@settings(max_examples=25)
@given(st.data())
def test_r11_out_gets_the_result_as_from_torchs_kernel(data: st.DataObject) -> None:
    """Of the right shape, empty, transposed, a view, or an input itself; an `out` that trains is torch's error."""
    product = data.draw(st.sampled_from(WRITING))
    low = data.draw(LOW)
    args = build([Leaf(s, data.draw(st.sampled_from([F32, low])), grad=False, seed=i) for i, s in enumerate(product.shapes[0])])
    call = product.calls["out"]
    expected = by_hand(product.plain, low)(*args)
    kind = data.draw(st.sampled_from(["whole", "empty", "transposed", "view", "trains"]))
    large = torch.zeros(2, *expected.shape, dtype=low)
    out = {
        "whole": large[0].clone(),
        "empty": torch.empty(0, dtype=low),
        "transposed": large[0].mT.contiguous().mT,
        "view": large[1],
        "trains": large[0].clone().requires_grad_(),
    }[kind]
    strides, memory = out.stride(), out.data_ptr()
    with hmp.casts(listed(low)):
        if kind == "trains":
            with pytest.raises(RuntimeError, match=r"out=|requires grad"):
                call(*args, out)
            return
        assert call(*args, out) is out
    same(out, expected)
    assert kind == "empty" or (out.stride() == strides and out.data_ptr() == memory)
    assert kind != "view" or (bool((large[0] == 0).all()) and torch.equal(large[1], expected))


def test_r11_out_may_be_an_input_or_have_another_dtype() -> None:
    x = random(6, 6, dtype=BF16, grad=False)
    expected = by_hand(torch.mm)(x, x)
    wide = torch.empty(6, 6)
    with hmp.casts(listed()):
        torch.mm(x.float(), x, out=wide)  # R6: what torch computes of these inputs is float32
        torch.mm(x, x, out=x)
    same(x, expected)
    same(wide, expected.float())
    with hmp.casts(listed()), pytest.raises(RuntimeError, match="dtype"):
        torch.mm(x, x, out=torch.empty(6, 6))


def test_r11_a_view_stays_a_view() -> None:
    """An einsum of one tensor multiplies nothing."""
    x = random(4, 5, dtype=BF16, grad=False)
    with hmp.casts(listed()):
        found = torch.einsum("ij->ji", x)
        found[0, 0] = 7
    assert found._base is x and float(x[0, 0]) == 7
    with hmp.casts(listed()):
        of_copy = torch.einsum("ij->ji", x.float())
        refused(lambda: of_copy.add_(1))


# --- gradients


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data())
def test_r11_second_derivatives_are_those_of_the_casts_written_out(data: st.DataObject) -> None:
    product = data.draw(st.sampled_from(PRODUCTS))
    low = data.draw(LOW)
    args = build(data.draw(drawn(product, st.sampled_from([F32, low]), subclass=False)))
    call = next(iter(product.calls.values()))

    def twice(call: Call) -> Any:
        of = [a for a in args if a.requires_grad]
        try:
            ends = [r for r in flat(call(*args)) if r.requires_grad]
            if not ends:
                return []
            first = torch.autograd.grad([e.float().square().sum() for e in ends], of, create_graph=True, allow_unused=True)
            left = [g for g in first if g is not None and g.requires_grad]
            second = torch.autograd.grad([g.float().square().sum() for g in left], of, allow_unused=True) if left else ()
        except (RuntimeError, NotImplementedError) as error:  # torch has no derivative, or takes no such strides
            return type(error)
        return [*first, *second]

    with hmp.casts(listed(low)):
        got = twice(call)
    expected = twice(by_hand(call, low))
    assert type(got) is type(expected)
    for one, other in zip(got, expected, strict=True) if isinstance(got, list) else ():
        assert (one is None) == (other is None)
        if one is not None:
            all_same([one], [other])


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, drop: float = 0.0) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=drop)


# looked up when they are called, as a program does
def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, w, b)


def convolution(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    return F.conv2d(x, w, b)


def dropped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    torch.default_generator.manual_seed(3)
    return attention(q, k, v, 0.3)


def recurrent(kind: str, layers: int = 1) -> Call:
    """`f(x, *weights)`, what a recurrent layer of this kind returns, in training with dropout between layers."""

    def call(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        torch.default_generator.manual_seed(4)
        state = x.new_zeros(layers, x.shape[1], weights[1].shape[1])
        hx = (state, state) if kind == "lstm" else state
        return getattr(torch._VF, kind)(x, hx, list(weights), True, layers, 0.4, True, False, False)[0]

    return call


def weights_of(gates: int, width: int, layers: int, dtype: torch.dtype) -> list[torch.Tensor]:
    each = [(gates * width, width), (gates * width, width), (gates * width,), (gates * width,)]
    return [random(*shape, dtype=dtype, seed=i, scale=0.2) for i, shape in enumerate(each * layers)]


# Each keeps something besides its inputs, large enough that backward computes it again.
AGAIN: dict[str, tuple[Call, Callable[[torch.dtype], list[torch.Tensor]]]] = {
    "attention": (attention, lambda dtype: [random(1, 2, 80, 32, dtype=dtype, seed=i) for i in range(3)]),
    "attention with dropout": (dropped, lambda dtype: [random(1, 2, 80, 32, dtype=dtype, seed=i) for i in range(3)]),
    "gru": (recurrent("gru"), lambda dtype: [random(9, 8, 40, dtype=dtype), *weights_of(3, 40, 1, dtype)]),
    "lstm": (recurrent("lstm"), lambda dtype: [random(9, 8, 40, dtype=dtype), *weights_of(4, 40, 1, dtype)]),
    "lstm with dropout": (recurrent("lstm", 2), lambda dtype: [random(5, 8, 40, dtype=dtype), *weights_of(4, 40, 2, dtype)]),
    "rnn_tanh": (recurrent("rnn_tanh"), lambda dtype: [random(9, 8, 72, dtype=dtype), *weights_of(1, 72, 1, dtype)]),
    # twice and not three times: a sum of three low-precision gradients depends on their order
    "a query twice": (lambda q, v: attention(q, q, v), lambda dtype: [random(1, 2, 80, 32, dtype=dtype, seed=i) for i in range(2)]),
    "views of one tensor": (
        lambda x: attention(*x.view(1, 80, 3, 2, 32).permute(2, 0, 3, 1, 4)),
        lambda dtype: [random(1, 80, 192, dtype=dtype)],
    ),
    "chain": (lambda a, b: torch.linalg.multi_dot([a, b, a]), lambda dtype: [random(70, 72, dtype=dtype), random(72, 70, dtype=dtype)]),
    "linear": (linear, lambda dtype: [random(2, 33, 64, dtype=dtype), random(80, 64, dtype=dtype), random(80, dtype=dtype)]),
    "heads": (
        lambda q, k: torch.matmul(q.transpose(1, 2), k.permute(0, 2, 3, 1)),
        lambda dtype: [random(1, 40, 4, 32, dtype=dtype, seed=i) for i in range(2)],
    ),
    "sliced": (lambda x, w: F.linear(x[..., :64], w), lambda dtype: [random(2, 33, 128, dtype=dtype), random(70, 64, dtype=dtype)]),
    "convolution": (convolution, lambda dtype: [random(2, 8, 17, 17, dtype=dtype), random(4, 8, 3, 3, dtype=dtype)]),
}
SOME_AGAIN = ["attention with dropout", "lstm with dropout", "linear"]


# The casts written out where there is more than one product to a call: views are not the product's, and each argument is cast by itself.
BY_HAND: dict[str, Call] = {
    "a query twice": lambda q, v: by_hand(attention)(q, q, v),
    "views of one tensor": lambda x: by_hand(attention)(*x.view(1, 80, 3, 2, 32).permute(2, 0, 3, 1, 4)),
    "chain": lambda a, b: by_hand(lambda *m: torch.linalg.multi_dot(m))(a, b, a),
    "heads": lambda q, k: by_hand(torch.matmul)(q.transpose(1, 2), k.permute(0, 2, 3, 1)),
    "sliced": lambda x, w: by_hand(F.linear)(x[..., :64], w),
}


def expected_of(name: str, args: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    end = end_of(name, args)
    return end, gradients(end, [a for a in args if a.requires_grad])


def end_of(name: str, args: list[torch.Tensor]) -> torch.Tensor:
    return (BY_HAND.get(name) or by_hand(AGAIN[name][0]))(*args)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_r11_what_is_large_has_the_same_gradients_each_time(dtype: torch.dtype) -> None:
    """retain_graph, create_graph, a second backward, and gradients of one input at a time: what is computed again is the same each time."""
    for name, (call, make) in AGAIN.items():
        args = make(dtype)
        end, wanted = expected_of(name, args)
        with hmp.casts(listed()):
            found = call(*args)
        same(found, end)
        for _ in range(2):
            all_same(gradients(found, args, retain_graph=True), wanted)
        for arg, each in zip(args, wanted, strict=True):
            all_same(gradients(found, [arg], retain_graph=True), [each])
        # not without: torch's LSTM has other last bits there. Of its kernel for attention without dropout it has no second derivative
        graph = {"retain_graph": True, "create_graph": name != "attention"}
        all_same(gradients(found, args, **graph), gradients(end_of(name, args), args, **graph))
        all_same(gradients(found, args), wanted)
        with pytest.raises(RuntimeError, match="second time"):
            gradients(found, args)


def test_r11_derivatives_of_inputs_that_depend_on_one_another() -> None:
    """With create_graph too each input has its own gradient, though one is computed from another, or stands in the call twice."""
    for call, wide in (
        (lambda q, k: attention(q, k, k), lambda q, k: by_hand(attention)(q, k, k)),
        (lambda a, b: torch.linalg.multi_dot([a, b, b]), lambda a, b: by_hand(lambda *m: torch.linalg.multi_dot(m))(a, b, b)),
    ):
        x = random(1, 2, 80, 32, dtype=BF16) if call.__code__.co_varnames[0] == "q" else random(72, 72, dtype=BF16, scale=0.1)
        derivatives = []
        for each in (call, wide):
            other = x * 0.5
            with sdpa_kernel(SDPBackend.MATH):
                if each is call:
                    with hmp.casts(listed()):
                        end = each(x, other)
                else:
                    end = each(x, other)
                first = gradients(end, [x, other], create_graph=True)
                derivatives.append([*first, *gradients(first[0] + first[1], [x])])
        for one, other in zip(*derivatives, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))  # in what order they are added up


def test_r11_a_forward_that_trains_has_the_bits_of_one_that_trains() -> None:
    """oneDNN has another LSTM for inference, whose last bits differ."""
    args = [random(16, 8, 64), *weights_of(4, 64, 1, F32)]
    call = recurrent("lstm")
    for of_no_grad in (False, True):
        with torch.set_grad_enabled(not of_no_grad):
            expected = by_hand(call)(*args)
            with hmp.casts(listed()):
                same(call(*args), expected)


def test_r11_weights_of_many_steps_used_again_have_the_gradients_of_one_sum() -> None:
    """The gradients of the steps are added up in float32 and rounded once, also of a large weight whose copy in float32 is shared."""
    layer, x = torch.nn.GRU(96, 96), random(20, 4, 96)
    of = [x, *layer.parameters()]
    rounded = {n: p.to(BF16).float() for n, p in layer.named_parameters()}
    expected = torch.func.functional_call(layer, rounded, (x.to(BF16).float(),))[0].to(BF16)
    wanted = gradients(expected, of)
    for _ in range(3):
        with hmp.casts(listed()):
            found = layer(x)[0]
        same(found, expected)
        all_same(gradients(found, of), wanted)


def test_r11_a_mask_that_was_made_in_inference_mode() -> None:
    with torch.inference_mode():
        mask = torch.ones(80, 80, dtype=torch.bool).tril()
    q = random(1, 2, 80, 32)
    with hmp.casts(listed()):
        found = F.scaled_dot_product_attention(q, q, q, mask)
    expected = by_hand(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask))(q, q, q)
    same(found, expected)
    all_same(gradients(found, [q]), gradients(expected, [q]))


@pytest.mark.parametrize("frozen", ["all but the first", "all but the last"])
def test_r11_frozen_inputs_change_no_gradient(frozen: str) -> None:
    for name, (call, make) in AGAIN.items():
        args = make(F32)
        at = 0 if frozen == "all but the first" else len(args) - 1
        for i, each in enumerate(args):
            each.requires_grad_(i == at)
        end, wanted = expected_of(name, args)
        with hmp.casts(listed()):
            found = call(*args)
        same(found, end)
        all_same(gradients(found, [args[at]]), wanted)


def test_r11_weights_frozen_after_inference_train_their_input_alone() -> None:
    layer = torch.nn.GRU(40, 40)
    x = random(9, 8, 40)
    weights = {name: p.detach().to(BF16).float() for name, p in layer.named_parameters()}
    end = torch.func.functional_call(layer, weights, (x.to(BF16).float(),))[0].to(BF16)
    with hmp.casts(listed()):
        with torch.no_grad():
            for _ in range(3):
                layer(x)
        layer.requires_grad_(False)
        found = layer(x)[0]
    same(found, end)
    all_same(gradients(found, [x]), gradients(end, [x]))


@pytest.mark.parametrize("name", [*SOME_AGAIN, *(pytest.param(n, marks=pytest.mark.slow) for n in AGAIN if n not in SOME_AGAIN)])
def test_r11_backward_from_several_threads_at_once(name: str) -> None:
    call, make = AGAIN[name]
    args = make(BF16)
    wanted = expected_of(name, args)[1]
    with hmp.casts(listed()):
        found = call(*args)

    def work(_: int) -> None:
        for _ in range(4):
            all_same(gradients(found, args, retain_graph=True), wanted)

    in_threads(work, range(4))


def test_r11_forward_in_threads_each_under_its_own_policy() -> None:
    x, w = random(9, 33), random(17, 33)
    wanted = {low: by_hand(F.linear, low)(x, w) for low in (BF16, F16)}

    def check(found: torch.Tensor, low: torch.dtype) -> None:
        all_same(gradients(found, [x, w]), gradients(by_hand(F.linear, low)(x, w), [x, w]))

    def work(low: torch.dtype) -> None:
        for _ in range(8):
            with hmp.casts(listed(low)):
                found = F.linear(x, w)
            same(found, wanted[low])
            in_thread(check, found, low)

    in_threads(work, [BF16, F16, BF16])


SWITCHES: dict[str, Callable[[], Any]] = {
    "sdpa_kernel": lambda: sdpa_kernel(SDPBackend.MATH),
    "mkldnn.flags": lambda: torch.backends.mkldnn.flags(enabled=False),
}


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_r11_what_chooses_torchs_kernels_may_be_in_force_in_forward_or_backward_alone(switch: str, where: str) -> None:
    """The gradient is that of the forward that was computed, not of another kernel's."""
    inside, outside = SWITCHES[switch], contextlib.nullcontext
    for name in ("attention", "attention with dropout", "lstm", "gru"):
        call, make = AGAIN[name]
        args = make(BF16)
        with inside() if where == "forward" else outside():
            expected = by_hand(call)(*args)
            with hmp.casts(listed()):
                found = call(*args)
        with inside() if where == "backward" else outside():
            wanted, got = gradients(expected, args), gradients(found, args)
        same(found, expected)
        all_same(got, wanted)
    assert torch.backends.mkldnn.enabled and torch.backends.cuda.flash_sdp_enabled()


def test_r11_random_numbers_drawn_after_backward_are_those_after_forward() -> None:
    """Dropout is drawn again for backward; the program's own numbers do not notice."""
    call, make = AGAIN["attention with dropout"]
    args = make(BF16)
    with hmp.casts(listed()):
        found = call(*args)
    before = torch.get_rng_state()
    gradients(found, args)
    assert torch.equal(torch.get_rng_state(), before)


# --- writes between forward and backward


WRITTEN = ["attention", "gru", "linear", "sliced", "heads", "convolution", "chain", "lstm"]


@pytest.mark.parametrize("name", WRITTEN)
def test_r11_a_write_before_backward_raises_where_torchs_own_kernel_would(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any input of a low dtype, changed in place; of float32 ones copies were kept."""
    call, make = AGAIN[name]
    found: dict[str, list[bool]] = {}
    for kernels in ("native", "float32"):
        monkeypatch.setenv("HMP_LOW_KERNELS", kernels)
        raised = found[kernels] = []
        for at in range(len(make(BF16))):
            args = make(BF16)
            with hmp.casts(listed()):
                end = call(*args)
            with torch.no_grad():
                args[at].mul_(2)
            try:
                gradients(end, args)
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)
                raised.append(True)
            else:
                raised.append(False)
        hmp.revert()
    # what is computed again needs all inputs, also those that torch's kernel does not keep
    assert [one or not other for one, other in zip(found["float32"], found["native"], strict=True)] == [True] * len(found["native"])
    assert name not in ("linear", "sliced", "heads", "convolution") or found["float32"] == found["native"]


def test_r11_an_error_in_the_middle_leaves_nothing_behind() -> None:
    x, w = random(9, 33), random(17, 33)
    with hmp.casts(listed()):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            F.linear(x, w.t())
        with pytest.raises(RuntimeError, match="stop here"), torch.autograd.graph.saved_tensors_hooks(_stop, lambda t: t):
            F.linear(x, w)
        saved: list[torch.Tensor] = []
        kept = x.exp()  # no hook of the products is left in force
        found = F.linear(x, w)
    assert not saved and kept.grad_fn is not None
    all_same(gradients(found, [x, w]), gradients(by_hand(F.linear)(x, w), [x, w]))


class Interrupt(BaseException):
    """What the alarm below raises between two bytecodes, as Ctrl-C does."""


def _interrupt(*_: object) -> None:
    raise Interrupt


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one that comes while memory is freed
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="a system without interval timers")
def test_r11_an_interrupt_leaves_no_hook_in_force_and_no_random_number_drawn() -> None:
    q, w = random(1, 2, 80, 32), random(64, 64)
    unseen = torch.autograd.graph.disable_saved_tensors_hooks  # raises while hooks are in force
    before, state = signal.signal(signal.SIGALRM, _interrupt), torch.get_rng_state()
    interrupted = 0
    try:
        for turn in range(150):
            try:
                with hmp.casts(listed()):
                    signal.setitimer(signal.ITIMER_REAL, 1e-5 + turn * 2e-5)
                    for _ in range(3):
                        (attention(q, q, q).float().sum() + F.linear(q.view(2, 40, 64), w).float().sum()).backward()
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                interrupted += 1
            with unseen("none is in force"):
                assert torch.equal(torch.get_rng_state(), state) and torch.is_grad_enabled()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted


def _stop(tensor: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("stop here")


# --- weights that are used again


def writes(layer: torch.nn.Linear) -> Iterator[str]:
    """Ways to change a weight, each done when its name is asked for."""
    with torch.no_grad():
        layer.weight.mul_(1.25)
        yield "mul_"
        layer.weight.data.add_(0.5)
        yield ".data"
        layer.weight.data = random(24, 24, seed=5, grad=False)
        yield "another .data"
        layer.weight.data = layer.weight.data.t()
        yield "the same memory transposed"
        layer.weight.detach().numpy()[3:7] = 2
        yield "numpy"
        layer.weight.requires_grad_(not layer.weight.requires_grad)
        yield "requires_grad"
        torch.nn.init.uniform_(layer.weight)
        yield "init"
        layer.load_state_dict({"weight": torch.eye(24) * 3, "bias": torch.ones(24)})
        yield "load_state_dict"
        torch.utils.swap_tensors(layer.weight, torch.nn.Parameter(random(24, 24, seed=9, grad=False)))
        yield "swap_tensors"
        layer.weight = torch.nn.Parameter(layer.weight.detach()[:, :])
        yield "another Parameter of that memory"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_r11_a_weight_used_again_is_never_stale(mode: Any) -> None:
    """In inference its rounded copy is kept in float32; any write in between is seen."""
    layer, x = torch.nn.Linear(24, 24), random(8, 24, grad=False)
    for _ in writes(layer):
        with mode():
            expected = by_hand(F.linear)(x, layer.weight, layer.bias)
            for _ in range(3):
                with hmp.casts(listed()):
                    same(layer(x), expected)


def test_r11_training_and_inference_take_turns_with_one_weight() -> None:
    layer, x = torch.nn.Linear(24, 24), random(8, 24)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for turn in range(6):
        if turn == 4:
            layer.requires_grad_(False)
        expected = by_hand(F.linear)(x, layer.weight, layer.bias)
        of = [x, *(p for p in layer.parameters() if p.requires_grad)]
        with hmp.casts(listed()):
            with torch.no_grad():
                same(layer(x), expected.detach())
                same(layer(x), expected.detach())
            found = layer(x)
        same(found, expected)
        got = gradients(found, of)
        all_same(got, gradients(expected, of))
        for p, gradient in zip(of[1:], got[1:], strict=True):
            p.grad = gradient
        optimizer.step()


def test_r11_a_weight_used_again_from_threads() -> None:
    layer, x = torch.nn.Linear(24, 24), random(8, 24, grad=False)
    with torch.no_grad():
        expected = by_hand(F.linear)(x, layer.weight, layer.bias)

    def work(_: int) -> None:
        with torch.no_grad(), hmp.casts(listed()):
            for _ in range(20):
                same(layer(x), expected)

    in_threads(work, range(3))


def tied(linear: Call, mm: Call, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(linear(torch.tanh(linear(x, w, b)), w, b))
    return mm(torch.tanh(mm(hidden, w)), w.t())


def test_r11_a_weight_used_several_times_in_training_has_the_gradients_of_a_cast_for_each_use() -> None:
    """R21: also a large one, whose copy in float32 is shared, tied to its own transpose, and written between two uses."""
    for width in (24, 136):
        w, b, x = torch.nn.Parameter(random(width, width, grad=False, scale=0.1)), torch.nn.Parameter(torch.ones(width)), random(5, width)

        for turn in range(4):
            expected = tied(by_hand(F.linear), by_hand(torch.mm), x, w, b)
            with hmp.casts(listed()):
                found = tied(linear, lambda *m: torch.mm(*m), x, w, b)
            same(found, expected)
            for _ in range(2):
                all_same(gradients(found, [x, w, b], retain_graph=True), gradients(expected, [x, w, b], retain_graph=True))
            if turn == 1:
                w.data[3:7] = 0.25
            elif turn == 2:
                torch.optim.SGD([w], 0.1).step()


def test_r11_an_activation_of_three_products_is_kept_once() -> None:
    """R21: the second and third product find the copy of the first."""
    model, x = [torch.nn.Linear(96, 96) for _ in range(3)], random(2, 96, 96)
    hidden = x * 1
    with hmp.casts(listed()):
        before = hmp.cache_info().hits
        ends = [layer(hidden) for layer in model]
        assert hmp.cache_info().hits == before + 2
    expected = [by_hand(F.linear)(hidden, *layer.parameters()) for layer in model]
    all_same(gradients(torch.stack(ends), [x], retain_graph=True), gradients(torch.stack(expected), [x]))


def test_r11_the_caches_limit_holds_for_copies_in_float32() -> None:
    layers, x = [torch.nn.Linear(16, 16, bias=False) for _ in range(4)], random(2, 16, grad=False)
    limit = 2 * 16 * 16 * 6  # of two weights: 2 bytes and 4 for each element
    hmp.set_cache_limit(limit)
    try:
        with torch.no_grad(), hmp.casts(listed()):
            for layer in layers * 2:
                same(layer(x), by_hand(F.linear)(x, layer.weight))
                assert hmp.cache_info().bytes <= limit
            assert hmp.cache_info().entries == 2
    finally:
        hmp.set_cache_limit(None)


def test_r11_a_view_of_the_copy_that_is_kept_is_not_taken_for_it() -> None:
    """A hook of the program's gets the low-precision copy of a frozen weight, and multiplies by its transpose."""
    w, x = torch.nn.Parameter(random(24, 24, grad=False), requires_grad=False), random(8, 24)
    kept: list[torch.Tensor] = []
    with hmp.casts(listed()):
        with torch.no_grad():
            for _ in range(3):
                torch.mm(x, w)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            torch.mm(x, w)
        (low,) = [t for t in kept if t.shape == w.shape]
        with torch.no_grad():
            same(torch.mm(x, low), by_hand(torch.mm)(x, w))
            same(torch.mm(x, low.t()), by_hand(torch.mm)(x, w.t()))


def test_r11_copies_of_a_model_are_its_own() -> None:
    """deepcopy, pickle and state_dict, between uses whose copies are kept."""
    model, x = hmp.apply(torch.nn.Linear(24, 24), listed()), random(8, 24, grad=False)
    with torch.no_grad():
        for _ in range(3):
            model(x)
        twin = copy.deepcopy(model)
        state = pickle.loads(pickle.dumps(model.state_dict()))
        twin.weight.mul_(2)
        for each in (model, twin, model):
            same(each(x), by_hand(F.linear)(x, each.weight, each.bias))
        model.load_state_dict(twin.state_dict())
        same(model(x), twin(x))
        model.load_state_dict(state)
        same(model(x), by_hand(F.linear)(x, state["weight"], state["bias"]))


# --- hooks, checkpoints, transforms, modes


def block(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Four products, attention with dropout among them, of which several are large."""
    q, k, v = (F.linear(x, w) for w in weights[:3])
    found = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], dropout_p=0.2)[:, 0]
    return torch.matmul(found, weights[3])


def block_by_hand(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    linear = by_hand(F.linear)
    q, k, v = (linear(x, w) for w in weights[:3])
    found = by_hand(F.scaled_dot_product_attention)(q[:, None], k[:, None], v[:, None], dropout_p=0.2)[:, 0]
    return by_hand(torch.matmul)(found, weights[3])


def block_args(dtype: torch.dtype = F32) -> list[torch.Tensor]:
    return [random(2, 36, 64, dtype=dtype), *(random(64, 64, dtype=dtype, seed=i, scale=0.2) for i in range(4))]


def trained(call: Call, args: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.default_generator.manual_seed(5)
    end = call(*args)
    end.float().square().sum().backward()
    return [end.detach(), *(a.grad for a in args)]


def on_cpu(*args: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return block(*args)


def without_hooks(*args: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        return block(*args)


def through_numpy(*args: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.dtype, t.float().numpy()), lambda p: torch.from_numpy(p[1]).to(p[0])):
        return block(*args)


def selective(*args: torch.Tensor) -> torch.Tensor:
    contexts = functools.partial(checkpoints.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return checkpoints.checkpoint(block, *args, use_reentrant=False, context_fn=contexts)


class Mode(TorchFunctionMode):
    """A mode of the user's that changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def in_mode(*args: torch.Tensor) -> torch.Tensor:
    with Mode():
        return block(*args)


def in_two_modes(*args: torch.Tensor) -> torch.Tensor:
    with Mode(), torch.device("cpu"), Mode():
        return block(*args)


def on_device(*args: torch.Tensor) -> torch.Tensor:
    with torch.device("cpu"):
        return block(*args)


def anomaly(*args: torch.Tensor) -> torch.Tensor:
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        return block(*args)


AROUND: dict[str, Call] = {
    "nothing": block,
    "a checkpoint": lambda *args: checkpoints.checkpoint(block, *args, use_reentrant=False),
    "a reentrant checkpoint": lambda *args: checkpoints.checkpoint(block, *args, use_reentrant=True),
    "a selective checkpoint": selective,
    "save_on_cpu": on_cpu,
    "disabled hooks": without_hooks,
    "hooks through numpy": through_numpy,
    "a device, before any mode": on_device,
    "a function mode": in_mode,
    "function modes and a device": in_two_modes,
    "a device, after a mode": on_device,
    "anomaly mode": anomaly,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_r11_what_stands_around_the_products_changes_no_bit(dtype: torch.dtype) -> None:
    """Checkpoints, hooks for saved tensors, modes: in the order above, for a mode of the user's changes how torch's functions are found."""
    expected = trained(block_by_hand, block_args(dtype))
    for name, call in AROUND.items():
        with hmp.casts(listed()):
            found = trained(call, block_args(dtype))
        for one, other in zip(found, expected, strict=True):
            assert_identical(one, other, name)


def test_r11_a_users_hooks_get_the_inputs_in_the_low_dtype() -> None:
    """As from torch's own kernel."""
    args = [random(2, 36, 64), random(64, 64)]
    seen: list[tuple[torch.dtype, torch.Size]] = []
    with hmp.casts(listed()), torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append((t.dtype, t.shape)) or t, lambda t: t):
        F.linear(*args)
        F.conv1d(args[0].transpose(1, 2), random(8, 64, 3))
    assert len(seen) == 4 and {dtype for dtype, _ in seen} == {BF16}


def test_r11_a_default_device_changes_no_bit() -> None:
    before = torch.get_default_device()
    torch.set_default_device("cpu")
    try:
        with hmp.casts(listed()):
            found = trained(block, block_args())
    finally:
        torch.set_default_device(before if before.type != "cpu" else None)
    all_same(found, trained(block_by_hand, block_args()))


def scalar(call: Call) -> Call:
    return lambda *args: call(*args).float().square().sum()


TRANSFORMS: dict[str, Callable[[Call], Any]] = {
    "grad": lambda f: torch.func.grad(scalar(f), (0, 1))(*pair()),
    "vjp": lambda f: torch.func.vjp(f, *pair())[1](torch.ones(3, 7, dtype=BF16)),
    "jvp": lambda f: torch.func.jvp(f, pair(), pair()),
    "vmap": lambda f: torch.func.vmap(f, (0, None))(pair()[0][:, None], pair()[1]),
    "vmap of weights": lambda f: torch.func.vmap(f, (None, 0))(pair()[0], torch.stack([pair()[1]] * 3)),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(scalar(f), 1), (0, None))(pair()[0][:, None], pair()[1]),
    "jacrev": lambda f: torch.func.jacrev(f, (0, 1))(*pair()),
    "jacfwd": lambda f: torch.func.jacfwd(f, (0, 1))(*pair()),
    "hessian": lambda f: torch.func.hessian(scalar(f), 1)(*pair()),
    "functional.jvp": lambda f: torch.autograd.functional.jvp(f, pair(), pair()),
}


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return random(3, 5, grad=False), random(7, 5, grad=False)


def test_r11_transforms_give_what_they_give_with_the_casts_written_out() -> None:
    """Also with weights whose copies inference keeps."""
    for name, transform in TRANSFORMS.items():
        with hmp.casts(listed()):
            found = pytree.tree_leaves(transform(F.linear))
        for one, other in zip(found, pytree.tree_leaves(transform(by_hand(F.linear))), strict=True):
            assert_identical(one, other, name)
    model, x = torch.nn.Linear(5, 7), pair()[0]
    with torch.no_grad(), hmp.casts(listed()):
        for _ in range(3):
            model(x)
        same(torch.func.vmap(model)(x), by_hand(F.linear)(x, model.weight, model.bias))


class Duck:
    """Handles torch's functions, and is no tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func


def test_r11_handlers_and_torch_fx_get_the_functions_that_users_hold() -> None:
    """R19."""
    with hmp.casts(listed()):
        assert torch.matmul(Duck(), random(2, 2)) == torch.matmul
        assert F.linear(random(2, 2, dtype=BF16), Duck()) == F.linear
        graph = torch.fx.symbolic_trace(lambda x, w: torch.matmul(F.linear(x, w), w))
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [F.linear, torch.matmul]
    x, w = random(3, 4), random(4, 4)
    with hmp.casts(listed()):
        same(graph(x, w), by_hand(torch.matmul)(by_hand(F.linear)(x, w), w))


# --- training


def test_r11_scaled_float16_training_skips_the_step_that_overflows() -> None:
    """A GradScaler's losses: a step with an infinite gradient is skipped, the others are those of the casts written out."""
    found = {}
    for kind in ("hmp", "by hand"):
        torch.default_generator.manual_seed(1)
        layers = [torch.nn.Linear(16, 16) for _ in range(2)]
        weights = [p for layer in layers for p in layer.parameters()]
        optimizer, scaler = torch.optim.SGD(weights, 0.05), torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
        scales = []
        for step in range(5):
            optimizer.zero_grad()
            x = random(8, 16, grad=False, seed=step)
            if kind == "hmp":
                with hmp.casts(listed(F16)):
                    end = layers[1](torch.tanh(layers[0](x)))
            else:
                linear = by_hand(F.linear, F16)
                end = linear(torch.tanh(linear(x, *layers[0].parameters())), *layers[1].parameters())
            scaler.scale(end.float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        found[kind] = [p.detach() for p in weights], scales
    all_same(found["hmp"][0], found["by hand"][0])
    assert found["hmp"][1] == found["by hand"][1] and found["hmp"][1][0] < 2.0**24  # the first overflowed


@pytest.mark.parametrize("recipe", ["bf16", "int8", "fp8"])
def test_r11_a_saved_list_packs_what_a_float32_product_keeps(recipe: str) -> None:
    """R22: forward has the same bits, what is packed is as near to it as the recipe is, in bfloat16 the same bits."""
    args = [random(64, 128), random(64, 128, scale=0.1), random(1, 2, 80, 32)]

    def model(linear: Call, attend: Call) -> list[torch.Tensor]:
        hidden = linear(torch.tanh(linear(args[0], args[1])), args[1].t())
        attended = attend(args[2], args[2], args[2])
        return [hidden, attended, *gradients(hidden, args[:2]), *gradients(attended, args[2:])]

    expected = model(by_hand(F.linear), by_hand(attention))
    names = {"linear", "scaled_dot_product_attention"}
    with hmp.casts(hmp.Policy("saves", bf16=frozenset(names), saved=frozenset(names), saved_recipe=recipe)):
        found = model(F.linear, attention)
    all_same(found[:2], expected[:2])
    for one, other in zip(found[2:], expected[2:], strict=True):
        assert float((one - other).norm() / other.norm()) <= {"bf16": 0.02, "int8": 0.02, "fp8": 0.08}[recipe]
    if recipe == "bf16":
        all_same(found[2:4], expected[2:4])


def test_r11_fp8_products_are_emulated_in_float32_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product on the FP8 list has the same bits on every processor; the others are float32's, rounded."""
    x, w, b = random(16, 32), random(32, 32), random(32)
    eighth = hmp.Policy("eighth", fp8=frozenset({"linear"}), bf16=frozenset({"mm"}))
    found = {}
    for kernels in ("native", "float32"):
        monkeypatch.setenv("HMP_LOW_KERNELS", kernels)
        with hmp.casts(eighth):
            end = F.linear(x, w, b)
            found[kernels] = [end, *gradients(end, [x, w, b])]
            if kernels == "float32":
                same(torch.mm(x, w), by_hand(torch.mm)(x, w))
        hmp.revert()
    all_same(found["float32"], found["native"])


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["torch-cpu", "habana", "saved8", "apex-o1", "bert", "resnet50"])
def test_r11_presets_train_as_near_to_float32_as_with_torchs_kernels(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.out = torch.nn.Conv1d(16, 32, 3, padding=1), torch.nn.Linear(32, 8)
            self.gru, self.attention = torch.nn.GRU(32, 32, batch_first=True), torch.nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.gelu(self.convolution(x)).transpose(1, 2)
            x = self.gru(x)[0].to(x.dtype) + x
            return self.out(self.attention(x, x, x, need_weights=False)[0].to(x.dtype))

    torch.default_generator.manual_seed(0)
    model, x = Model(), random(4, 16, 24)

    def train() -> list[torch.Tensor]:
        of = [x, *model.parameters()]
        return list(torch.autograd.grad(model(x).float().square().sum(), of))

    exact, errors, dtypes = train(), {}, {}
    for kernels in ("native", "float32"):
        monkeypatch.setenv("HMP_LOW_KERNELS", kernels)
        with hmp.casts(preset):
            found, dtypes[kernels] = train(), model(x).dtype
        hmp.revert()
        errors[kernels] = sum(float((a - b).square().sum()) for a, b in zip(found, exact, strict=True)) ** 0.5
    assert dtypes["float32"] is dtypes["native"]
    assert errors["float32"] <= 1.25 * errors["native"] + 1e-6


RECURRENT = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM, "rnn": torch.nn.RNN, "gru_cell": torch.nn.GRUCell, "lstm_cell": torch.nn.LSTMCell}


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_r11_recurrent_layers_under_torch_cpu_return_the_dtypes_of_torch_autocast(packed: bool) -> None:
    """What torch.autocast leaves in float32 (a state, the result of a GRU and of an LSTM of a packed batch) stays so and is not rounded."""
    for name, kind in RECURRENT.items():
        layer = kind(12, 16)
        if name.endswith("cell"):
            if packed:
                continue
            x = random(3, 12)
        else:
            x = random(6, 3, 12)
        given = torch.nn.utils.rnn.pack_padded_sequence(x, [6, 4, 1]) if packed else x
        with torch.autocast("cpu"):
            autocast = layer(given)
        with hmp.casts("torch-cpu"):
            found = layer(given)
        rounded = {n: p.to(BF16).float() for n, p in layer.named_parameters()}
        expected = torch.func.functional_call(layer, rounded, (_mapped(given, lambda t: t.to(BF16).float()),))
        for one, wide, dtype in zip(_values(found), _values(expected), [t.dtype for t in _values(autocast)], strict=True):
            assert_identical(one, wide.to(dtype), name)
        of = [x, *layer.parameters()]
        ends = [next(_values(found)), next(_values(expected)).to(next(_values(found)).dtype)]
        all_same(*(gradients(end, of, retain_graph=True) for end in ends))  # both go through one pack_padded_sequence


def test_r11_a_float32_state_beside_low_weights_keeps_its_gradient() -> None:
    """torch-cpu: a GRU's state is not rounded."""
    layer, x, h = torch.nn.GRU(40, 40), random(9, 8, 40), random(1, 8, 40)
    of = [x, h, *layer.parameters()]
    with hmp.casts("torch-cpu"):
        found = layer(x, h)[0]
    rounded = {n: p.to(BF16).float() for n, p in layer.named_parameters()}
    expected = torch.func.functional_call(layer, rounded, (x.to(BF16).float(), h))[0]
    same(found, expected)
    all_same(gradients(found, of), gradients(expected, of))


def test_r11_eval_computes_what_training_does() -> None:
    """R8: torch's fast paths for attention in eval are one op each, whose products would not be decided."""
    layer, x = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), random(2, 5, 16, grad=False)
    for lists in ("habana", "torch-cpu"):
        with hmp.casts(lists):
            trained = layer.train()(x)
            with torch.no_grad():
                same(layer.eval()(x), trained)


def _mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return value._replace(data=function(value.data)) if hasattr(value, "batch_sizes") else function(value)


def _values(value: Any) -> Iterator[torch.Tensor]:
    for each in value if isinstance(value, tuple) and not hasattr(value, "batch_sizes") else (value,):
        if isinstance(each, tuple) and not hasattr(each, "batch_sizes"):
            yield from each
        else:
            yield each.data if hasattr(each, "batch_sizes") else each


# --- who has the word


def test_r11_disable_casts_and_native_leave_products_to_torchs_kernel() -> None:
    x = random(8, 16, dtype=BF16, grad=False)
    with hmp.casts(listed()):
        for inside, wanted in (
            (contextlib.nullcontext(), F32),
            (hmp.disable_casts(), BF16),
            (torch.autocast("cpu", enabled=False), BF16),  # R17: as disable_casts()
            (hmp.casts(policy(fp32=["mm"])), F32),
        ):
            with inside, Kernels() as kernels:
                torch.mm(x, x.t())
            assert kernels.dtypes == {wanted}
        assert hmp.set_low_kernels("native") == "float32"
        with Kernels() as kernels:
            torch.mm(x, x.t())
        assert kernels.dtypes == {BF16}
        assert hmp.set_low_kernels("float32") == "native"
        with Kernels() as kernels:
            torch.mm(x, x.t())
        assert kernels.dtypes == {F32}
    with Kernels() as kernels:  # no policy is in force
        torch.mm(x, x.t())
    assert kernels.dtypes == {BF16}


@pytest.mark.parametrize("lists", [listed(), policy(), "torch-cpu"], ids=["listed", "unlisted", "torch-cpu"])
def test_r11_a_region_of_torch_autocast_inside_has_the_last_word(lists: Any) -> None:
    """R17: the results have the dtype of the region."""
    x, w = random(8, 16), random(16, 16)
    for dtype in (BF16, F16):
        for has in (F32, BF16, F16):
            with hmp.casts(lists), torch.autocast("cpu", dtype=dtype):
                found = F.linear(x.to(has), w.to(has))
                assert torch.mm(x.to(has), w.to(has)).dtype is found.dtype is dtype
            all_same([g.dtype for g in gradients(found, [x, w])], [F32, F32])
    with torch.autocast("cpu", dtype=F16), hmp.casts(listed()):
        same(F.linear(x, w), by_hand(F.linear)(x, w))


def test_r11_a_wrong_value_names_the_three_and_patches_nothing() -> None:
    run = run_in_another_process(
        """
        import os
        os.environ["HMP_LOW_KERNELS"] = "fast"
        names = torch.mm, torch.Tensor.matmul, F.linear
        for use in (hmp.convert, lambda: hmp.casts("habana").__enter__(), lambda: hmp.set_low_kernels("float32")):
            try:
                use()
            except hmp.HmpError as error:
                print(all(repr(each) in str(error) for each in ("auto", "native", "float32", "fast")))
        print((torch.mm, torch.Tensor.matmul, F.linear) == names, hmp.is_converted())
        os.environ["HMP_LOW_KERNELS"] = ""
        try:
            hmp.set_low_kernels("fast")
        except hmp.HmpError as error:
            print(all(repr(each) in str(error) for each in ("auto", "native", "float32", "fast")))
        print(hmp.set_low_kernels("native"), hmp.set_low_kernels("float32"), hmp.set_low_kernels("auto"))
        """
    )
    assert run.split() == "True True True True False True auto native float32".split()


@pytest.mark.slow
def test_r11_auto_is_float32_for_a_dtype_without_instructions_and_native_for_others() -> None:
    """As torch's own flags say: in processes that see this processor whole, and without AVX512."""
    code = """
        from torch.utils._python_dispatch import TorchDispatchMode
        class Kernels(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if "mm" in str(func):
                    print(args[0].dtype)
                return func(*args, **(kwargs or {}))
        for low in (torch.bfloat16, torch.float16):
            has = getattr(torch.ops.mkldnn, f"_is_mkldnn_{'bf16' if low is torch.bfloat16 else 'fp16'}_supported")()
            with hmp.casts(hmp.Policy("mine", bf16={"mm"}, dtype=low)), Kernels():
                print(low if has else torch.float32)
                torch.mm(torch.ones(4, 4), torch.ones(4, 4))
    """
    for environment in ({"HMP_LOW_KERNELS": ""}, {"HMP_LOW_KERNELS": "auto", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            said = run_in_another_process(code).split()
        assert said[::2] == said[1::2] and len(said) == 4


# --- classes and layouts


class Wrapped(torch.Tensor):
    """A wrapper subclass that hands every op on to the tensor that it holds."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool = False) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, requires_grad=requires_grad
        )

    def __init__(self, inner: torch.Tensor, requires_grad: bool = False) -> None:
        self.inner = inner.detach()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.as_strided.default, torch.ops.aten.equal.default):
            raise NotImplementedError(f"Wrapped has no {func}")
        args, kwargs = pytree.tree_map(lambda x: x.inner if isinstance(x, Wrapped) else x, (args, kwargs or {}))
        return pytree.tree_map(lambda x: Wrapped(x) if isinstance(x, torch.Tensor) else x, func(*args, **kwargs))


class Handles(torch.Tensor):
    """A subclass with a `__torch_function__` of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("kind", [Wrapped, Handles, Tagged], ids=lambda k: k.__name__)
def test_r11_subclasses_get_the_numbers_of_plain_tensors(kind: Any, dtype: torch.dtype) -> None:
    for shape in ((2, 36, 64), (3, 64)):  # what linear keeps of the first is a view of its input
        x, w = random(*shape, dtype=dtype), random(70, 64, dtype=dtype)
        of = [Wrapped(x, True), Wrapped(w, True)] if kind is Wrapped else [x.detach().as_subclass(kind).requires_grad_(), w]
        with hmp.casts(listed()):
            end = F.linear(*of)
        expected = by_hand(F.linear)(x, w)
        weights = torch.linspace(-1.0, 1.5, end.numel()).reshape(end.shape).to(BF16)
        got = torch.autograd.grad(end, of, Wrapped(weights) if kind is Wrapped else weights)
        all_same([_plain(end.detach()), *map(_plain, got)], [expected, *gradients(expected, [x, w])])


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.inner if isinstance(tensor, Wrapped) else tensor.as_subclass(torch.Tensor)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_r11_nested_tensors_compute_in_float32(layout: torch.layout) -> None:
    parts = [random(n, 64, grad=False, seed=n) for n in (30, 50)]
    w = random(70, 64)
    nested = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
    with hmp.casts(listed()):
        found = torch.cat(F.linear(nested, w).unbind())
    expected = by_hand(F.linear)(torch.cat(parts), w)
    same(found, expected)
    all_same(gradients(found, [w]), gradients(expected, [w]))


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
        all_same(gradients(found, [other]), gradients(expected, [other]))
        assert rows.dtype is F32
    squares = random(6, 6, grad=False).to_sparse(), random(6, 6, grad=False).to_sparse_csr()
    for call in (lambda: torch.sparse.mm(squares[0], squares[0]), lambda: torch.sparse.mm(squares[1], other[:6], "sum")):
        with hmp.casts("torch-cpu"):  # which torch.autocast does not reach
            found = call()
        assert found.dtype is F32
        all_same(found.detach().to_dense(), call().detach().to_dense())


def test_r11_fake_tensors_have_no_values_to_be_compared() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.randn(2, 64, 4, 32, requires_grad=True)
    with hmp.casts(listed()):  # outside of the mode
        end = torch.matmul(q.transpose(1, 2), q.permute(0, 2, 3, 1))
        attended = attention(q, q, q)
    for each in (end, attended):
        assert each.dtype is BF16
        (gradient,) = torch.autograd.grad(each.float().sum(), q)
        assert gradient.dtype is F32


@pytest.mark.slow
def test_r11_dtensors_compute_in_float32() -> None:
    """A DTensor knows no as_strided, and views of one are kept for backward."""
    said = run_in_another_process(
        """
        import torch.distributed as dist
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        hmp.set_low_kernels("float32")
        lists = hmp.Policy("mine", bf16={"linear", "matmul"})
        for dtype in (torch.float32, torch.bfloat16):
            for shape in ((2, 36, 64), (80, 64)):
                for placement in (Replicate(), Shard(0)):
                    x, w = torch.randn(shape).to(dtype), torch.randn(70, 64).to(dtype)
                    of = [distribute_tensor(x, mesh, [placement]), distribute_tensor(w, mesh, [Replicate()])]
                    of = [each.requires_grad_() for each in of]
                    with hmp.casts(lists):
                        end = F.linear(*of)
                    got = torch.autograd.grad(end, of, distribute_tensor(torch.ones_like(end.full_tensor()), mesh, [placement]))
                    plain = [x.requires_grad_(), w.requires_grad_()]
                    wide = F.linear(*(t.bfloat16().float() for t in plain)).bfloat16()
                    wanted = torch.autograd.grad(wide, plain, torch.ones_like(wide))
                    found = [end.full_tensor(), *(g.full_tensor() for g in got)]
                    print(all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(found, [wide, *wanted])))
        """
    )
    assert said.split() == ["True"] * 8


# --- compiled, traced, exported


def step(x: torch.Tensor, w: torch.Tensor, low: torch.Tensor) -> tuple[torch.Tensor, ...]:
    attended = F.scaled_dot_product_attention(x, x, x)
    mixed = torch.einsum("bhsd,de->bhse", attended, w) @ w.t()
    into = low.clone()
    into.addmm_(low, low)
    return mixed, mixed.float().sum(-1), into


def step_by_hand(x: torch.Tensor, w: torch.Tensor, low: torch.Tensor) -> tuple[torch.Tensor, ...]:
    attended = by_hand(F.scaled_dot_product_attention)(x, x, x)
    mixed = by_hand(torch.matmul)(by_hand(lambda a, b: torch.einsum("bhsd,de->bhse", a, b))(attended, w), w.t())
    return mixed, mixed.float().sum(-1), by_hand(torch.addmm)(low, low, low)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_r11_compiled_code_computes_what_eager_code_does(backend: str, fresh_compiler: None) -> None:
    """fullgraph; and it follows set_low_kernels(), and weights that are written between calls."""
    x, w, low = random(1, 2, 6, 8), random(8, 8), random(5, 5, dtype=BF16, grad=False)
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    expected = step_by_hand(x, w, low)
    with hmp.casts(listed()):
        found = compiled(x, w, low)
    all_same(list(found), list(expected))
    all_same(gradients(found[1], [x, w]), gradients(expected[1], [x, w]))
    layer = torch.nn.Linear(24, 24)
    model, given = torch.compile(layer, backend=backend, fullgraph=True), random(8, 24, grad=False)
    with torch.no_grad(), hmp.casts(listed()):
        for _ in range(3):
            same(model(given), by_hand(F.linear)(given, layer.weight, layer.bias))
            layer.weight.mul_(1.5)
        hmp.set_low_kernels("native")
        with Kernels() as kernels:
            layer(given)
        native = layer(given)
        assert kernels.dtypes == {BF16}
        same(model(given), native)
        hmp.set_low_kernels("float32")
        same(model(given), by_hand(F.linear)(given, layer.weight, layer.bias))
    with torch.inference_mode(), hmp.casts(listed()):
        same(model(given), by_hand(F.linear)(given, layer.weight, layer.bias))


@pytest.mark.slow
def test_r11_cells_and_convolutions_compile(fresh_compiler: None) -> None:
    gru, lstm, convolution = torch.nn.GRUCell(12, 16), torch.nn.LSTMCell(12, 16), torch.nn.Conv2d(3, 4, 3)
    x, h, image = random(3, 12), random(3, 16), random(1, 3, 6, 6)

    def forward() -> Any:
        return [gru(x, h), *lstm(x, (h, h)), convolution(image)]

    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    for lists in (listed(), "torch-cpu"):
        with hmp.casts(lists):
            all_same(compiled(), forward())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("width", [24, 136])
def test_r11_a_traced_model_computes_in_float32_and_follows_its_weights(width: int) -> None:
    """Small weights, and those whose copy in float32 is shared; with a gradient and without: no copy that is kept gets into a trace."""
    model, x = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 4)), random(8, width, grad=False)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), hmp.casts(listed()):
            for _ in range(3):
                expected = model(x)
            traced = torch.jit.trace(model, (x,))
        same(traced(x), expected)
        with torch.no_grad():
            model[0].weight.mul_(2)
            with hmp.casts(listed()):
                same(traced(x), model(x))


@pytest.mark.slow
def test_r11_an_exported_model_computes_in_float32(fresh_compiler: None) -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)), random(8, 24, grad=False)
    for strict in (False, True):
        with hmp.casts(listed()):
            exported = torch.export.export(model, (x,), strict=strict).module()
            same(exported(x), model(x))


# --- memory


def kept_by_hooks(call: Call) -> int:
    """The bytes of the memory that the ops of a call keep for backward, as hooks for saved tensors see it."""
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            found[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    alive: list[torch.Tensor] = []
    given = {t.untyped_storage().data_ptr() for t in gc.get_objects() if type(t) is torch.Tensor and t.is_leaf and t.requires_grad}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        alive.append(call())
    return sum(found.values())


def kept_by_graph(call: Call) -> int:
    """The bytes that a call allocates and does not free, its result aside."""
    call()  # kernels keep some memory from their first call on
    gc.collect()
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        end = call()
    return sum(event.self_cpu_memory_usage for event in profile.key_averages()) - end.nbytes


BYTES: dict[str, tuple[Callable[[Call], int], Call, Callable[[torch.dtype], list[torch.Tensor]]]] = {
    "linear": (kept_by_hooks, linear, lambda dtype: [random(4, 64, 64), random(64, 64), random(64)]),
    "heads": (kept_by_hooks, AGAIN["heads"][0], lambda dtype: [random(2, 40, 4, 32, seed=i) for i in range(2)]),
    "conv2d": (kept_by_hooks, convolution, lambda dtype: [random(4, 8, 16, 16), random(8, 8, 3, 3), random(8)]),
    "attention": (kept_by_graph, attention, lambda dtype: [random(2, 4, 64, 32, seed=i) for i in range(3)]),
    "attention with dropout": (kept_by_graph, dropped, lambda dtype: [random(2, 4, 64, 32, seed=i) for i in range(3)]),
    "gru": (kept_by_graph, recurrent("gru"), lambda dtype: [random(16, 16, 64), *weights_of(3, 64, 1, F32)]),
    "lstm": (kept_by_graph, recurrent("lstm"), lambda dtype: [random(16, 16, 64), *weights_of(4, 64, 1, F32)]),
}


@pytest.mark.parametrize(
    "name", [n if how is kept_by_hooks else pytest.param(n, marks=pytest.mark.slow) for n, (how, _, _) in BYTES.items()]
)
def test_r11_no_more_bytes_are_kept_for_backward_than_by_torch_autocast(name: str) -> None:
    count, call, make = BYTES[name]
    args = make(F32)
    with torch.autocast("cpu", cache_enabled=False):
        autocast = count(lambda: call(*args))
    with hmp.casts(listed()):
        ours = count(lambda: call(*args))
    assert 0 < ours <= 1.05 * autocast


def test_r11_what_is_kept_is_freed_when_backward_has_run_or_the_result_is_gone() -> None:
    """Without the garbage collector: there is no cycle."""
    gc.collect()
    gc.disable()
    try:
        for name, (call, make) in AGAIN.items():
            for ends in ("backward", "dropped"):
                given = [a * 1 for a in make(BF16)]
                with hmp.casts(listed()):
                    found = call(*given)
                references = [weakref.ref(each) for each in (*given, found)]
                if ends == "backward":
                    found.float().sum().backward()
                    del given
                    assert not any(r() for r in references[:-1]), name  # while the result lives
                else:
                    del given
                del found
                assert not any(r() for r in references), name
    finally:
        gc.enable()


# --- tools


def test_r11_tools_see_a_product_that_computes_in_float32() -> None:
    """record, compare, detect_nonfinite and summary run, and change nothing."""
    model, x = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)), random(8, 16, grad=False)
    lists = listed()
    with hmp.casts(lists):
        expected = model(x)
    with hmp.record() as report, hmp.casts(lists):
        same(model(x), expected)
    assert "linear" in str(report)
    comparison = hmp.compare(model, x, policy=lists, loss=lambda end: end.float().square().mean())
    assert "linear" in str(comparison)
    assert "linear" in str(hmp.summary(model, x, policy=lists)).lower()
    with hmp.casts(listed(F16)), pytest.raises(hmp.NonFiniteError, match="mm"), hmp.detect_nonfinite():
        torch.mm(torch.full((4, 4), 300.0), torch.full((4, 4), 300.0))


@pytest.mark.slow
def test_r11_benchmark_and_tune_run_under_it() -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)), random(8, 16, grad=False)
    assert "torch-cpu" in str(hmp.benchmark(lambda: model(x).float().sum().backward(), ["torch-cpu"], model=model, rounds=1, steps=1))
    found = hmp.tune(model, [x] * 2, loss=lambda model, batch: model(batch).float().square().mean(), progress=False, steps=2)
    with hmp.casts(found.policy):
        model(x)
