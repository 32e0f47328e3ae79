"""The cast rules on the device, each beside plain torch on the same device with the casts written out: results and gradients to the bit.

What torch alone needs; tests/rules holds the whole of it, and runs with tensors on the device by HMP_TEST_DEVICE.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import checkpoint as torchs

import hmp
from device_kit import BF16, DEVICE, F16, F32, Checks, all_same, policy, same, seed, synchronize, tensor
from hmp.core.torch_ops import op_facts
from ops_kit import OPS
from oracle import Outcome, assert_same, by_explicit_casts, outcome

check = Checks()
# torch's own knows no XLA
checkpoint = (importlib.import_module("torch_xla.utils.checkpoint") if DEVICE == "xla" else torchs).checkpoint
Call = Callable[..., Any]


SEVERAL = [name for name, (_, make) in OPS.items() if len(make()) > 1]


def _to(value: Any, dtype: torch.dtype) -> Any:
    """Leaves in that dtype."""
    return [t.detach().to(dtype).requires_grad_(t.requires_grad) for t in value]


def _each(names: list[str], one: Callable[[str], None]) -> str:
    failures = []
    for name in names:
        try:
            one(name)
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
        hmp.revert()
    assert not failures, f"{len(failures)} of {len(names)}:\n" + "\n".join(failures)
    return f"{len(names)} ops"


def _listed(list_name: str, low: torch.dtype, given: torch.dtype, to: torch.dtype) -> str:
    def one(name: str) -> None:
        call, make = OPS[name]
        want = by_explicit_casts(call, _to(make(), given), None, to)
        with hmp.casts(policy(**{list_name: name}, dtype=low)):
            got = outcome(call, _to(make(), given))
        assert_same(got, _or_in_float32(name, want, _to(make(), given), to))

    return _each(list(OPS), one)


# Ops of hmp's table (R11) that XLA has a kernel for, of cdist a forward one: they run in float32 all the same.
IN_FLOAT32 = {"xla": {"cdist", "linalg.inv", "linalg.eigvalsh"}}


def _or_in_float32(name: str, want: Outcome, args: list[Any], to: torch.dtype) -> Outcome:
    """R11: what has no forward kernel in the low-precision dtype runs in float32. Lacking a backward is torch's error."""
    call = OPS[name][0]
    if want.error is None:
        return want
    forward_alone = by_explicit_casts(call, [t.detach() for t in args], None, to)
    return want if forward_alone.error is None and name not in IN_FLOAT32.get(DEVICE, ()) else by_explicit_casts(call, args, None, F32)


@check
def r1_ops_of_the_low_list_in_bfloat16() -> str:
    return _listed("bf16", BF16, F32, BF16)


@check
def r1_ops_of_the_low_list_in_float16() -> str:
    return _listed("bf16", F16, F32, F16)


@check
def r2_ops_of_the_float32_list() -> str:
    return _listed("fp32", BF16, BF16, F32)


def _mixed(args: list[Any], first: torch.dtype, others: torch.dtype) -> list[Any]:
    return [*_to(args[:1], first), *_to(args[1:], others)]


@check
def r3_ops_of_the_promote_list_take_the_widest() -> str:
    def one(name: str) -> None:
        call, make = OPS[name]
        for first, others in ((BF16, F32), (F32, BF16), (F16, BF16)):
            want = by_explicit_casts(call, _mixed(make(), first, others), None, F32)
            with hmp.casts(policy(promote=name)):
                got = outcome(call, _mixed(make(), first, others))
            assert_same(got, want)

    return _each(SEVERAL, one)


@check
def r9_batch_norm_keeps_its_state_in_float32_and_moves_it() -> None:
    def run(explicit: bool) -> list[torch.Tensor]:
        mean, var = torch.zeros(16, device=DEVICE), torch.ones(16, device=DEVICE)
        x, weight, bias = (t.requires_grad_() for t in (tensor(8, 16, 4, 4), tensor(16, seed=1), tensor(16, seed=2)))
        y = F.batch_norm(x.to(BF16) if explicit else x, mean, var, weight, bias, training=True)
        y.float().square().mean().backward()
        assert bool((mean != 0).all() & (var != 1).all()), "the statistics did not move"
        return [y, mean, var, *(t.grad for t in (x, weight, bias) if t.grad is not None)]

    want = run(explicit=True)
    with hmp.casts(policy(bf16="batch_norm")):
        all_same(run(explicit=False), want, "batch_norm")


