"""The fast path of attention is on again where casts are off; quantization-aware training under hmp.

The flows of torch.ao run, and fake quantization computes what it computes in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.ao.quantization as ao

import hmp
from trap_kit import same


def test_the_fast_path_is_on_again_where_casts_are_off():
    layer, x = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 5, 8)
    with torch.no_grad():
        plain = layer(x)
        with hmp.casts("habana"):
            with hmp.disable_casts():
                assert torch.backends.mha.get_fastpath_enabled()
                same(layer(x), plain)
        hmp.convert()
        with hmp.disable_casts():
            same(layer(x), plain)
        hmp.revert()
        same(layer(x), plain)


pytestmark = pytest.mark.filterwarnings("ignore")  # torch.ao.quantization is deprecated
SCALE, ZERO = torch.ones(4) / 8, torch.zeros(4, dtype=torch.int32)
OBSERVED = (torch.zeros(1), torch.zeros(1), torch.ones(1), torch.zeros(1, dtype=torch.int32))  # which the op writes into


def fused(x: torch.Tensor) -> torch.Tensor:
    on = torch.ones(1, dtype=torch.int64)
    return torch.fused_moving_avg_obs_fake_quant(x, on, on, *(t.clone() for t in OBSERVED), 0.01, 0, 255, 0)


FAKE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "per channel": lambda x: torch.fake_quantize_per_channel_affine(x, SCALE, ZERO, 1, -128, 127),
    "per tensor": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.125, 0, -128, 127),
    "per tensor, scale as a tensor": lambda x: torch.fake_quantize_per_tensor_affine(x, SCALE[:1], ZERO[:1], -128, 127),
    "learnable per tensor": lambda x: torch._fake_quantize_learnable_per_tensor_affine(x, SCALE[:1], torch.zeros(1), -128, 127),
    "learnable per channel": lambda x: torch._fake_quantize_learnable_per_channel_affine(x, SCALE, torch.zeros(4), 1, -128, 127),
    "fused": fused,
    "quantize_per_tensor": lambda x: torch.quantize_per_tensor(x, 0.125, 0, torch.qint8).dequantize(),
    "quantize_per_channel": lambda x: torch.quantize_per_channel(x, SCALE, ZERO, 1, torch.qint8).dequantize(),
    "quantize_per_tensor_dynamic": lambda x: torch.quantize_per_tensor_dynamic(x, torch.qint8, False).dequantize(),
    "FusedMovingAvgObsFakeQuantize": lambda x: ao.FusedMovingAvgObsFakeQuantize()(x),
    "FakeQuantize": lambda x: ao.FakeQuantize()(x),
    "per channel FakeQuantize": lambda x: ao.default_per_channel_weight_fake_quant()(x),
    **{name: (lambda x, name=name: getattr(ao, name)()(x)) for name in ("MinMaxObserver", "PerChannelMinMaxObserver", "HistogramObserver")},
}


OLD_KERNELS = pytest.mark.skipif(torch.__version__ < (2, 10), reason="a kernel of this torch refuses gradients in low-precision dtypes")


@pytest.mark.parametrize(
    ("dtype", "listed"),
    [pytest.param(torch.bfloat16, {"*"}, marks=OLD_KERNELS, id="all listed"), pytest.param(torch.float16, set(), id="none listed")],
)
def test_a_low_input_is_quantized_as_it_is_in_float32(dtype: torch.dtype, listed: set[str]) -> None:
    x = torch.randn(2, 4).to(dtype)
    wanted = {name: call(x.float()) for name, call in FAKE.items()}
    with hmp.casts(hmp.Policy("of a test", dtype=dtype, bf16=listed)):
        for name, call in FAKE.items():
            leaf = x.clone().requires_grad_()
            got = call(leaf)
            if got.requires_grad:
                got.sum().backward()
                assert leaf.grad is not None and leaf.grad.dtype is dtype, name
            # results in the low-precision dtype are rounded
            torch.testing.assert_close(got.float(), wanted[name], rtol=2**-8, atol=2**-8, msg=lambda said, name=name: f"{name}: {said}")
