"""Quantization-aware training under hmp: the flows of torch.ao run, and fake quantization computes what it computes in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.ao.quantization as ao
import torch.ao.quantization.quantize_fx as ao_fx
from torch import nn

import hmp

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


class Eager(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.layers = ao.QuantStub(), ao.DeQuantStub(), layers()
        self.functional = torch.ao.nn.quantized.FloatFunctional()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(self.quant(x))
        return self.dequant(self.functional.add(y, y))


def layers() -> nn.Sequential:
    convolution = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()
    return nn.Sequential(*convolution, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


def eager() -> nn.Module:
    model = Eager().train()
    model.layers = ao.fuse_modules_qat(model.layers, [["0", "1", "2"]])
    model.qconfig = ao.get_default_qat_qconfig("x86")
    return ao.prepare_qat(model)


def fx() -> nn.Module:
    return ao_fx.prepare_qat_fx(layers().train(), ao.get_default_qat_qconfig_mapping("x86"), (torch.ones(2, 3, 6, 6),))


@pytest.mark.parametrize(
    ("prepare", "convert", "policy"),
    [
        pytest.param(eager, ao.convert, "habana", id="eager"),
        pytest.param(fx, ao_fx.convert_fx, hmp.Policy("all", bf16={"*"}), id="fx", marks=pytest.mark.slow),
    ],
)
def test_a_prepared_model_trains_and_converts(prepare, convert, policy) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6)
    model = prepare()
    with hmp.casts(policy):
        model(x).float().square().mean().backward()
        assert all(p.grad.isfinite().all() and p.grad.dtype is torch.float32 for p in model.parameters())
        quantized = convert(model.eval())
        trained = model(x)
        got = quantized(x)
    torch.testing.assert_close(got.float(), trained.float(), rtol=0.1, atol=0.1)
