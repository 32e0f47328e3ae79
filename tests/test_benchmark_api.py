"""hmp.benchmark(): which steps run in which order under which casts, from which state, and what is said about them."""

from __future__ import annotations

import copy
import inspect
import json
import math
import random
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmp
from hmp import patches
from hmp.benchmark import memory, sampling
from hmp.benchmark.result import Benchmark, Row, StepError

ROOT = Path(__file__).resolve().parent.parent
BF16, FP32 = torch.bfloat16, torch.float32
ONCE: dict[str, Any] = {"rounds": 1, "steps": 1}
LINEAR = hmp.Policy("only linear", bf16={"linear"})


def nothing() -> None:
    """A step that has nothing to do."""


class Training:
    """A model with dropout, batch norm and an unsaved buffer, Adam, and one batch; calling it is one step."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.one, self.norm, self.two = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.model = nn.ModuleList([self.one, self.norm, self.two])
        self.model.register_buffer("calls", torch.zeros(()), persistent=False)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.x, self.y = torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1])
        self.linear: Callable[..., torch.Tensor] = lambda *arguments: F.linear(*arguments)  # found when called, so that it can be patched

    def __call__(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        hidden = F.dropout(self.norm(self.linear(self.x, self.one.weight, self.one.bias).float()), 0.5)
        loss = F.cross_entropy(self.linear(hidden, self.two.weight, self.two.bias).float(), self.y)
        loss.backward()
        self.optimizer.step()
        self.model.calls += 1
        return loss

    def benchmark(self, policies: Any = ("float32",), **options: Any) -> Benchmark:
        return hmp.benchmark(self, policies, model=self.model, optimizer=self.optimizer, **options)

    def everything(self) -> tuple[Any, ...]:
        gradients = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        return copy.deepcopy((self.model.state_dict(), self.model.calls, self.optimizer.state_dict(), gradients))


# -- what runs, and under what


def seen() -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of a product that all the lists hold, and of one that habana's alone holds."""
    x = torch.ones(2, 2)
    return F.linear(x, x).dtype, (x * x).dtype


def test_rounds_take_every_policy_once_in_an_order_that_rotates() -> None:
    names = {(FP32, FP32): "float32", (BF16, FP32): "autocast", (BF16, BF16): "habana"}
    ran: list[str] = []
    result = hmp.benchmark(lambda: ran.append(names[seen()]), rounds=4, steps=2, warmup=1)
    f, a, h = (3 * [name] for name in ("float32", "autocast", "habana"))  # one untimed step, two timed ones
    assert ran[-36:] == [*f, *a, *h, *a, *h, *f, *h, *f, *a, *f, *a, *h]
    preparing = ran[:-36]
    assert preparing == sorted(preparing, key=["float32", "autocast", "habana"].index)
    assert [row.name for row in result] == ["float32", "autocast", "habana"]
    assert [len(row.samples) for row in result] == [4, 4, 4]
    assert (result.rounds, result.untimed_steps, result.steps) == (4, 1, 2)


def test_one_in_ten_steps_is_untimed_at_least() -> None:
    ran: list[int] = []
    result = hmp.benchmark(lambda: ran.append(0), ["float32"], rounds=1, steps=35, warmup=2)
    assert result.untimed_steps == 3
    before = len(ran)
    hmp.benchmark(lambda: ran.append(0), ["float32"], rounds=2, steps=35, warmup=2)
    assert len(ran) - before == before + 38


def test_policies_are_presets_folders_and_policies(tmp_path: Path) -> None:
    folder = LINEAR.save(tmp_path / "mine")
    other = LINEAR.save(tmp_path / "other")
    given = ["torch-cpu", folder, str(other), LINEAR, hmp.Policy("mul alone", bf16={"mul"})]
    found: list[Any] = []
    result = hmp.benchmark(lambda: found.append(seen()), given, **ONCE)
    assert [row.name for row in result] == ["torch-cpu", str(folder), str(other), "only linear", "mul alone"]
    assert list(dict.fromkeys(found)) == [(BF16, FP32), (FP32, BF16)]
    assert result["mul alone"].description.startswith("policy 'mul alone': bf16 1")


