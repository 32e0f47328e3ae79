"""R11, "No instructions", in programs: weights used again, hooks, checkpoints, transforms, modes, training."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as checkpoints
from torch.overrides import TorchFunctionMode

import hmp
from autocast_kit import needs_autocasts_lstm
from no_instructions_kit import Call, all_same, attention, by_hand, gradients, linear, listed, random
from oracle import BF16, F32, assert_identical
from saved_oracle import packs
from trap_kit import same

pytestmark = pytest.mark.usefixtures("no_instructions")


# --- weights that are used again


def writes(layer: torch.nn.Linear) -> Iterator[str]:
    """Ways to change a weight that differ in kind (P3 has all of them), each done when its name is asked for."""
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


def without_hooks(*args: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
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


def on_device(*args: torch.Tensor) -> torch.Tensor:
    with torch.device("cpu"):
        return block(*args)


def anomaly(*args: torch.Tensor) -> torch.Tensor:
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        return block(*args)


# Checkpoints and hooks for saved tensors: tests/training/test_checkpointing_hooks.py and P9.
AROUND: dict[str, Call] = {
    "nothing": block,
    "a selective checkpoint": selective,
    "disabled hooks": without_hooks,
    "a device, before any mode": on_device,
    "a function mode": in_mode,
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


@packs
def test_r11_a_users_hooks_get_the_inputs_in_the_low_dtype() -> None:
    """As from torch's own kernel."""
    args = [random(2, 36, 64), random(64, 64)]
    seen: list[tuple[torch.dtype, torch.Size]] = []
    with hmp.casts(listed()), torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append((t.dtype, t.shape)) or t, lambda t: t):
        F.linear(*args)
        F.conv1d(args[0].transpose(1, 2), random(8, 64, 3))
    assert len(seen) == 4 and {dtype for dtype, _ in seen} == {BF16}


# --- training


@packs
def test_r11_a_saved_list_packs_what_a_float32_product_keeps() -> None:
    """R22: forward has the same bits, what is packed is as near to it as the recipe is, in bfloat16 the same bits."""
    args = [random(64, 128), random(64, 128, scale=0.1), random(1, 2, 80, 32)]

    def model(linear: Call, attend: Call) -> list[torch.Tensor]:
        hidden = linear(torch.tanh(linear(args[0], args[1])), args[1].t())
        attended = attend(args[2], args[2], args[2])
        return [hidden, attended, *gradients(hidden, args[:2]), *gradients(attended, args[2:])]

    expected, names = model(by_hand(F.linear), by_hand(attention)), {"linear", "scaled_dot_product_attention"}
    for recipe, near in {"bf16": 0.02, "int8": 0.05, "fp8": 0.08}.items():  # fp8 packs rows of 32
        with hmp.casts(hmp.Policy("saves", bf16=names, saved=frozenset(names), saved_recipe=recipe)):
            found = model(F.linear, attention)
        all_same(found[:2], expected[:2])
        for one, other in zip(found[2:], expected[2:], strict=True):
            assert float((one - other).norm() / other.norm()) <= near, recipe
        if recipe == "bf16":
            all_same(found[2:4], expected[2:4])


RECURRENT = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM, "rnn": torch.nn.RNN, "gru_cell": torch.nn.GRUCell, "lstm_cell": torch.nn.LSTMCell}


def test_r11_recurrent_layers_under_torch_cpu_return_the_dtypes_of_torch_autocast() -> None:
    """What torch.autocast leaves in float32 (a state, the result of a GRU and of an LSTM of a packed batch) stays so and is not rounded."""
    needs_autocasts_lstm()
    for (name, kind), packed in itertools.product(RECURRENT.items(), (False, True)):
        if name.endswith("cell") and packed:
            continue
        layer, x = kind(12, 16), random(3, 12) if name.endswith("cell") else random(6, 3, 12)
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


def _mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return value._replace(data=function(value.data)) if hasattr(value, "batch_sizes") else function(value)


def _values(value: Any) -> Iterator[torch.Tensor]:
    for each in value if isinstance(value, tuple) and not hasattr(value, "batch_sizes") else (value,):
        if isinstance(each, tuple) and not hasattr(each, "batch_sizes"):
            yield from each
        else:
            yield each.data if hasattr(each, "batch_sizes") else each
