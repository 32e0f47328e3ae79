"""What is measured of each op, beside explicit casts in plain torch.

No public call shows what was measured of an op before the search.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hmp
from hmp.core import lists
from hmp.tools.benchmark import policy_active
from hmp.tools.tune import probe as module
from hmp.tools.tune.decisions import Decisions, Key
from hmp.tools.tune.probe import Measured, probe
from hmp.tools.tune.task import Task
from tune_kit import perceptron, sgd, squared

START = hmp.Policy("start", bf16={"linear"}, fp32={"softmax", "layer_norm", "exp"})


def measured(
    model: torch.nn.Module, batches: list, loss, per_module: bool = False, start: hmp.Policy = START, in_bytes: bool = True
) -> tuple[dict[Key, Measured], float]:
    """What one step shows of each unit in the low-precision dtype, and its loss."""
    decisions = Decisions(start, None, per_module, [])
    task = Task(model, batches, loss, None, sgd, None, 0)
    with task.prepared(), policy_active(decisions.start):
        found, value = probe(task, decisions, (lists.kind_of("bf16"),), in_bytes)
    return found["bf16"], value


def low(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16)


def test_the_error_of_an_op_is_that_of_its_cast_inputs_and_the_sensitivity_the_gradient_times_it() -> None:
    model, batches = perceptron()
    found, watched = measured(model, batches, squared)
    x = batches[0]
    with torch.no_grad():
        first = model.first(x)
        hidden = F.relu(model.norm(first))
        second = model.second(hidden)
        pairs = [
            (F.linear(low(x), low(model.first.weight), low(model.first.bias)), first),
            (F.linear(low(hidden), low(model.second.weight), low(model.second.bias)), second),
        ]
        wanted = (sum((a.double() - b.double()).square().sum() for a, b in pairs) / sum(b.double().square().sum() for _, b in pairs)).sqrt()
    linear, softmax = found[Key("linear")], found[Key("softmax")]
    assert linear.calls == 2 and linear.error == pytest.approx(float(wanted), rel=1e-6)
    out = second.clone().requires_grad_()
    soft = F.softmax(out, -1)
    soft.retain_grad()
    loss = (soft - (x[:, :8] > 0).float()).square().mean()
    loss.backward()
    error = F.softmax(low(second), -1).float() - soft.detach()
    assert softmax.error == pytest.approx(float(error.double().norm() / soft.detach().double().norm()), rel=1e-6)
    product = (soft.grad * error).detach()
    wanted = max(abs(float(product.sum())), float(product.square().sum().sqrt())) / float(loss.detach())
    assert softmax.change(watched) == pytest.approx(wanted, rel=1e-3)


def test_running_statistics_move_once_and_draws_are_those_of_a_plain_run() -> None:
    """The op runs several times to be measured; its state is that of one call, and other draws would be an error of about 1."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(64))
    batches, seen = [torch.randn(16, 8)], []

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        value = model(x).square().mean()
        seen.append(model[2].running_mean.clone())
        return value

    twin = copy.deepcopy(model)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = float(loss(twin, batches[0]))
    found, watched = measured(model, batches, loss)
    assert watched == plain and torch.equal(seen[1], seen[0])
    assert 1e-4 < found[Key("dropout")].error < 4e-3  # bfloat16's rounding


@pytest.mark.native_kernels  # a product that computes in float32 saves float32
def test_the_gain_in_bytes_is_that_of_plain_torch_and_copies_of_weights_count() -> None:
    model, batches = perceptron()
    found, _ = measured(model, batches, squared)
    # float32 saves the inputs; bfloat16 those and a copy of the second weight, which the gradient of the first layer needs
    wide = 32 * 16 * 4 + 32 * 64 * 4
    assert found[Key("linear")].of == wide
    assert found[Key("linear")].gain == wide - (wide // 2 + 64 * 8 * 2)


def test_the_gain_in_time_is_that_of_the_least_disturbed_round(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = perceptron()
    # seconds of a call in float32 and in bfloat16, in five rounds, of which one is disturbed by nothing
    planted = itertools.cycle([9.0, 9.0, 3.0, 7.0, 8.0, 1.0, 5.0, 9.0, 9.0, 9.0])
    monkeypatch.setattr(module, "seconds_of", lambda step: (next(planted), step()))
    found, _ = measured(model, batches, squared, in_bytes=False)
    assert found[Key("softmax")].calls == 1 and found[Key("linear")].calls == 2
    assert all((each.of, each.gain) == (3.0 * each.calls, 2.0 * each.calls) for each in found.values())


def test_what_overflows_cannot_be_low() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    batches, start = [torch.randn(4, 4)], START.replace(dtype="float16")
    found, watched = measured(model, batches, lambda m, x: torch.exp(m(x) + 20.0).mean(), start=start)
    assert found[Key("exp")].cannot == "gives NaN or Inf"
    assert found[Key("exp")].change(watched) == float("inf")
    assert not found[Key("linear")].cannot


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_parts_are_measured(reentrant: bool) -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self[1], self[0](x), use_reentrant=reentrant)

    torch.manual_seed(0)
    model = Checkpointed(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Softmax(-1)))
    found = hmp.tune(model, [torch.randn(8, 16)], loss=lambda model, x: model(x).float().square().mean(), objective="memory")
    assert {"linear", "gelu", "softmax"} <= {unit.op for unit in found.units if 0 < unit.change < 1}


def test_no_hook_stays_on_a_parameter_that_an_op_gives_as_it_is() -> None:
    class Identity(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ F.dropout(self.weight, 0.5, False)

    model, short = Identity(16, 16), {"ops": ["dropout", "matmul"], "objective": "memory", "max_trials": 2}
    hmp.tune(model, [torch.randn(8, 16)], loss=lambda model, x: model(x).float().square().mean(), **short)
    assert not model.weight._backward_hooks


def test_what_is_called_under_transforms_can_be_decided() -> None:
    class Transformed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.func.vmap(lambda each: torch.softmax(torch.mv(self.weight, torch.exp(each)), -1))(x)

    short = {"objective": "memory", "start": START, "max_trials": 2}
    result = hmp.tune(Transformed(8, 8), [torch.randn(4, 8)], loss=lambda model, x: model(x).float().square().mean(), **short)
    assert {"exp", "softmax"} <= {unit.op for unit in result.units if unit.change < 1}