def test_rows_without_hmp_run_on_torch_itself(torch_differences: Callable[[], list[str]]) -> None:
    patched: dict[str, set[bool]] = {"float32": set(), "autocast": set(), "habana": set()}
    differences: list[str] = []

    def step() -> None:
        name = "autocast" if torch._C._is_any_autocast_enabled() else "habana" if hmp.casts_enabled() else "float32"
        patched[name].add(patches.installed())
        if name == "float32" and not differences:
            differences.append(str(torch_differences()))

    hmp.benchmark(step, rounds=2, steps=1)
    assert patched == {"float32": {False}, "autocast": {False}, "habana": {True}}
    assert differences == ["[]"]
    assert not patches.installed()


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
        result = hmp.benchmark(lambda: found.append(seen()), ["float32", "habana"], **ONCE)
        assert seen() == (BF16, FP32)
        assert "call hmp.revert() first" in str(result)
        assert hmp.fallbacks() == before
        handle.revert()
        assert not hmp.is_converted()
    assert set(found) == {(FP32, FP32), (BF16, BF16)}
    assert "hmp.revert()" not in str(hmp.benchmark(nothing, ["float32"], **ONCE))


# -- the same state for everybody


def plain_losses(training: Training, steps: int, seed: int, around: Callable[[], Any]) -> list[float]:
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        with around():
            losses.append(training().item())
    return losses


def test_losses_are_those_of_plain_loops_from_the_same_state_and_seed() -> None:
    result = Training().benchmark(["float32", "autocast", LINEAR], rounds=3, steps=4, warmup=2, seed=7)
    with_hand_casts = Training()
    with_hand_casts.linear = lambda x, weight, bias: F.linear(x.to(BF16), weight.to(BF16), bias.to(BF16))
    for name, training, around in (
        ("float32", Training(), torch.enable_grad),
        ("autocast", Training(), lambda: torch.autocast("cpu", dtype=BF16)),
        ("only linear", with_hand_casts, torch.enable_grad),
    ):
        expected = plain_losses(training, 6, 7, around)
        assert (result[name].first_loss, result[name].last_loss) == (expected[0], expected[-1]), name
        assert result[name].loss_change == 0
    assert result["only linear"].last_loss != result["float32"].last_loss
    assert result.losses_compare


def test_state_seeds_and_gradients_are_as_they_were() -> None:
    training = Training()
    training()
    training()
    before = training.everything()
    random.seed(3)
    torch.manual_seed(3)
    training.benchmark(["float32", "habana"], rounds=2, steps=2)
    torch.testing.assert_close(training.everything(), before, rtol=0, atol=0)
    drawn = random.random(), torch.rand(()).item()
    random.seed(3)
    torch.manual_seed(3)
    assert drawn == (random.random(), torch.rand(()).item())


def test_gradients_that_were_not_there_are_not_there_afterwards() -> None:
    training = Training()
    training.benchmark(**ONCE)
    assert all(parameter.grad is None for parameter in training.model.parameters())
    assert training.optimizer.state_dict()["state"] == {}


def test_every_policy_draws_the_same_random_numbers() -> None:
    numpy = pytest.importorskip("numpy")

    def step() -> float:
        return torch.rand(()).item() + random.random() + numpy.random.rand()

    result = hmp.benchmark(step, rounds=2, steps=3)
    assert len({(row.first_loss, row.last_loss, row.loss_change) for row in result}) == 1


def test_other_state_and_reset_are_put_back_before_each_sample() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    batches: list[float] = []

    def step() -> float:
        optimizer.step()
        scheduler.step()
        return batches.pop() + scheduler.last_epoch

    result = hmp.benchmark(step, optimizer=optimizer, state=scheduler, reset=lambda: batches.__setitem__(slice(None), [5.0] * 99), **ONCE)
    assert [(row.first_loss, row.last_loss) for row in result] == 3 * [(6.0, 7.0)]
    assert scheduler.last_epoch == 0
    assert len(batches) == 99


def test_without_state_losses_are_not_compared_and_that_is_said() -> None:
    result = hmp.benchmark(lambda: 1.0, ["float32"], **ONCE)
    assert not result.losses_compare
    assert "Losses are not compared" in str(result)
    assert "loss, step 1" not in str(result)


