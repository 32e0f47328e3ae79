"""hmp.benchmark() where something fails, is not finite, is not what it seems, or is given wrongly."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmp
from benchmark_kit import LINEAR, ONCE, Training, nothing
from hmp.benchmark.result import StepError
from hmp.lists import presets
from hmp.patching import patches

# -- failures


def failing_under_casts(error: BaseException, times: int = 0) -> Callable[[], float]:
    left = [times]

    def step() -> float:
        if hmp.casts_enabled():
            left[0] -= 1
            if left[0] < 0:
                raise error
        return 1.0

    return step


@pytest.mark.parametrize("times", [0, 1, 6], ids=["at once", "while memory is measured", "in a later round"])
def test_an_error_is_in_its_row_and_the_others_go_on(times: int) -> None:
    step = failing_under_casts(ValueError("no casts,\nplease"), times)
    result = hmp.benchmark(step, ["habana", "float32", "autocast"], rounds=5, steps=1)
    assert result["habana"].error == "ValueError: no casts,"
    assert [len(result[name].samples) for name in ("float32", "autocast")] == [5, 5]
    assert len(result["habana"].samples) < 5
    assert result.baseline == "float32"
    assert "\nhabana    ValueError: no casts,\n" in str(result)
    assert not patches.installed()


def test_a_step_that_failed_holds_no_memory() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def step() -> None:
        activation = torch.ones(3)
        if hmp.casts_enabled():
            held.append(weakref.ref(activation))
            raise MemoryError
        assert all(reference() is None for reference in held)

    result = hmp.benchmark(step, ["habana", "float32"], **ONCE)
    assert [row.error for row in result] == ["MemoryError", None]
    assert len(held) == 1


def test_a_step_without_a_backward_leaves_nothing() -> None:
    """A graph that holds a result of its own by a pack hook is freed by backward alone."""

    def measured() -> weakref.ref[torch.Tensor]:
        weight = torch.nn.Parameter(torch.ones(2, 2))
        hmp.benchmark(lambda: float((weight * 2).softmax(-1).sum().detach()), ["habana", "float32"], **ONCE)
        return weakref.ref(weight)

    held = measured()
    gc.collect()
    assert held() is None


def test_the_baseline_is_the_first_that_ran_where_float32_is_not_among_them() -> None:
    result = hmp.benchmark(failing_under_casts(ValueError("no")), ["habana", "autocast"], **ONCE)
    assert result.baseline == "autocast"
    assert result["autocast"].ratio == 1.0


def test_an_error_under_every_policy_is_raised() -> None:
    def step() -> None:
        raise ZeroDivisionError("by zero")

    with pytest.raises(StepError) as caught:
        hmp.benchmark(step)
    assert str(caught.value) == (
        "the step failed under every policy; under 'float32' with ZeroDivisionError: by zero. Make it run once by itself first"
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert not patches.installed()


@pytest.mark.parametrize("times", [0, 4], ids=["at once", "in a round"])
def test_an_interrupt_leaves_torch_and_state_as_they_were(times: int, torch_differences: Callable[[], list[str]]) -> None:
    training = Training()
    before = training.everything()
    stop = failing_under_casts(KeyboardInterrupt(), times)
    with pytest.raises(KeyboardInterrupt):
        hmp.benchmark(lambda: (training(), stop())[0], model=training.model, optimizer=training.optimizer, rounds=9, steps=1)
    assert not hmp.casts_enabled()
    assert torch_differences() == []
    torch.testing.assert_close(training.everything(), before, rtol=0, atol=0)


def test_an_interrupt_leaves_a_conversion_in_force_that_was_made_before() -> None:
    x = torch.ones(2, 2)
    with hmp.convert(policy=LINEAR):
        with pytest.raises(KeyboardInterrupt):
            hmp.benchmark(failing_under_casts(KeyboardInterrupt(), 4), rounds=9, steps=1)
        assert (F.linear(x, x).dtype, (x * x).dtype) == (torch.bfloat16, torch.float32)


def test_a_reset_that_fails_is_not_a_policys_failure() -> None:
    with pytest.raises(LookupError):
        hmp.benchmark(nothing, ["float32", "habana"], reset=lambda: {}["no"], **ONCE)


def test_a_loss_that_is_not_finite_is_shown(tmp_path: Path) -> None:
    result = hmp.benchmark(lambda: torch.tensor(math.nan) if hmp.casts_enabled() else 1.0, ["float32", "habana"], state=nn.ReLU(), **ONCE)
    assert "habana: the loss became nan." in result.notes
    assert str(result["habana"].first_loss) == "nan"
    assert json.loads(result.to_json(tmp_path / "a.json").read_text())["rows"][1]["last_loss"] == "nan"


def test_what_is_no_loss_is_no_loss() -> None:
    for value in (None, torch.ones(3), {"loss": 1.0}, "1"):
        row = hmp.benchmark(lambda value=value: value, ["float32"], **ONCE)["float32"]
        assert (row.first_loss, row.last_loss, row.loss_change) == (None, None, None)


@pytest.mark.parametrize("how", ["torch.autocast", "hmp"])
def test_a_step_that_casts_by_itself_is_found_out(how: str) -> None:
    training = Training()

    def step() -> torch.Tensor:
        with torch.autocast("cpu") if how == "torch.autocast" else hmp.casts("torch-cpu"):
            return training()

    notes = hmp.benchmark(step, ["float32", "habana"], **ONCE).notes
    assert f"The step puts {how} in force by itself, which is so in every row. Take it out of the step." in notes
    assert not patches.installed()


def never() -> None:
    raise AssertionError("the step must not run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": 3}, "step is an object of type int; give a function without arguments that does one step"),
        (
            {"step": lambda batch: batch},
            "step is called without arguments, and this one is not (missing a required argument: 'batch'); give lambda: step(...)",
        ),
        ({"policies": "habana"}, "policies='habana' is one policy; give a list, such as policies=['float32', 'habana']"),
        ({"policies": []}, "policies is empty; name at least one, such as 'float32', 'autocast' or 'habana'"),
        (
            {"policies": ["habana", "float32", "habana"]},
            "policies names 'habana' twice; take one of them out, or tell them apart: policy.replace(name='another name')",
        ),
        (
            {"policies": ["fp32"]},
            f"'fp32' is no policy; presets are {presets.names()}, or name a folder of list files; "
            "'float32' is torch without casts, 'autocast' is torch.autocast",
        ),
        ({"seconds": 0}, "seconds=0 is no time; give a positive number"),
        ({"rounds": 0}, "rounds=0 is no count; give 1 or more"),
        ({"steps": 1.5}, "steps=1.5 is no count; give 1 or more"),
        ({"warmup": 0}, "warmup=0 is no count; give 1 or more"),
        ({"model": nothing}, "model= takes a torch.nn.Module, not an object of type function; other objects go into state=[...]"),
        (
            {"optimizer": 3},
            "optimizer= takes objects with state_dict() and load_state_dict(); int lacks them. "
            "Put it back yourself in a function that you give as reset=",
        ),
        (
            {"state": [nn.ReLU(), "x"]},
            "state= takes objects with state_dict() and load_state_dict(); str lacks them. "
            "Put it back yourself in a function that you give as reset=",
        ),
        ({"reset": 3}, "reset= takes a function without arguments, not an object of type int"),
        (
            {"policies": [hmp.Policy("autocast", bf16={"mm"})]},
            "a policy called 'autocast' would be mistaken for torch's own; give policy.replace(name='another name')",
        ),
        (
            {"device": "meta", "policies": ["autocast"]},
            "torch.autocast does not know the device 'meta'; take 'autocast' out of policies, or give device=",
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_wrong_arguments_are_errors_before_anything_has_run(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(hmp.HmpError) as caught:
        hmp.benchmark(**{"step": never, **arguments})
    assert str(caught.value) == message
    assert not patches.installed()


def test_a_device_that_there_is_not_is_an_error() -> None:
    with pytest.raises(hmp.HmpError, match=r"^device='gpu' is none: "):
        hmp.benchmark(never, device="gpu")
    with pytest.raises(hmp.HmpError, match=r"^device=2\.5 is none; give one such as 'cpu' or 'cuda:0'$"):
        hmp.benchmark(never, device=2.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_device_that_torch_was_not_built_for_is_an_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getattr(torch, kind), "is_available", lambda: False)
    message = f"^device='{kind}': torch sees no {kind.upper()} device here; ask for 'cpu', or install torch for {kind.upper()}$"
    with pytest.raises(hmp.HmpError, match=message):
        hmp.benchmark(never, device=kind)
    assert not patches.installed()


def test_a_list_that_cannot_be_read_is_an_error_that_says_where(tmp_path: Path) -> None:
    folder = LINEAR.save(tmp_path / "mine")
    (folder / "bf16.txt").write_text("liner\n")
    with pytest.raises(hmp.OpListError, match=r"bf16.txt:1: 'liner' is no torch op; did you mean 'linear'"):
        hmp.benchmark(never, ["float32", folder])


def test_casts_around_the_benchmark_are_errors_where_they_would_win() -> None:
    with torch.autocast("cpu"), pytest.raises(hmp.HmpError) as caught:
        hmp.benchmark(never)
    assert str(caught.value) == (
        "torch.autocast is enabled around benchmark(), and would be in every row; leave it: 'autocast' is a row of its own"
    )
    model = hmp.apply(nn.ReLU())
    with pytest.raises(hmp.HmpError) as caught:
        hmp.benchmark(never)
    assert str(caught.value) == (
        "hmp.apply() was called on a module that is still there, whose policy would win over those to be compared; "
        "call hmp.remove(model) or hmp.revert() first"
    )
    hmp.remove(model)
    hmp.benchmark(nothing, **ONCE)
