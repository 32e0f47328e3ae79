"""An einsum of two operands as one product of batches of matrices."""

from __future__ import annotations

import math
from typing import NamedTuple

_DOTS = "0123456789"  # labels of the dimensions of "...": no equation has digits


class Contraction(NamedTuple):
    """How to bring both operands to (batch, rows, inner) and (batch, inner, columns), and the product back.

    Permute each operand, reshape it, multiply, reshape the product, and permute that. Without a batch they are matrices.
    """

    left_order: list[int]
    left_shape: tuple[int, ...]
    right_order: list[int]
    right_shape: tuple[int, ...]
    shape: list[int]
    order: list[int]


def contraction(equation: str, left_sizes: tuple[int, ...], right_sizes: tuple[int, ...]) -> Contraction | None:
    """Return the contraction of an equation; None where it isn't a product of batches of matrices, or torch refuses it.

    It is None, too, for a label that one operand has twice, a summed label that one operand lacks, and sizes that broadcast.
    """
    terms = _terms(equation, len(left_sizes), len(right_sizes))
    if terms is None:
        return None
    left, right, out = terms
    sizes = dict(zip(left + right, (*left_sizes, *right_sizes), strict=True))
    if any(sizes[label] != size for label, size in zip(left, left_sizes, strict=True)):
        return None
    shared = [label for label in left if label in right]
    alone = [label for label in left + right if label not in shared]
    if any(label not in out for label in alone) or any(label not in sizes for label in out):
        return None
    batch = [label for label in out if label in shared]
    rows, columns = [label for label in out if label in left and label not in shared], [label for label in out if label not in left]
    inner = sorted(label for label in shared if label not in out)  # as torch orders them: the order of the sums is its own
    made = batch + rows + columns

    def size(labels: list[str]) -> int:
        return math.prod([sizes[label] for label in labels])

    first = (size(batch),) if batch else ()
    return Contraction(
        [left.index(label) for label in batch + rows + inner],
        (*first, size(rows), size(inner)),
        [right.index(label) for label in batch + inner + columns],
        (*first, size(inner), size(columns)),
        [sizes[label] for label in made],
        [made.index(label) for label in out],
    )


def _terms(equation: str, *dims: int) -> tuple[str, str, str] | None:
    """Return the labels of two operands and of the result, one a dimension; None for another equation."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != 2 or not _are_letters("".join(terms)) or not _are_letters(out):
        return None
    dotted = [dim - len(term) + 3 if "..." in term else 0 for term, dim in zip(terms, dims, strict=True)]
    dots = _DOTS[: max(dotted)]
    left, right = (term.replace("...", dots[len(dots) - count :]) for term, count in zip(terms, dotted, strict=True))
    if arrow:
        if dots and "..." not in out:
            return None
        out = out.replace("...", dots)
    else:
        labels = left + right
        out = dots + "".join(sorted(label for label in labels if labels.count(label) == 1 and label not in dots))
    if (len(left), len(right)) != dims or any(len(set(term)) != len(term) for term in (left, right, out)):
        return None
    return left, right, out


def _are_letters(term: str) -> bool:
    letters = term.replace("...", "")
    return not letters or (letters.isascii() and letters.isalpha())
