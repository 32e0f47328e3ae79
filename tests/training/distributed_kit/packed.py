"""Run by torchrun, with modes: one step with a saved list in each of them, beside the same step of one process. Writes a list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import parallel_modes as modes
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import measured
from torch import Tensor

import hmp
import saved_oracle as oracle

ROWS = 64  # of each rank: 12,288 numbers behind the first product
EIGHT = hmp.Policy("eight bits", saved={"gelu", "linear"}, saved_recipe="int8")


class Net(modes.Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def share(rank: int) -> Tensor:
    return torch.randn(ROWS, modes.WIDTH, generator=torch.Generator().manual_seed(rank))


def quantised(net: Net, x: Tensor) -> Tensor:
    """The net in plain autograd, whose backward gets quantised tensors, but for the batch."""
    hidden = oracle.Gelu.apply(F.linear(x, net.up.weight, net.up.bias), "int8")
    return oracle.Linear.apply(hidden, net.down.weight, net.down.bias, "int8")


def gradients(forward: Callable[[Net, Tensor], Tensor], ranks: int) -> list[Tensor]:
    """The mean over the ranks' shares, each computed by itself, in this process."""
    means: list[Tensor] = []
    for rank in range(ranks):
        net = modes.fresh(Net)
        forward(net, share(rank)).float().square().sum().backward()
        own = [p.grad / ranks for p in net.parameters()]
        means = [a + b for a, b in zip(means, own, strict=True)] if means else own
    return means


def measure(mode: str, rank: int, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {"mode": mode}
    x = share(rank)
    sides = {
        "eight": (EIGHT, quantised, hmp.Policy("nothing")),
        "saved8": (hmp.Policy.load("saved8"), lambda net, x: hmp.apply(net, "saved8")(x), hmp.Policy.load("autocast")),
    }
    for name, (policy, alone, unpacked) in sides.items():
        with hmp.casts(unpacked):
            plain, exact = modes.fresh(Net)(x), gradients(lambda net, x: net(x), ranks)
        expected = gradients(alone, ranks)
        model = modes.MODES[mode](modes.fresh(Net)).model
        with hmp.casts(policy), hmp.record() as report:
            out = model(x)
            out.float().square().sum().backward()
        got = [modes.full(p.grad) for p in model.parameters()]
        found[name] = {
            "forward": torch.equal(out, plain),
            "gradients": [torch.equal(a, b) for a, b in zip(got, expected, strict=True)],
            "packed": [row.left < row.nbytes for row in report.kept if row.op == "gelu"],
            "fallbacks": hmp.fallbacks(),
        }
        found[name]["rounds"] = not torch.equal(expected[2], exact[2])
    return found


if __name__ == "__main__":
    measured(lambda names: [measure(mode, dist.get_rank(), dist.get_world_size()) for mode in names])
