"""The rules look at dtypes, not at device names: they hold on devices that are not here, by fake tensors of each of them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hmp
from fake_devices import DEVICES, Trace, fake_tensors
from hmp.torch_private import TORCH
from low_kernels_kit import computes_in_float32
from oracle import BF16, F16, F32
from trap_kit import policy, refused

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


# A listed op of each kind, by Habana's lists.
LISTED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.dtype]] = {
    "linear": (lambda x: F.linear(x, x), BF16),
    "matmul": (lambda x: x @ x, BF16),
    "bmm": (lambda x: torch.bmm(x.unsqueeze(0), x.unsqueeze(0)), BF16),
    "conv1d": (lambda x: F.conv1d(x.unsqueeze(0), x.unsqueeze(2)), BF16),
    "relu": (lambda x: torch.nn.ReLU()(x), BF16),
    "leaky_relu": (lambda x: torch._C._nn.leaky_relu(x, 0.1), BF16),
    "dropout": (lambda x: F.dropout(x, 0.5), BF16),
    "layer_norm": (lambda x: F.layer_norm(x, (4,)), BF16),
    "softmax": (lambda x: torch.special.softmax(x, 0), F32),
    "log": (lambda x: x.log(), F32),
    "truediv": (lambda x: 2.0 / x, F32),
    "bce": (lambda x: F.binary_cross_entropy_with_logits(x, x), F32),
}


def test_r1_r2_listed_ops_of_each_kind() -> None:
    # torch 2.7 and 2.9 built for CUDA ask the driver which convolution a fake tensor has, and there is none
    asks = torch.version.cuda and not torch.cuda.is_available() and TORCH < (2, 11)
    for device in each_device():
        with hmp.casts("habana"):
            for (name, (call, wanted)), dtype in itertools.product(LISTED.items(), (F32, BF16)):
                if not (device == "cuda" and asks and "conv" in name):
                    result = call(on(device, 4, 4, dtype=dtype))
                    assert (result.dtype, result.device.type) == (wanted, device), name


def test_r2_look_ups_and_losses_with_indices_of_the_device() -> None:
    for device in each_device():
        table, low = on(device, 5, 3), on(device, 5, 3, dtype=BF16)
        with hmp.casts("habana"):
            assert F.embedding(index(device, 4), low).dtype is F32
            assert F.embedding_bag(index(device, 2, 2), low).dtype is F32
            assert F.nll_loss(low, index(device, 5)).dtype is F32
            assert F.cross_entropy(low, index(device, 5)).dtype is F32
        with hmp.casts(policy(bf16=["embedding", "embedding_bag"])), Trace() as trace:
            assert F.embedding(index(device, 4), table).dtype is BF16
        assert trace.arguments("embedding")[0] is F32  # the result is cast, not the table


# What these rules do is decided by dtypes alone: two tensors of any dtypes have on every device the results that they have on the CPU.
LISTS = {"habana": "habana", "nothing": policy()}
CALLS: dict[str, Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "R3 cat": lambda d, a, b: torch.cat([a, b]),
    "R3 add": lambda d, a, b: a + b,
    "R3 add a 0-dim tensor": lambda d, a, b: a + b.sum(),
    "R3 where": lambda d, a, b: torch.where(a > 0, a, b),
    "R5 mul_": lambda d, a, b: a.mul_(b),
    "R5 addmm_": lambda d, a, b: a.addmm_(b, b),
    "R5 index_put_": lambda d, a, b: a.index_put_((index(d, 2),), b.narrow(0, 0, 2)),
    "R5 relu in place": lambda d, a, b: F.relu(a, True),
    "R5 dropout in place": lambda d, a, b: F.dropout(a, 0.5, True, inplace=True),
    "R5 out=": lambda d, a, b: torch.mul(a, b, out=a),
    "R7 mm": lambda d, a, b: torch.mm(a, b),
    "R7 conv1d": lambda d, a, b: F.conv1d(a.unsqueeze(0), b.unsqueeze(0)),
    "R7 bilinear": lambda d, a, b: F.bilinear(a, b, on(d, 2, 3, 3)),
    "R7 prelu": lambda d, a, b: F.prelu(a, b.select(0, 0)),
    "R7 huber_loss": lambda d, a, b: F.huber_loss(a, b),
    "R14": lambda d, a, b: hmp.disable_casts(F.layer_norm)(torch.softmax(a, -1), (3,)),
}


def dtypes_of_calls(device: str) -> dict[tuple[str, ...], torch.dtype]:
    """What each call gives, by the name of the lists, of the call, and of the two dtypes."""
    found = {}
    for lists, each in LISTS.items():
        with hmp.casts(each):
            for (name, call), dtypes in itertools.product(CALLS.items(), ((BF16, F32), (F32, BF16))):
                result = call(device, *(on(device, 3, 3, dtype=dtype) for dtype in dtypes))
                assert result.device.type == device
                found[(lists, name, *map(str, dtypes))] = result.dtype
    return found


def test_r3_r5_r7_r14_have_on_every_device_the_dtypes_that_they_have_on_the_cpu() -> None:
    with fake_tensors():
        expected = dtypes_of_calls("cpu")
        for device in ("cuda", "hpu"):  # one whose kernels torch has, one that registers its own
            assert dtypes_of_calls(device) == expected, device
    assert expected["habana", "R3 add", str(BF16), str(F32)] is expected["nothing", "R7 mm", str(F32), str(BF16)] is F32
    assert expected["nothing", "R7 mm", str(BF16), str(F32)] is expected["habana", "R5 mul_", str(BF16), str(F32)] is BF16


def test_r6_a_result_arrives_in_out_in_its_dtype() -> None:
    for device in each_device():
        a, out, empty = on(device, 2, 2), on(device, 2, 2), on(device, 0)
        with hmp.casts("habana"), Trace() as trace:
            assert torch.matmul(a, a, out=out) is out
            assert torch.softmax(on(device, 2, 2, dtype=BF16), -1, out=empty) is empty
        assert out.dtype is empty.dtype is F32 and empty.shape == (2, 2)
        wide = device == "cpu" and computes_in_float32(BF16)
        assert [seen[0] for name, seen in trace.calls if name == "mm"] == [F32 if wide else BF16]


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
            first, *others = [a for a in trace.arguments(f"native_{name}") if isinstance(a, torch.dtype)]
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
        assert trace.arguments("masked_fill")[-1] == LOW_LOWEST
        with hmp.casts("habana"), Trace() as trace:
            assert ((1.0 - low) * LOWEST).dtype is BF16
        assert F32 in trace.arguments("mul") and LOW_LOWEST in trace.arguments("clamp")
        with hmp.casts(policy(bf16=["add"])), Trace() as trace:
            assert (low + mask).dtype is BF16
        assert LOW_LOWEST in trace.arguments("clamp")  # the mask is cast saturating
        with hmp.casts(policy(dtype=F16)), Trace() as trace:
            low.to(F16).clamp(min=-1e9)
        assert torch.finfo(F16).min in trace.arguments("clamp")


def test_r17_autocast_of_the_device_is_answered_for_and_its_disabled_region_acts_as_disable_casts() -> None:
    for device in each_device():
        x = on(device, 3, 3)
        with hmp.casts("habana"):
            assert torch.is_autocast_enabled(device)
            assert torch.get_autocast_dtype(device) is BF16
            with torch.autocast(device, enabled=False):
                assert not torch.is_autocast_enabled(device)
                assert torch.matmul(x, x).dtype is F32
            assert torch.matmul(x, x).dtype is BF16


def transformer_block(device: str) -> list[torch.dtype]:
    """A block of a model, by functional calls; the dtype after each of them."""
    x, w, tokens = on(device, 2, 4, 8), on(device, 8, 8), index(device, 2, 4)
    seen = [F.embedding(tokens, on(device, 9, 8)), F.layer_norm(x, (8,))]
    q, k, v = (F.linear(seen[-1], w) for _ in range(3))
    scores = q @ k.transpose(-1, -2) / 8**0.5 + (1 - on(device, 4, 4)) * LOWEST
    seen += [q, scores, F.softmax(scores, -1), F.softmax(scores, -1).type_as(v) @ v]
    seen += [F.gelu(F.linear(seen[-1], w)), torch.cat([seen[-1], x]), x.mean(-1).pow(2).rsqrt()]
    seen += [F.cross_entropy(F.linear(x, w).flatten(0, 1), index(device, 8)), F.mse_loss(x, x), F.conv1d(x, on(device, 3, 4, 1))]
    x += seen[0]
    return [t.dtype for t in (*seen, x)]


@pytest.mark.native_kernels  # a CPU that computes in float32 has casts to it besides
@pytest.mark.parametrize("name", ["habana-o2", "autocast"])
def test_a_preset_casts_on_every_device_what_it_casts_on_the_cpu(name: str) -> None:
    found = {}
    for device in EVERY:
        with fake_tensors(), hmp.casts(hmp.Policy.load(name).unscoped), Trace() as trace:
            found[device] = transformer_block(device), trace.casts()
    for device in DEVICES:
        assert found[device] == found["cpu"], device
    assert found["cpu"][1], "this preset casts nothing here"


# --- the meta device: plain tensors without values


def test_rules_hold_on_the_meta_device() -> None:
    # before torch 2.13 computed there by Python code of torch's, whose products and sums are cast
    in_python = {"bce"} if TORCH < (2, 13) else set()
    with hmp.casts("habana"):
        for name, (call, wanted) in LISTED.items():
            if name not in in_python:
                assert call(on("meta", 4, 4)).dtype is call(on("meta", 4, 4, dtype=BF16)).dtype is wanted, name
        x, low = on("meta", 3, 3), on("meta", 3, 3, dtype=BF16)
        assert low.mul_(x) is low and low.dtype is BF16
        assert torch.matmul(x, x, out=on("meta", 3, 3)).dtype is F32
        assert torch.cat([low, x]).dtype is F32
        assert torch.linalg.inv(low).dtype is F32 and torch.fft.fft(low).dtype is torch.complex64
        refused(lambda: x.t().add_(1))
        assert transformer_block("meta") == transformer_block("cpu")


def test_gradients_on_the_meta_device_have_their_leafs_dtype() -> None:
    x, w = (on("meta", 3, 3).requires_grad_() for _ in range(2))
    low = on("meta", 3, 3, dtype=BF16).requires_grad_()
    with hmp.casts("habana"):
        (gradient,) = torch.autograd.grad(torch.softmax(F.linear(x, w) * low, -1).sum(), w, create_graph=True)
        gradient.sum().backward()
    assert gradient.dtype is x.grad.dtype is w.grad.dtype is F32 and low.grad.dtype is BF16


def test_a_module_built_on_the_meta_device_runs() -> None:
    model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, device="meta")
    hmp.convert()
    later = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, device="meta")
    for each in (model, later):
        assert {p.dtype for p in each.parameters()} == {F32}
        assert each(on("meta", 2, 4, 8)).dtype is each.eval()(on("meta", 2, 4, 8)).dtype
