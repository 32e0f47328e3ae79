"""Numbers, tables and JSON as text, for reports, messages and notebooks."""

from .as_json import SCHEMA_VERSION, json_text, json_values, versioned
from .notebooks import in_notebook
from .origin import provenance
from .target import written
from .text_table import aligned
from .units import NOTHING, count, dtype_name, duration, share, size, some, two_digits, typeset_duration

__all__ = [
    "NOTHING",
    "SCHEMA_VERSION",
    "aligned",
    "count",
    "dtype_name",
    "duration",
    "in_notebook",
    "json_text",
    "json_values",
    "provenance",
    "share",
    "size",
    "some",
    "two_digits",
    "typeset_duration",
    "versioned",
    "written",
]
