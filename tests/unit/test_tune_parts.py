"""Parts of a search: the integer programme beside every subset, what tells a search from another, and how far it says it is.

No public call gives the programme its costs, and a search for each answer takes minutes.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import itertools
import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hmp
import tune_result_kit
from hmp.tune import identity, third_level
from hmp.tune.decisions import Key
from hmp.tune.identity import key_of
from hmp.tune.progress import Lines, Progress, Silent, shown
from hmp.tune.solver import Model, solve
from tune_kit import perceptron, sgd, squared


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def tell(progress: Progress) -> None:
    progress.stage("measuring [red]ops[/]")  # brackets are text to the bar
    progress.step(7, 30, "2 of 4 units: 0.620 of float32's")
    progress.step(31, 30, "")
    progress.close()


def test_lines_say_how_far_it_is_where_it_is_asked_for_or_stderr_is_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    tell(shown(True))
    printed = capsys.readouterr()
    assert not printed.out
    assert "measuring" in printed.err and "7 of about 30: 2 of 4 units" in printed.err and "31 of about 31" in printed.err
    for progress in (False, None):
        tell(shown(progress))
        assert capsys.readouterr() == ("", "")


def test_a_terminal_has_a_bar_where_rich_is_and_lines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    bar = shown(None)
    tell(bar)
    assert "measuring [red]ops[/]" in sys.stderr.getvalue()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert isinstance(shown(None), Lines) and not isinstance(bar, Lines)
    monkeypatch.setattr(sys, "stderr", None)  # as pythonw has it
    assert all(isinstance(shown(progress), Silent) for progress in (True, None))


def test_an_object_with_the_methods_is_told_and_anything_else_is_an_error() -> None:
    mine = Lines()
    assert shown(mine) is mine
    with pytest.raises(hmp.HmpError, match="progress='bar'"):
        shown("bar")  # type: ignore[arg-type]


def test_the_table_has_the_choice_the_trials_the_units_and_how_it_ended() -> None:
    text = str(tune_result_kit.result())
    for each in ("linear", "matmul", "0.62", "habana", "autocast", "loss +4.00%, 1.00% allowed", "One note.", "seed 0"):
        assert each in text, each
    assert "no bound" in str(tune_result_kit.bare())
    assert "the budget is spent" in str(tune_result_kit.result(stopped="budget"))
    assert "the same call goes on from here" in str(tune_result_kit.result(stopped="interrupted"))
    slow = tune_result_kit.trial("slow", ("linear",), ratio=1.25)
    assert "no gain" in str(tune_result_kit.result(best=slow))
    assert "0.71 of float32's bytes" in str(tune_result_kit.result(objective="memory", predicted=-(2.0**21), left=2.0**20))


KEYS = [Key(name) for name in "abcdef"]


COSTS = st.floats(-10, 10).map(lambda x: round(x, 3))


@st.composite
def models(draw: st.DrawFn) -> Model:
    keys = KEYS[: draw(st.integers(1, 6))]
    pairs = [pair for pair in itertools.permutations(keys, 2) if draw(st.booleans())]
    return Model(
        {key: draw(COSTS) for key in keys},
        {pair: abs(draw(COSTS)) for pair in pairs},
        {key: draw(st.one_of(st.floats(0, 1).map(lambda x: round(x, 3)), st.just(math.inf))) for key in keys},
    )


def cost(model: Model, low: frozenset[Key]) -> float:
    crossing = sum(c for (a, b), c in model.flows.items() if (a in low) != (b in low))
    return sum(model.costs[key] for key in low) + crossing


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(models(), st.one_of(st.just(math.inf), st.floats(0, 2)), st.data())
def test_no_subset_that_is_allowed_costs_less(model: Model, limit: float, data: st.DataObject) -> None:
    keys = list(model.costs)
    barred = frozenset(data.draw(st.sets(st.sampled_from(keys), max_size=2)))
    failed = [frozenset(data.draw(st.sets(st.sampled_from(keys), min_size=1)))] if data.draw(st.booleans()) else []

    def allowed(low: frozenset[Key]) -> bool:
        # a little room: the solver's own tolerance is 1e-6 of the bound
        within = sum(model.sensitivities[key] for key in low) <= limit * (1 + 1e-5) + 1e-9 if low else True
        return (
            within
            and not low & barred
            and not any(each <= low for each in failed)
            and all(math.isfinite(model.sensitivities[key]) for key in low)
        )

    subsets = (frozenset(s) for size in range(len(keys) + 1) for s in itertools.combinations(keys, size))
    best = min(cost(model, low) for low in subsets if allowed(low))
    found = solve(model, limit=limit, barred=barred, failed=failed)
    assert allowed(found)
    assert cost(model, found) == pytest.approx(model.cost(found))
    assert cost(model, found) <= best + 1e-4 * max(1.0, abs(best))


def test_nothing_to_decide_is_no_choice() -> None:
    assert solve(Model({}, {}, {})) == frozenset()


RATE = 0.1


def _paced(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=_rate())


def _rate() -> float:
    return RATE


def _at(rate: float, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate)


class _Scaled(nn.Linear):
    """A part whose settings and state can differ though its weights are the same."""

    def __init__(self, scale: float) -> None:
        super().__init__(8, 8)
        self.scale, self.drop = scale, nn.Dropout(0.0)
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(super().forward(x)) * self.scale + self.shift


def key(rate: float = 0.1, change=lambda module: None, how: str = "closure") -> str:
    torch.manual_seed(0)
    model = _Scaled(1.0)
    change(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "RATE", rate)
        optimizer = {
            "closure": lambda m: _at(rate, m),
            "default": lambda m, lr=rate: _at(lr, m),
            "global": _paced,
            "partial": functools.partial(_at, rate),
        }[how]
        return key_of(identity.of_model(model), identity.of_function(optimizer))


def test_a_search_is_told_from_another_by_what_its_functions_read_and_its_model_holds() -> None:
    for how in ("closure", "default", "global", "partial"):
        assert key(how=how) == key(how=how) != key(0.2, how=how)
    for change in (
        lambda m: m.eval(),
        lambda m: m.shift.fill_(1.0),
        lambda m: setattr(m, "scale", 2.0),
        lambda m: setattr(m.drop, "p", 0.5),
        lambda m: setattr(m, "drop", nn.Identity()),
        lambda m: m.bias.requires_grad_(False),
    ):
        assert key(change=change) != key()


def test_what_a_function_counts_and_names_of_attributes_are_no_other_function(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return squared(model, x)

    before = identity.of_function(loss)
    loss(*(each if at == 0 else each[0] for at, each in enumerate(perceptron())))
    assert calls == 1 and identity.of_function(loss) == before
    monkeypatch.setitem(globals(), "drop", 3)  # forward() reads self.drop
    reads = identity.of_function(_Scaled.forward)
    monkeypatch.setitem(globals(), "drop", 4)
    assert identity.of_function(_Scaled.forward) == reads


@pytest.mark.slow
def test_where_fp8_is_computed_it_must_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(third_level, "is_real", lambda *_: True)
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 3)), [torch.randn(16, 32) for _ in range(2)]
    given = {"loss": lambda m, x: m(x).square().mean(), "optimizer": sgd, "steps": 12, "tolerance": 0.1}
    result = hmp.tune(model, batches, levels=("fp8", "bf16", "fp32"), objective="time", **given)
    assert any(trial.fp8 and trial.fits and trial.ratio is not None for trial in result.trials)
    assert not result.policy.fp8 and any("no product in FP8" in note for note in result.notes)
