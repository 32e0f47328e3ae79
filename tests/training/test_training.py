"""Training loops under every shipped policy; the fast path is on again where casts are off; quantization-aware training under hmp.

The flows of torch.ao run, and fake quantization computes what it computes in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.ao.quantization as ao
import torch.nn.functional as F

import hmp
from trap_kit import same

LOW, HALF, WIDE = torch.bfloat16, torch.float16, torch.float32


class Net(torch.nn.Module):
    """A little of everything: convolution, norms, attention, recurrence, embedding, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.BatchNorm2d(8)
        self.embed = torch.nn.Embedding(4, 8)
        self.encoder = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.gru = torch.nn.GRU(8, 8, batch_first=True)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, image, token):
        x = F.max_pool2d(F.relu(self.norm(self.conv(image))), 2)
        x = x.flatten(2).transpose(1, 2) + self.embed(token)[:, None]
        x, _ = self.gru(self.encoder(x))
        return self.head(F.dropout(x.mean(1), 0.1, self.training))


def _data():
    generator = torch.Generator().manual_seed(0)
    image, token = torch.randn(16, 1, 4, 4, generator=generator), torch.randint(0, 4, (16,), generator=generator)
    return image, token, (image.mean((1, 2, 3)) > 0).long() + (token > 1).long()


NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in hmp.policies() if name != "habana"]


@pytest.mark.parametrize("name", ["habana", *NIGHTLY])
def test_training_in_float16_with_a_scaler_falls_under_every_shipped_policy(name):
    image, token, target = _data()
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    losses = []
    with hmp.casts(hmp.Policy.load(name).unscoped.replace(dtype=HALF)):
        for _ in range(50):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(image, token), target)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    assert all(torch.isfinite(torch.tensor(losses)))
    assert sum(losses[-5:]) / 5 < 0.7 * sum(losses[:5]) / 5, losses
    assert {p.dtype for p in model.parameters()} == {WIDE} == {b.dtype for b in model.buffers() if b.is_floating_point()}
    assert scaler.get_scale() >= 2.0**8


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
