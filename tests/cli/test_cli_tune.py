"""hmp tune and hmp init on the command line: what they hand on, print and write, and their exit statuses."""

from __future__ import annotations

import itertools
import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hmp
import tune_result_kit
from hmp.cli import main

TINY = """\
import torch

def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))

def batches():
    random = torch.Generator().manual_seed(0)
    for _ in range(100):
        yield torch.randn(8, 4, generator=random)

def loss(model, batch):
    return (model(batch).squeeze() - batch.sum(1)).square().mean()
"""


@pytest.fixture(autouse=True)
def recipe(in_a_folder_of_its_own: None) -> None:
    Path("recipe.py").write_text(TINY)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What hmp.tune() was called with; it gives back `given["result"]`, or raises it, after the loss was called if `given["runs"]`."""
    given: dict[str, Any] = {"result": tune_result_kit.result(), "runs": True}

    def tune(model: Any, batches: Any, **options: Any) -> Any:
        result = given["result"]
        given.update(options, model=model, batches=batches)
        if given["runs"]:
            options["loss"](model, batches[0])
        if isinstance(result, BaseException):
            raise result
        result.save(options["folder"])
        return result

    monkeypatch.setattr(hmp, "tune", tune)
    return given


def test_the_recipe_and_the_options_are_handed_on(given: dict[str, Any]) -> None:
    Path("recipe.py").write_text(TINY + "\ndef optimizer(model): ...\n\ndef metric(model): ...\n")
    assert main(["tune", "recipe.py"]) == 0
    assert isinstance(given["model"], torch.nn.Sequential)
    assert len(given["batches"]) == 16
    assert (given["optimizer"].__name__, given["metric"].__name__) == ("optimizer", "metric")
    names = "tolerance seconds max_trials start per_module ops objective steps seed levels".split()
    assert [given[name] for name in names] == [0.01, None, None, "autocast", False, None, "time", None, 0, ["bf16", "fp32"]]
    command = (
        "tune recipe.py --out there --tolerance loss=0.02,metric=0.01 --start bert --per-module --ops linear,softmax "
        "--objective memory --steps 40 --seed 3 --levels fp8,bf16,fp32"
    )
    assert main([*command.split(), "--max-trials", "7"]) == 0
    assert [given[name] for name in names] == [
        {"loss": 0.02, "metric": 0.01}, None, 7, "bert", True, ["linear", "softmax"], "memory", 40, 3, ["fp8", "bf16", "fp32"],
    ]  # fmt: skip
    assert len(given["batches"]) == 40
    assert given["folder"] == Path("there")
    assert main(["tune", "recipe.py", "--seconds", "90", "--tolerance", "0.5"]) == 0
    assert (given["seconds"], given["tolerance"]) == (90.0, 0.5)


def test_it_prints_the_result_and_how_to_use_the_lists(given: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "recipe.py", "--html", "tune.html"]) == 0
    printed = capsys.readouterr()
    assert printed.out == (
        f"{given['result']}\n\n"
        "lists, with a reason for each entry: tuned/bf16.txt, tuned/fp32.txt, tuned/promote.txt\n"
        'use them: hmp.apply(model, "tuned"), or hmp run --policy tuned script.py\n'
        "page with all trials: tune.html\n"
    )
    assert "<html" in Path("tune.html").read_text(encoding="utf-8")
    assert hmp.Policy.load("tuned") == given["result"].policy


def test_a_step_that_fails_is_an_error_of_its_own() -> None:
    Path("recipe.py").write_text(TINY.replace("batch.sum(1)", "batch.sum(1)[:3]"))
    with pytest.raises(RuntimeError, match="must match the size") as caught:
        main(["tune", "recipe.py"])
    assert (caught.traceback[-1].name, caught.traceback[-1].lineno + 1) == ("loss", 12)


def test_nothing_but_float32_within_the_tolerance_is_one(given: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    bare = replace(tune_result_kit.trial("nothing low", ()), lists={})
    given["result"] = tune_result_kit.result(trials=(tune_result_kit.FLOAT32, tune_result_kit.TRIALS[3], bare), best=bare)
    assert main(["tune", "recipe.py"]) == 1
    printed = capsys.readouterr()
    assert printed.err == "hmp tune: only float32 is within the tolerance; raise --tolerance\n"
    assert Path("tuned/bf16.txt").is_file()


def test_ctrl_c_is_130_and_says_what_there_is(given: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    given["result"] = KeyboardInterrupt()
    assert main(["tune", "recipe.py"]) == 130
    assert capsys.readouterr().err == "hmp tune: interrupted; if any lists were verified, the best are in tuned\n"


def test_it_says_each_trial_and_the_folder_has_what_was_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "recipe.py", "--ops", "tanh", "--objective", "memory"]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("hmp tune: running float32 and the presets\nhmp tune: trial 1, float32: fits\n")
    assert "trial 1," not in printed.out
    assert hmp.Policy.load("tuned") == hmp.Policy.from_dict(json.loads(Path("tuned/tune.json").read_text(encoding="utf-8"))["policy"])


# -- hmp init


@pytest.mark.slow
def test_the_recipe_of_init_serves_all_three(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "mine.py"]) == 0
    assert "hmp tune mine.py" in capsys.readouterr().out
    text = Path("mine.py").read_text(encoding="utf-8")
    assert "hmp tune mine.py " in text and "recipe.py" not in text
    # fewer and smaller batches: that they serve is the question here
    Path("mine.py").write_text(text.replace("waves(128, seed", "waves(8, seed").replace("range(64)", "range(2)").replace("1024", "64"))
    assert main(["benchmark", "mine.py", "--seconds", "0.1", "--steps", "1"]) == 0
    assert main(["compare", "mine.py"]) == 0
    assert main(["tune", "mine.py", "--max-trials", "5", "--steps", "2", "--tolerance", "1"]) == 0
    assert "metric at most 100.00% worse" in capsys.readouterr().out


def test_the_recipe_of_init_learns() -> None:
    assert main(["init"]) == 2 and Path("recipe.py").read_text() == TINY  # there is one
    assert main(["init", "no/recipe.py"]) == 2
    Path("recipe.py").unlink()
    assert main(["init"]) == 0
    torch.manual_seed(0)
    recipe = runpy.run_path("recipe.py")
    model = recipe["model"]()
    optimizer = recipe["optimizer"](model)
    before = recipe["metric"](model)
    for batch in itertools.islice(itertools.cycle(list(recipe["batches"]())), 20):
        optimizer.zero_grad()
        recipe["loss"](model, batch).backward()
        optimizer.step()
    assert before < 0.4 and recipe["metric"](model) > 0.9
    assert model.training
