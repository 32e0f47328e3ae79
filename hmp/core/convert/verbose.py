"""What `convert(isVerbose=True)` logs: the policy, then every distinct decision once, through the logger `hmp`."""

from __future__ import annotations

import logging
from typing import Any

from .. import locks
from ..casting import each_tensor
from ..formatting import dtype_name
from ..log import caller, log, should_log
from ..observe import Call, Listener
from ..policy import ListName, Policy
from ..rules import rules


def announce(policy: Policy) -> None:
    """Log the policy that became active, and give the logger a handler on stderr if it has none."""
    if not should_log():
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


class VerboseLog(Listener):
    """Logs each distinct decision once: op, place of the call, input dtypes, what was cast to what."""

    measures = lists_casts = True

    def __init__(self) -> None:
        self._said: set[tuple[Any, ...]] = set()
        self._lock = locks.RLock()

    def end(self, call: Call) -> None:
        """Log the decision where it is a new one."""
        rule = call.rule
        inputs = tuple(tensor.dtype for tensor in each_tensor(call.given))
        if not inputs or rule is None or rule.kind is rules.ONE_OP:
            return
        place = "{}:{}".format(*caller())
        decision = (rule.op, place, inputs, tuple(call.cast_dtypes))
        with self._lock:
            if decision in self._said:
                return
            self._said.add(decision)
        if should_log():
            casts = ", ".join(dict.fromkeys(f"{dtype_name(a)} -> {dtype_name(b)}" for a, b in call.cast_dtypes)) or "nothing to cast"
            log.info("%s (%s) at %s: inputs %s: %s", rule.op, rule.kind, place, ", ".join(map(dtype_name, inputs)), casts)