def test_state_that_was_not_given_shows_in_the_losses() -> None:
    training = Training()
    result = hmp.benchmark(training, ["float32"], optimizer=training.optimizer, rounds=3, steps=5)
    (note,) = [note for note in result.notes if "was not given" in note]
    assert note.startswith("float32: the same steps ended at losses from ")
    assert result["float32"].loss_change > 0


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
            f"'fp32' is no policy; presets are {', '.join(hmp.policies())}, or name a folder of list files; "
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


# -- time, by a clock that only steps move


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(sampling, "clock", lambda: self.now)

    def step(self, seconds: Callable[[], float]) -> Callable[[], None]:
        def step() -> None:
            self.now += seconds()

        return step


def test_medians_spreads_and_ratios_are_those_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    # seconds of a step in each sample: both policies are prepared twice, then their order alternates; the machine gets slower
    preparing = [9.0, 9.0, 9.0, 9.0]
    plan = iter([*preparing, 1.0, 0.5, 1.0, 2.0, 4.0, 2.0, 4.0, 8.0, 4.0, 1.0, 0.0])
    now = []
    step = Clock(monkeypatch).step(lambda: now[-1])
    result = hmp.benchmark(step, ["float32", "habana"], reset=lambda: now.append(next(plan)), rounds=5, steps=2)
    assert list(plan) == []
    assert result["float32"].samples == (1.0, 2.0, 4.0, 8.0, 4.0)
    assert result["habana"].samples == (0.5, 1.0, 2.0, 4.0, 1.0)
    assert result["float32"].seconds == 4.0
    assert result["float32"].spread == 2.0  # from the second to the fourth of five
    assert result["habana"].seconds == 1.0
    assert result["habana"].ratio == 0.5  # of the rounds, not of the medians
    assert result["float32"].ratio == 1.0


def test_fewer_than_three_rounds_have_no_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    row = hmp.benchmark(Clock(monkeypatch).step(lambda: 1.0), ["float32"], rounds=2, steps=1)["float32"]
    assert (row.seconds, row.spread) == (1.0, None)


