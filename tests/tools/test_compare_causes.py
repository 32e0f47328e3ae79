"""compare() measures what a move gains: in ten small models it names the op that loses the output's digits, as explicit casts show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hmp
from trap_kit import policy

Op = Callable[..., Any]
LOW = {"matmul", "linear", "mul", "add", "sub", "pow", "sum", "softmax", "cumsum", "exp", "log_softmax", "var", "norm"}


class Ops:
    """torch's ops with every cast written out: in bfloat16, but for those whose names are given, which compute in float32."""

    def __init__(self, wide: frozenset[str] = frozenset(), low: torch.dtype = torch.bfloat16) -> None:
        self.wide, self.low = wide, low

    def __call__(self, name: str, op: Op, *inputs: Any, **kwargs: Any) -> Any:
        dtype = torch.float32 if name in self.wide else self.low
        return op(*(each.to(dtype) if isinstance(each, Tensor) else each for each in inputs), **kwargs)


class Torch:
    """The ops as they are, for hmp to cast."""

    def __call__(self, name: str, op: Op, *inputs: Any, **kwargs: Any) -> Any:
        return op(*inputs, **kwargs)


class Cause(NamedTuple):
    op: str
    ops: tuple[str, ...]  # what the model runs on the BF16 list
    forward: Callable[[Any, dict[str, Tensor]], Tensor]
    tensors: Callable[[], dict[str, Tensor]]


def rotary(run: Any, t: dict[str, Tensor]) -> Tensor:
    """Angles of large positions."""
    angles = run("matmul", torch.matmul, t["positions"], t["frequencies"])
    return run("linear", F.linear, run("mul", torch.mul, t["x"], angles.float().cos()), t["w"])


def router(run: Any, t: dict[str, Tensor]) -> Tensor:
    """Experts whose scores are nearly the same."""
    scores = run("matmul", torch.matmul, t["x"], t["gate"])
    chosen = F.one_hot(scores.argmax(-1), scores.shape[-1]).float()
    return run("linear", F.linear, t["x"], t["w"]).float() * (chosen @ t["scale"])


def cumulated(run: Any, t: dict[str, Tensor]) -> Tensor:
    """A long cumulative sum, of which the differences count."""
    total = run("cumsum", torch.cumsum, t["x"].exp(), -1).float()
    return run("linear", F.linear, total[:, 8:] - total[:, :-8], t["w"])


def variance(run: Any, t: dict[str, Tensor]) -> Tensor:
    """The variance of values around a large mean."""
    y = run("add", torch.add, t["x"], t["mean"])
    return run("linear", F.linear, t["x"], t["w"]).float() / y.float().var(-1, keepdim=True).sqrt()


def distances(run: Any, t: dict[str, Tensor]) -> Tensor:
    """|a|² + |b|² - 2ab of points that are near to each other."""
    products = run("matmul", torch.matmul, t["a"], t["b"].T).float()
    squared = t["a"].square().sum(-1)[:, None] + t["b"].square().sum(-1) - 2 * products
    return run("linear", F.linear, torch.exp(-squared), t["w"])


def vocabulary(run: Any, t: dict[str, Tensor]) -> Tensor:
    """Logits of a large vocabulary, of which a softmax takes exp."""
    logits = run("matmul", torch.matmul, t["x"], t["table"]).float()
    return run("linear", F.linear, torch.softmax(logits, -1), t["w"])


def long_norm(run: Any, t: dict[str, Tensor]) -> Tensor:
    """What is left of a long vector's norm beyond that of another."""
    length = run("sum", torch.sum, t["x"].square(), -1).float()
    return run("linear", F.linear, t["y"], t["w"]).float() * (length - length.mean())[:, None]


def timestep(run: Any, t: dict[str, Tensor]) -> Tensor:
    """A diffusion model's embedding of its timesteps."""
    angles = run("mul", torch.mul, t["steps"][:, None], t["frequencies"])
    return run("linear", F.linear, angles.float().sin(), t["w"])


def mask(run: Any, t: dict[str, Tensor]) -> Tensor:
    """A bias of distances that is added to large scores before their softmax."""
    scores = run("add", torch.add, t["scores"], t["bias"]).float()
    return run("linear", F.linear, torch.softmax(scores, -1), t["w"])


