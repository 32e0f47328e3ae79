"""What `convert(isVerbose=True)` logs: the policy, then every distinct decision once, through the logger `hmp`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from .. import fork_safe
from ..casting import Caster, Tensor, each_tensor
from ..formatting import dtype_name
from ..observing import caller, log, speaks
from ..policy import ListName, Policy
from ..rules import Observer, OpRule, rules


def announce(policy: Policy) -> None:
    """Logs the policy that has become active; gives the logger a handler on stderr if it has none."""
    if not speaks():
        return
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("hmp: %(message)s"))
        log.addHandler(handler)
    if not log.isEnabledFor(logging.INFO):
        log.setLevel(logging.INFO)
    log.info("%s", policy)
    lists: tuple[ListName, ...] = ("bf16", "fp32")
    for cast in lists:
        log.info("  %s: %s", cast, ", ".join(policy.entries(cast)))


class LogObserver(Observer):
    """Logs each distinct decision once: op, place of the call, input dtypes, what was cast to what."""

    def __init__(self) -> None:
        self._said: set[tuple[Any, ...]] = set()
        self._lock = fork_safe.RLock()
        self._made: ContextVar[list[tuple[torch.dtype, torch.dtype]] | None] = ContextVar("hmp_casts_made", default=None)

    def casting(self, caster: Caster) -> Caster:
        """A caster that casts by `caster`, and notes the dtypes for the call in progress."""

        def noting(tensor: Tensor, dtype: torch.dtype) -> Tensor:
            made = self._made.get()
            if made is not None:
                made.append((tensor.dtype, dtype))
            return caster(tensor, dtype)

        return noting

    def around(self, wrapper: Callable[..., Any], rule: OpRule) -> Callable[..., Any]:
        """A function that calls `wrapper`, and logs its decision where it is a new one."""

        def observed(*args: Any, **kwargs: Any) -> Any:
            before = self._made.get()
            made: list[tuple[torch.dtype, torch.dtype]] = []
            try:
                self._made.set(made)
                return wrapper(*args, **kwargs)
            finally:
                self._made.set(before)
                self._say(rule, args, kwargs, made)

        return observed

    def _say(self, rule: OpRule, args: Any, kwargs: Any, made: list[tuple[torch.dtype, torch.dtype]]) -> None:
        inputs = tuple(t.dtype for t in each_tensor((*args, *kwargs.values())))
        if not inputs or rule.kind is rules.ONE_OP:
            return
        place = "{}:{}".format(*caller())
        decision = (rule.op, place, inputs, tuple(made))
        with self._lock:
            if decision in self._said:
                return
            self._said.add(decision)
        if speaks():
            casts = ", ".join(dict.fromkeys(f"{dtype_name(a)} -> {dtype_name(b)}" for a, b in made)) or "nothing to cast"
            log.info("%s (%s) at %s: inputs %s: %s", rule.op, rule.kind, place, ", ".join(map(dtype_name, inputs)), casts)
