"""compare_captures(): two captures beside each other, output by output."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from ..context import disable_casts
from ..errors import HmpError
from ..formatting import count
from ..numerics.distance import LARGE, distance
from .capture import INPUTS, Call, Capture, Output
from .comparison import CaptureComparison, Computed, Gap, side_of
from .fingerprint import sampled_columns, sketch
from .renaming import renamer
from .rows import MASKS, Alignment, aligned

Tensor = torch.Tensor


def compare_captures(
    a: Capture | str | Path,
    b: Capture | str | Path,
    *,
    map: Mapping[str, str] | Iterable[str] = (),
    rows: tuple[int, int] | None = None,
) -> CaptureComparison:
    """How far two captured programs are apart, module by module: where they part first, how the gap grows, what each computed in.

    Modules are beside each other by name and number of the call. `map` says which names of the first are others in the second:
    `["model.layers.*=transformer.h.*"]`, each `*` for any text, each rule on what those before it gave. Where the batches differ, the rows
    and places that stand beside each other are those with the same `input_ids`, without what `attention_mask` (or capture's `mask=`)
    leaves out: a batch of one and a batch of eight, padded on either side. `rows=(0, 3)` names one row of each instead. Gaps are relative
    to `b`. HmpError where no names are common, rows cannot be told, or the programs were given other tokens.
    """
    one, other = (each if isinstance(each, Capture) else Capture.load(each) for each in (a, b))
    rename = renamer(map, dict.fromkeys(call.module for call in one.calls))
    there = {(call.module, call.number): at for at, call in enumerate(other.calls)}
    pairs = [(at, there.get((rename(call.module), call.number))) for at, call in enumerate(one.calls)]
    common = [(at, found) for at, found in pairs if found is not None]
    if not any(one.calls[at].kind for at, _ in common):
        raise HmpError(
            f"{one.path} and {other.path} have no module's name in common: {_names(one)} and {_names(other)}; say which are the same: "
            'map=["model.layers.*=transformer.h.*"], --map "model.layers.*=transformer.h.*"'
        )
    order = _order(one.calls)
    common.sort(key=lambda pair: order[pair[0]])
    find = _Alignments(one, other, rows)
    with disable_casts(), torch.no_grad():
        gaps = [gap for at, found in common for gap in _gaps(one, other, at, found, find.of(at, found))]
    alone = dict.fromkeys(one.calls[at].module for at, found in pairs if found is None)
    taken = {found for _, found in common}
    alone_there = dict.fromkeys(call.module for at, call in enumerate(other.calls) if at not in taken)
    notes = _notes(one, other, list(alone), list(alone_there), gaps)
    return CaptureComparison(side_of(one), side_of(other), tuple(gaps), tuple(alone), tuple(alone_there), (*find.notes(), *notes))


def _order(calls: Sequence[Call]) -> list[tuple[int, bool]]:
    """What sorts calls as they returned, and what a model was given before the first of that call of the model."""
    begun: dict[tuple[str, int], int] = {}
    for at, call in enumerate(calls):
        begun.setdefault((call.root, call.step), at)
    return [(begun[call.root, call.step], False) if call.module.endswith(INPUTS) else (at, True) for at, call in enumerate(calls)]


class _Alignments:
    """The alignment of each pair of calls of the models, found once."""

    def __init__(self, a: Capture, b: Capture, rows: tuple[int, int] | None) -> None:
        self._captures = a, b
        self._rows = rows
        self._inputs = [
            {(call.root, call.step): at for at, call in enumerate(each.calls) if call.module.endswith(INPUTS)} for each in (a, b)
        ]
        self._found: dict[tuple[str, int, str, int], Alignment] = {}

    def of(self, a: int, b: int) -> Alignment:
        """That of two calls of modules."""
        one, other = self._captures[0].calls[a], self._captures[1].calls[b]
        key = one.root, one.step, other.root, other.step
        if key not in self._found:
            given = self._inputs[0].get(key[:2]), self._inputs[1].get(key[2:])
            self._found[key] = aligned(*self._captures, given, self._rows)
        return self._found[key]

    def notes(self) -> tuple[str, ...]:
        """Which rows stand beside which, once for all calls that are aligned alike."""
        return tuple(dict.fromkeys(each.note for each in self._found.values() if each.note))


def _gaps(a: Capture, b: Capture, at: int, found: int, alignment: Alignment) -> Iterator[Gap]:
    """A gap for each output that a call of a module has on both sides."""
    one, other = a.calls[at], b.calls[found]
    for here, there in _outputs(one, other):
        relative, how, why = _apart(a, b, (at, here), (found, there), alignment)
        path = one.outputs[here].path
        sides = _computed(one, here), _computed(other, there)
        yield Gap(other.module, one.module, one.kind, one.number, one.step, one.is_leaf, path, *sides, relative, how, why)


def _computed(call: Call, output: int) -> Computed:
    return Computed(call.inputs, call.weights, call.outputs[output].dtype, call.outputs[output].shape)


def _outputs(a: Call, b: Call) -> list[tuple[int, int]]:
    """The outputs with one path, but masks, which say what is compared; where there is none, the first of each side, since a module may
    return a tensor or a tuple that begins with it."""
    places = {output.path: at for at, output in enumerate(b.outputs) if output.path not in MASKS or b.kind}
    pairs = [(at, places[output.path]) for at, output in enumerate(a.outputs) if output.path in places]
    return pairs or ([(0, 0)] if a.outputs and b.outputs and a.kind else [])


def _apart(a: Capture, b: Capture, here: tuple[int, int], there: tuple[int, int], alignment: Alignment) -> tuple[float | None, str, str]:
    """How far two outputs are apart, how that is known, and why not."""
    one, other = a.calls[here[0]].outputs[here[1]], b.calls[there[0]].outputs[there[1]]
    if not one.bits or not other.bits:
        return None, "", "torch did not tell the values"
    if alignment.is_whole:
        if one.shape != other.shape:
            return None, "", f"shapes {list(one.shape)} and {list(other.shape)}"
        if (one.dtype, one.bits) == (other.dtype, other.bits):
            return 0.0, "bits", ""
        if not (one.is_whole and other.is_whole):
            return _projected(a, b, here, there)
    if not one.kept or not other.kept:
        return None, "", "its values were not kept, and no rows can be told apart without them"
    values = _same_columns(a.values(*here), b.values(*there), one, other)
    picked = None if values is None else alignment.picked(*values)
    if picked is None:
        return None, "", f"shapes {list(one.shape)} and {list(other.shape)} do not tell which rows and places are the same"
    return _relative(*picked), "values" if one.is_whole and other.is_whole else "sample", ""


def _relative(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b|| in float64; infinite where one side alone is NaN, infinite, or beyond 2**100, as masks are, or has another sign."""
    one, other = a.to(torch.float64), b.to(torch.float64)
    kinds = [torch.where(each.abs() < LARGE, 0.0, each.clamp(-1.0, 1.0).nan_to_num(2.0)) for each in (one, other)]
    if not torch.equal(*kinds):
        return math.inf
    found = distance(one, other).relative
    if not found and a.dtype == b.dtype and not a.is_floating_point() and not torch.equal(a, b):
        return torch.finfo(torch.float64).eps  # integers that float64 does not tell apart
    return found


def _same_columns(a: Tensor, b: Tensor, one: Output, other: Output) -> tuple[Tensor, Tensor] | None:
    """The values of the columns that both captures keep."""
    if one.is_whole and other.is_whole:
        return a, b
    if one.width != other.width:
        return None
    columns = sampled_columns(one.width, min(one.kept, other.kept))
    return a[..., columns] if one.is_whole else a[..., : len(columns)], b[..., columns] if other.is_whole else b[..., : len(columns)]


def _projected(a: Capture, b: Capture, here: tuple[int, int], there: tuple[int, int]) -> tuple[float | None, str, str]:
    """The distance of two outputs of which not all values are kept, estimated from their projections."""
    one, other = a.calls[here[0]].outputs[here[1]], b.calls[there[0]].outputs[there[1]]
    if one.nonfinite != other.nonfinite:
        return math.inf, "projections", ""
    difference = _sketch(a, here, one) - _sketch(b, there, other)
    error = float(torch.linalg.vector_norm(difference))
    if not error and one.dtype == other.dtype:
        return None, "", "its bits are others, and its projections do not tell by how much"
    return (error / other.norm if other.norm else math.inf if error else 0.0), "projections", ""


def _sketch(capture: Capture, at: tuple[int, int], output: Output) -> Tensor:
    return sketch(capture.values(*at)) if output.is_whole else capture.sketch(*at)


def _notes(a: Capture, b: Capture, alone_a: list[str], alone_b: list[str], gaps: Sequence[Gap]) -> list[str]:
    """What was not compared, and what each capture says of itself."""
    notes = [
        f"{count(len(names), 'module')} of {capture.name} alone returned, or more often: {_some(names)}"
        for capture, names in ((a, alone_a), (b, alone_b))
        if names
    ]
    unknown = [gap for gap in gaps if gap.relative is None]
    notes += (
        [f"{count(len(unknown), 'output')} could not be compared: {_some([f'{gap.named} ({gap.why})' for gap in unknown])}"]
        if unknown
        else []
    )
    for how, said in (("sample", "by a sample of their columns"), ("projections", "by random projections, mostly within a tenth")):
        some = sum(gap.how == how for gap in gaps)
        notes += [f"{count(some, 'output')} compared {said}"] if some else []
    return notes + [f"{capture.name}: {note}" for capture in (a, b) for note in capture.notes]


def _names(capture: Capture) -> str:
    """Some of the modules' names, for an error."""
    names = dict.fromkeys(call.module for call in capture.calls if call.module and not call.module.endswith(INPUTS))
    return f"{capture.name} has {_some(list(names)) or 'the model alone'}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(name or "(the model)" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
