"""R11: the table of ops without a kernel, what is tried where it says nothing; how weights of recurrent layers come to cuDNN's function.

No public call shows whether an op's kernel was known, tried or remembered. None reaches cuDNN where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import hmp
from hmp.core import tables, torch_private
from hmp.core.ops import table
from hmp.core.rules import special
from trap_kit import policy


def test_r11_random_ops_are_never_run_again() -> None:
    for op in ("dropout", "rrelu", "multinomial"):
        policy = hmp.Policy("mine", bf16={op})
        with hmp.convert(policy=policy):
            rules = [d.ruled for d in tables.decide(policy).values() if d.ruled.op == op]
        assert rules and not any(rule.facts.retries for rule in rules), op


# What an op of op_db lacks on the CPU for some of its samples only: these are tried, not known.
TRIED = table.KERNEL_BY_ARGUMENTS | {"as_strided"}  # as_strided: the sample's storage is too small in two bytes an element


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # op_db samples deprecated names and degenerate shapes too
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.nightly)], ids=str)
def test_r11_the_table_holds_every_op_of_torchs_own_tests_without_a_kernel(dtype: torch.dtype) -> None:
    """Plain torch is asked: what accepts its samples in float32 and refuses them all in the low-precision dtype is on the table."""
    from torch.testing._internal.common_methods_invocations import op_db

    known = {name for device, dtypes, names in table.NO_KERNEL if device in ("*", "cpu") and str(dtype)[6:] in dtypes for name in names}
    missing = []
    for info in op_db:
        name = info.name.removeprefix("nn.functional.")
        synonyms = table.SYNONYMS.get(name, ())
        if torch.float32 not in info.dtypes or name.startswith("jiterator") or known.intersection({name, *synonyms}) or name in TRIED:
            continue
        for sample, _ in zip(info.sample_inputs_func(info, "cpu", torch.float32, False), range(4), strict=False):
            if _runs(info.op, sample, torch.float32) and not _runs(info.op, sample, dtype):
                missing.append(name)
                break
    assert missing == []


def _runs(op: Callable[..., object], sample: object, dtype: torch.dtype) -> bool:
    def cast(value: object) -> object:
        return value.detach().to(dtype) if isinstance(value, torch.Tensor) and value.dtype is torch.float32 else value

    args, kwargs = pytree.tree_map(cast, ((sample.input, *sample.args), sample.kwargs))  # type: ignore[attr-defined]
    try:
        op(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError):
        return False
    return True


LAYERS = {
    "LSTM": lambda: torch.nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "LSTM, projected": lambda: torch.nn.LSTM(3, 4, proj_size=2, batch_first=True),
    "GRU without biases": lambda: torch.nn.GRU(3, 4, bias=False),
    "RNN": lambda: torch.nn.RNN(3, 4, nonlinearity="relu"),
}


@pytest.mark.native_kernels
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_cudnn_is_asked_as_the_module_asks_it(name: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a function that lays the weights out as cuDNN's does, where there is no GPU."""
    layer = LAYERS[name]()
    asked: list[Any] = []

    def flatten(weights: list[torch.Tensor], *how: Any) -> None:
        asked.append((len(weights), *how))
        buffer, at = torch.cat([each.reshape(-1) for each in weights]), 0
        for each in weights:
            each.set_(buffer[at : at + each.numel()].view_as(each))
            at += each.numel()

    monkeypatch.setattr(torch_private, "flatten_cudnn_weights", flatten)
    monkeypatch.setattr(special, "_are_for_cudnn", lambda weights: weights[0].dtype is torch.bfloat16)
    x = torch.randn(5, 2, 3).transpose(0, 1) if layer.batch_first else torch.randn(5, 2, 3)
    batch = torch.nn.utils.rnn.pack_padded_sequence(x, [5, 3], layer.batch_first) if packed else x
    low = {n: p.detach().bfloat16().requires_grad_() for n, p in layer.named_parameters()}
    want = torch.func.functional_call(layer, low, (batch.to(torch.bfloat16),))[0]
    with hmp.convert(policy=policy(bf16=["lstm", "gru", "rnn_relu"])):
        got = layer(batch)[0]
    got, want = (got.data, want.data) if packed else (got, want)
    assert torch.equal(got, want)
    got.float().sum().backward()
    want.float().sum().backward()
    for each, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, low[each].grad.float(), rtol=1e-2, atol=1e-2)
    of_a_layer = (4 if layer.bias else 2) + (layer.proj_size > 0)
    mode = {"LSTM": 2, "GRU": 3, "RNN_RELU": 0}[layer.mode]
    ways = layer.num_layers * (2 if layer.bidirectional else 1)
    how = (of_a_layer, 3, mode, 4, layer.proj_size, layer.num_layers, layer.batch_first and not packed, layer.bidirectional)
    assert asked == [(of_a_layer * ways, *how)]
