"""A training step with its linear layers in FP8, if the device computes in FP8: time and memory against torch.autocast's."""

from __future__ import annotations

from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hmp
from hmp.fp8 import RECIPES
from hmp.fp8.kernels import is_real

from ..harness.results import Found, Row, at_most
from ..harness.sides import LOW, Side, autocast, policy_of, rotated, under_hmp
from ..harness.stats import paired_ratio
from ..harness.timing import WALL, step_seconds

WIDTH, HEADS, SEQUENCES, TOKENS = 4096, 32, 4, 1024
TARGET = 0.83  # 1.2 times as fast
TESTED = ("tensorwise", "rowwise")
_WHAT = f"training step, linear in FP8 ({{}}), two layers {WIDTH:,} wide, hmp / torch.autocast"


class Layer(nn.Module):
    """A layer of a transformer, without biases."""

    def __init__(self, width: int, heads: int, device: str) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, device=device) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False, device=device)
        self.out = nn.Linear(width, width, bias=False, device=device)
        self.up = nn.Linear(width, 4 * width, bias=False, device=device)
        self.down = nn.Linear(4 * width, width, bias=False, device=device)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def run(rounds: int, device: str) -> Found:
    """Return the rows about FP8, with "not measured" if the device would emulate it."""
    found = Found("fp8")
    real = [name for name in TESTED if is_real("auto", torch.device(device), RECIPES[name])]
    for name in TESTED:
        if name not in real:
            said = f"not measured: torch has no such kernel for {device} here, and emulated products say nothing about time"
            found.rows.append(Row(_WHAT.format(name), f"≤ {TARGET}", said, None))
    if real:
        measure(found, real, rounds, device)
    return found


def measure(
    found: Found, recipes: list[str], rounds: int, device: str, width: int = WIDTH, sequences: int = SEQUENCES, tokens: int = TOKENS
) -> None:
    """Time a step and, on CUDA, its peak of memory: torch.autocast, hmp with the same lists, and each recipe, in turns."""
    torch.manual_seed(0)
    heads = max(HEADS * width // WIDTH, 1)
    net = nn.Sequential(*(Layer(width, heads, device) for _ in range(2)))
    x = torch.randn(sequences, tokens, width, device=device)
    fp8 = hmp.Policy.load("fp8").unscoped
    sides: list[Side] = [autocast(device), under_hmp(hmp.Policy.load(policy_of(device)).replace(dtype=LOW))]
    sides += [under_hmp(fp8.replace(fp8_recipe=name), name) for name in recipes]

    def step(side: Side) -> None:
        side.run(lambda: net(x).float().square().mean()).backward()
        net.zero_grad(set_to_none=True)

    samples: dict[str, list[float]] = {side.name: [] for side in sides}
    peaks: dict[str, int] = {}
    for number in range(rounds):
        for side in rotated(sides, number):
            with side.visit():
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                samples[side.name].append(step_seconds(lambda side=side: step(side), 3, device, WALL))
                peaks[side.name] = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    found.samples |= samples
    found.details.append(f"two layers {width:,} wide, {sequences} x {tokens:,} tokens; medians of {rounds} rounds in turns")
    for side in sides:
        peak = f"   peak of memory {peaks[side.name] / 2**20:,.0f} MiB" if peaks[side.name] else ""
        found.details.append(f"{side.name:12} {1000 * median(samples[side.name]):9.2f} ms{peak}")
    for name in recipes:
        ratio = paired_ratio(samples[name], samples["autocast"])
        found.rows.append(at_most(_WHAT.format(name), TARGET, ratio, ratio.text()))
