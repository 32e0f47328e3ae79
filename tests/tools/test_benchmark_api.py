"""hmp.benchmark(): which steps run in which order, under which casts, from which state; what fails, isn't finite, or is given wrongly."""

from __future__ import annotations

import json
import math
import random
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

BF16, FP32 = torch.bfloat16, torch.float32
BOTH = hmp.Policy("both", bf16={"linear", "mul"})

# -- what runs, and under what


def seen() -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of a product that all the lists hold, and of one that one list alone holds."""
    x = torch.ones(2, 2)
    return F.linear(x, x).dtype, (x * x).dtype


def test_rounds_take_every_policy_once_in_an_order_that_rotates() -> None:
    names = {(FP32, FP32): "float32", (BF16, FP32): "torch.autocast", (BF16, BF16): "both"}
    ran: list[str] = []
    result = hmp.benchmark(lambda: ran.append(names[seen()]), ["float32", "torch.autocast", BOTH], rounds=3, steps=2)
    f, a, h = (4 * [name] for name in ("float32", "torch.autocast", "both"))  # two untimed steps, two timed ones
    assert ran[-36:] == [*f, *a, *h, *a, *h, *f, *h, *f, *a]
    preparing = ran[:-36]
    assert preparing == sorted(preparing, key=["float32", "torch.autocast", "both"].index)
    assert [row.name for row in result] == ["float32", "torch.autocast", "both"]
    assert [len(row.samples) for row in result] == [3, 3, 3]
    assert (result.rounds, result.untimed_steps, result.steps) == (3, 2, 2)


def test_rows_without_hmp_run_on_torch_itself(torch_differences: Callable[[], list[str]]) -> None:
    rows: set[str] = set()

    def step() -> None:
        name = "torch.autocast" if torch._C._is_any_autocast_enabled() else "mine" if hmp.casts_enabled() else "float32"
        if name not in rows:
            rows.add(name)
            assert (torch_differences() == []) is (name != "mine")

    hmp.benchmark(step, ["float32", "torch.autocast", LINEAR], **ONCE)
    assert rows == {"float32", "torch.autocast", "mine"}


def test_a_policy_is_in_force_in_backward_and_not_in_the_optimizer() -> None:
    training, dtypes = Training(), set()
    training.one.weight.register_hook(lambda gradient: dtypes.add((gradient.dtype, seen())))
    training.optimizer.register_step_pre_hook(lambda *_: dtypes.add(seen()))
    training.benchmark([LINEAR], **ONCE)
    assert dtypes == {(FP32, (FP32, FP32)), (FP32, FP32)}


def test_a_conversion_made_before_is_in_force_again_and_said() -> None:
    found: list[Any] = []
    with hmp.convert(policy=LINEAR) as handle:
        before = hmp.fallbacks()
        result = hmp.benchmark(lambda: found.append(seen()), ["float32", BOTH], **ONCE)
        assert seen() == (BF16, FP32)
        assert "Call hmp.revert() first" in str(result)
        assert hmp.fallbacks() == before
        handle.revert()
        assert not hmp.is_converted()
    assert set(found) == {(FP32, FP32), (BF16, BF16)}


# -- the same state for everybody


def test_losses_are_those_of_plain_loops_from_the_same_state_and_seed() -> None:
    result = Training().benchmark(["float32", "torch.autocast", LINEAR], rounds=1, steps=4, seed=7)
    with_hand_casts = Training()
    with_hand_casts.linear = lambda x, weight, bias: F.linear(x.to(BF16), weight.to(BF16), bias.to(BF16))
    for name, training, around in (
        ("float32", Training(), torch.enable_grad),
        ("torch.autocast", Training(), lambda: torch.autocast("cpu", dtype=BF16)),
        ("only linear", with_hand_casts, torch.enable_grad),
    ):
        torch.manual_seed(7)
        for _ in range(6):
            with around():
                loss = training().item()
        assert result[name].loss == loss, name
    assert result["only linear"].loss != result["float32"].loss
    assert result.losses_compare


def test_state_seeds_and_gradients_are_as_they_were() -> None:
    training = Training()
    training.benchmark(["float32"], **ONCE)
    assert all(parameter.grad is None for parameter in training.model.parameters())
    assert training.optimizer.state_dict()["state"] == {}
    training()
    before = training.everything()
    random.seed(3)
    torch.manual_seed(3)
    training.benchmark(["float32", LINEAR], **ONCE)
    torch.testing.assert_close(training.everything(), before, rtol=0, atol=0)
    drawn = random.random(), torch.rand(()).item()
    random.seed(3)
    torch.manual_seed(3)
    assert drawn == (random.random(), torch.rand(()).item())


def test_every_policy_draws_the_same_random_numbers() -> None:
    numpy = pytest.importorskip("numpy")

    def step() -> float:
        return torch.rand(()).item() + random.random() + numpy.random.rand()

    result = hmp.benchmark(step, ["float32", "torch.autocast"], rounds=2, steps=3)
    assert len({row.loss for row in result}) == 1


def test_other_state_and_reset_are_put_back_before_each_sample() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    batches: list[float] = []

    def step() -> float:
        optimizer.step()
        scheduler.step()
        return batches.pop() + scheduler.last_epoch

    reset = lambda: batches.__setitem__(slice(None), [5.0] * 99)  # noqa: E731
    result = hmp.benchmark(step, ["float32", "torch.autocast"], optimizer=optimizer, state=scheduler, reset=reset, **ONCE)
    # of the third step: two are not timed
    assert [row.loss for row in result] == 2 * [8.0]
    assert scheduler.last_epoch == 0
    assert len(batches) == 99


def test_losses_are_compared_where_all_state_was_given_alone() -> None:
    result = hmp.benchmark(lambda: 1.0, ["float32"], **ONCE)
    assert not result.losses_compare and "The losses can't be compared" in str(result)
    training = Training()
    result = hmp.benchmark(training, ["float32"], optimizer=training.optimizer, rounds=3, steps=5)
    assert any("Pass all state" in note for note in result.notes)


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
    ({"policies": [hmp.Policy("torch.autocast", bf16={"mm"})]}, "a policy called 'torch.autocast'"),
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


def test_casts_around_the_benchmark_are_errors_where_they_would_win() -> None:
    with torch.autocast("cpu"), pytest.raises(hmp.HmpError, match=r"torch\.autocast is enabled"):
        hmp.benchmark(never)
    model = hmp.apply(nn.ReLU())
    with pytest.raises(hmp.HmpError, match=r"hmp\.remove\(model\) or hmp\.revert\(\)"):
        hmp.benchmark(never)
    hmp.remove(model)
    hmp.benchmark(nothing, ["float32"], **ONCE)
