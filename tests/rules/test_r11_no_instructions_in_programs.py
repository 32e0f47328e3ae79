"""R11, "No instructions", in programs: a saved list, and recurrent layers under torch-cpu."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hmp
from autocast_kit import needs_autocasts_lstm
from no_instructions_kit import Call, all_same, attention, by_hand, gradients, random
from oracle import BF16, assert_identical
from saved_oracle import packs
from trap_kit import same

pytestmark = pytest.mark.usefixtures("no_instructions")


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


@packs
def test_r11_a_saved_list_packs_no_frozen_weight() -> None:
    """What the product saves of it is a copy in float32, which no gradient leads to."""
    x, w = random(64, 128), random(64, 128, grad=False)
    with hmp.casts(hmp.Policy("saves", bf16={"linear"}, saved=frozenset({"linear"}), saved_recipe="fp8")):
        found = F.linear(x, w)
    all_same(gradients(found, [x]), gradients(by_hand(F.linear)(x, w), [x]))


RECURRENT = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM, "rnn": torch.nn.RNN, "gru_cell": torch.nn.GRUCell, "lstm_cell": torch.nn.LSTMCell}


def test_r11_recurrent_layers_under_torch_cpu_return_the_dtypes_of_torch_autocast() -> None:
    """What torch.autocast leaves in float32 (a state, the result of a GRU) stays so and is not rounded; packed batches are left to it."""
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
        if packed:
            for one, other in zip(_values(found), _values(autocast), strict=True):
                assert_identical(one.detach(), other.detach(), name)
            continue
        rounded = {n: p.to(BF16).float() for n, p in layer.named_parameters()}
        expected = torch.func.functional_call(layer, rounded, (x.to(BF16).float(),))
        for one, wide, dtype in zip(_values(found), _values(expected), [t.dtype for t in _values(autocast)], strict=True):
            assert_identical(one, wide.to(dtype), name)
        of = [x, *layer.parameters()]
        ends = [next(_values(found)), next(_values(expected)).to(next(_values(found)).dtype)]
        all_same(*(gradients(end, of) for end in ends))


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


def _values(value: Any) -> Iterator[torch.Tensor]:
    for each in value if isinstance(value, tuple) and not hasattr(value, "batch_sizes") else (value,):
        if isinstance(each, tuple) and not hasattr(each, "batch_sizes"):
            yield from each
        else:
            yield each.data if hasattr(each, "batch_sizes") else each
