"""Python values that json.dumps() writes as valid JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

SCHEMA_VERSION = 1


def json_values(value: Any) -> Any:
    """`value` with the strings "nan", "inf" and "-inf" for the floats that JSON lacks. Dicts are copied, lists and tuples become lists."""
    if isinstance(value, dict):
        return {key: json_values(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def versioned(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` after the version of their form: every JSON that hmp writes says it first."""
    return {"schema_version": SCHEMA_VERSION, **values}


def json_text(values: Mapping[str, Any]) -> str:
    """`values` as JSON, with their version."""
    return json.dumps({**versioned(values), **json_values(dict(values))}, indent=1, allow_nan=False)
