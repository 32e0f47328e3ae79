"""The moves that compare() measures: from the same state each, in few steps, of applied models too, and what is not known is said."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hmp
from command_kit import RECIPE
from hmp.cli import main
from trap_kit import policy


class Angles(nn.Module):
    """Large positions whose cosine is taken."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, torch.ones(1, 16)).cos()


X = 5000 + torch.arange(64.0)[:, None]


def trained() -> nn.Sequential:
    """Its output depends on dropout's mask, and on the statistics that batch norm has in training."""
    torch.manual_seed(0)
    return nn.Sequential(Angles(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))


def squares(output: Tensor) -> Tensor:
    return output.float().square().mean()


def explicit(model: nn.Sequential, wide: bool) -> Tensor:
    """The model with its casts written out, the angles in float32 or not."""
    dtype = torch.float32 if wide else torch.bfloat16
    low = [layer.weight.bfloat16() for layer in (model[1], model[4])], [layer.bias.bfloat16() for layer in (model[1], model[4])]
    angles = torch.matmul(X.to(dtype), torch.ones(1, 16, dtype=dtype)).cos()
    hidden = torch.nn.functional.linear(angles.bfloat16(), low[0][0], low[1][0])
    return torch.nn.functional.linear(model[3](model[2](hidden)).bfloat16(), low[0][1], low[1][1]).float()


def exact(model: nn.Sequential) -> Tensor:
    return model(X)


def seeded(run: Any, model: nn.Sequential, *args: Any) -> Tensor:
    torch.manual_seed(3)
    return run(copy.deepcopy(model), *args).detach()


@pytest.mark.native_kernels
def test_every_trial_starts_from_the_same_state_which_is_there_again_afterwards() -> None:
    model = trained()
    state, before = copy.deepcopy(model.state_dict()), seeded(exact, model)
    wanted = [(seeded(explicit, model, wide) - before).norm() / before.norm() for wide in (False, True)]
    torch.manual_seed(3)
    random = torch.get_rng_state()
    found = hmp.compare(model, X, policy(bf16={"matmul", "linear"}), loss=squares)
    (best,) = found.advice
    assert best.named == "matmul @ 0" and (found.output, best.output) == pytest.approx(tuple(map(float, wanted)), rel=0.05)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random) and model.training and all(p.grad is None for p in model.parameters())
    torch.manual_seed(3)
    again = hmp.compare(model, X, policy(bf16={"matmul", "linear"}), loss=squares)
    assert again.trials == found.trials


def test_an_applied_model_is_measured_under_the_moved_policy_and_has_its_own_again() -> None:
    model, lists = nn.Sequential(Angles(), nn.Linear(16, 4)), policy(bf16={"matmul", "linear"})
    alone = hmp.compare(model, X, lists, loss=squares)
    hmp.apply(model, lists, outputs="float32")
    with torch.no_grad():
        before = model(X)
        found = hmp.compare(model, X)
        assert torch.equal(model(X), before) and model(X).dtype is torch.float32
    assert found.advice[0].named == alone.advice[0].named == "matmul @ 0" and found.advice[0].output < 0.01 < found.output
    assert hmp.verify(model, X, lists)
    hmp.remove(model)
    with torch.no_grad():
        assert torch.equal(model(X), model.float()(X)) and model(X).dtype is torch.float32


