"""hmp.compare() on whole models: it decides as hmp does without it, leaves no trace, holds few tensors; and the moves that it measures."""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hmp
from command_kit import RECIPE
from hmp.cli import main
from trap_kit import policy

LOW = policy(bf16={"linear", "dropout"}, fp32={"softmax"}, name="low")


class Fn(nn.Module):
    """A module of given layers whose forward is a function of it and the inputs."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._run = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self, *args, **kwargs)


def net(*, dropout: float = 0.5) -> nn.Sequential:
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4)]
    return nn.Sequential(*layers, nn.Softmax(-1))


def test_what_is_drawn_in_low_precision_is_drawn_once():
    def noisy(self: Any, x: torch.Tensor) -> torch.Tensor:
        low = x.bfloat16()
        drawn = torch.zeros_like(low)
        part = drawn[:]  # a view of what is written after it
        drawn.uniform_()
        noise = torch.randn_like(low) + part
        return (low + noise) * torch.bernoulli(torch.full_like(low, 0.5))

    assert hmp.compare(Fn(noisy), torch.randn(64), policy()).output < 0.01


def test_an_exception_in_the_model_is_its_own_leaves_it_as_before_and_says_what_was_seen():
    def raises(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.layer(self.norm(x)))
        if y.dtype is torch.bfloat16:
            raise KeyError("label")
        return y

    model = Fn(raises, norm=nn.BatchNorm1d(4), layer=nn.Linear(4, 4))
    weight = model.layer.weight.clone()
    with pytest.raises(KeyError, match="label") as caught:
        hmp.compare(model, torch.randn(2, 4), policy(bf16={"linear"}))
    assert caught.value.args == ("label",)
    (note,) = caught.value.__notes__
    assert note.startswith("the last ops that compare() saw under policy 'test") and "linear in layer (bfloat16)" in note
    assert torch.equal(model.layer.weight, weight) and model.layer.weight.grad is None
    assert float(model.norm.running_mean.abs().sum()) == 0.0 and int(model.norm.num_batches_tracked) == 0
    assert not hmp.casts_enabled()


@pytest.mark.slow
def test_nothing_stays_in_memory():
    def tensors() -> list[torch.Tensor]:
        gc.collect()
        return [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]

    model, x = net(), torch.randn(6, 8)
    hmp.compare(model, x, LOW, loss=squares)
    before = tensors()  # kept, so that no later tensor gets the id of one of them
    ids = set(map(id, before))
    assert hmp.compare(model, x, LOW, loss=squares).rows
    assert not [tensor.shape for tensor in tensors() if id(tensor) not in ids]


def test_an_in_place_write_through_a_view_reaches_the_reference():
    def writes(self: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(2, 4)
        out[0] = (x * 3).bfloat16()
        out[1].copy_(x).mul_(2)
        return out * 1

    x = torch.randn(4)
    exact = torch.stack((x * 3, x * 2))
    got = torch.stack(((x * 3).bfloat16().float(), x * 2))
    assert hmp.compare(Fn(writes), x, policy()).output == pytest.approx(float((got - exact).norm() / exact.norm()), rel=1e-4)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_layers_whose_kernels_keep_notes_for_backward(kind: str):
    layer = getattr(nn, kind)(4, 8, num_layers=2, dropout=0.3)
    model, x, lists = Fn(lambda self, x: self.layer(x)[0], layer=layer), torch.randn(5, 3, 4), policy(bf16={kind.lower()})
    torch.manual_seed(1)
    with hmp.casts(lists):
        loss = squares(model(x)).item()
    torch.manual_seed(1)
    comparison = hmp.compare(model, x, lists, loss=squares)
    assert comparison.loss_value == loss
    assert 0 < comparison.output < 0.02 and 0 < comparison.gradient < 0.02
    assert comparison.advice[0].named == f"{kind.lower()} @ layer" and comparison.advice[0].output == 0.0


def test_a_loss_is_given_or_the_outputs_own_or_none_and_a_mapping_is_keywords(tmp_path: Any):
    forward = hmp.compare(net(), (torch.randn(6, 8),), LOW)
    assert forward.loss is forward.gradient is None and {r.direction for r in forward.rows} == {"forward"}

    def with_loss(self: Any, *, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    comparison = hmp.compare(Fn(with_loss, layer=nn.Linear(4, 2)), {"inputs": torch.randn(3, 4), "labels": torch.tensor([0, 1, 1])}, LOW)
    assert {r.op for r in comparison.rows if r.direction == "backward"} >= {"linear", "cross_entropy"}
    assert {r.module for r in comparison.rows} >= {"layer", "Fn"}
    read = json.loads(comparison.to_json(tmp_path / "it.json").read_text())
    assert read["policy"] == "low" and len(read["rows"]) == len(comparison.rows)
    assert read["trials"]["alone"][0]["moves"] == [["linear @ layer", "fp32"]]
    assert {"op", "aten", "direction", "module", "dtype", "isolated", "accumulated"} <= set(read["rows"][0])


DETACHED = Fn(lambda self, x: self.layer(x).detach(), layer=nn.Linear(8, 4))
ONES = torch.ones(6, 8)


def test_wrong_use_is_an_error_that_says_what_is_wrong():
    for call, told in (
        (lambda: hmp.compare(net(), ONES, LOW, loss=lambda out: out), "float32[6, 4]"),
        (lambda: hmp.compare(net(), ONES, LOW, loss=lambda out: 1.0), "float"),
        (lambda: hmp.compare(nn.ReLU(), ONES, LOW, loss=torch.sum), "no weight of the model does"),
        (lambda: hmp.compare(net(), ONES, LOW, loss=lambda out: out.detach().sum()), "in loss(output) detaches it"),
        (lambda: hmp.compare(DETACHED, ONES, LOW, loss=torch.sum), "the loss does not depend on them"),
        (lambda: hmp.compare(net(), ONES, LOW, loss=3), "int"),
        (lambda: hmp.compare(net(), ONES, LOW, loss=lambda out: hmp.compare(net(), ONES, LOW).loss), "inside compare()"),
        (lambda: hmp.compare(net(), ONES, LOW, trials=-1), "trials=-1"),
        (lambda: hmp.compare(net(), ONES, LOW, tolerance=-0.1), "tolerance=-0.1"),
    ):
        with pytest.raises(hmp.HmpError) as caught:
            call()
        assert told in str(caught.value)
    with torch.no_grad():  # as one without a gradient is told to do
        comparison = hmp.compare(DETACHED, ONES, LOW, loss=lambda out: out.detach().sum())
    assert comparison.output is not None and comparison.gradient is None


def test_a_checkpointed_models_recomputation_is_compared_as_forward():
    model = Fn(lambda self, x: torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False), inner=nn.Linear(4, 4))
    comparison = hmp.compare(model, torch.randn(2, 4), LOW, loss=lambda out: out.sum())
    of_linear = [(r.aten, r.direction) for r in comparison.rows if r.op == "linear" for _ in range(r.calls)]
    # torch recomputes as far as backward needs it: the casts of input, weight and bias
    assert of_linear.count(("_to_copy", "forward")) == 6 and ("mm", "backward") in of_linear
    assert comparison.gradient < 0.02


def test_a_run_without_hmp_is_told_and_that_the_model_goes_another_way_in_float32():
    def by_dtype(self: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Picks a constant by the dtype, as many losses do."""
        y = torch.softmax(self.layer(x), -1)
        return {"loss": -(y.clamp_min(torch.finfo(y.dtype).eps)).log().min(), "y": y}

    torch.manual_seed(0)
    model, x, lists = Fn(by_dtype, layer=nn.Linear(64, 512)), 30 * torch.randn(4, 64), policy(bf16={"linear"})
    plain = model(x)["loss"].item()
    with hmp.casts(lists):
        cast = model(x)["loss"].item()
    found = hmp.compare(model, x, lists)
    assert abs(cast - plain) > 0.5 * abs(plain)
    assert found.float32_loss_value == pytest.approx(plain) and found.loss_value == pytest.approx(cast)
    assert found.loss == pytest.approx(abs(cast - plain) / abs(plain))
    assert "computes something else in float32" in str(found)
    # moved, the op takes float32's way
    assert found.advice[0].named == "linear @ layer" and found.advice[0].loss == 0.0


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


