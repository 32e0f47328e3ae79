"""hmp.apply(model) without a policy is torch.autocast of the device: the same bits forward and backward, on small networks.

Recurrent ones: on_rules.py.
"""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import devices_here
import hmp
from device_kit import BF16, DEVICE, F16, F32, all_same, apart, preset, synchronize, tensor


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each[:, None] for each in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


def _conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3),
        nn.GroupNorm(4, 16), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8),
    )  # fmt: skip


SEQUENCES, IMAGES = (4, 16, 32), (2, 3, 16, 16)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)), SEQUENCES),
    "convolutions": (_conv, IMAGES),
    "attention": (Attention, SEQUENCES),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), SEQUENCES),
}


def _build(name: str) -> tuple[nn.Module, torch.Tensor]:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = make()
    return model.to(DEVICE), tensor(*shape, seed=4)


def _run(name: str, region: Callable[[nn.Module], Any], training: bool) -> list[torch.Tensor]:
    """The result and, in training, the gradients and the statistics."""
    model, x = _build(name)
    model.train(training)
    call = region(model)
    if not training:
        with torch.no_grad():
            return [call(x)]
    x.requires_grad_()
    y = call(x)
    loss = F.mse_loss(y.float(), torch.zeros_like(y, dtype=F32))
    loss.backward()
    assert x.grad is not None
    synchronize()  # XLA compiles equal steps once
    found = [p.grad for p in model.parameters()]
    assert all(g is not None and g.dtype is F32 for g in found), "a gradient is missing or narrowed"
    return [y, x.grad, *found, *(b for b in model.buffers() if b.is_floating_point())]


def _autocast(dtype: torch.dtype | None) -> Callable[[nn.Module], Any]:
    def region(model: nn.Module) -> Any:
        def call(x: torch.Tensor) -> torch.Tensor:
            # a cast for each use, whose gradients hmp sums in float32
            with torch.autocast(DEVICE, dtype=dtype, cache_enabled=False):
                return model(x)

        return call

    return region


def _has_float16() -> bool:
    model, x = _build("mlp")
    return _autocast(F16)(model)(x).dtype is F16


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("name", MODELS)
def test_apply_equals_torch_autocast(name: str, training: bool, dtype: torch.dtype) -> None:
    if name == "encoder layer" and not training:
        pytest.skip("in eval hmp gives it the precision of training (R8), torch.autocast takes its fast path")
    if dtype is F16 and not _has_float16():
        pytest.skip(f"torch.autocast({DEVICE!r}) has no float16 here")
    policy = hmp.Policy.load("autocast").replace(dtype=dtype)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):  # both sides choose the same kernels
        try:
            want = _run(name, _autocast(dtype), training)
        except RuntimeError as error:
            pytest.skip(f"torch.autocast raises: {error}")
        ours = _run(name, lambda model: hmp.apply(model, policy), training)
    if DEVICE != "xla":
        all_same(ours, want, name)
    else:  # which fuses other ops where a cast is used again, and sums in another order
        assert [t.dtype for t in ours] == [t.dtype for t in want]
        assert apart(*(torch.cat([t.float().flatten() for t in found]) for found in (ours, want))) < 0.02


def test_the_low_dtype_is_bfloat16_and_of_torch_s_own_lists_torch_s_own_default() -> None:
    """float16 on CUDA; and torch answers so when it is asked where hmp casts."""
    model, x = _build("mlp")
    plain, said = _autocast(None)(model)(x).dtype, []
    # bfloat16 on GPUs with instructions for it, else torch.autocast's own default
    low = BF16 if DEVICE == "cuda" and torch.cuda.get_device_capability()[0] >= 8 else torch.get_autocast_dtype(DEVICE)
    for policy, wanted in (("autocast", low), (preset(), plain)):
        with hmp.casts(policy):
            got = model(x).dtype
            assert got is wanted, (policy, got, wanted)
            assert torch.is_autocast_enabled(DEVICE)
            assert torch.get_autocast_dtype(DEVICE) is wanted
        said.append(f"{policy} {got}")
    print(", ".join(said))


def test_the_lists_are_what_torch_answers() -> None:
    if preset() != f"torch-{DEVICE}" or preset() not in hmp.policies():
        pytest.skip(f"hmp keeps no lists of torch.autocast({DEVICE!r})")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as said:
        sys.argv[1:] = [preset(), folder]
        runpy.run_path(str(devices_here.ROOT / ".ci" / "autocast-lists"))
        kept = hmp.Policy.load(preset())
        assert hmp.Policy.load(folder).replace(name=kept.name) == kept
    assert kept == hmp.Policy.load("autocast")
    print(said.getvalue())
