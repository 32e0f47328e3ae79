"""hmp.benchmark() where something fails, is not finite, is not what it seems, or is given wrongly."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hmp
from benchmark_kit import LINEAR, ONCE, Training, nothing

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


@pytest.mark.parametrize("times", [1, 4], ids=["while memory is measured", "in a later round"])
def test_an_error_is_in_its_row_and_the_others_go_on(times: int) -> None:
    step = failing_under_casts(ValueError("no casts,\nplease"), times)
    result = hmp.benchmark(step, [LINEAR, "torch.autocast", "float32"], rounds=3, steps=1)
    assert result["only linear"].error == "ValueError: no casts,"
    assert [len(result[name].samples) for name in ("float32", "torch.autocast")] == [3, 3]
    assert len(result["only linear"].samples) < 3
    assert result.baseline == "float32"
    assert "ValueError: no casts," in str(result)
    without = hmp.benchmark(failing_under_casts(ValueError("no")), [LINEAR, "torch.autocast"], **ONCE)  # the first that ran is the baseline
    assert without.baseline == "torch.autocast" and without["torch.autocast"].ratio == 1.0


def test_a_step_that_failed_holds_no_memory() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def step() -> None:
        activation = torch.ones(3)
        if hmp.casts_enabled():
            held.append(weakref.ref(activation))
            raise MemoryError
        assert all(reference() is None for reference in held)

    result = hmp.benchmark(step, [LINEAR, "float32"], **ONCE)
    assert [row.error for row in result] == ["MemoryError", None]
    assert len(held) == 1


def test_an_error_under_every_policy_is_raised() -> None:
    def step() -> None:
        raise ZeroDivisionError("by zero")

    with pytest.raises(hmp.HmpError, match="ZeroDivisionError: by zero") as caught:
        hmp.benchmark(step, ["float32", LINEAR])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("times", [0, 4], ids=["at once", "in a round"])
def test_an_interrupt_leaves_torch_and_state_as_they_were(times: int, torch_differences: Callable[[], list[str]]) -> None:
    training = Training()
    before = training.everything()
    stop = failing_under_casts(KeyboardInterrupt(), times)
    options = {"model": training.model, "optimizer": training.optimizer, "rounds": 9, "steps": 1}
    with pytest.raises(KeyboardInterrupt):
        hmp.benchmark(lambda: (training(), stop())[0], ["float32", LINEAR], **options)
    assert not hmp.casts_enabled()
    assert torch_differences() == []
    torch.testing.assert_close(training.everything(), before, rtol=0, atol=0)


def test_a_reset_that_fails_is_not_a_policys_failure() -> None:
    with pytest.raises(LookupError):
        hmp.benchmark(nothing, ["float32", LINEAR], reset=lambda: {}["no"], **ONCE)


def test_a_loss_that_is_not_finite_is_shown(tmp_path: Path) -> None:
    result = hmp.benchmark(lambda: torch.tensor(math.nan) if hmp.casts_enabled() else 1.0, ["float32", LINEAR], state=nn.ReLU(), **ONCE)
    assert any("nan" in note for note in result.notes)
    assert str(result["only linear"].loss) == "nan"
    assert json.loads(result.to_json(tmp_path / "a.json").read_text())["rows"][1]["loss"] == "nan"


def test_a_step_that_casts_by_itself_is_found_out() -> None:
    training = Training()

    def step() -> torch.Tensor:
        with torch.autocast("cpu"):
            return training()

    notes = hmp.benchmark(step, ["float32", LINEAR], **ONCE).notes
    assert any("itself enables torch.autocast" in note for note in notes)


def never() -> None:
    raise AssertionError("the step must not run")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"step": 3}, "int"),
    ({"step": lambda batch: batch}, "'batch'"),
    ({"policies": "habana"}, "policies=['float32', 'habana']"),
    ({"policies": 3}, "policies= expected a list, got 3"),
    ({"policies": []}, "policies= is empty"),
    ({"policies": ["habana", "float32", "habana"]}, "'habana' twice"),
    ({"policies": ["fp32"]}, "unknown policy 'fp32'"),
    ({"policies": [hmp.Policy("torch.autocast", bf16={"mm"})]}, "'torch.autocast'"),
    ({"seconds": 0}, "seconds=0"),
    ({"rounds": 0}, "rounds=0"),
    ({"steps": 1.5}, "steps=1.5"),
    ({"model": nothing}, "function"),
    ({"optimizer": 3}, "int"),
    ({"state": [nn.ReLU(), "x"]}, "str"),
    ({"reset": 3}, "int"),
    ({"device": "meta", "policies": ["torch.autocast"]}, "'meta'"),
    ({"device": "gpu"}, "device='gpu'"),
    ({"device": 2.5}, "device=2.5"),
]


def test_wrong_arguments_are_errors_before_anything_has_run() -> None:
    for arguments, told in WRONG:
        with pytest.raises(hmp.HmpError) as caught:
            hmp.benchmark(**{"step": never, **arguments})
        assert told in str(caught.value), arguments


def test_a_list_that_cannot_be_read_is_an_error_that_says_where(tmp_path: Path) -> None:
    folder = LINEAR.save(tmp_path / "mine")
    (folder / "bf16.txt").write_text("liner\n")
    with pytest.raises(hmp.errors.OpListError, match=r"bf16.txt:1: unknown op 'liner'; did you mean 'linear'"):
        hmp.benchmark(never, ["float32", folder])


def test_casts_around_the_benchmark_are_errors_where_they_would_win() -> None:
    with torch.autocast("cpu"), pytest.raises(hmp.HmpError, match=r"torch\.autocast is enabled"):
        hmp.benchmark(never)
    model = hmp.apply(nn.ReLU())
    with pytest.raises(hmp.HmpError, match=r"hmp\.remove\(model\) or hmp\.revert\(\)"):
        hmp.benchmark(never)
    hmp.remove(model)
    hmp.benchmark(nothing, ["float32"], **ONCE)
