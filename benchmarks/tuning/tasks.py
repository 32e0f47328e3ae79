"""All tasks by name: six models, and three failures that are planted."""

from __future__ import annotations

from . import planted, text, vision
from .task import Task

MODELS: dict[str, Task] = {task.name: task for task in (*vision.TASKS, *text.TASKS)}
PLANTED: dict[str, Task] = {task.name: task for task in planted.TASKS}
TASKS = MODELS | PLANTED
