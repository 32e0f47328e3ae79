"""Which rows and places of one batch are where in another: a batch of one against a row of eight, padding left, right or absent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...errors import HmpError
from ..formatting import count
from .trace import MASK, TOKENS, Capture

Tensor = torch.Tensor
# What a model is given → whether it marks the padding, and not what counts. The first is what capture(mask=...) was given.
MASKS = {MASK: False, "attention_mask": False, "src_key_padding_mask": True, "key_padding_mask": True}


@dataclass(frozen=True)
class Batch:
    """What a model's call was given: how many rows and places (0 if unknown), which places of each row count, and the tokens there."""

    name: str
    rows: int
    length: int
    counted: tuple[Tensor, ...] | None
    tokens: tuple[Tensor, ...] | None


@dataclass(frozen=True)
class Pair:
    """A row of one batch and its row of the other, with the places in each that are compared; None for all."""

    row_a: int
    row_b: int
    places_a: Tensor | None
    places_b: Tensor | None


@dataclass(frozen=True)
class Alignment:
    """The pairs of two batches; `is_whole` if every place of every row is at the same position in both."""

    a: Batch
    b: Batch
    pairs: tuple[Pair, ...]
    is_whole: bool
    note: str

    def picked(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the elements of two outputs that stand for the same rows and places, as vectors; None if the shapes do not show which."""
        if self.is_whole:
            return (a.reshape(-1), b.reshape(-1)) if a.shape == b.shape else None
        with_rows_a, with_rows_b = _with_rows(a, self.a), _with_rows(b, self.b)
        if with_rows_a is None or with_rows_b is None or with_rows_a.dim() != with_rows_b.dim():
            return None
        dims = _place_dims(with_rows_a.shape, with_rows_b.shape, self.a.length, self.b.length)
        if len(dims) > 1:
            return None  # heads as many as places, or attention's weights
        found = []
        for pair in self.pairs:
            if pair.row_a >= len(with_rows_a) > 1 or pair.row_b >= len(with_rows_b) > 1:
                return None
            picked_a = _places(with_rows_a[pair.row_a % len(with_rows_a)], dims, pair.places_a)
            picked_b = _places(with_rows_b[pair.row_b % len(with_rows_b)], dims, pair.places_b)
            if picked_a.shape != picked_b.shape:
                return None
            found.append((picked_a.reshape(-1), picked_b.reshape(-1)))
        return torch.cat([one for one, _ in found]), torch.cat([other for _, other in found])


def align_batches(a: Capture, b: Capture, calls: tuple[int | None, int | None], rows: tuple[int, int] | None) -> Alignment:
    """Return the alignment of two calls of the models, by the places of what they were given in `calls`.

    Raise HmpError where it is not known, or where they were given other tokens.
    """
    one, other = _batch(a, calls[0]), _batch(b, calls[1])
    for batch, row in zip((one, other), rows or (), strict=False):
        if batch.rows and not 0 <= row < batch.rows:
            raise HmpError(f"{batch.name}: expected a row from 0 to {batch.rows - 1}, got {row}")
    if rows is None and not (one.rows and other.rows):  # modules were called, and not the model that holds them
        return Alignment(one, other, (), True, "")
    if one.tokens is not None and other.tokens is not None:
        pairs = _by_tokens((one.name, one.tokens), (other.name, other.tokens), rows)
    elif rows is not None or one.rows == other.rows:
        pairs = [rows] if rows is not None else [(row, row) for row in range(one.rows)]
    else:
        raise HmpError(
            f"the rows of {one.name} (a batch of {one.rows}) and {other.name} (of {other.rows}) can't be matched without tokens "
            "(input_ids); name one row of each: rows=(0, 3), --row-a 0 --row-b 3"
        )
    made = tuple(_pair(one, other, *pair) for pair in pairs)
    if all(pair.places_a is not None and not len(pair.places_a) for pair in made):
        raise HmpError(
            f"the masks of {one.name} and {other.name} leave no token in common; pass hmp.capture(..., mask=m), with m = 1 at real tokens"
        )
    same_rows = rows is None and one.rows == other.rows and [(pair.row_a, pair.row_b) for pair in made] == [(r, r) for r in range(one.rows)]
    is_whole = (
        same_rows and all(_is_all(pair.places_a, one) and _is_all(pair.places_b, other) for pair in made) and one.length == other.length
    )
    return Alignment(one, other, made, is_whole, "" if is_whole else _told(one, other, made))


def _batch(capture: Capture, call: int | None) -> Batch:
    outputs = () if call is None else capture.calls[call].outputs
    shapes = [output.shape for output in outputs if output.shape and output.path != MASK]
    shape = next((each for each in shapes if len(each) > 1), shapes[0] if shapes else (0,))
    given: dict[str, Tensor] = {}
    for at, each in enumerate(outputs):
        if each.path in (TOKENS, *MASKS) and len(each.shape) == 2 and each.is_whole and each.bits and call is not None:
            given[each.path] = capture.values(call, at)
    if TOKENS in given:
        shape = tuple(given[TOKENS].shape)
    elif MASK in given:  # the input that it goes over
        shape = next((each for each in shapes if each[:2] == tuple(given[MASK].shape)), shape)
    if call is not None and not capture.calls[call].root and MASK in given and not _fits(given[MASK], shape):
        raise HmpError(
            f"{capture.name}: expected a mask= of the batch's shape {list(shape[:2])}, got {list(given[MASK].shape)}; capture again with a "
            "mask of that shape, 1 at real tokens"
        )
    rows, length = shape[0], shape[1] if len(shape) > 1 else 0
    counted = next(
        (_counted(given[name], marks, length) for name, marks in MASKS.items() if name in given and _fits(given[name], shape)), None
    )
    tokens = given.get(TOKENS)
    kept = None if tokens is None else tuple(row if counted is None else row[counted[at]] for at, row in enumerate(tokens))
    return Batch(capture.name, rows, length, counted, kept)


def _fits(mask: Tensor, shape: Sequence[int]) -> bool:
    """Return True if it is a mask of zeros and ones over the batch's places; with a cache it goes over the earlier ones too."""
    is_binary = bool(((mask == 0) | (mask == 1)).all())
    return is_binary and len(shape) > 1 and len(mask) == shape[0] and mask.shape[1] >= shape[1]


def _counted(mask: Tensor, is_padding: bool, length: int) -> tuple[Tensor, ...]:
    return tuple((row[-length:] != is_padding).nonzero().flatten() for row in mask)


def _by_tokens(a: tuple[str, tuple[Tensor, ...]], b: tuple[str, tuple[Tensor, ...]], rows: tuple[int, int] | None) -> list[tuple[int, int]]:
    """Return the rows with the same tokens, as far as the shorter one goes.

    A server that is given the prompt alone computes the same there.
    """
    (name_a, tokens_a), (name_b, tokens_b) = a, b
    if rows is not None:
        one, other = tokens_a[rows[0]], tokens_b[rows[1]]
        if not _begin_alike(one, other):
            raise HmpError(
                f"expected rows with the same tokens, got row {rows[0]} of {name_a} and row {rows[1]} of {name_b}: {_first(one)} and "
                f"{_first(other)}; name two rows with the same tokens, or none to have them matched"
            )
        return [rows]
    left, found = dict(enumerate(tokens_b)), []
    for row, tokens in enumerate(tokens_a):
        alike = [(len(other) != len(tokens), at != row, at) for at, other in left.items() if _begin_alike(tokens, other)]
        if alike:
            same = min(alike)[-1]
            del left[same]
            found.append((row, same))
    if not found:
        raise HmpError(
            f"no row of {name_a} has the tokens of a row of {name_b}: their first rows begin with {_first(tokens_a[0])} and "
            f"{_first(tokens_b[0])}; capture both programs with the same batch"
        )
    return found


def _begin_alike(one: Tensor, other: Tensor) -> bool:
    common = min(len(one), len(other))
    return common > 0 and torch.equal(one[:common], other[:common])


def _first(tokens: Tensor) -> str:
    return str(tokens[:6].tolist())


def _pair(a: Batch, b: Batch, row_a: int, row_b: int) -> Pair:
    if a.counted is None and b.counted is None and (a.tokens is None or b.tokens is None or a.length == b.length):
        return Pair(row_a, row_b, None, None)
    places_a, places_b = (
        torch.arange(batch.length, device="cpu") if batch.counted is None else batch.counted[row] for batch, row in ((a, row_a), (b, row_b))
    )
    common = min(len(places_a), len(places_b))
    if len(places_a) != len(places_b) and (a.tokens is None or b.tokens is None):
        raise HmpError(
            f"row {row_a} of {a.name} has {len(places_a)} unmasked positions, row {row_b} of {b.name} {len(places_b)}, and without tokens "
            "(input_ids) they can't be matched; capture the same rows, or pass mask= to both captures"
        )
    return Pair(row_a, row_b, places_a[:common], places_b[:common])


def _is_all(places: Tensor | None, batch: Batch) -> bool:
    return places is None or len(places) == batch.length


def _told(a: Batch, b: Batch, pairs: Sequence[Pair]) -> str:
    """Return in words which rows are compared with which."""
    shown = ", ".join(f"row {pair.row_a} against row {pair.row_b}" for pair in pairs[:4])
    more = f" and {len(pairs) - 4} more" if len(pairs) > 4 else ""
    places = sum(len(pair.places_a) for pair in pairs if pair.places_a is not None)
    which = f", {count(places, 'position')} compared" if places else ""
    alone = min(a.rows, b.rows) - len(pairs) if a.tokens is not None and b.tokens is not None else 0
    lacking = f"; {count(alone, 'row')} without a counterpart" if alone > 0 and len(pairs) > 1 else ""
    batches = f" of batches of {a.rows} and {b.rows}" if a.rows and b.rows else ""
    return f"{shown}{more}{batches}{which}{lacking}"


def _with_rows(values: Tensor, batch: Batch) -> Tensor | None:
    """Return the output with the batch's rows first: one that has a row for each token is split up. One row may stand for all."""
    if not values.dim():
        return None
    if not batch.rows or len(values) in (batch.rows, 1):
        return values
    return values.unflatten(0, (batch.rows, batch.length)) if batch.length and len(values) == batch.rows * batch.length else None


def _place_dims(a: Sequence[int], b: Sequence[int], length_a: int, length_b: int) -> list[int]:
    """Return the dimensions of a row that run over its places: of [rows, places, width] the first, else all that are as long."""
    fitting = [dim - 1 for dim in range(1, len(a)) if (a[dim], b[dim]) == (length_a, length_b)]
    return fitting[:1] if len(a) <= 3 and fitting[:1] == [0] else fitting


def _places(row: Tensor, dims: Sequence[int], places: Tensor | None) -> Tensor:
    if places is None:
        return row
    for dim in dims:
        row = row.index_select(dim, places)
    return row
