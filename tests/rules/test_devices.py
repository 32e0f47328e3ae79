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
from op_table import BF16_LIST, FP32_LIST, Op
from oracle import BF16, F16, F32, castable, flat
from strategies import Leaf
from trap_kit import policy, refused

LOWEST = torch.finfo(F32).min
LOW_LOWEST = torch.finfo(BF16).min
EVERY = ("cpu", *DEVICES)


@pytest.fixture(params=EVERY)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each device's name, inside a mode in which tensors of it can be made."""
    with fake_tensors():
        yield request.param


# Some calls need a guard of the device, which is not here either: x[0] and x[None], batch norm in training, gradients. Views by
# method, functional calls and no gradients do not; tests/device has the rest.


def on(device: str, *shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.empty(shape, device=device, dtype=dtype)


def index(device: str, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, device=device, dtype=torch.long)


def results_of(ops: list[Op], device: str, dtypes: tuple[torch.dtype, ...]) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """The castable results of every op at every site. Left out are those whose indices stand on the CPU, in op_table.py."""
    for op in ops:
        for label, call in op.sites.items():
            if (op.name, label) in {("cross_entropy", "classes"), ("cross_entropy", "module")} or op.name in ("nll_loss", "embedding_bag"):
                continue
            turn = itertools.cycle(dtypes)
            args = [
                on(device, *a.shape, dtype=F32 if i in op.keep else next(turn)) if isinstance(a, Leaf) else a for i, a in enumerate(op.args)
            ]
            yield f"{op.name} {label}", castable(flat(call(*args)))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtypes", [(F32,), (BF16,), (F32, BF16)], ids=str)
def test_r1_r2_listed_ops_at_every_site(device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    if device == "cuda" and torch.version.cuda and not torch.cuda.is_available() and TORCH < (2, 11):
        pytest.skip("torch 2.7 and 2.9 built for CUDA ask the driver which convolution a fake tensor has, and there is none")
    with hmp.casts("habana"):
        for ops, dtype in ((BF16_LIST, BF16), (FP32_LIST, F32)):
            for name, results in results_of(ops, device, dtypes):
                assert results, name
                assert {r.dtype for r in results} == {dtype}, name
                assert {r.device.type for r in results} == {device}, name


def test_r2_look_ups_and_losses_with_indices_of_the_device(device: str) -> None:
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
LISTS = {
    "habana": "habana",
    "nothing": policy(),
    "wide": policy(fp32=["*"]),
    "R4": policy(bf16=["add"], promote=["add"]),
}
CALLS: dict[str, Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "R3 cat": lambda d, a, b: torch.cat([a, b]),
    "R3 add": lambda d, a, b: a + b,
    "R3 add a 0-dim tensor": lambda d, a, b: a + b.sum(),
    "R3 baddbmm": lambda d, a, b: torch.baddbmm(*(t.unsqueeze(0) for t in (a, b, b))),
    "R3 where": lambda d, a, b: torch.where(a > 0, a, b),
    "R5 mul_": lambda d, a, b: a.mul_(b),
    "R5 addmm_": lambda d, a, b: a.addmm_(b, b),
    "R5 index_put_": lambda d, a, b: a.index_put_((index(d, 2),), b.narrow(0, 0, 2)),
    "R5 scatter_": lambda d, a, b: a.scatter_(0, index(d, 3, 3), b),
    "R5 relu in place": lambda d, a, b: F.relu(a, True),
    "R5 dropout in place": lambda d, a, b: F.dropout(a, 0.5, True, inplace=True),
    "R5 out=": lambda d, a, b: torch.mul(a, b, out=a),
    "R7 mm": lambda d, a, b: torch.mm(a, b),
    "R7 conv1d": lambda d, a, b: F.conv1d(a.unsqueeze(0), b.unsqueeze(0)),
    "R7 index_add": lambda d, a, b: a.index_add(0, index(d, 3), b),
    "R7 bilinear": lambda d, a, b: F.bilinear(a, b, on(d, 2, 3, 3)),
    "R7 lerp": lambda d, a, b: torch.lerp(a, b, 0.5),
    "R7 prelu": lambda d, a, b: F.prelu(a, b.select(0, 0)),
    "R7 huber_loss": lambda d, a, b: F.huber_loss(a, b),
    "R14": lambda d, a, b: hmp.disable_casts(F.layer_norm)(torch.softmax(a, -1), (3,)),
}


def dtypes_of_calls(device: str) -> dict[tuple[str, ...], torch.dtype]:
    """What each call gives, by the name of the lists, of the call, and of the two dtypes."""
    found = {}
    for lists, each in LISTS.items():
        with hmp.casts(each):
            for (name, call), dtypes in itertools.product(CALLS.items(), ((BF16, F32), (F32, BF16), (BF16, F16), (BF16, BF16))):
                result = call(device, *(on(device, 3, 3, dtype=dtype) for dtype in dtypes))
                assert result.device.type == device
                found[(lists, name, *map(str, dtypes))] = result.dtype
    return found


@pytest.mark.slow
def test_r3_r4_r5_r7_r14_have_on_every_device_the_dtypes_that_they_have_on_the_cpu() -> None:
    with fake_tensors():
        expected = dtypes_of_calls("cpu")
        for device in ("cuda", "hpu"):  # one whose kernels torch has, one that registers its own
            assert dtypes_of_calls(device) == expected, device
    assert {expected["habana", "R3 add", str(BF16), str(F16)], expected["nothing", "R7 mm", str(F32), str(BF16)]} == {F32}
    assert expected["nothing", "R7 mm", str(BF16), str(F32)] is expected["wide", "R5 mul_", str(BF16), str(F32)] is BF16


def test_r6_a_result_arrives_in_out_in_its_dtype(device: str) -> None:
    a, out, empty = on(device, 2, 2), on(device, 2, 2), on(device, 0)
    with hmp.casts("habana"), Trace() as trace:
        assert torch.matmul(a, a, out=out) is out
        assert torch.softmax(on(device, 2, 2, dtype=BF16), -1, out=empty) is empty
    assert out.dtype is empty.dtype is F32 and empty.shape == (2, 2)
    assert [seen[0] for name, seen in trace.calls if name == "mm"] == [F32 if device == "cpu" and computes_in_float32(BF16) else BF16]


AFFINE = {
    # what the device's kernel takes beside a low input: where it has no mixed kernel weight and bias are cast as well (R9)
    "layer_norm": {"cuda": BF16, "xpu": BF16},
    "group_norm": {"cuda": BF16, "xpu": BF16},
    "batch_norm": {},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", AFFINE)
def test_r9_weights_of_norms_stay_float32_where_the_device_has_a_mixed_kernel(device: str, name: str) -> None:
    x, w = on(device, 2, 4, 5), on(device, 4)
    arrives_at = {"layer_norm": "native_layer_norm", "group_norm": "native_group_norm", "batch_norm": "native_batch_norm"}[name]
    mean, var = on(device, 4), on(device, 4)
    with hmp.casts("habana"), Trace() as trace:
        y = {
            "layer_norm": lambda: F.layer_norm(x, (4, 5), on(device, 4, 5), on(device, 4, 5)),
            "group_norm": lambda: F.group_norm(x, 2, w, w),
            "batch_norm": lambda: F.batch_norm(x, mean, var, w, w),
        }[name]()
    first, *others = [a for a in trace.arguments(arrives_at) if isinstance(a, torch.dtype)]
    assert y.dtype is first is BF16
    assert set(others) == {AFFINE[name].get(device, F32)}
    assert mean.dtype is var.dtype is F32


NO_KERNEL: dict[str, tuple[Callable[[torch.Tensor], Any], set[str]]] = {
    # op → where it is known to have no kernel for bfloat16, or says so when it is asked
    "fft.fft": (lambda x: torch.fft.fft(x), set(EVERY)),
    "fft.rfftn": (lambda x: torch.fft.rfftn(x), set(EVERY)),
    "linalg.inv": (lambda x: torch.linalg.inv(x), set(EVERY)),
    "linalg.eigh": (lambda x: torch.linalg.eigh(x)[0], set(EVERY)),
    "Tensor.logdet": (lambda x: x.logdet(), set(EVERY)),
    "svd": (lambda x: torch.linalg.svd(x)[1], set(EVERY)),
    # until torch 2.11 it asks for values, which fake tensors have not
    **({"quantile": (lambda x: x.quantile(0.5), set(EVERY))} if TORCH >= (2, 13) else {}),
    "special.bessel_j0": (lambda x: torch.special.bessel_j0(x), set(EVERY)),
    "avg_pool3d": (lambda x: F.avg_pool3d(x.reshape(1, 1, 4, 4), (1, 2, 2)), {"cpu"}),
    "histc": (lambda x: torch.histc(x), {"cuda"}),
    "igamma": (lambda x: torch.igamma(x, x), {"cuda"}),
    "norm(nuc)": (lambda x: torch.norm(x, "nuc"), set(EVERY)),
    "relu": (lambda x: torch.relu(x), set()),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lists", ["habana", "nothing"])
def test_r11_an_op_without_a_kernel_runs_in_float32_on_the_devices_that_have_none(device: str, lists: str) -> None:
    logging.getLogger("hmp").setLevel(logging.ERROR)
    x = on(device, 4, 4, dtype=BF16)
    with hmp.casts(policy() if lists == "nothing" else lists):
        for name, (call, devices) in NO_KERNEL.items():
            result = call(x)
            wide = torch.complex64 if result.is_complex() else F32
            assert result.dtype is (wide if device in devices else BF16), name
            assert result.device.type == device, name
        assert set(hmp.fallbacks()) >= {"fft.fft", "norm"} and ("histc" in hmp.fallbacks()) == (device == "cuda")
    logging.getLogger("hmp").setLevel(logging.NOTSET)


def test_r12_scalars_and_masks_beyond_the_low_dtype_arrive_within_it(device: str) -> None:
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


def test_r17_autocast_of_the_device_is_answered_for_and_its_disabled_region_acts_as_disable_casts(device: str) -> None:
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
@pytest.mark.slow
@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", hmp.policies())
def test_every_preset_casts_on_every_device_what_it_casts_on_the_cpu(name: str) -> None:
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
    in_python = {"binary_cross_entropy_with_logits"} if TORCH < (2, 13) else set()
    with hmp.casts("habana"):
        for ops, dtype in ((BF16_LIST, BF16), (FP32_LIST, F32)):
            for name, results in results_of([op for op in ops if op.name not in in_python], "meta", (F32, BF16)):
                assert {r.dtype for r in results} == {dtype}, name
        x, low = on("meta", 3, 3), on("meta", 3, 3, dtype=BF16)
        assert low.mul_(x) is low and low.dtype is BF16
        assert torch.matmul(x, x, out=on("meta", 3, 3)).dtype is F32
        assert torch.cat([low, x]).dtype is F32
        assert torch.linalg.inv(low).dtype is F32 and torch.fft.fft(low).dtype is torch.complex64
        refused(lambda: x.t().add_(1))
    with hmp.casts("habana"):
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
