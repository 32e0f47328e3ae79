"""The cast rules on the device, each beside plain torch on the same device with the casts written out: results and gradients to the bit.

What a device may have otherwise than the CPU; tests/rules holds the rules, and runs with tensors on the device (device_tensors.py).
"""

from __future__ import annotations

import copy
import importlib
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import checkpoint as torchs

import hmp
from device_kit import BF16, DEVICE, F32, ON_CPU, all_same, policy, same, seed, synchronize, tensor
from thread_kit import in_threads

# torch's own knows no XLA
checkpoint = (importlib.import_module("torch_xla.utils.checkpoint") if DEVICE == "xla" else torchs).checkpoint


# Ops of hmp's table (R11) that XLA has a kernel for, of cdist a forward one: they run in float32 all the same.
IN_FLOAT32 = {"xla": {"cdist", "linalg.inv", "linalg.eigvalsh"}}


CALLS: dict[str, Callable[..., Any]] = {
    "linalg.inv": lambda a: torch.linalg.inv(a),
    "linalg.qr": lambda a: torch.linalg.qr(a)[1],
    "linalg.det": lambda a: torch.linalg.det(a),
    "linalg.cholesky": lambda a: torch.linalg.cholesky(a),
    "igamma": lambda a: torch.igamma(a.abs(), a.abs()),
    "histc": lambda a: torch.histc(a, 4),
    "fft": lambda a: torch.fft.rfft(a),
    "linalg.eigvalsh": lambda a: torch.linalg.eigvalsh(a),
    "bessel_j0": lambda a: torch.special.bessel_j0(a),
    "avg_pool3d": lambda a: F.avg_pool3d(a[None, None, None], (1, 2, 2)),
}


@pytest.mark.parametrize("name", CALLS)
def test_r11_an_op_without_a_kernel_gives_float32(name: str) -> None:
    """By the table or learnt: whatever plain torch refuses in bfloat16 comes out in float32 with float32's values."""
    call, low = CALLS[name], (tensor(4, 4) + 4 * torch.eye(4, device=DEVICE)).to(BF16)
    try:
        want = call(low.float() if name in IN_FLOAT32.get(DEVICE, ()) else low)
    except (RuntimeError, NotImplementedError):
        want = call(low.float())
        print("no kernel in bfloat16")
    with hmp.casts(policy(bf16="relu")):
        got = call(low)
        assert call(low).dtype is got.dtype
    same(got, want.float() if name == "histc" and got.dtype is F32 else want, name)


def test_r14_a_checkpoint_is_recomputed_as_its_forward_ran() -> None:
    w = tensor(8, 8, seed=1, grad=True)
    dtypes: list[torch.dtype] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        y = torch.matmul(x, w)
        dtypes.append(y.dtype)
        return F.dropout(torch.softmax(y, -1), 0.5)

    def run(reentrant: bool | None) -> list[torch.Tensor]:
        seed(0)
        w.grad, x = None, tensor(4, 8, grad=True)
        with hmp.casts("habana"):
            y = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
        y.float().square().sum().backward()
        assert x.grad is not None and w.grad is not None
        return [y, x.grad, w.grad.clone()]

    want = run(None)
    for reentrant in (True,) if DEVICE == "xla" else (True, False):
        dtypes.clear()
        all_same(run(reentrant), want, f"use_reentrant={reentrant}")
        assert dtypes == [BF16, BF16], dtypes


@pytest.mark.skipif(ON_CPU, reason="only on an accelerator: the CPU's backward runs on the calling thread")
@pytest.mark.skipif(DEVICE == "xla", reason="torch.utils.checkpoint knows no XLA; above that of torch_xla is tried")
def test_r14_threads_with_policies_of_their_own_share_the_devices_thread() -> None:
    """Backward of an accelerator runs on a thread of its own, which all callers share."""
    start, runs = threading.Barrier(2), {"habana": [], "other": []}
    policies = {"habana": "habana", "other": policy(bf16="softmax", fp32="matmul mul")}
    w = tensor(3, 3, grad=True)

    def train(name: str) -> None:
        def block(x: torch.Tensor) -> torch.Tensor:
            y = torch.matmul(x, w)
            z = torch.softmax(y, -1)
            runs[name].append((threading.get_ident(), y.dtype, z.dtype))
            return y * z

        x = tensor(2, 3, grad=True)
        for _ in range(10):
            with hmp.casts(policies[name]):
                loss = checkpoint(block, x, use_reentrant=False).float().sum()
            start.wait()
            loss.backward()

    in_threads(train, runs)
    assert [dtypes for _, *dtypes in runs["habana"]] == [[BF16, F32]] * 20
    assert [dtypes for _, *dtypes in runs["other"]] == [[F32, BF16]] * 20
    assert len({thread for found in runs.values() for thread, *_ in found[1::2]}) == 1, "they were recomputed on one thread"


RECURRENT: dict[str, Callable[[], torch.nn.RNNBase]] = {
    "LSTM": lambda: torch.nn.LSTM(16, 32, num_layers=2, batch_first=True),
    "LSTM, bidirectional, projected": lambda: torch.nn.LSTM(16, 32, bidirectional=True, proj_size=8),
    "LSTM without biases": lambda: torch.nn.LSTM(16, 32, bias=False),
    "GRU": lambda: torch.nn.GRU(16, 32, bidirectional=True),
    "RNN": lambda: torch.nn.RNN(16, 32, nonlinearity="relu"),
}


def test_r21_recurrent_layers_equal_explicit_casts_without_a_warning() -> None:
    """Of padded and of packed batches, in training twice and without a gradient."""
    # XLA compiles each step, and plain torch reads the memory of packed batches, which its tensors have not
    size, kinds = (3, (False,)) if DEVICE == "xla" else (7, (False, True))

    def run(layer: torch.nn.RNNBase, call: Callable[[Any], Any], packed: bool) -> list[torch.Tensor]:
        x = tensor(size, size, 16, seed=3)
        batch = torch.nn.utils.rnn.pack_padded_sequence(x, [7, 6, 6, 4, 2, 2, 1], layer.batch_first) if packed else x
        found: list[torch.Tensor] = []
        for _ in range(2):
            y = call(batch)[0]
            y = y.data if packed else y
            y.float().square().mean().backward()
            synchronize()  # XLA compiles this round and the next one apart
            found.append(y)
        with torch.no_grad():
            y = call(batch)[0]
        found.append(y.data if packed else y)
        return found

    for name, make in RECURRENT.items():
        for packed in kinds:
            torch.manual_seed(0)
            layer = make().to(DEVICE)
            other = copy.deepcopy(layer)

            def explicit(batch: Any, other: torch.nn.RNNBase = other) -> Any:
                low = {n: p.to(BF16) for n, p in other.named_parameters()}
                lowered = batch.to(BF16) if isinstance(batch, torch.Tensor) else batch._replace(data=batch.data.to(BF16))
                return torch.func.functional_call(other, low, (lowered,))

            want = run(other, explicit, packed)
            with hmp.convert(policy=policy(bf16="lstm gru rnn_relu")), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                got = run(layer, layer, packed)
            said = [str(each.message) for each in caught if "contiguous chunk" in str(each.message)]
            assert not said, f"{name}: {said}"
            all_same(got, want, f"{name}, packed: {packed}")
            for parameter, of_other in zip(layer.parameters(), other.parameters(), strict=True):
                apart = float((parameter.grad - of_other.grad).norm() / of_other.grad.norm())
                assert apart < 0.01, f"{name}, packed: {packed}: a gradient is {apart} away"
    print(", ".join(RECURRENT))
