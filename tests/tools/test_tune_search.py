"""Lists that tune() writes, beside runs in plain torch and beside every subset."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch

import hmp
from plain_hooks import seen_by_hooks
from tune_kit import overflowing, parity, perceptron, rotary, sgd, squared, trained

STEPS = 30


def by_itself(make, loss, policy: hmp.Policy | None, steps: int = STEPS, optimizer=sgd) -> float:
    """The loss after training in a loop that is none of tune()'s."""
    model, batches = make()
    torch.manual_seed(0)
    return trained(model, batches, loss, steps, optimizer, around=None if policy is None else lambda: hmp.casts(policy, model=model))


@pytest.mark.slow
def test_a_name_on_torch_autocasts_list_may_stand_for_a_decided_op_and_another() -> None:
    """_native_multi_head_attention names scaled_dot_product_attention too, which is decided here."""
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    result = hmp.tune(
        model, [torch.randn(4, 3, 8)], loss=lambda m, x: m(x).square().mean(), objective="memory", max_trials=2, start="torch-cpu"
    )
    assert {unit.op for unit in result.units} >= {"linear", "scaled_dot_product_attention"}


@pytest.mark.native_kernels  # computed in float32, products save float32
def test_a_gain_below_a_floor_is_no_gain() -> None:
    """The logits are 1 KiB in float32; the linear layers keep a hundred, of which the low-precision dtype saves about half."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 256), torch.nn.Linear(256, 2))
    batches = [(torch.randn(128, 8), torch.randint(2, (128,))) for _ in range(2)]
    names = ["linear", "cross_entropy"]
    result = hmp.tune(model, batches, loss=classified, tolerance=0.9, objective="memory", ops=names)
    saved = {unit.op: unit.gain for unit in result.units}
    assert 0 < saved["cross_entropy"] < 0.005 * result["float32"].saved_bytes < saved["linear"]
    assert "linear" in result.policy.bf16
    assert "cross_entropy" in result.policy.fp32


def classified(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.native_kernels  # without instructions a product keeps other bytes
@pytest.mark.slow
@pytest.mark.parametrize("tolerance", [pytest.param(0.02, marks=pytest.mark.nightly), 0.0005])
def test_no_subset_within_the_tolerance_keeps_fewer_bytes(tolerance: float) -> None:
    """Beside all sixteen choices for four ops, each trained in a loop of its own and with its own count of the bytes."""
    names = ("linear", "relu", "layer_norm", "softmax")
    model, batches = perceptron()
    result = hmp.tune(model, batches, loss=squared, optimizer=sgd, steps=STEPS, tolerance=tolerance, objective="memory", ops=names)
    plain = by_itself(perceptron, squared, None)
    base = hmp.Policy.load("habana")
    rest = base.replace(bf16=base.bf16 - set(names), fp32=base.fp32 - set(names), promote=base.promote - set(names))
    least = math.inf
    for size in range(5):
        for low in map(frozenset, itertools.combinations(names, size)):
            policy = rest.replace(bf16=rest.bf16 | low, fp32=rest.fp32 | (set(names) - low))
            if abs(by_itself(perceptron, squared, policy) / plain - 1) <= tolerance:
                least = min(least, kept(policy))
    assert kept(result.policy) == least


def kept(policy: hmp.Policy) -> int:
    """The bytes that the first step keeps for backward: every storage once, parameters left out."""
    model, batches = perceptron()
    with hmp.casts(policy):
        return sum(seen_by_hooks(model, lambda model: squared(model, batches[0])).saved.values())


@pytest.mark.slow
@pytest.mark.native_kernels  # else a product saves its inputs in float32, and linear stays there
def test_from_a_policy_that_gives_nan_it_reaches_working_lists_and_names_the_op() -> None:
    habana = hmp.Policy.load("habana")
    start = habana.replace(dtype="float16", bf16=habana.bf16 | {"exp", "log"}, fp32=habana.fp32 - {"log"}, name="broken")

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x).float() - 1.0).square().mean()

    assert not math.isfinite(by_itself(overflowing, loss, start))
    model, batches = overflowing()
    result = hmp.tune(model, batches, loss=loss, optimizer=sgd, steps=STEPS, tolerance=0.05, start=start, objective="memory")
    assert not result[start.name].fits
    assert "exp" in result.policy.fp32
    assert result.policy.dtype is torch.float16
    assert "linear" in result.policy.bf16
    plain, tuned = by_itself(overflowing, loss, None), by_itself(overflowing, loss, result.policy)
    assert abs(tuned / plain - 1) <= 0.05


@pytest.mark.slow
def test_an_op_whose_rounding_no_gradient_tells_of_is_found() -> None:
    """Positions times frequencies need no gradient: only trying it shows what bfloat16 does to them."""
    model, batches = rotary()
    start = hmp.Policy.load("habana")
    assert "mul" in start.bf16
    result = hmp.tune(model, batches, loss=parity, optimizer=sgd, steps=60, tolerance=0.02, start=start, objective="memory")
    plain = by_itself(rotary, parity, None, 60)
    assert abs(by_itself(rotary, parity, start, 60) / plain - 1) > 0.02
    assert "mul" in result.policy.fp32
    assert abs(by_itself(rotary, parity, result.policy, 60) / plain - 1) <= 0.02


class Gate(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mul(x, self.scale)


@pytest.mark.slow
def test_scoped_lines_keep_the_module_that_needs_it_in_float32_and_no_other() -> None:
    """Two modules call the same op; the first of them rounds positions."""

    def make() -> tuple[torch.nn.Module, list[torch.Tensor]]:
        torch.manual_seed(3)
        return torch.nn.Sequential(rotary()[0], torch.nn.Linear(1, 64), Gate(), torch.nn.Linear(64, 1)), rotary()[1]

    def slowly(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.003)

    model, batches = make()
    options = {"objective": "memory", "per_module": True, "ops": ["mul", "linear"], "start": "habana"}
    result = hmp.tune(model, batches, loss=parity, optimizer=slowly, steps=60, tolerance=0.02, **options)
    # whichever of the two is on the list for the others
    assert {(rule.text, rule.list_name) for rule in result.policy.scoped} & {("mul @ 0", "fp32"), ("mul @ 2", "bf16")}
    hmp.apply(model, result.policy)
    with hmp.record() as report:
        model(batches[0])
    computes = {row.module: row.compute for row in report.rows if row.op == "mul"}
    hmp.remove(model)
    assert (computes["0"], computes["2"]) == ("float32", "bfloat16")
    plain, tuned = (by_itself(make, parity, policy, 60, slowly) for policy in (None, result.policy))
    assert abs(tuned / plain - 1) <= 0.02


@pytest.mark.slow
def test_a_metric_and_the_loss_are_bounds() -> None:
    def accuracy(model: torch.nn.Module) -> float:
        with torch.no_grad():
            x = perceptron()[1][0]
            return float(((model(x) > 0.125).float() == (x[:, :8] > 0).float()).float().mean())

    model, batches = perceptron()
    asked = {"metric": 0.0, "loss": 0.0005}
    result = hmp.tune(model, batches, loss=squared, optimizer=sgd, steps=STEPS, metric=accuracy, tolerance=asked, objective="memory")
    assert result.best.metric >= result["float32"].metric
    plain, tuned = (by_itself(perceptron, squared, policy, STEPS) for policy in (None, result.policy))
    assert abs(tuned / plain - 1) <= 0.0005


def test_ctrl_c_leaves_the_best_lists_so_far(tmp_path) -> None:
    calls = []

    def counted(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 4 * 11 + 5:  # the watched step, and four trials of ten steps and a look
            raise KeyboardInterrupt
        return squared(model, x)

    model, batches = perceptron()
    with pytest.raises(KeyboardInterrupt):
        hmp.tune(model, batches, loss=counted, optimizer=sgd, steps=10, tolerance=0.01, objective="memory", folder=tmp_path)
    left = hmp.Policy.load(tmp_path)
    assert left.casts_by_op("bf16")  # verified lists, ready to use
    assert abs(by_itself(perceptron, squared, left, 10) / by_itself(perceptron, squared, None, 10) - 1) <= 0.01
    assert json.loads((tmp_path / "tune.json").read_text())["stopped"] == "interrupted"
    assert not hmp.is_converted()


def test_empty_lists_are_tried_where_time_counts_and_can_be_loaded(tmp_path) -> None:
    model, batches = perceptron()
    result = hmp.tune(model, batches, loss=squared, optimizer=sgd, steps=3, max_trials=5, tolerance=0.0, folder=tmp_path)
    assert result["no lists"].fits
    assert not (result["no lists"].policy.bf16 or result["no lists"].policy.fp32 or result["no lists"].policy.promote)
    assert result["no lists"].loss == result["float32"].loss
    assert hmp.Policy.load(tmp_path) == result.policy
    result.policy.replace(bf16=(), fp32=(), promote=()).save(tmp_path / "empty")
    assert hmp.Policy.load(tmp_path / "empty") == hmp.Policy()
