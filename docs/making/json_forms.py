"""The page of the JSON that hmp writes: the keys, of samples that were made while the site was built."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_FORMS = {
    "report.json": ("A recording", "`report.to_json(path)`, `hmp run --report FILE.json`"),
    "comparison.json": ("A comparison with float32", "`comparison.to_json(path)`, `hmp compare --json FILE`"),
    "captures.json": ("Two programs compared", "`comparison.to_json(path)`, `hmp diff A.capture B.capture --json FILE`"),
    "tuning.json": ("A search for lists", "`result.to_json(path)`"),
    "benchmark.json": ("A benchmark", "`result.to_json(path)`, `hmp benchmark --json FILE`"),
    "summary.json": ("A summary of layers", "`hmp summary --json FILE`"),
    "weights.json": ("Weights that were cast", "`hmp cast-weights --json FILE`"),
    "doctor.json": ("The doctor's findings", "`hmp doctor --json FILE`"),
    "check.json": ("What is said of list files", "`hmp check --json FILE`"),
    "explain.json": ("What a policy does with an op", "`hmp explain --json FILE`"),
    "lists.json": ("The presets", "`hmp lists --json FILE`"),
    "diff.json": ("What two policies treat differently", "`hmp diff --json FILE`"),
}


# The objects whose keys are names, and not words of the form.
_NAMED = {
    "changes": "OP",
    "devices": "DEVICE",
    "devices.DEVICE.kernels": "DTYPE",
    "extras": "EXTRA",
    "models[].parameters": "DTYPE",
    "models[].kept": "MODULE",
    **{f"{side}.{what}": "DTYPE" for side in "ab" for what in ("weights", "outputs")},
}
_DEPTH = 4


def page(samples: Mapping[str, bytes]) -> str:
    """A table of keys for each form."""
    parts = [
        "# JSON\n\nEvery command that has `--json` takes a FILE that ends in `.json`, or `-` to print it in place of the text. Every JSON "
        "says its `schema_version`. What JSON has no number for is the "
        'text "nan", "inf" or "-inf". The tables show the keys of samples that were made with this site; `[]` is each element of a list, '
        'a word in capitals stands for names, and "null, here" is said of what the samples had no value for.\n'
    ]
    for name, (title, source) in _FORMS.items():
        rows = dict(_keys(json.loads(samples[name])))
        table = "\n".join(f"| `{key}` | {kind} |" for key, kind in rows.items())
        parts.append(f"## {title}\n\n{source}\n\n| key | value |\n|---|---|\n{table}\n")
    return "\n".join(parts)


def _keys(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The keys of a JSON value, in order, with the kinds of their values."""
    if path.count(".") + path.count("[]") >= _DEPTH:
        return
    if isinstance(value, list) and value:
        yield from _keys(_one_of(value), f"{path}[]")
    elif isinstance(value, dict) and path in _NAMED:
        here = f"{path}.{_NAMED[path]}"
        yield here, _kind(_one_of(list(value.values())))
        yield from _keys(_one_of(list(value.values())), here)
    elif isinstance(value, dict):
        for key, each in value.items():
            here = f"{path}.{key}" if path else key
            yield here, _kind(each)
            yield from _keys(each, here)


def _one_of(values: list[Any]) -> Any:
    """One value that shows most: of objects every key, with a value that is not null or empty where one has it."""
    if not all(isinstance(value, dict) for value in values):
        return next((value for value in values if value not in (None, [], {})), values[0])
    merged: dict[str, list[Any]] = {}
    for value in values:
        for key, each in value.items():
            merged.setdefault(key, []).append(each)
    return {key: _one_of(found) for key, found in merged.items()}


def _kind(value: Any, plural: bool = False) -> str:
    if isinstance(value, list):
        return f"list{'s' * plural}" + (f" of {_kind(_one_of(value), plural=True)}" if value else "")
    kinds = {dict: "object", str: "text", bool: "truth value", int: "number", float: "number"}
    return "null, here" if value is None else kinds[type(value)] + "s" * plural
