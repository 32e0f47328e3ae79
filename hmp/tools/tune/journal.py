"""What was measured before: a search goes on from its tune.json, and that of another task is refused."""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...core.casting import each_tensor
from ...core.formatting import of_json
from ...core.policy import Policy
from ...errors import HmpError
from .files import JSON_FILE
from .result import Stopped, Trial, TuneResult, Unit, result_of, trial_of
from .task import Task

_ANEW = "name another folder, or give resume=False (--no-resume) to start anew"
# Losses of the same training that are further apart are of two tasks; by less they differ with the number of threads.
_SAME_LOSS = 1e-4


class OtherTaskError(HmpError):
    """The folder holds what was measured of another task."""


class Journal:
    """Return the trials and measurements of an earlier search with this key; empty without one.

    Raise HmpError if the folder holds those of another task, or the file isn't hmp's.
    """

    def __init__(self, folder: Path | None, key: Mapping[str, str], resume: bool) -> None:
        self.trials: dict[str, Trial] = {}
        self.units: tuple[Unit, ...] = ()
        self.result: TuneResult | None = None  # of a search that ended by itself
        self._file = file = None if folder is None else folder / JSON_FILE
        if file is None or not resume or not file.is_file():
            return
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            known = values["key"]
            apart = [f"{name} ({known.get(name)} there, {key[name]} here)" for name in key if key[name] != known.get(name)]
            if apart:
                raise OtherTaskError(f"{file}: is of a search with another {' and another '.join(apart)}; {_ANEW}")
            self.trials = {_id(trial.name, trial.policy): trial for trial in map(trial_of, values["trials"])}
            self.units = tuple(of_json(Unit, each) for each in values["units"])
            if values["stopped"] == Stopped.SOLVED:
                self.result = result_of(values)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
            raise HmpError(
                f"{file}: expected a tune.json of hmp, got {type(error).__name__}: {error}; take it away, or name another folder"
            ) from None

    def trial(self, name: str, policy: Policy) -> Trial | None:
        """Return the trial of that policy, None where it was not made."""
        return self.trials.get(_id(name, policy))

    def check(self, known: float, loss: float) -> None:
        """Compare float32's loss with that of the earlier search: another model, loss or optimizer gives another. HmpError then."""
        if not math.isclose(known, loss, rel_tol=_SAME_LOSS):
            raise OtherTaskError(
                f"{self._file}: is of a search in which float32's loss was {known:.6g}, here it is {loss:.6g}: "
                f"the model, the loss or the optimizer is another; {_ANEW}"
            )


def search_key(task: Task, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return what identifies a search: its settings, the shapes of the model's tensors and the first batch."""
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in task.model.state_dict().items()]
    batch = hashlib.sha256()
    for tensor in each_tensor((task.batches[0],)):
        if tensor.layout is torch.strided and not tensor.is_nested:
            plain = tensor.detach().cpu().contiguous()
            batch.update(ctypes.string_at(plain.data_ptr(), plain.nbytes))  # without numpy
    found: dict[str, Any] = {"model": hashlib.sha256(repr(shapes).encode()).hexdigest()[:12], "first batch": batch.hexdigest()[:12]}
    found |= {"number of batches": len(task.batches), "steps": task.steps, "torch": torch.__version__, "device": task.device}
    return {name: str(value) for name, value in {**settings, **found}.items()}


def _id(name: str, policy: Policy) -> str:
    return name if name == "float32" else policy.fingerprint  # float32 runs without hmp