@pytest.mark.parametrize(
    ("one_step", "seconds", "steps", "rounds"),
    [
        (10.0, 30.0, 1, 3),  # at least three rounds
        (1.0, 30.0, 1, 13),  # 4 steps of preparing, 2 in a sample: 4 + 13 * 2 = 30
        (1.0, 9.0, 1, 3),
        (2.0**-6, 2.0, 13, 8),  # 1 + 1 + 2 + 4 until the clock can be read, 3 watched, 14 in a sample: 11 + 8 * 14 < 128
    ],
)
def test_rounds_go_on_until_the_time_is_spent(
    one_step: float, seconds: float, steps: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = hmp.benchmark(Clock(monkeypatch).step(lambda: one_step), ["float32"], seconds=seconds)
    assert (result.steps, result.rounds) == (steps, rounds)


# -- memory


def squares(model: nn.Linear, x: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        hidden = model(model(x))  # keeps x, the result between, and the weight for the second one
        (hidden * hidden.view(-1, 8)).sum().backward()  # keeps one storage under two names

    return step


def test_saved_bytes_count_a_storage_once_and_no_parameters() -> None:
    model, x = nn.Linear(8, 8, bias=False), torch.rand(4, 8)
    for given in ({"model": model}, {}):
        result = hmp.benchmark(squares(model, x), ["float32", LINEAR], **ONCE, **given)
        assert result.memory_kind == "saved for backward"
        assert result["float32"].memory == 3 * 4 * 8 * 4
        # x, the result between and the hidden one in bfloat16, and the weight's copy of the second call
        assert result["only linear"].memory == 3 * 4 * 8 * 2 + 8 * 8 * 2
    assert hmp.benchmark(nothing, ["float32"], **ONCE)["float32"].memory == 0


def test_frozen_weights_of_the_model_are_left_out() -> None:
    model = nn.Linear(8, 8, bias=False).requires_grad_(False)
    x = torch.rand(4, 8, requires_grad=True)
    assert hmp.benchmark(lambda: model(x).sum().backward(), ["float32"], model=model, **ONCE)["float32"].memory == 0


def test_a_step_that_does_not_stand_being_watched_is_timed_all_the_same() -> None:
    weight = torch.rand(3)
    gradient = torch.func.grad(lambda w: (w * w).sum())
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        result = hmp.benchmark(lambda: gradient(weight), ["float32"], **ONCE)
    assert result["float32"].memory is None
    assert result["float32"].samples
    assert "float32: memory could not be measured, RuntimeError: not here" in result.notes


def test_an_accelerators_memory_is_its_allocators_peak_without_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    fake = SimpleNamespace(
        reset_peak_memory_stats=lambda device: calls.append(("reset", device)),
        max_memory_allocated=lambda device: 1000,
        memory_allocated=lambda device: 600,
    )
    monkeypatch.setattr(torch, "fake", fake, raising=False)
    device: Any = SimpleNamespace(type="fake")
    meter = memory.meter(device, [], copies=300)
    assert meter.kind == "peak memory"
    assert meter.measure(lambda: calls.append("step")) == 700
    assert calls == [("reset", device), "step"]
    assert memory.allocated(device) == 600
    assert memory.allocated(torch.device("cpu")) == 0


# -- the result


RESULT = Benchmark(
    rows=(
        Row("float32", "torch without casts", 0.25, 0.025, 1.0, 3 * 2**20, 2.0, 1.25, 0.0, None, (0.25, 0.5)),
        Row("autocast", "torch.autocast('cpu'), bfloat16", error="ValueError: no"),
        Row("habana", "policy 'habana'", 12.5e-6, None, 0.5, 512, 2.0, math.nan, 0.0, None, (12.5e-6,)),
    ),
    baseline="float32", rounds=1, untimed_steps=1, steps=20, seed=0, losses_compare=True,
    memory_kind="saved for backward", device="cpu", torch="2.13.0", threads=2, notes=("A note.",),
)  # fmt: skip
TABLE = """\
hmp benchmark: cpu, torch 2.13.0, 2 threads; medians of 1 round, 20 timed steps a policy in each

policy    step time  spread  vs float32  saved for backward  loss, step 1  step 21
----------------------------------------------------------------------------------
float32      250 ms  10.0 %        1.00             3.0 MiB             2     1.25
autocast  ValueError: no
habana      12.5 us       -        0.50               512 B             2      nan

A note."""


def test_table() -> None:
    assert str(RESULT) == repr(RESULT) == TABLE


def test_json_holds_everything(tmp_path: Path) -> None:
    path = RESULT.to_json(tmp_path / "result.json")
    values = json.loads(path.read_text())
    assert values == RESULT.to_dict()
    assert values["rows"][0] == {
        "name": "float32", "description": "torch without casts", "seconds": 0.25, "spread": 0.025, "ratio": 1.0, "memory": 3 * 2**20,
        "first_loss": 2.0, "last_loss": 1.25, "loss_change": 0.0, "error": None, "samples": [0.25, 0.5],
    }  # fmt: skip
    assert values["rows"][2]["last_loss"] == "nan"


def test_rows_are_found_by_name_and_cannot_be_changed() -> None:
    assert RESULT["habana"].ratio == 0.5
    assert len(RESULT) == 3
    with pytest.raises(KeyError, match="no policy 'bert' was benchmarked; there are float32, autocast, habana"):
        RESULT["bert"]
    with pytest.raises(AttributeError):
        RESULT["habana"].ratio = 2.0  # type: ignore[misc]


def test_progress_is_one_line_on_stderr_and_gone_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    hmp.benchmark(nothing, ["float32"], progress=True, **ONCE)
    printed = capsys.readouterr()
    assert printed.err == "\r\033[Kpreparing: float32\r\033[Kround 1: float32\r\033[K"
    hmp.benchmark(nothing, ["float32"], **ONCE)
    assert capsys.readouterr().err == ""


def test_it_is_a_public_name_with_the_policies_of_the_documentation() -> None:
    assert "benchmark" in hmp.__all__
    assert inspect.signature(hmp.benchmark).parameters["policies"].default == ("float32", "autocast", "habana")
    assert inspect.getdoc(hmp.benchmark)


def test_importing_hmp_does_not_import_the_benchmark() -> None:
    code = (
        "import sys, hmp; print(sorted(n for n in sys.modules if n.startswith(('hmp.benchmark', 'hmp.recipe'))), callable(hmp.benchmark))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "['hmp.benchmark'] True\n", done.stderr
