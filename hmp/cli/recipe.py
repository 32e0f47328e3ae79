"""A recipe: a Python file that says how a model, its batches and its loss are made, or what one step is."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import itertools
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import HmpError, is_interrupt
from ..tools.compare.trials import ModelStep
from ..tools.model_call import named_arguments
from ..tools.tune.task import scalar, stepping

_MADE, _LOSS = "model() -> a torch.nn.Module, batches() -> an iterable", "loss(model, batch) -> a scalar tensor"
_TRAINED = f"{_MADE}, {_LOSS} and, for training, optimizer(model)"
# A command → what it takes of a recipe.
FORMS = {
    "benchmark": f"a recipe for hmp benchmark defines {_TRAINED}; or step() alone",
    "compare": f"a recipe for hmp compare defines {_MADE} and {_LOSS}",
    "summary": f"a recipe for hmp summary defines {_MADE} and {_LOSS}",
    "tune": f"a recipe for hmp tune defines {_TRAINED}, and optionally metric(model) -> a number, larger is better",
}
MOST_BATCHES = 16
# name → how many arguments it is called with
_PIECES = {"model": 0, "batches": 0, "loss": 2, "optimizer": 1, "metric": 1, "step": 0}
_NEEDED = ("model", "batches", "loss")
_MODULE = "hmp_recipe"


class RecipeError(HmpError):
    """A recipe that cannot be used."""


@dataclass(frozen=True)
class TaskRecipe:
    """The functions of a recipe file: `model`, `batches` and `loss`, maybe `optimizer` and `metric`; or `step` alone."""

    path: str
    model: Callable[[], Any] | None = None
    batches: Callable[[], Iterable[Any]] | None = None
    loss: Callable[[Any, Any], Any] | None = None
    optimizer: Callable[[Any], Any] | None = None
    metric: Callable[[Any], Any] | None = None
    step: Callable[[], Any] | None = None

    def make_step(self) -> RecipeStep:
        """Return a step to run; model, batches and optimizer are made by the recipe's functions.

        Raise RecipeError where they make no such thing.
        """
        if self.step is not None:
            return RecipeStep(self.step)
        model, batches = self.make_model_and_batches()
        optimizer = None if self.optimizer is None else self._call("optimizer", self.optimizer, model)
        if self.optimizer is not None:
            stepping(optimizer, self._error)
        return _training_step(self, model, optimizer, batches)

    def make_model_and_batches(self, most: int = MOST_BATCHES) -> tuple[torch.nn.Module, list[Any]]:
        """Return what model() and batches() give, of the latter the first `most`.

        Raise RecipeError if that isn't a module, or without a batch.
        """
        if self.model is None or self.batches is None:
            raise RecipeError(f"{self.path}: defines step() alone; this needs model(), batches() and loss(model, batch)")
        model = self._call("model", self.model)
        if not isinstance(model, torch.nn.Module):
            raise RecipeError(f"{self.path}: model() returned an object of type {type(model).__name__}; return a torch.nn.Module")
        made = self._call("batches", self.batches)
        if not isinstance(made, Iterable):
            raise RecipeError(
                f"{self.path}: batches() returned an object of type {type(made).__name__}; return an iterable, such as a list"
            )
        batches = self._call("batches", lambda: list(itertools.islice(made, most)))
        if not batches:
            raise RecipeError(f"{self.path}: batches() returned no batch; return at least one")
        return model, batches

    def _error(self, message: str) -> RecipeError:
        return RecipeError(f"{self.path}: {message}")

    def _call(self, name: str, function: Any, *arguments: Any) -> Any:
        """Return what one of the functions returns."""
        try:
            return function(*arguments)
        except Exception as error:
            if is_interrupt(error):
                raise KeyboardInterrupt from error
            raise RecipeError(f"{_place(self.path, error)}: {_listed([name])} raised {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class RecipeStep:
    """One step of a recipe as a function without arguments, and the objects whose state it changes."""

    run: Callable[[], Any]
    model: torch.nn.Module | None = None
    optimizer: Any = None
    state: tuple[Any, ...] = ()


@dataclass
class RecipeLoss(ModelStep):
    """A recipe's loss on a batch; the output is what the model returns where the recipe calls it, or the loss where it never does."""

    recipe: TaskRecipe | None = None

    def forward(self) -> tuple[Any, torch.Tensor | None, str, Mapping[str, Any]]:
        """Return the output, or the outputs of all calls, the loss, what that is, and the arguments of the last call."""
        assert self.recipe is not None
        of = self.recipe.loss
        assert of is not None
        outputs: list[Any] = []
        given: list[tuple[Any, Any]] = [((), {})]

        def called(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            outputs.append(output)
            given.append((args, kwargs))

        hook = self.model.register_forward_hook(called, with_kwargs=True)
        try:
            loss = scalar(of(self.model, self.batch), self.recipe._error)
        finally:
            hook.remove()
        output = outputs[0] if len(outputs) == 1 else outputs or loss
        return output, *self.started(loss, "forward and backward of the recipe's loss"), named_arguments(self.model, *given[-1])


class _Position:
    """Which batch is next; a state that can be put back like an optimizer's."""

    def __init__(self) -> None:
        self.index = 0

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, values: dict[str, int]) -> None:
        self.index = values["index"]


