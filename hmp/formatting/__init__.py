"""Numbers, tables and HTML as text. Knows no values of hmp's."""

from . import html, units
from .as_json import json_values
from .text_table import aligned
from .units import count, dtype_name, duration, size

__all__ = [
    "aligned",
    "count",
    "dtype_name",
    "duration",
    "html",
    "json_values",
    "size",
    "units",
]
