"""Takes a kind of list out again, which a test has added."""

from __future__ import annotations

from hmp.core import lists
from hmp.core.ops import sites


def remove(name: str) -> None:
    """Take out a kind of list, while no policy is in force. Policies that have such a list are of no use from then on."""
    rule = lists.kind_of(name).rule
    lists._labels.pop(rule.label, None)
    lists._kinds = tuple(kind for kind in lists.kinds() if kind.name != name)
    sites.forget()  # what was decided by such a list