def _training_step(recipe: TaskRecipe, model: torch.nn.Module, optimizer: Any, batches: list[Any]) -> RecipeStep:
    """Forward, backward and update on the next batch; no update without an optimizer, no backward where no gradient is asked for."""
    position, of = _Position(), recipe.loss
    assert of is not None

    def step() -> torch.Tensor:
        batch = batches[position.index % len(batches)]
        position.index += 1
        (model if optimizer is None else optimizer).zero_grad()
        loss = scalar(of(model, batch), recipe._error)
        if loss.requires_grad:
            loss.backward()
            if optimizer is not None:
                optimizer.step()
        return loss.detach()

    return RecipeStep(step, model, optimizer, (position,))


def load(path: str | Path, command: str = "benchmark") -> TaskRecipe:
    """Return the recipe in a file, which is run once, as a module whose folder can be imported from.

    RecipeError says what it lacks for that command.
    """
    file, form = Path(path), FORMS[command]
    if not file.is_file():
        raise RecipeError(f"{path}: no such file; give a Python file: {form}")
    module = _run(file)
    found = {name: getattr(module, name) for name in _PIECES if hasattr(module, name)}
    if "step" in found and any(name in found for name in _NEEDED):
        raise RecipeError(f"{path}: defines step() and also {_listed([n for n in _NEEDED if n in found])}; keep one of the two: {form}")
    if "step" in found and command != "benchmark":
        raise RecipeError(f"{path}: defines step() alone, which is for hmp benchmark; {form}")
    missing = [] if "step" in found else [name for name in _NEEDED if name not in found]
    if missing:
        raise RecipeError(f"{path}: lacks {_listed(missing)}; {form}")
    for name, piece in found.items():
        if not callable(piece):
            raise RecipeError(
                f"{path}: {name} is an object of type {type(piece).__name__}, not a function; write def {_listed([name])}: return ..."
            )
    return TaskRecipe(str(path), **found)


def _run(file: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(_MODULE, file, loader=importlib.machinery.SourceFileLoader(_MODULE, str(file)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(file.resolve().parent)
    sys.modules[_MODULE] = module  # dataclasses and pickles look their module up
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python recipe.py` does; it stays for what the functions import later
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        if is_interrupt(error):  # Ctrl-C in an import comes out as an ImportError
            raise KeyboardInterrupt from error
        cause = f"{type(error).__name__}: {error}"
        raise RecipeError(f"{_place(file, error)}: cannot be run, {cause}; it must run by itself: python {file}") from error
    return module


def _place(path: str | Path, error: BaseException) -> str:
    """Return the file, with the line in it where the error arose."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) and error.filename == str(path) else lines[-1] if lines else None
    return str(path) if line is None else f"{path}:{line}"


def _listed(names: list[str]) -> str:
    calls = [f"{name}({', '.join(('model', 'batch')[: _PIECES[name]])})" for name in names]
    return " and ".join(filter(None, (", ".join(calls[:-1]), calls[-1])))
