"""hmp.compare(): its numbers, computed by hand and by plain torch with explicit casts, and what a move gains in ten models with a cause."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hmp
from trap_kit import policy

# bfloat16 has eight significant bits: at 1 its spacing is 2**-7, and 1 + 2**-9 is rounded to 1; at 3 its spacing is 2**-6
X = 1 + 2.0**-9
W = 3.0
EXACT = W * X  # 3 + 3 * 2**-9, and bfloat16 has 3
LINEAR = 3 * 2.0**-9 / EXACT
WEIGHT_GRAD = 2.0**-8 / (2 + 2.0**-8)  # 2 * X for a gradient of 2, and bfloat16 has 2


class TwoLayers(torch.nn.Module):
    """x → 3 x → 1 (3 x), doubled."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(1, 1, bias=False)
        self.second = torch.nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            self.first.weight.fill_(W)
            self.second.weight.fill_(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * 2


def found(**lists: Any) -> Any:
    return hmp.compare(TwoLayers(), torch.tensor([[X]]), policy(**lists), loss=lambda out: out.sum())


def test_isolated_is_an_ops_own_rounding_and_accumulated_what_came_in_too() -> None:
    """`linear` rounds its input and nothing else: 3 x is 3. The second layer gets 3, which is exact: alone it errs by nothing, but what
    came in is off. The loss is 6 for 6 + 3 * 2**-8; the gradients of the two weights are 2 for 2 x and 6 for 6 x."""
    comparison = found(bf16={"linear"})
    products = {(r.module, r.direction): r for r in comparison.rows if (r.op, r.aten) == ("linear", "mm")}
    assert len(products) == sum((r.op, r.aten) == ("linear", "mm") for r in comparison.rows)
    first, second, backward = products["first", "forward"], products["second", "forward"], products["first", "backward"]
    assert first.isolated == pytest.approx(LINEAR)
    assert (first.dtype, first.listed, first.calls) == ("bfloat16", "bf16", 1)
    assert (second.isolated, second.accumulated) == pytest.approx((0.0, LINEAR))
    assert backward.isolated == pytest.approx(WEIGHT_GRAD)
    assert comparison.loss_value == 6.0
    assert comparison.loss == pytest.approx(LINEAR) == pytest.approx(comparison.output)
    off, exact = (2.0**-8, 3 * 2.0**-8), (2 * X, 6 * X)
    assert comparison.gradient == pytest.approx((sum(e**2 for e in off) / sum(e**2 for e in exact)) ** 0.5)


def test_float32_is_exact() -> None:
    """With `linear` on the FP32 list nothing rounds, and nothing is advised."""
    comparison = found(fp32={"linear"})
    assert {r.isolated for r in comparison.rows} == {0.0} == {r.accumulated for r in comparison.rows}
    assert comparison.advice == () == comparison.trials.alone
    assert "nothing has to be moved: the error is within the tolerance of 0.0039" in str(comparison)
    assert (comparison.output, comparison.loss, comparison.gradient) == (0.0, 0.0, 0.0)


def test_shares_are_of_the_squared_isolated_errors():
    """Of linear, forward and backward, and of exp, whose result is rounded: what each adds to the sum of squares."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.exp(torch.nn.functional.linear(x, torch.full((1, 1), W)))

    with torch.no_grad():
        comparison = hmp.compare(Model(), torch.tensor([[X]]), policy(bf16={"linear", "exp"}), tolerance=0.001)
    exp = float(torch.tensor(W).exp())  # 20.0855, at which bfloat16's spacing is 0.125: 20.125
    error = (20.125 - exp) / exp
    shares = {group.name: group.share for group in comparison.by_op() if group.share}
    assert shares == pytest.approx({"linear": LINEAR**2 / (LINEAR**2 + error**2), "exp": error**2 / (LINEAR**2 + error**2)}, rel=1e-5)
    assert [group.name for group in comparison.by_op()][:2] == ["exp", "linear"]
    # 3 + 3 * 2**-9 is rounded by linear, and by exp's cast of it, too: to move one of them gains nothing
    assert [trial.gains(comparison.trials.start) for trial in comparison.trials.alone] == [False, False] and comparison.advice == ()
    assert {move.entry for move in comparison.trials.together.moves} == {"linear", "exp"} and comparison.trials.together.output == 0.0
    assert "several ops share the cause" in str(comparison)


def test_a_listed_sum_is_measured_as_it_runs_with_both_inputs_rounded() -> None:
    """A sum with what may be a mask, and is none: torch adds the rounded inputs, and rounds. Its error is the output's, by torch alone."""
    x, shift = torch.linspace(-1, 3, 32).reshape(4, 8), torch.linspace(-2, 2, 8)

    class Shifted(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + shift

    comparison = hmp.compare(Shifted(), x, policy(bf16={"add"}))
    (row,) = (each for each in comparison.rows if each.aten == "add")
    exact = x.double() + shift.double()
    off = x.bfloat16() + shift.bfloat16() - exact
    assert (row.isolated, comparison.output) == pytest.approx((float(off.norm() / exact.norm()),) * 2, rel=1e-4)


LOW = policy(bf16={"linear"}, name="brain")
HALF = policy(bf16={"linear"}, dtype=torch.float16, name="half")


def norm(tensor: torch.Tensor) -> float:
    return float(tensor.double().norm())


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 32, bias=False), torch.nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def squares(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def run(net: Net, x: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What each layer returns, the loss and the gradients, with the products in `dtype`: plain torch."""
    weights = [layer.weight.detach().clone().requires_grad_() for layer in (net.first, net.second)]
    hidden = F.linear(x.to(dtype), weights[0].to(dtype))
    output = F.linear(torch.tanh(hidden).to(dtype), weights[1].to(dtype))
    loss = squares(output)
    gradients = torch.autograd.grad(loss, weights)
    whole = torch.cat([g.flatten() for g in gradients])
    found = {"first": hidden, "second": output, "output": output, "loss": loss, "gradient": whole, "first's gradient": gradients[0]}
    return {name: tensor.detach().double() for name, tensor in found.items()}


@pytest.mark.slow
@pytest.mark.native_kernels  # a product of backward that computes in float32 is compared before it is rounded
def test_both_are_against_float32() -> None:
    net, x = Net(), torch.randn(24, 16)
    both = hmp.compare(net, x, LOW, against=HALF, loss=squares)
    low, half, exact = (run(net, x, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32))
    for end in ("output", "loss", "gradient"):
        assert [getattr(side, end) for side in (both, both.against)] == [
            pytest.approx(norm(values[end] - exact[end]) / norm(exact[end]), rel=1e-3) for values in (low, half)
        ]
    for side, values in ((both, low), (both.against, half)):
        calls = {row.module: row for row in side.rows if (row.op, row.direction, row.aten) == ("linear", "forward", "mm")}
        assert set(calls) == {"first", "second"}
        for module, row in calls.items():
            accumulated = norm(values[module] - exact[module]) / norm(exact[module])
            assert row.accumulated == pytest.approx(accumulated, rel=1e-3)
        assert calls["first"].isolated == pytest.approx(norm(values["first"] - exact["first"]) / norm(exact["first"]), rel=1e-3)


def test_what_one_policy_makes_infinite_is_said(tmp_path: Path) -> None:
    """300 * 300 is beyond float16."""
    net = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Tanh())
    torch.nn.init.constant_(net[0].weight, 300.0)
    both = hmp.compare(net, torch.tensor([[300.0]]), LOW, against=HALF, loss=lambda out: out.float().sum())
    errors = [group.isolated for side in (both, both.against) for group in side.by_op() if group.name == "linear"]
    assert errors == [pytest.approx(0.0, abs=0.01), math.inf]
    finite, net[0].weight.data = torch.tensor([[30.0]]), torch.tensor([[30.0]])
    of_loss = hmp.compare(net[0], finite, policy(bf16={"linear", "mul"}, dtype=torch.float16), loss=lambda out: (out * out).sum())
    assert of_loss.loss == math.inf and of_loss.advice[0].named == "mul" and "nothing has to be moved" not in str(of_loss)
    lines = [line.split() for line in str(both).splitlines() if line.startswith("linear  ")]
    assert lines[1][2:4] == [">1", ">1"] and lines[0][2] != ">1" and "nan" not in str(both).lower()
    assert "NaN" not in both.to_json(tmp_path / "both.json").read_text(encoding="utf-8")


def test_dropout_draws_the_same_under_each_policy() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 8))
    x, state = torch.randn(16, 32), torch.get_rng_state()
    found = hmp.compare(net, x, LOW, against=HALF, loss=squares)
    assert torch.equal(torch.get_rng_state(), state)
    assert found.against is not None and found.loss_value == pytest.approx(found.against.loss_value, rel=0.01)
    torch.manual_seed(1)
    assert hmp.compare(net, x, LOW, loss=squares).loss_value != pytest.approx(found.loss_value, rel=0.01)  # under other masks


def test_wrong_use_is_an_error_that_names_the_policies() -> None:
    net, x = Net(), torch.randn(2, 16)
    with pytest.raises(hmp.HmpError, match="against='other' is the same policy as 'brain'"):
        hmp.compare(net, x, LOW, against=LOW.replace(name="other"))
    with pytest.raises(hmp.errors.OpListError, match="no_such"):
        hmp.compare(net, x, LOW, against="no_such")
    hmp.apply(net, LOW)
    with pytest.raises(hmp.HmpError, match=r"'brain' is applied to the model .* 'half'; call hmp.remove\(model\)"):
        hmp.compare(net, x, against=HALF)


Op = Callable[..., Any]


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
