"""Batches that are used many times, whatever the user's loss does to the one that it is given."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch


class Unchanged:
    """Gives out a batch for each use. A loss that takes out entries or writes into tensors is found out on a copy, and is given copies
    from then on; any other is given the batch itself, for a copy takes time."""

    def __init__(self) -> None:
        self._writes = False
        self._known: dict[int, Any] = {}  # holds them, so that no other gets the same id

    def call(self, loss: Any, model: torch.nn.Module, batch: Any) -> Any:
        """loss(model, batch), after which the batch is as it was."""
        if id(batch) in self._known and not self._writes:
            return loss(model, batch)
        try:
            given = copy.deepcopy(batch)
        except Exception:  # there are objects without copies, such as tensors with a history
            return loss(model, batch)
        before = _content(given)
        try:
            return loss(model, given)
        finally:
            self._known[id(batch)] = batch
            self._writes = self._writes or _content(given) != before


def _content(value: Any) -> Any:
    """What tells a batch from itself when it was written to."""
    if isinstance(value, torch.Tensor):
        return id(value), tuple(value.shape), None if value.is_inference() else value._version
    if isinstance(value, Mapping):
        return {name: _content(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_content(each) for each in value]
    attributes = getattr(value, "__dict__", None)
    return id(value), {} if attributes is None else {name: _content(each) for name, each in attributes.items()}
