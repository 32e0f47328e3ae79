"""A recipe file: what it may hold, the step that is made of it, and what is said about one that cannot be used.

No public call reads a recipe without the work of a command.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hmp
from hmp.cli.recipe import MOST_BATCHES, RecipeError, load

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


def test_without_an_optimizer_there_are_gradients_and_no_update(write) -> None:
    step = load(write(GOOD.partition("def optimizer")[0])).make_step()
    before = step.model.weight.detach().clone()
    step.run()
    step.run()
    assert step.optimizer is None
    assert torch.equal(step.model.weight, before)
    assert torch.equal(step.model.weight.grad, torch.full((1, 3), 1.0))  # of the second batch alone


def test_a_step_alone_is_a_recipe(write) -> None:
    step = load(write("def step():\n    return 3.0\n")).make_step()
    assert (step.run(), step.model, step.optimizer, step.state) == (3.0, None, None, ())


@pytest.mark.parametrize(
    ("text", "place", "told"),
    [
        ("", "", "lacks model(), batches() and loss(model, batch)"),
        ("def step(): pass\ndef model(): pass\n", "", "defines step() and also model()"),
        ("step = 3\n", "", "int, not a function"),
        ("\nx = y\n", ":2", "NameError: name 'y' is not defined"),
        ("raise SystemExit(1)\n", ":1", "SystemExit: 1"),
        ("import no_such_module\n", ":1", "No module named 'no_such_module'"),
        ("x = 1\ndef step(:\n", ":2", "SyntaxError"),
    ],
)
def test_a_file_that_is_no_recipe_is_an_error_with_its_place(write, text: str, place: str, told: str) -> None:
    path = write(text)
    with pytest.raises(RecipeError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}{place}: ") and told in str(caught.value)
    assert isinstance(caught.value, hmp.HmpError)


@pytest.mark.parametrize(
    ("old", "new", "place", "told"),
    [
        ("return torch.nn.Linear(FEATURES, 1)", "return 3", "", "model() returned an object of type int"),
        ("return torch.nn.Linear(FEATURES, 1)", "return 1 / 0", ":5", "model() raised ZeroDivisionError"),
        ("range(100)", "[]", "", "batches() returned no batch"),
        ("range(100)", "[1 / 0]", ":8", "batches() raised ZeroDivisionError"),
        ("return torch.optim", "return 3 #", "", "optimizer(model) returned an object of type int"),
        ("return model(batch).mean()", "return None", "", "loss(model, batch) returned an object of type NoneType"),
    ],
)
def test_functions_that_make_something_else_are_errors_with_their_place(write, old: str, new: str, place: str, told: str) -> None:
    path = write(GOOD.replace(old, new))
    with pytest.raises(RecipeError) as caught:
        load(path).make_step().run()
    assert str(caught.value).startswith(f"{path}{place}: {told}")
