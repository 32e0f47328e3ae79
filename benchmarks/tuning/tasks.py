"""All tasks by name: six models, four of them larger, and three planted failures."""

from __future__ import annotations

from . import large, planted, text, vision
from .task import Task

MODELS: dict[str, Task] = {task.name: task for task in (*vision.TASKS, *text.TASKS)}
PLANTED: dict[str, Task] = {task.name: task for task in planted.TASKS}
LARGE: dict[str, Task] = {task.name: task for task in large.TASKS}
TASKS = MODELS | LARGE | PLANTED
