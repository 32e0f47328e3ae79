"""Numbers, tables and JSON as text, for reports, messages and notebooks."""

from .files import json_text, json_values, json_written, of_json, provenance, versioned, written
from .tables import aligned, in_notebook
from .units import NOTHING, count, dtype_name, duration, share, size, some, two_digits, typeset_duration

__all__ = [
    "NOTHING",
    "aligned",
    "count",
    "dtype_name",
    "duration",
    "in_notebook",
    "json_text",
    "json_values",
    "json_written",
    "of_json",
    "provenance",
    "share",
    "size",
    "some",
    "two_digits",
    "typeset_duration",
    "versioned",
    "written",
]
