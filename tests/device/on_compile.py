"""torch.compile under hmp on the device: what is compiled computes what runs uncompiled, by the backends that work here."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
import torch.nn.functional as F

import hmp
from device_kit import BF16, Net, all_same, batch, gradients, lists, loss_of, on_cuda, synchronize, tensor


def _compiles(backend: str) -> None:
    """NotRun where torch cannot compile by this backend here: no compiler, no Triton."""
    x = tensor(4, 4)
    logging.getLogger("torch._inductor").setLevel(logging.CRITICAL)
    try:
        torch.compile(lambda t: t * 2 + 1, backend=backend)(x)
    except Exception as error:
        pytest.skip(f"{backend} does not work here, without hmp too: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
    finally:
        torch._dynamo.reset()


def _steps(backend: str | None, count: int = 4) -> list[torch.Tensor]:
    net = Net()
    model = net if backend is None else torch.compile(net, backend=backend)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    seen = []
    for number in range(count):
        loss = loss_of(model, *batch(10 * number))
        loss.backward()
        seen += [loss.detach().clone(), *gradients(net)]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            y = model(batch(5)[0])
            assert y.dtype is BF16, y.dtype
            seen.append(y.clone())
        synchronize()  # XLA would else compute each step anew in the next one
    return seen


def _converted(backend: str | None) -> list[torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of releases whose Dynamo hmp does not know
        with hmp.convert(policy=lists()):
            return _steps(backend)


def test_eager_and_aot_eager_have_the_bits_of_uncompiled_code() -> None:
    want = _converted(None)
    for backend in ("eager", "aot_eager"):
        _compiles(backend)
        all_same(_converted(backend), want, backend)


def test_inductor_is_close_to_eager_and_follows_the_weights() -> None:
    """Fused kernels round less often: dtypes are equal, values close."""
    _compiles("inductor")
    got, want = _converted("inductor"), _converted(None)
    apart = 0.0
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        assert one.dtype is other.dtype, (number, one.dtype, other.dtype)
        difference = float((one.float() - other.float()).norm() / other.float().norm().clamp_min(1e-12))
        assert difference < 0.02, (number, difference)
        apart = max(apart, difference)
    print(f"at most {apart:.1e} of the norm apart")


@on_cuda("its graphs are CUDA's")
def test_reduce_overhead_follows_the_weights() -> None:
    """mode="reduce-overhead": inductor's own CUDA graphs."""
    _compiles("inductor")
    weight = torch.nn.Parameter(tensor(256, 256) / 16)
    x = tensor(8, 256, seed=1)
    with hmp.convert(policy=lists()), torch.no_grad():
        compiled = torch.compile(lambda t: F.linear(t, weight), mode="reduce-overhead")
        for number in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(x).clone()
            with hmp.disable_casts():
                want = F.linear(x.to(BF16), weight.to(BF16))
            assert float((got.float() - want.float()).abs().max()) <= 0.02 * float(want.abs().max()), number
            weight.mul_(-1.5)
    print("six calls")
