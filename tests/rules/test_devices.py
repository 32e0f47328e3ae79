"""The rules look at dtypes, not at device names: they hold on devices that are not here, by fake tensors of each of them.

Those have a device, a dtype and a shape but no values.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import hmp
from dispatch_kit import Trace
from oracle import BF16, F16, F32
from torch_has import TORCH
from trap_kit import policy, same

DEVICES = ("hpu", "cuda", "xpu", "mps")


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Every tensor made inside is a fake one; what torch remembers of earlier calls on fake tensors is not asked."""
    with pytest.MonkeyPatch.context() as patch:
        if not hasattr(torch, "hpu"):
            # what Habana's plugin brings
            stub: Any = types.ModuleType("torch.hpu")
            stub.is_available = stub.is_initialized = lambda: False
            stub.current_device, stub.device_count = lambda: 0, lambda: 1
            stub.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
            patch.setattr(torch, "hpu", stub, raising=False)
        mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
        mode.cache_enabled = False
        with mode:
            yield


LOWEST = torch.finfo(F32).min
LOW_LOWEST = torch.finfo(BF16).min
EVERY = ("cpu", *DEVICES)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.getLogger("hmp").setLevel(logging.ERROR)
    yield
    logging.getLogger("hmp").setLevel(logging.NOTSET)


def each_device() -> Iterator[str]:
    """Each device's name, inside a mode in which tensors of it can be made."""
    for device in EVERY:
        with fake_tensors():
            yield device


# Some calls need a guard of the device, which is not here either: x[0] and x[None], batch norm in training, gradients. Views by
# method, functional calls and no gradients do not; tests/device has the rest.


