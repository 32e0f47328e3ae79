"""Which units are one too many, found in as few trials as halving needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .decisions import Key


def bisect(
    good: frozenset[Key], rest: Sequence[Key], fits: Callable[[frozenset[Key], Key | None], bool], bar: Callable[[Key], None]
) -> frozenset[Key]:
    """`good`, which fits, with those of `rest` that can be added in this order; each other one, with which it is one too many, is barred.

    `fits` is asked of a set and, where it ends inside `rest`, of the unit that was added last.
    """
    while rest:
        if fits(good.union(rest), None):
            return good.union(rest)
        fitting, failing = 0, len(rest)
        while failing - fitting > 1:
            middle = (fitting + failing) // 2
            if fits(good.union(rest[:middle]), rest[middle - 1]):
                fitting = middle
            else:
                failing = middle
        bar(rest[fitting])
        good, rest = good.union(rest[:fitting]), rest[fitting + 1 :]
    return good
