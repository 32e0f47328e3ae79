"""Results as files: JSON that any reader takes, and when and with what they were made."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...errors import HmpError
from ...version import __version__

_SCHEMA_VERSION = 1
T = TypeVar("T")


def json_values(value: Any) -> Any:
    """`value` with the strings "nan", "inf" and "-inf" for the floats that JSON lacks. Dicts are copied, lists and tuples become lists."""
    if isinstance(value, dict):
        return {key: json_values(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def of_json(kind: type[T], values: Mapping[str, Any]) -> T:
    """The dataclass of that kind whose fields `values` describes: lists become tuples, and strings the floats that JSON lacks."""
    found: dict[str, Any] = {}
    for each in dataclasses.fields(kind):  # type: ignore[arg-type]
        if each.name in values:
            value = values[each.name]
            is_number = isinstance(value, str) and "float" in str(each.type)
            found[each.name] = float(value) if is_number else tuple(value) if isinstance(value, list) else value
    return kind(**found)


def versioned(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` after the version of their form: every JSON that hmp writes says it first."""
    return {"schema_version": _SCHEMA_VERSION, **values}


def json_text(values: Mapping[str, Any]) -> str:
    """`values` as JSON, with their version."""
    return json.dumps(versioned(json_values(dict(values))), indent=1, allow_nan=False)


def written(path: str | Path, text: Callable[[], str]) -> Path:
    """The file `path`, into which the text that `text` makes was written. HmpError where its folder is missing: before the text is made,
    for a page takes time."""
    target = Path(path)
    if not target.absolute().parent.is_dir():
        raise HmpError(f"{target}: there is no folder {target.parent} to write it into; make the folder first")
    target.write_text(text(), encoding="utf-8")
    return target


def json_written(path: str | Path, values: Callable[[], Mapping[str, Any]]) -> Path:
    """The file `path`, into which what `values` gives was written as JSON. HmpError as of `written`."""
    return written(path, lambda: json_text(values()) + "\n")


def provenance() -> dict[str, str]:
    """The date to the minute, in the time of this machine, and the versions of hmp and torch."""
    return {"date": f"{datetime.now():%Y-%m-%d %H:%M}", "hmp": __version__, "torch": torch.__version__}