def on(device: str, *shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.empty(shape, device=device, dtype=dtype)


def index(device: str, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, device=device, dtype=torch.long)


AFFINE = {
    # what the device's kernel takes beside a low input: where it has no mixed kernel weight and bias are cast as well (R9)
    "layer_norm": {"cuda": BF16, "xpu": BF16},
    "group_norm": {"cuda": BF16, "xpu": BF16},
    "batch_norm": {},
}


def test_r9_weights_of_norms_stay_float32_where_the_device_has_a_mixed_kernel() -> None:
    for device in each_device():
        x, w, mean, var = on(device, 2, 4, 5), on(device, 4), on(device, 4), on(device, 4)
        norms = {
            "layer_norm": lambda x=x, d=device: F.layer_norm(x, (4, 5), on(d, 4, 5), on(d, 4, 5)),
            "group_norm": lambda x=x, w=w: F.group_norm(x, 2, w, w),
            "batch_norm": lambda x=x, w=w, mean=mean, var=var: F.batch_norm(x, mean, var, w, w),
        }
        for name, norm in norms.items():
            with hmp.casts("habana"), Trace() as trace:
                y = norm()
            first, *others = [a for a in trace.of(f"native_{name}")[0] if isinstance(a, torch.dtype)]
            assert y.dtype is first is BF16
            assert set(others) == {AFFINE[name].get(device, F32)}, (device, name)
        assert mean.dtype is var.dtype is F32


NO_KERNEL: dict[str, tuple[Callable[[torch.Tensor], Any], set[str]]] = {
    # op → where it is known to have no kernel for bfloat16, or says so when it is asked
    "fft.fft": (lambda x: torch.fft.fft(x), set(EVERY)),
    "linalg.inv": (lambda x: torch.linalg.inv(x), set(EVERY)),
    "Tensor.logdet": (lambda x: x.logdet(), set(EVERY)),
    # until torch 2.11 it asks for values, which fake tensors have not
    **({"quantile": (lambda x: x.quantile(0.5), set(EVERY))} if TORCH >= (2, 13) else {}),
    "avg_pool3d": (lambda x: F.avg_pool3d(x.reshape(1, 1, 4, 4), (1, 2, 2)), {"cpu"}),
    "histc": (lambda x: torch.histc(x), {"cuda"}),
    "igamma": (lambda x: torch.igamma(x, x), {"cuda"}),
    "norm(nuc)": (lambda x: torch.norm(x, "nuc"), set(EVERY)),
    "relu": (lambda x: torch.relu(x), set()),
}


@pytest.mark.parametrize("lists", ["habana", policy()], ids=["habana", "nothing"])
def test_r11_an_op_without_a_kernel_runs_in_float32_on_the_devices_that_have_none(lists: Any) -> None:
    for device in each_device():
        x = on(device, 4, 4, dtype=BF16)
        with hmp.casts(lists):
            before = hmp.fallbacks()
            for name, (call, devices) in NO_KERNEL.items():
                result = call(x)
                wide = torch.complex64 if result.is_complex() else F32
                assert result.dtype is (wide if device in devices else BF16), (device, name)
                assert result.device.type == device, name
            counted = {op for op, times in hmp.fallbacks().items() if times > before.get(op, 0)}
            assert counted >= {"fft.fft", "norm"} and ("histc" in counted) == (device == "cuda")


def test_r12_scalars_and_masks_beyond_the_low_dtype_arrive_within_it() -> None:
    for device in each_device():
        low, mask = on(device, 3, 3, dtype=BF16), on(device, 3, 3)
        with hmp.casts("habana"), Trace() as trace:
            assert low.masked_fill(low > 0, LOWEST).dtype is BF16
        assert trace.of("masked_fill")[0][-1] == LOW_LOWEST
        with hmp.casts("habana"), Trace() as trace:
            assert ((1.0 - low) * LOWEST).dtype is BF16
        assert F32 in trace.of("mul")[0] and LOW_LOWEST in trace.of("clamp")[0]
        with hmp.casts(policy(bf16=["add"])), Trace() as trace:
            assert (low + mask).dtype is BF16
        assert LOW_LOWEST in trace.of("clamp")[0]  # the mask is cast saturating
        with hmp.casts(policy(dtype=F16)), Trace() as trace:
            low.to(F16).clamp(min=-1e9)
        assert torch.finfo(F16).min in trace.of("clamp")[0]


def program(device: str) -> list[torch.dtype]:
    """A block of a model, and what else a program does, by functional calls; the dtype after each of them. R1 to R7, R14."""
    x, w, tokens = on(device, 2, 4, 8), on(device, 8, 8), index(device, 2, 4)
    seen = [F.embedding(tokens, on(device, 9, 8)), F.embedding_bag(index(device, 2, 2), w), F.layer_norm(x, (8,))]
    q, k, v = (F.linear(seen[-1], w) for _ in range(3))
    scores = q @ k.transpose(-1, -2) / 8**0.5 + (1 - on(device, 4, 4)) * LOWEST
    seen += [q, scores, F.softmax(scores, -1), F.softmax(scores, -1).type_as(v) @ v]
    seen += [F.gelu(F.linear(seen[-1], w)), torch.cat([seen[-1], x]), x.mean(-1).pow(2).rsqrt(), 2.0 / q, q + x, q + x.sum()]
    seen += [F.cross_entropy(F.linear(x, w).flatten(0, 1), index(device, 8)), F.mse_loss(x, x)]
    low, other = on(device, 4, 4, dtype=BF16), on(device, 4, 4)
    if not (device == "cuda" and ASKS_THE_DRIVER):
        seen += [F.conv1d(x, on(device, 3, 4, 1)), F.conv1d(low.unsqueeze(0), other.unsqueeze(2))]
    seen += [torch.mm(low, other), torch.mm(other, low), F.prelu(low, other.select(0, 0)), F.huber_loss(low, other)]
    seen += [low.mul_(other), low.addmm_(other, other), low.index_put_((index(device, 2),), other.narrow(0, 0, 2)), F.relu(low, True)]
    seen += [torch.mul(low, other, out=low), torch.matmul(other, other, out=on(device, 4, 4)), torch.softmax(low, -1, out=on(device, 0))]
    seen += [torch.where(low > 0, low, other), F.dropout(low, 0.5), hmp.disable_casts(torch.softmax)(low, -1)]
    x += seen[0]
    return [t.dtype for t in (*seen, x)]


# torch 2.7 and 2.9 built for CUDA ask the driver which convolution a fake tensor has, and there is none
ASKS_THE_DRIVER = torch.version.cuda and not torch.cuda.is_available() and TORCH < (2, 11)


@pytest.mark.native_kernels  # a CPU that computes in float32 has casts to it besides
@pytest.mark.parametrize("name", ["habana", pytest.param("autocast", marks=pytest.mark.slow)])
def test_a_preset_casts_on_every_device_what_it_casts_on_the_cpu(name: str) -> None:
    found = {}
    for device in each_device():
        with hmp.casts(hmp.Policy.load(name).unscoped), Trace() as trace:
            found[device] = program(device), [seen[:2] for seen in trace.of("_to_copy")]
    for device in DEVICES:
        assert (device == "cuda" and ASKS_THE_DRIVER) or found[device] == found["cpu"], device
    assert found["cpu"][1], "this preset casts nothing here"


# --- the meta device: plain tensors without values


def test_rules_hold_on_the_meta_device() -> None:
    with hmp.casts("habana"):
        assert program("meta") == program("cpu")
        x, low = on("meta", 3, 3), on("meta", 3, 3, dtype=BF16)
        assert torch.linalg.inv(low).dtype is F32 and torch.fft.fft(low).dtype is torch.complex64
        assert x.t().dtype is F32


# --- R8 where torch's C ops run Python code of torch: under FakeTensorMode and other dispatch modes, and on the meta device


# What torch's decompositions and meta kernels are written in; on a list, each would be decided a second time inside other ops.
WRITTEN_IN = """abs add amax amin any arange bitwise_or ceil clamp clone cumsum div empty_like eq exp expm1 floor full full_like ge
    gt le log log1p lt mean mul ne neg pow prod reciprocal rsqrt select sigmoid sqrt squeeze sub sum tanh truediv unsqueeze where
    zeros_like""".split()
PYTHON_INSIDE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
    "dist": lambda x: torch.dist(x, x),
    "ldexp": lambda x: torch.ldexp(x, x),
    "selu": lambda x: F.selu(x),
}