def test_steps_are_counted_and_what_was_not_tried_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    steps = []

    class Counts(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            steps.append(1)
            return super().forward(x)

    torch.manual_seed(0)
    model, x = Counts(*(nn.Linear(16, 16) for _ in range(12))), torch.randn(32, 16)
    found = hmp.compare(model, x, policy(bf16={"linear"}), tolerance=1e-4, progress=True)
    # without hmp, compared, under the policy, and seven trials: the compared one takes as long as three or more
    assert len(steps) == 3 + 7
    assert capfd.readouterr().err.count("moved") == 7
    assert found.trials.untried == 7 and "not tried: 7 more moves" in str(found)
    # the rounding is spread over all layers: the op itself is moved, everywhere
    assert [move.entry for move in found.trials.together.moves] == ["linear"] and found.trials.together.output == 0.0
    steps.clear()
    none = hmp.compare(model, x, policy(bf16={"linear"}), trials=0)
    assert len(steps) == 3 and "moves were not measured" in str(none) and none.advice == ()
    more = hmp.compare(model, x, policy(bf16={"linear"}), trials=20, tolerance=1.0)
    assert more.trials.untried == 0 and len(more.trials.alone) == 12 and more.trials.together is None


def test_the_set_is_the_smallest_one_that_reaches_the_tolerance() -> None:
    """Two modules with angles, each of which makes half of the output."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.head = Angles(), Angles(), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.head(self.one(x)), self.head(self.other(x + 7))])

    torch.manual_seed(0)
    found = hmp.compare(Two(), X, policy(bf16={"matmul", "linear"}), tolerance=0.02)
    assert {each.named for each in found.advice} == {"matmul @ one", "matmul @ other"}
    together = found.trials.together
    assert {move.entry for move in together.moves} == {"matmul @ one", "matmul @ other"}
    assert together.output < 0.02 < min(each.output for each in found.trials.alone)
    assert "within the tolerance of 0.02" in str(found)
    near = hmp.compare(Two(), X, policy(bf16={"matmul", "linear"}), tolerance=0.0, trials=3)
    assert near.trials.together.output > 0 and "the nearest of the sets tried to" in str(near)


def test_a_cause_that_lists_do_not_affect_is_said() -> None:
    class Casts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.bfloat16().float() * 2).cos()

    found = hmp.compare(Casts(), X, policy(bf16={"linear"}))
    assert found.output > 0.1 and found.advice == ()
    assert "bfloat16 adds most of it" in str(found) and "lists don't affect it" in str(found)


def test_a_move_that_changes_what_is_drawn_or_fails_is_not_measured() -> None:
    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.matmul(x, torch.ones(1, 16))
            return torch.cat([y, torch.randn_like(y)])

    class Refuses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.matmul(x, torch.ones(1, 16))
            if y.dtype is torch.float32 and hmp.casts_enabled():
                raise ValueError("not in float32")
            return y

    (drawn,) = hmp.compare(Draws(), X, policy(bf16={"matmul"})).trials.alone
    assert drawn.output is None and "draws other random numbers" in drawn.why_not
    found = hmp.compare(Refuses(), X, policy(bf16={"matmul"}))
    assert "matmul was not measured: raised ValueError: not in float32" in str(found) and found.advice == ()


@pytest.mark.parametrize(("wrong", "told"), [({"trials": -1}, "trials=-1"), ({"tolerance": -0.1}, "tolerance=-0.1")])
def test_wrong_use_is_said(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(hmp.HmpError, match=told):
        hmp.compare(nn.Linear(1, 1), X, **wrong)


class Twice(nn.Module):
    """Calls one layer twice and another once."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.softmax(self.layer(self.norm(x)), -1))


def cosine(x: Tensor) -> Tensor:
    return (x * 1.0).cos()


class Cosine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return cosine(x)


def test_a_users_function_on_a_list_is_moved_like_an_op() -> None:
    name = f"{__name__}.cosine"
    found = hmp.compare(Cosine(), X, policy(bf16=[name]))
    assert found.output > 0.1 and [(each.named, each.output) for each in found.advice] == [(name, 0.0)]


def test_calls_are_those_of_the_op() -> None:
    found = hmp.compare(Twice(), torch.randn(4, 16), "torch-cpu", loss=squares)
    calls = {group.name: group.calls for group in found.by_op()}
    assert {name: calls[name] for name in ("linear", "layer_norm", "softmax")} == {"linear": 2, "layer_norm": 1, "softmax": 1}
    assert {group.name: group.calls for group in found.by_module() if group.name in ("layer", "norm")} == {"layer": 2, "norm": 1}


def test_a_recipes_output_is_what_the_model_returns_as_in_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, file = tmp_path / "recipe.py", tmp_path / "c.json"
    recipe.write_text(RECIPE)
    assert main(["compare", str(recipe), "--policy", "habana", "--json", str(file)]) == 0
    values, names = json.loads(file.read_text()), {}
    exec(RECIPE, names)
    torch.manual_seed(0)
    model, batches = names["model"](), list(names["batches"]())
    x = batches[0][0] if isinstance(batches[0], (tuple, list)) else batches[0]
    with torch.no_grad():
        wanted = hmp.compare(model, (x,), "habana")
    assert values["output"] == pytest.approx(wanted.output) and values["output"] != values["loss"]
    assert {row["module"] for row in values["rows"]} >= {row.module for row in wanted.rows}