def seeded(run: Any, model: nn.Sequential, *args: Any) -> Tensor:
    torch.manual_seed(3)
    return run(copy.deepcopy(model), *args).detach()


@pytest.mark.native_kernels
def test_every_trial_starts_from_the_same_state_which_is_there_again_afterwards() -> None:
    model = trained()
    state, before = copy.deepcopy(model.state_dict()), seeded(nn.Sequential.__call__, model, X)
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


def test_steps_are_counted_and_what_was_not_tried_is_said(capfd, monkeypatch, unpatched) -> None:
    steps, looked = [], []
    monkeypatch.setattr(gc, "get_objects", lambda *of, get=gc.get_objects: looked.append(of) or get(*of))  # to patch, and to undo it

    class Counts(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            steps.append(1)
            return super().forward(x)

    torch.manual_seed(0)
    model, x = Counts(*(nn.Linear(16, 16) for _ in range(12))), torch.randn(32, 16)
    found = hmp.compare(model, x, policy(bf16={"linear"}), tolerance=1e-4, progress=True)
    # without hmp, compared, under the policy, and seven trials: the compared one takes as long as three or more
    assert len(steps) == 3 + 7 and len(looked) <= 3
    assert capfd.readouterr().err.count("moved") == 7
    assert found.trials.untried == 7 and "not tried: 7 more moves" in str(found)
    # the rounding is spread over all layers: the op itself is moved, everywhere
    assert [move.entry for move in found.trials.together.moves] == ["linear"] and found.trials.together.output == 0.0
    none = hmp.compare(model, x, policy(bf16={"linear"}), trials=0)
    assert len(steps) == 3 + 7 + 3 and "moves were not measured" in str(none) and none.advice == ()
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