def test_r8_ops_that_are_python_inside_are_decided_once_on_every_device() -> None:
    calls = PYTHON_INSIDE | {
        "mish": lambda x: F.mish(x),
        "cumprod": lambda x: torch.cumprod(x, 0),
        "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x),
        "layer_norm": lambda x: torch.layer_norm(x, (4,)),
        "vector_norm": lambda x: torch.linalg.vector_norm(x),
        "addmm": lambda x: torch.addmm(x, x, x),
        "bilinear": lambda x: F.interpolate(x.reshape(1, 1, 4, 4), scale_factor=2.0, mode="bilinear"),
    }
    for device in DEVICES:
        with fake_tensors(), hmp.casts(policy(bf16=WRITTEN_IN)):
            for name, call in calls.items():
                assert call(torch.empty(4, 4, device=device)).dtype is F32, name
            assert torch.exp(torch.empty(4, 4, device=device)).dtype is BF16


# --- what is remembered, and other modes


def test_r16_what_fake_tensors_learnt_under_casts_is_what_plain_torch_gives() -> None:
    """FakeTensorMode remembers results for the process: nothing of hmp may be among them."""
    FakeTensorMode.cache.clear()
    with hmp.casts(policy(bf16=WRITTEN_IN)), FakeTensorMode():
        for call in PYTHON_INSIDE.values():
            call(torch.empty(5, 7))
    hmp.revert()
    with FakeTensorMode():
        for name, call in PYTHON_INSIDE.items():
            assert call(torch.empty(5, 7)).dtype is F32, name
    FakeTensorMode.cache.clear()


def test_r8_the_code_of_a_users_dispatch_mode_runs_without_casts() -> None:
    seen = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            one = torch.ones(2, 2)
            seen.append((hmp.casts_enabled(), torch.matmul(one, one).dtype, (one * 2).dtype))
            return func(*args, **(kwargs or {}))

    x = torch.randn(2, 2)
    with hmp.casts("habana"):
        plain = torch.matmul(x, x).sin()
        for _ in range(2):  # the second time through a class that is known
            with Noting():
                same(torch.matmul(x, x).sin(), plain)
                assert hmp.casts_enabled()
        assert torch.matmul(x, x).dtype is BF16
    assert set(seen) == {(False, F32, F32)} and len(seen) >= 4
    hmp.revert()
    seen.clear()
    with Noting():
        torch.matmul(x, x)
    assert set(seen) == {(False, F32, F32)}
