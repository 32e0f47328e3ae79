"""Modules of one program by the names that another one has for them: `model.layers.*=transformer.h.*`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from ...core.formatting import some
from ...errors import HmpError
from .capture import INPUTS


def renamer(rules: Mapping[str, str] | Iterable[str], names: Iterable[str]) -> Callable[[str], str]:
    """What gives a name in the second program for one in the first: each rule in turn rewrites what the ones before it gave.

    A rule is `OLD=NEW`, with as many `*` on both sides, each of which stands for any text; `model.*` also for `model` itself, and
    `model.*=*` takes the prefix away. HmpError for a rule that is none, or that no name in `names` follows.
    """
    pairs = list(rules.items()) if isinstance(rules, Mapping) else [_split(rule) for rule in rules]
    steps = [_rule(old, new) for old, new in pairs]
    known = list(names)
    for (old, new), step in zip(pairs, steps, strict=True):
        changed = [step(name) for name in known]
        if changed == known:
            raise HmpError(f"map {old}={new}: no module's name is {old}; there are {_some(known)}")
        known = changed

    def renamed(name: str) -> str:
        if not name.endswith(INPUTS):
            for step in steps:
                name = step(name)
        return name

    return renamed


def _split(rule: str) -> tuple[str, str]:
    old, equals, new = rule.partition("=")
    if not equals:
        raise HmpError(f"map {rule}: there is no = in it; give OLD=NEW, such as model.layers.*=transformer.h.*")
    return old, new


def _rule(old: str, new: str) -> Callable[[str], str]:
    if old.count("*") != new.count("*"):
        raise HmpError(f"map {old}={new}: {old.count('*')} and {new.count('*')} stars; each * on the left is one on the right")
    # a dot ends every name, so that `model.*` holds for `model` too
    pattern = re.compile("(.*)".join(map(re.escape, _ended(old).split("*"))))
    parts = _ended(new).split("*")

    def renamed(name: str) -> str:
        found = pattern.fullmatch(f"{name}.")
        if found is None:
            return name
        texts = [text for pair in zip(parts, (*found.groups(), ""), strict=True) for text in pair]
        return "".join(texts).strip(".")

    return renamed


def _ended(pattern: str) -> str:
    return pattern if pattern.endswith("*") else f"{pattern}."


def _some(names: list[str]) -> str:
    shown = [name for name in names if name and not name.endswith(INPUTS)]
    return some(shown, 4)
