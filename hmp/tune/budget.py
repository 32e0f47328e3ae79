"""How long a search may go on: wall time, or evaluations."""

from __future__ import annotations

import math
import re
import time
from typing import Any

from ..errors import HmpError

_FORM = "give seconds, or a text such as '10 min', '2 h' or '30 evaluations'"
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*")
_UNITS = {"": 1.0, "s": 1.0, "sec": 1.0, "seconds": 1.0, "min": 60.0, "minutes": 60.0, "h": 3600.0, "hours": 3600.0}
_COUNTS = frozenset({"evaluation", "evaluations", "evals", "trials"})


class Over(Exception):
    """The budget is spent."""


class Budget:
    """Seconds or evaluations that may be spent; the time begins when it is made. HmpError for what is no budget."""

    def __init__(self, given: float | str | None) -> None:
        self.seconds, self.evaluations = _parsed(given)
        self.spent = 0
        self._started = time.perf_counter()

    def take(self) -> None:
        """Spends one evaluation. Over where none is left."""
        if self.spent >= self.evaluations or time.perf_counter() - self._started >= self.seconds:
            raise Over
        self.spent += 1


def _parsed(given: Any) -> tuple[float, float]:
    if given is None:
        return math.inf, math.inf
    number, unit = given, ""
    if isinstance(given, str):
        found = _TEXT.fullmatch(given.lower())
        if found is None:
            raise HmpError(f"budget={given!r} is no budget; {_FORM}")
        number, unit = float(found[1]), found[2]
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not (math.isfinite(number) and number > 0):
        raise HmpError(f"budget={given!r} is no budget; {_FORM}")
    if unit in _COUNTS:
        return math.inf, number
    if unit not in _UNITS:
        raise HmpError(f"budget={given!r} has the unit {unit!r}; {_FORM}")
    return number * _UNITS[unit], math.inf
