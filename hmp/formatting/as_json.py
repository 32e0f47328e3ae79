"""Python values that json.dumps() writes as valid JSON."""

from __future__ import annotations

import math
from typing import Any


def json_values(value: Any) -> Any:
    """`value` with the strings "nan", "inf" and "-inf" for the floats that JSON lacks. Dicts are copied, lists and tuples become lists."""
    if isinstance(value, dict):
        return {key: json_values(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
