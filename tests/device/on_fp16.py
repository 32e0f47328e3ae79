"""float16 training with torch.amp.GradScaler: losses, scales and weights are those of plain torch with every cast written out."""

from __future__ import annotations

import pytest
import torch

import hmp
from device_kit import DEVICE, F16, F32, Net, PlainHalf, all_same, batch, lists, loss_of, parameters, synchronize, tensor

STEPS, OVERFLOW = 12, 5
INITIAL = 2.0**12


def train(net: torch.nn.Module, *, clip: bool = False, fused: bool = False) -> tuple[list[torch.Tensor], list[float], list[bool]]:
    """Losses and weights, the scale after each step, and whether the step moved the weights. One batch overflows float16."""
    scaler = torch.amp.GradScaler(DEVICE, init_scale=INITIAL, growth_interval=4)
    optimizer = (
        torch.optim.AdamW(net.parameters(), lr=0.001, fused=True) if fused else torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    )
    losses, scales, moved = [], [], []
    for step in range(STEPS):
        x, y = batch(10 * step)
        before = parameters(net)
        loss = loss_of(net, x * 1e6 if step == OVERFLOW else x, y)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        synchronize()  # XLA would else compute each step anew in the next one
        losses.append(loss.detach().clone())
        scales.append(scaler.get_scale())
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, parameters(net), strict=True)))
    return losses + parameters(net), scales, moved


def _agree(**options: bool) -> str:
    want, wanted_scales, wanted_moves = train(PlainHalf(), **options)
    with hmp.convert(policy=lists(F16)):
        got, scales, moved = train(Net(), **options)
    assert scales == wanted_scales and moved == wanted_moves, (scales, wanted_scales, moved, wanted_moves)
    assert not moved[OVERFLOW] and sum(moved) >= STEPS - 3, moved
    assert scales[OVERFLOW] == scales[OVERFLOW - 1] / 2, scales
    assert max(scales) > INITIAL, scales  # it grew, too
    assert not all(bool(t.isfinite().all()) for t in want[OVERFLOW : OVERFLOW + 1]), "nothing overflowed"
    assert all(p.dtype is F32 and bool(p.isfinite().all()) for p in got[STEPS:])
    all_same(got, want, f"{options}")
    return "scales " + " ".join(f"{scale:g}" for scale in scales)


def test_a_step_that_overflows_is_skipped_and_the_scale_halves_with_clipped_gradients_too() -> None:
    _agree()
    print(_agree(clip=True))


def test_it_does_so_with_a_fused_optimizer() -> None:
    """A fused optimizer gets the scale and the overflow on the device, and asks nobody."""
    weight = tensor(2, grad=True)
    weight.sum().backward()
    try:
        torch.optim.AdamW([weight], fused=True).step()
    except RuntimeError as error:
        pytest.skip(f"torch has no fused optimizer here: {error}")
    print(_agree(fused=True))
