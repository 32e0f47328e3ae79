"""What the tests of the innermost policy share: a model with a head in float32, lists that say so, and its numbers in plain torch."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from autocast_kit import BF16, F32, HERE, OFF, real_state
from trap_kit import policy

# matmul is on torch.autocast's low list, so that its dtype tells who has the last word
FULL = policy(fp32=["matmul"], name="full")
X = torch.randn(3, 3)
ON = ((True, BF16), *OFF[1:])


def autocast(dtype: torch.dtype = BF16) -> torch.autocast:
    return torch.autocast(HERE, dtype=dtype)


def closing_over(forward):
    """A function that calls `forward` inside a region of torch.autocast."""

    def wrapped(*args, **kwargs):
        with autocast():
            return forward(*args, **kwargs)

    return wrapped


def matmuls() -> torch.dtype:
    return torch.matmul(X, X).dtype


class Head(nn.Module):
    """A body in bfloat16 and a head in float32, by the lists of `write_lists()`."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.lm_head = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.lm_head(self.body(x))


class OwnRegion(Head):
    """One whose own code opens a region of torch.autocast."""

    def forward(self, x):
        with autocast():
            return super().forward(x)


def write_lists(folder: Path) -> Path:
    """The folder, which holds lists for `Head`."""
    (folder / "bf16.txt").write_text("linear\n")
    (folder / "fp32.txt").write_text("linear @ lm_head\n")
    return folder


def by_hand(model: Head) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and gradient of the head in plain torch, body in bfloat16 and head in float32."""
    weight = model.lm_head.weight.detach().requires_grad_()
    hidden = F.linear(X.to(BF16), model.body.weight.to(BF16), model.body.bias.to(BF16))
    out = F.linear(hidden.float(), weight, model.lm_head.bias)
    return out.detach(), torch.autograd.grad(out.sum(), weight)[0]


def assert_by_the_lists(model: Head, call=None, enabled: bool = False) -> None:
    """`call`, or the model itself, gives the head's output and gradient in float32, and leaves torch.autocast as it was."""
    model.zero_grad()
    out = (model if call is None else call)(X)
    assert real_state()[0][0] is enabled
    with torch.autocast(HERE, enabled=False):  # backward is called outside of regions
        out.sum().backward()
        wanted = by_hand(model)
    assert out.dtype is F32
    torch.testing.assert_close(out.detach(), wanted[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(model.lm_head.weight.grad, wanted[1], rtol=0, atol=1e-6)