def grid(run: Any, t: dict[str, Tensor]) -> Tensor:
    """Coordinates of a large image, of which the parts of a pixel count."""
    places = run("sub", torch.sub, t["places"], t["origin"]).float()
    return run("linear", F.linear, places - places.floor(), t["w"])


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape)


CAUSES = {
    "rotary angles": Cause("matmul", ("matmul", "mul", "linear"), rotary, lambda: {
        "positions": 60_000 + torch.arange(64.0)[:, None], "frequencies": 10_000.0 ** -(torch.arange(16.0) / 16)[None],
        "x": randn(64, 16), "w": randn(8, 16)}),
    "a router": Cause("matmul", ("matmul", "linear"), router, lambda: {
        "x": randn(256, 32), "gate": randn(32, 1) + 1e-3 * randn(32, 8), "scale": 10 * randn(8, 1), "w": randn(8, 32)}),
    "a cumsum": Cause("cumsum", ("cumsum", "linear"), cumulated, lambda: {"x": randn(4, 1024), "w": randn(8, 1016)}),
    "a variance of large means": Cause("add", ("add", "linear"), variance, lambda: {
        "x": randn(32, 64), "mean": 300 + randn(32, 1), "w": randn(8, 64)}),
    "a distance matrix": Cause("matmul", ("matmul", "linear"), distances, lambda: {
        "a": 8 + randn(32, 4, scale=0.3), "b": 8 + randn(32, 4, scale=0.3), "w": randn(8, 32)}),
    "logits of a large vocabulary": Cause("matmul", ("matmul", "linear"), vocabulary, lambda: {
        "x": randn(16, 64), "table": 3 * randn(64, 5000), "w": randn(8, 5000)}),
    "a norm of a long vector": Cause("sum", ("sum", "linear"), long_norm, lambda: {
        "x": randn(16, 20_000), "y": randn(16, 32), "w": randn(8, 32)}),
    "a timestep": Cause("mul", ("mul", "linear"), timestep, lambda: {
        "steps": torch.arange(801.0, 865), "frequencies": torch.exp(-torch.arange(16.0) / 2), "w": randn(8, 16)}),
    "a mask": Cause("add", ("add", "linear"), mask, lambda: {
        "scores": randn(32, 32), "bias": 500 + torch.arange(32.0)[:, None] * 3, "w": randn(8, 32)}),
    "a coordinate grid": Cause("sub", ("sub", "linear"), grid, lambda: {
        "places": 2000 * torch.rand(64, 16), "origin": torch.full((1, 16), 1000.0), "w": randn(8, 16)}),
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, cause: Cause, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.cause = cause
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor)) if name == "w" else self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        held = {**dict(self.named_buffers()), **dict(self.named_parameters())}
        return self.cause.forward(Torch(), held) + x


def distance(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.native_kernels
@pytest.mark.parametrize("name", CAUSES)
def test_the_planted_cause_is_named_first_with_the_error_that_explicit_casts_leave(name: str) -> None:
    torch.manual_seed(0)
    cause = CAUSES[name]
    tensors = cause.tensors()
    exact = cause.forward(Ops(low=torch.float32), tensors)
    errors = {op: distance(cause.forward(Ops(frozenset({op})), tensors).float(), exact) for op in cause.ops}
    before = distance(cause.forward(Ops(), tensors).float(), exact)
    assert min(errors, key=lambda op: errors[op]) == cause.op and errors[cause.op] < before / 5, (before, errors)  # it is a cause

    model = nn.Sequential(Block(cause, tensors))
    found = hmp.compare(model, torch.zeros(()), policy(bf16=set(cause.ops)), loss=lambda out: out.float().square().mean())
    best = found.advice[0]
    assert best.moves == ((f"{cause.op} @ 0", "fp32"),)
    assert found.output == pytest.approx(before, rel=0.02) and best.output == pytest.approx(errors[cause.op], rel=0.02)
    measured = {trial.named.partition(" @ ")[0]: trial.output for trial in found.trials.alone}
    assert {op: measured[op] for op in errors if op in measured} == {
        op: pytest.approx(errors[op], rel=0.02) for op in errors if op in measured
    }
    assert found.by_op()[0].name == cause.op and found.by_module()[0].name == "0"
    assert found.by_op()[0].moved == found.by_module()[0].moved == best.output
    assert f"first: {cause.op} @ 0 (output" in str(found)
