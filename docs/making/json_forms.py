"""The page of the JSON that hmp writes: the keys, of samples that were made while the site was built."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_FORMS = {
    "report.json": ("A recording", "`report.to_json(path)`, `hmp run --report FILE.json`"),
    "comparison.json": ("A comparison with float32", "`comparison.to_json(path)`, `hmp compare --json FILE`"),
    "tuning.json": ("A search for lists", "`result.to_json(path)`"),
    "benchmark.json": ("A benchmark", "`result.to_json(path)`, `hmp benchmark --json FILE`"),
    "summary.json": ("A summary of layers", "`hmp summary --json FILE`"),
    "doctor.json": ("The doctor's findings", "`hmp doctor --json FILE`"),
    "check.json": ("What is said of list files", "`hmp check --json FILE`"),
    "explain.json": ("What a policy does with an op", "`hmp explain --json FILE`"),
    "lists.json": ("A policy", "`hmp lists NAME --json FILE`"),
    "diff.json": ("What two policies treat differently", "`hmp diff --json FILE`"),
}


def page(samples: Mapping[str, bytes]) -> str:
    """A table of keys for each form."""
    parts = [
        "# JSON\n\nEvery command that has `--json` takes a FILE that ends in `.json`, or `-` to print it in place of the text. Every JSON "
        "says its `schema_version`, a whole number that grows when a key goes or changes its meaning. What JSON has no number for is the "
        'text "nan", "inf" or "-inf". The tables show the keys of samples that were made with this site; `[]` is each element of a list.\n'
    ]
    for name, (title, source) in _FORMS.items():
        rows = dict(_keys(json.loads(samples[name])))
        table = "\n".join(f"| `{key}` | {kind} |" for key, kind in rows.items())
        parts.append(f"## {title}\n\n{source}\n\n| key | value |\n|---|---|\n{table}\n")
    return "\n".join(parts)


def _keys(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """The keys of a JSON value, in order, with the kinds of their values."""
    if isinstance(value, dict):
        for key, each in value.items():
            here = f"{path}.{key}" if path else key
            yield here, _kind(each)
            if depth < 3:
                yield from _keys(each, here, depth + 1)
    elif isinstance(value, list):
        for each in value[:1]:
            yield from _keys(each, f"{path}[]", depth)


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return f"list of {_kind(value[0])}s" if value else "list"
    names = {dict: "object", str: "text", bool: "true or false", int: "number", float: "number", type(None): "null where there is none"}
    return names[type(value)]
