"""Four tasks of a size at which low precision pays: 256 wide and some 2,048 positions a batch, where the others have 48 and 400."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from . import text, vision
from .task import Task, annealed

_WIDTH, _STEPS = 256, 60  # a step takes some fifty times as long as one of the others, and more is learnt in it


def _larger(name: str, rate: float, steps: int = _STEPS, **changes: Any) -> Task:
    task = next(task for task in (*vision.TASKS, *text.TASKS) if task.name == name)
    about = f"{task.about}; {_WIDTH} wide"
    return dataclasses.replace(
        task, name=f"{name}-large", about=about, optimizer=annealed(rate, steps // 4), steps=steps, large=True, **changes
    )


TASKS = [
    _larger(
        "vit",
        2.5e-4,
        steps=120,  # before that, its accuracy on what it has not seen is luck: float32 nudged was 7 % better
        model=functools.partial(vision.vit, width=_WIDTH, patch=1),
        batches=functools.partial(vision.batches, rows=32),
    ),
    _larger(
        "bert",
        1e-3,
        model=functools.partial(text.bert, width=_WIDTH),
        batches=functools.partial(text.sentences, rows=88),
    ),
    _larger(
        "gpt2",
        1e-3,
        model=functools.partial(text.gpt2, width=_WIDTH, length=128),
        batches=functools.partial(text.characters, length=128),
    ),
    _larger(
        "t5",
        1e-3,
        model=functools.partial(text.t5, width=_WIDTH),
        batches=functools.partial(text.reversals, rows=256),
    ),
]
