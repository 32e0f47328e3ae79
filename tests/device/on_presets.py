"""hmp.apply(model) without a policy is torch.autocast of the device: the same bits forward and backward, on small networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hmp
from device_kit import BF16, DEVICE, F16, F32, ON_CUDA, all_same, preset, same, synchronize, tensor


class Recurrent(torch.nn.Module):
    def __init__(self, kind: Callable[..., torch.nn.Module]) -> None:
        super().__init__()
        self.inner = kind(32, 64, num_layers=2, batch_first=True, bidirectional=True)
        self.head = torch.nn.Linear(128, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x)[0])


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = torch.nn.LayerNorm(32), torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each[:, None] for each in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


def _mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8))


def _conv() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Conv2d(16, 16, 3),
        torch.nn.GroupNorm(4, 16), torch.nn.SiLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 8),
    )  # fmt: skip


def _encoder() -> torch.nn.Module:
    return torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)


# XLA compiles each step of a recurrent net
SEQUENCES, IMAGES = (4, 4 if DEVICE == "xla" else 16, 32), (2, 3, 16, 16)
MODELS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "mlp": (_mlp, SEQUENCES),
    "convolutions": (_conv, IMAGES),
    "attention": (Attention, SEQUENCES),
    "encoder layer": (_encoder, SEQUENCES),
    "lstm": (lambda: Recurrent(torch.nn.LSTM), SEQUENCES),
    "gru": (lambda: Recurrent(torch.nn.GRU), SEQUENCES),
    "rnn": (lambda: Recurrent(torch.nn.RNN), SEQUENCES),
}
RECURRENT = ("lstm", "gru", "rnn")


def _build(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = make()
    return model.to(DEVICE), tensor(*shape, seed=4)


def _run(name: str, region: Callable[[torch.nn.Module], Any], training: bool) -> list[torch.Tensor]:
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


def _autocast(dtype: torch.dtype | None) -> Callable[[torch.nn.Module], Any]:
    def region(model: torch.nn.Module) -> Any:
        def call(x: torch.Tensor) -> torch.Tensor:
            # a cast for each use, whose gradients are summed in float32 as hmp sums those of a recurrent op's steps (R21)
            with torch.autocast(DEVICE, dtype=dtype, cache_enabled=False):
                return model(x)

        return call

    return region


def _written_out(dtype: torch.dtype) -> Callable[[torch.nn.Module], Any]:
    """Every parameter and the input cast: torch.autocast runs cuDNN's recurrent nets in float16, whatever its dtype is."""

    def region(model: torch.nn.Module) -> Any:
        def call(x: torch.Tensor) -> torch.Tensor:
            low = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
            found: torch.Tensor = torch.func.functional_call(model, low, (x.to(dtype),))
            return found

        return call

    return region


def _near(got: list[torch.Tensor], want: list[torch.Tensor], what: str) -> None:
    """Equal results; gradients but for rounding: oneDNN gives those of an LSTM's weights in float32, which torch.autocast rounds. Where no
    kernel computes a whole recurrent net torch.autocast casts its input for each direction, and hmp once."""
    same(got[0], want[0], what)
    for number, (one, other) in enumerate(zip(got[1:], want[1:], strict=True)):
        one, other = one.cpu().double(), other.cpu().double()
        apart = float((one - other).norm() / other.norm())
        assert apart < 0.01, f"{what}, gradient {number}: {apart} away"


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
    by_hand = ON_CUDA and name in RECURRENT and dtype is not F16
    near = training and (by_hand or name == "lstm" or (DEVICE == "pretend" and name in RECURRENT))
    policy = hmp.Policy.load("autocast").replace(dtype=dtype)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):  # both sides choose the same kernels
        try:
            want = _run(name, (_written_out if by_hand else _autocast)(dtype), training)
        except RuntimeError as error:
            pytest.skip(f"torch.autocast raises: {error}")
        (_near if near else all_same)(_run(name, lambda model: hmp.apply(model, policy), training), want, name)


def _low_dtype() -> torch.dtype:
    """bfloat16 on GPUs with instructions for it, else torch.autocast's own default."""
    return BF16 if DEVICE == "cuda" and torch.cuda.get_device_capability()[0] >= 8 else torch.get_autocast_dtype(DEVICE)


def test_the_low_dtype_is_bfloat16_and_of_torch_s_own_lists_torch_s_own_default() -> None:
    """float16 on CUDA; and torch answers so when it is asked where hmp casts."""
    model, x = _build("mlp")
    plain, said = _autocast(None)(model)(x).dtype, []
    for policy, wanted in (("autocast", _low_dtype()), (preset(), plain)):
        with hmp.casts(policy):
            got = model(x).dtype
            assert got is wanted, (policy, got, wanted)
            assert torch.is_autocast_enabled(DEVICE)
            assert torch.get_autocast_dtype(DEVICE) is wanted
        said.append(f"{policy} {got}")
    print(", ".join(said))
