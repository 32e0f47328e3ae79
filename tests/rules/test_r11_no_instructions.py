"""R11, "No instructions": a product computes in float32 on its rounded inputs and is rounded, in backward too, and loses nothing by it.

The oracle is plain torch with the casts written out: `op(x.to(low).float(), ...).to(low)`.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import hmp
from autocast_kit import needs_autocasts_lstm
from no_instructions_kit import (
    AGAIN,
    Call,
    all_same,
    attention,
    by_hand,
    convolution,
    dropped,
    end_of,
    expected_of,
    gradients,
    linear,
    listed,
    random,
    recurrent,
    weights_of,
)
from oracle import BF16, F16, F32, kept_for_backward
from saved_oracle import packs
from thread_kit import in_threads
from trap_kit import same

pytestmark = pytest.mark.usefixtures("no_instructions")


# --- every op, every spelling


def test_r11_float16_overflows_to_infinity_where_it_is_rounded() -> None:
    x = torch.full((4, 64), 60.0)
    with hmp.casts(listed(F16)):
        large, small = torch.mm(x, 1000 * x[0, 0] * torch.ones(64, 4)), torch.mm(x, torch.ones(64, 4))
    assert large.dtype is F16 and bool(large.isposinf().all())
    same(small, torch.full((4, 4), 3840.0, dtype=F16))


# --- gradients


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


def test_r11_out_takes_no_part_in_autograd_as_in_torch() -> None:
    for grad, lists in itertools.product((False, True), (hmp.Policy("none"), listed())):
        x, out = random(4, 4, dtype=BF16, grad=grad), torch.zeros(4, 4, dtype=BF16)
        with hmp.casts(lists), pytest.raises(RuntimeError, match="automatic differentiation") if grad else contextlib.nullcontext():
            torch.mm(x, x, out=out)
        same(out, torch.zeros(4, 4, dtype=BF16) if grad else by_hand(torch.mm)(x, x))


def test_r11_a_tensordot_to_one_element_is_the_sum_that_torch_autocast_leaves_in_float32() -> None:
    a, b = random(4, 4, grad=False), random(4, 4, grad=False, seed=1)
    for dims in (2, ([1, 0], [0, 1]), 1, ([1], [0]), 0):
        with torch.autocast("cpu"):
            dtype = torch.tensordot(a, b, dims).dtype  # float32 of one element, in torch 2.7 bfloat16 of any
        expected = torch.tensordot(a, b, dims) if dtype is F32 else by_hand(torch.tensordot)(a, b, dims)
        with hmp.casts("torch-cpu"):
            same(torch.tensordot(a, b, dims), expected)
            same(torch.tensordot(a, b, dims=dims), expected)


def test_r11_a_view_stays_a_view() -> None:
    """An einsum of one tensor multiplies nothing."""
    x = random(4, 5, dtype=BF16, grad=False)
    with hmp.casts(listed()):
        found = torch.einsum("ij->ji", x)
        found[0, 0] = 7
    assert found._base is x and float(x[0, 0]) == 7


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


def test_r11_backward_from_several_threads_at_once() -> None:
    for name in ("attention with dropout", "linear"):
        call, make = AGAIN[name]
        args = make(BF16)
        wanted = expected_of(name, args)[1]
        with hmp.casts(listed()):
            found = call(*args)

        def work(_: int, found: torch.Tensor = found, args: Any = args, wanted: Any = wanted) -> None:
            for _ in range(2):
                all_same(gradients(found, args, retain_graph=True), wanted)

        in_threads(work, range(4))


SWITCHES: list[Callable[[], Any]] = [lambda: sdpa_kernel(SDPBackend.MATH), lambda: torch.backends.mkldnn.flags(enabled=False)]


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_r11_what_chooses_torchs_kernels_may_be_in_force_in_forward_or_backward_alone(where: str) -> None:
    """The gradient is that of the forward that was computed, not of another kernel's."""
    outside = contextlib.nullcontext
    for inside, name in itertools.product(SWITCHES, ("attention", "attention with dropout", "lstm", "gru")):
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


@packs
def test_r11_a_write_before_backward_raises_where_torchs_own_kernel_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any input of a low-precision dtype, changed in place; of float32 ones copies were kept."""
    found: dict[tuple[str, str], list[bool]] = {}
    for kernels, name in itertools.product(("native", "float32"), WRITTEN):
        monkeypatch.setenv("HMP_LOW_KERNELS", kernels)
        call, make = AGAIN[name]
        raised = found[kernels, name] = []
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
        if name == WRITTEN[-1]:
            hmp.revert()
    for name in WRITTEN:
        ours, native = found["float32", name], found["native", name]
        # what is computed again needs all inputs, also those that torch's kernel does not keep
        assert all(one or not other for one, other in zip(ours, native, strict=True)), name
        assert name not in ("linear", "sliced", "heads", "convolution") or ours == native


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


def _stop(tensor: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("stop here")


# --- memory


def kept_by_hooks(call: Call, args: list[torch.Tensor]) -> int:
    return kept_for_backward(lambda: call(*args), besides=args)[0]


def kept_by_graph(call: Call, args: list[torch.Tensor]) -> int:
    """The bytes that a call allocates and does not free, its result aside."""
    call(*args)  # kernels keep some memory from their first call on
    gc.collect()
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        end = call(*args)
    return sum(event.self_cpu_memory_usage for event in profile.key_averages()) - end.nbytes


BY_HOOKS = {
    "linear": (linear, [(4, 64, 64), (64, 64), (64,)]),
    "heads": (AGAIN["heads"][0], [(2, 40, 4, 32)] * 2),
    "conv2d": (convolution, [(4, 8, 16, 16), (8, 8, 3, 3), (8,)]),
}
BY_GRAPH = {
    "attention": (attention, [(2, 4, 64, 32)] * 3),
    "attention with dropout": (dropped, [(2, 4, 64, 32)] * 3),
    "gru": (recurrent("gru"), [(16, 16, 64), (192, 64), (192, 64), (192,), (192,)]),
    "lstm": (recurrent("lstm"), [(16, 16, 64), (256, 64), (256, 64), (256,), (256,)]),
}


@packs
@pytest.mark.parametrize("count", [kept_by_hooks, pytest.param(kept_by_graph, marks=pytest.mark.slow)])
def test_r11_no_more_bytes_are_kept_for_backward_than_by_torch_autocast(count: Callable[[Call, list[torch.Tensor]], int]) -> None:
    for name, (call, shapes) in (BY_HOOKS if count is kept_by_hooks else BY_GRAPH).items():
        if name == "lstm":
            needs_autocasts_lstm()
        args = [random(*shape, seed=i, scale=0.2) for i, shape in enumerate(shapes)]
        with torch.autocast("cpu", cache_enabled=False):
            autocast = count(call, args)
        with hmp.casts(listed()):
            ours = count(call, args)
        assert 0 < ours <= 1.05 * autocast, name


@pytest.mark.slow
def test_r11_what_is_kept_is_freed_when_backward_has_run_or_the_result_is_gone() -> None:
    """Without the garbage collector: there is no cycle."""
    gc.collect()
    gc.disable()
    try:
        for name in ("attention with dropout", "gru", "views of one tensor", "linear"):
            call, make = AGAIN[name]
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
