"""Values as JSON has them."""

from __future__ import annotations

import math
from typing import Any


def json_values(value: Any) -> Any:
    """`value`, its dicts and sequences copied, with the strings "nan", "inf" and "-inf" for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: json_values(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
