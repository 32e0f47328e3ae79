"""A recipe file: what it may hold, the step that is made of it, and what is said about one that cannot be used."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hmp
from hmp.tune.recipe import FORMS, MOST_BATCHES, RecipeError, load

GOOD = """\
import torch
from beside import FEATURES

def model():
    return torch.nn.Linear(FEATURES, 1)

def batches():
    for number in range(100):
        yield torch.full((2, FEATURES), float(number))

def loss(model, batch):
    return model(batch).mean()

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.125)
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Writes recipe.py, with a module that it may import beside it; imports are undone."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside.py").write_text("FEATURES = 3\n")

    def write(text: str) -> Path:
        path = tmp_path / "recipe.py"
        path.write_text(text)
        return path

    yield write
    for name in ("hmp_recipe", "beside"):
        sys.modules.pop(name, None)


def test_steps_are_those_of_a_plain_loop_over_the_first_batches(write) -> None:
    torch.manual_seed(0)
    step = load(write(GOOD)).make_step()
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    for number in [*range(MOST_BATCHES), 0, 1]:
        optimizer.zero_grad()
        loss = model(torch.full((2, 3), float(number))).mean()
        loss.backward()
        optimizer.step()
        assert step.run() == loss
    assert torch.equal(step.model.weight, model.weight)
    assert isinstance(step.optimizer, torch.optim.SGD)


def test_the_place_in_the_batches_is_state(write) -> None:
    step = load(write(GOOD.replace("lr=0.125", "lr=0.0"))).make_step()
    (position,) = step.state
    kept = position.state_dict()
    losses = [step.run().item() for _ in range(3)]
    position.load_state_dict(kept)
    assert [step.run().item() for _ in range(3)] == losses
    assert len(set(losses)) == 3


def test_without_an_optimizer_there_are_gradients_and_no_update(write) -> None:
    step = load(write(GOOD.partition("def optimizer")[0])).make_step()
    before = step.model.weight.detach().clone()
    step.run()
    step.run()
    assert step.optimizer is None
    assert torch.equal(step.model.weight, before)
    assert torch.equal(step.model.weight.grad, torch.full((1, 3), 1.0))  # of the second batch alone


def test_a_loss_without_gradients_is_an_inference_step(write) -> None:
    text = GOOD.replace("def loss", "@torch.no_grad()\ndef loss")
    step = load(write(text)).make_step()
    assert step.run().shape == ()
    assert step.model.weight.grad is None


def test_a_step_alone_is_a_recipe(write) -> None:
    step = load(write("def step():\n    return 3.0\n")).make_step()
    assert (step.run(), step.model, step.optimizer, step.state) == (3.0, None, None, ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f"PATH: lacks model(), batches() and loss(model, batch); {FORMS['benchmark']}"),
        ("def model(): pass\ndef batches(): pass\n", f"PATH: lacks loss(model, batch); {FORMS['benchmark']}"),
        ("def step(): pass\ndef model(): pass\n", f"PATH: defines step() and also model(); keep one of the two: {FORMS['benchmark']}"),
        ("step = 3\n", "PATH: step is an object of type int, not a function; write def step(): return ..."),
        ("def step(batch): pass\n", "PATH: step(batch) is called as step(); write def step(): ..."),
        (
            GOOD.replace("loss(model, batch)", "loss(batch)"),
            "PATH: loss(batch) is called as loss(model, batch); write def loss(model, batch): ...",
        ),
        ("\nx = y\n", "PATH:2: cannot be run, NameError: name 'y' is not defined; it must run by itself: python PATH"),
        ("raise SystemExit(1)\n", "PATH:1: cannot be run, SystemExit: 1; it must run by itself: python PATH"),
        (
            "import no_such_module\n",
            "PATH:1: cannot be run, ModuleNotFoundError: No module named 'no_such_module'; it must run by itself: python PATH",
        ),
    ],
)
def test_a_file_that_is_no_recipe_is_an_error(write, text: str, message: str) -> None:
    path = write(text)
    with pytest.raises(RecipeError) as caught:
        load(path)
    assert str(caught.value) == message.replace("PATH", str(path))
    assert isinstance(caught.value, hmp.HmpError)


@pytest.mark.parametrize("command", ["compare", "summary", "tune"])
def test_a_command_that_needs_a_model_is_told_what_it_takes(command: str, write) -> None:
    form = "model() -> a torch.nn.Module, batches() -> an iterable"
    for text, what in (
        ("", "lacks model(), batches() and loss(model, batch)"),
        ("def step(): ...", "defines step() alone, which is for hmp benchmark"),
    ):
        with pytest.raises(RecipeError, match=re.escape(f": {what}; a recipe for hmp {command} defines {form}")) as caught:
            load(write(text), command)
        assert "or step() alone" not in str(caught.value)
        assert ("metric(model)" in str(caught.value)) == ("optimizer(model)" in str(caught.value)) == (command == "tune")


def test_a_syntax_error_has_its_line(write) -> None:
    path = write("x = 1\ndef step(:\n")
    with pytest.raises(RecipeError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:2: cannot be run, SyntaxError: ")


def test_a_file_that_there_is_not_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path / "no.py")
    assert str(caught.value) == f"{tmp_path / 'no.py'}: no such file; give a Python file: {FORMS['benchmark']}"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return torch.nn.Linear(FEATURES, 1)", "return 3", ": model() returned an object of type int; return a torch.nn.Module"),
        ("return torch.nn.Linear(FEATURES, 1)", "return 1 / 0", ":5: model() raised ZeroDivisionError: division by zero"),
        (
            "for number in range(100):\n        yield",
            "return",
            ": batches() returned an object of type int; return an iterable, such as a list",
        ),
        ("range(100)", "[]", ": batches() returned no batch; return at least one"),
        ("range(100)", "[1 / 0]", ":8: batches() raised ZeroDivisionError: division by zero"),
        ("return torch.optim", "return 3 #", ": optimizer(model) returned an object of type int; return a torch.optim.Optimizer"),
    ],
)
def test_functions_that_make_something_else_are_errors(write, old: str, new: str, message: str) -> None:
    text = GOOD.replace(old, new)
    if new == "return":
        text = text.replace("return torch.full((2, FEATURES), float(number))", "return 3")
    path = write(text)
    with pytest.raises(RecipeError) as caught:
        load(path).make_step()
    assert str(caught.value) == f"{path}{message}"


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        ("model(batch)", "a tensor of shape (2, 1)"),
        ("model(batch).mean().item()", "an object of type float"),
        ("None", "an object of type NoneType"),
    ],
)
def test_a_loss_that_is_no_scalar_tensor_is_an_error(write, returned: str, what: str) -> None:
    path = write(GOOD.replace("return model(batch).mean()", f"return {returned}"))
    with pytest.raises(RecipeError) as caught:
        load(path).make_step().run()
    assert str(caught.value) == f"{path}: loss(model, batch) returned {what}; return a scalar tensor, such as its .mean()"