@check
def r9_norms_with_float32_weights_give_the_lists_dtype() -> None:
    x, w, mean, var = tensor(2, 4, 5), tensor(4, seed=1), tensor(4, seed=2), tensor(4, seed=3).abs()
    norms = {
        "layer_norm": lambda: F.layer_norm(x, (5,), tensor(5), tensor(5)),
        "group_norm": lambda: F.group_norm(x, 2, w, w),
        "batch_norm": lambda: F.batch_norm(x, mean, var, w, w),
        "instance_norm": lambda: F.instance_norm(x, mean, var, w, w),
    }
    for name, call in norms.items():
        with hmp.casts(policy(bf16=name)):
            assert call().dtype is BF16, name


@check
def r11_the_table_of_missing_kernels_is_true_of_this_device() -> str:
    """Each named op that can be called with one or two tensors: plain torch refuses the low-precision dtype where the table says so."""
    named = {
        (name, dtype)
        for where, dtypes, names in op_facts.NO_KERNEL
        if where in ("*", DEVICE)
        for name in names
        for dtype in dtypes.split()
        if not name.startswith("special.")
    }
    wrong, tried = [], 0
    for name, dtype in sorted(named):
        function = getattr(torch, name, None) or getattr(torch.linalg, name.removeprefix("linalg."), None)
        if function is None or (DEVICE == "xla" and name == "lobpcg"):  # of which XLA compiles each iteration
            continue
        x = tensor(4, 4).abs() + 4 * torch.eye(4, device=DEVICE)
        for args in ((x,), (x, x)):
            try:
                function(*args)
                synchronize()
            except Exception:  # it takes other arguments
                continue
            tried += 1
            low = [a.to(getattr(torch, dtype)) for a in args]
            try:
                function(*low)
                synchronize()
                wrong.append(f"{name} has a kernel in {dtype}")
            except Exception:  # lobpcg looks its dtype up in a table
                pass
            break
    assert tried > 20, tried
    # an op that has a kernel after all is computed in float32: slower, never wrong
    return f"{tried} looked at; {'; '.join(wrong) or 'none has a kernel'}"


@check
def r11_ops_without_a_kernel_give_float32() -> str:
    """By the table or learnt: whatever plain torch refuses in bfloat16 comes out in float32 with float32's values."""
    x = tensor(4, 4) + 4 * torch.eye(4, device=DEVICE)
    calls: dict[str, Call] = {
        "linalg.inv": lambda a: torch.linalg.inv(a),
        "linalg.qr": lambda a: torch.linalg.qr(a)[1],
        "linalg.det": lambda a: torch.linalg.det(a),
        "cholesky": lambda a: torch.linalg.cholesky(a @ a.mT + torch.eye(4, device=a.device, dtype=a.dtype)),
        "igamma": lambda a: torch.igamma(a.abs(), a.abs()),
        "histc": lambda a: torch.histc(a, 4),
        "fft": lambda a: torch.fft.rfft(a),
        "linalg.eigvalsh": lambda a: torch.linalg.eigvalsh(a),
        "bessel_j0": lambda a: torch.special.bessel_j0(a),
        "avg_pool3d": lambda a: F.avg_pool3d(a[None, None, None], (1, 2, 2)),
    }
    low, refused = x.to(BF16), []

    def one(name: str) -> None:
        call = calls[name]
        try:
            want = call(low.float() if name in IN_FLOAT32.get(DEVICE, ()) else low)
        except (RuntimeError, NotImplementedError):
            refused.append(name)
            if name == "cholesky":
                want = torch.linalg.cholesky((low @ low.mT + torch.eye(4, device=DEVICE, dtype=BF16)).float())
            else:
                want = call(low.float())
        with hmp.casts(policy(bf16="relu")):
            got = call(low)
            assert call(low).dtype is got.dtype
        if name == "histc" and got.dtype is F32:
            want = want.float()
        same(got, want, name)

    _each(list(calls), one)
    return f"without a kernel in bfloat16: {', '.join(refused)}"


@check
def r14_a_checkpoint_is_recomputed_as_its_forward_ran() -> None:
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


RECURRENT: dict[str, Callable[[], torch.nn.RNNBase]] = {
    "LSTM": lambda: torch.nn.LSTM(16, 32, num_layers=2, batch_first=True),
    "LSTM, bidirectional, projected": lambda: torch.nn.LSTM(16, 32, bidirectional=True, proj_size=8),
    "LSTM without biases": lambda: torch.nn.LSTM(16, 32, bias=False),
    "GRU": lambda: torch.nn.GRU(16, 32, bidirectional=True),
    "RNN": lambda: torch.nn.RNN(16, 32, nonlinearity="relu"),
}


@check
def r21_recurrent_layers_equal_explicit_casts_without_a_warning() -> str:
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
    return ", ".join(RECURRENT)
