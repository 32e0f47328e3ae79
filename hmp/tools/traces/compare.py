"""compare_captures(): two captures compared output by output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch

from ...core.active import disable_casts
from ...errors import HmpError
from ..compare.distance import distance
from ..formatting import count, some
from .batch_alignment import MASKS, Alignment, align_batches
from .comparison import OTHER_BITS, CaptureComparison, Computed, Gap, side_of
from .module_names import renamer
from .trace import INPUTS, Capture, ModuleCall

Tensor = torch.Tensor


def compare_captures(
    a: Capture | str | Path,
    b: Capture | str | Path,
    *,
    map: Mapping[str, str] | Iterable[str] = (),
    rows: tuple[int, int] | None = None,
) -> CaptureComparison:
    """Compare two captured programs module by module: where they first differ, how the difference grows, and the dtypes of each.

    Modules are matched by name and number of the call. If the batches differ, as a batch of one and a padded batch of eight, rows and
    positions with the same `input_ids` are matched. Positions masked by `attention_mask` (or capture's `mask=`) are left out.

    Args:
        a: A capture, or its file.
        b: Another capture or file. Differences are relative to it.
        map: Rules that map names of `a` to names of `b`: `["model.layers.*=transformer.h.*"]`. `*` matches any text; each rule is applied
            to the result of the rules before it.
        rows: A row of each batch, such as (0, 3), instead of rows with the same tokens.

    Returns:
        The comparison.

    Raises:
        HmpError: The captures have no module name in common, or their rows or tokens can't be matched.

    Example:
        >>> net, x = torch.nn.Linear(4, 2), torch.randn(3, 4)
        >>> for name in ("a.capture", "b.capture"):
        ...     with hmp.capture(name, net):
        ...         y = net(x)
        >>> print(hmp.compare_captures("a.capture", "b.capture").first)
        None
    """
    one, other = (each if isinstance(each, Capture) else Capture.load(each) for each in (a, b))
    if one.name == other.name and one.path != other.path:
        one, other = _ByPath(one.path), _ByPath(other.path)
    rename = renamer(map, dict.fromkeys(call.module for call in one.calls))
    pairs = list(_pairs(one.calls, other.calls, rename))
    common = [(at, found) for at, found in pairs if found is not None]
    if not any(one.calls[at].kind for at, _ in common):
        raise HmpError(
            f"{one.path} and {other.path} have no module name in common: {_names(one)} and {_names(other)}; map the names: "
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
    notes = [*_notes(one, other, list(alone), list(alone_there), gaps), *_told_of_pairs(one, other, common)]
    return CaptureComparison(side_of(one), side_of(other), tuple(gaps), tuple(alone), tuple(alone_there), (*find.notes(), *notes))


class _ByPath(Capture):
    """A capture that is called by its path, where both files have one name."""

    @property
    def name(self) -> str:
        return str(self.path)


def _pairs(a: Sequence[ModuleCall], b: Sequence[ModuleCall], rename: Callable[[str], str]) -> Iterator[tuple[int, int | None]]:
    """Match the calls of the first with those of the second.

    In the same call of the model, which need not call each module every time, as experts; else, where the second calls a part by itself,
    the one of the same number.
    """
    outermost = {(name, number): step for name, number, step in _outermost(b)}
    steps: dict[tuple[str, int], tuple[str, int]] = {}
    for name, number, step in _outermost(a):
        if (there_too := outermost.pop((rename(name), number), None)) is not None:
            steps[step] = there_too
    there = {(call.module, call.number): at for at, call in enumerate(b)}
    in_step = {(call.module, (call.root, call.step), nth): at for at, (call, nth) in enumerate(_counted(b))}
    taken = set(steps.values())
    for at, (call, nth) in enumerate(_counted(a)):
        renamed, beside = rename(call.module), steps.get((call.root, call.step))
        found = there.get((renamed, call.number))
        if beside is not None and (found is None or (b[found].root, b[found].step) in taken):
            found = in_step.get((renamed, beside, nth))
        yield at, found


def _outermost(calls: Sequence[ModuleCall]) -> Iterator[tuple[str, int, tuple[str, int]]]:
    """Yield the calls of what no other module called: module, number, and which call of the model that is. Their inputs follow them."""
    for call, after in pairwise(calls):
        if after.module.endswith(INPUTS):
            yield call.module, call.number, (call.root, call.step)


def _counted(calls: Sequence[ModuleCall]) -> Iterator[tuple[ModuleCall, int]]:
    """Yield each call, and how many of its module there were before it in the same call of the model."""
    seen: Counter[tuple[str, str, int]] = Counter()
    for call in calls:
        key = call.module, call.root, call.step
        yield call, seen[key]
        seen[key] += 1


def _order(calls: Sequence[ModuleCall]) -> list[tuple[int, bool]]:
    """Return what sorts calls as they returned, and what a model was given before the first of that call of the model."""
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
        """Return that of two calls of modules."""
        one, other = self._captures[0].calls[a], self._captures[1].calls[b]
        key = one.root, one.step, other.root, other.step
        if key not in self._found:
            given = self._inputs[0].get(key[:2]), self._inputs[1].get(key[2:])
            self._found[key] = align_batches(*self._captures, given, self._rows)
        return self._found[key]

    def notes(self) -> tuple[str, ...]:
        """Return which rows are compared with which, once for all calls that are aligned alike."""
        return tuple(dict.fromkeys(each.note for each in self._found.values() if each.note))


def _gaps(a: Capture, b: Capture, at: int, found: int, alignment: Alignment) -> Iterator[Gap]:
    """Yield a gap for each output that a call of a module has on both sides."""
    one, other = a.calls[at], b.calls[found]
    for here, there in _outputs(one, other):
        relative, how, why = _apart(a, b, (at, here), (found, there), alignment)
        path = one.outputs[here].path
        sides = _computed(one, here), _computed(other, there)
        yield Gap(other.module, one.module, one.kind, one.number, one.step, one.is_leaf, path, *sides, relative, how, why)


def _computed(call: ModuleCall, output: int) -> Computed:
    return Computed(call.inputs, call.weights, call.outputs[output].dtype, call.outputs[output].shape)


def _outputs(a: ModuleCall, b: ModuleCall) -> list[tuple[int, int]]:
    """Return the outputs with one path, but masks, which say what is compared.

    Without one, the first of each side, since a module may return a tensor or a tuple that begins with it.
    """
    places = {path: at for at, path in enumerate(_paths(b)) if path[0] not in MASKS or b.kind}
    pairs = [(at, places[path]) for at, path in enumerate(_paths(a)) if path in places]
    return pairs or ([(0, 0)] if a.outputs and b.outputs and a.kind else [])


def _paths(call: ModuleCall) -> list[tuple[str, int]]:
    """Return the paths of the outputs, each with how often it was there before: a key may have dots in it."""
    paths = [output.path for output in call.outputs]
    return [(path, paths[:at].count(path)) for at, path in enumerate(paths)]


def _apart(a: Capture, b: Capture, here: tuple[int, int], there: tuple[int, int], alignment: Alignment) -> tuple[float | None, str, str]:
    """Return how far two outputs are apart, how that is known, and why not."""
    one, other = a.calls[here[0]].outputs[here[1]], b.calls[there[0]].outputs[there[1]]
    if not one.bits or not other.bits:
        return None, "", "torch did not give access to its values"
    if alignment.is_whole:
        if one.shape != other.shape:
            return None, "", f"shapes {list(one.shape)} and {list(other.shape)}"
        if (one.dtype, one.bits) == (other.dtype, other.bits):
            return 0.0, "bits", ""
    if not (one.is_whole and other.is_whole):
        why = "it was too large to be stored"
        return None, "", f"{OTHER_BITS}, and {why}" if alignment.is_whole and one.dtype == other.dtype else why
    picked = alignment.picked(a.values(*here), b.values(*there))
    if picked is None:
        return None, "", f"shapes {list(one.shape)} and {list(other.shape)} can't be matched by rows and positions"
    return _relative(*picked), "values", ""


def _relative(a: Tensor, b: Tensor) -> float:
    """Return ||a - b|| / ||b|| in float64.

    Infinite where one side alone is NaN, infinite, or beyond 2**100, as masks are, or has another sign.
    """
    found = distance(a.to(torch.float64), b.to(torch.float64)).relative
    if not found and a.dtype == b.dtype and not a.is_floating_point() and not torch.equal(a, b):
        return torch.finfo(torch.float64).eps  # integers that float64 does not distinguish
    return found


def _notes(a: Capture, b: Capture, alone_a: list[str], alone_b: list[str], gaps: Sequence[Gap]) -> list[str]:
    """Return what was not compared, and what each capture says of itself."""
    notes = [
        f"{count(len(names), 'module')} called only in {capture.name}, or more often there: {_some(names)}"
        for capture, names in ((a, alone_a), (b, alone_b))
        if names
    ]
    unknown = [gap for gap in gaps if gap.relative is None]
    notes += (
        [f"{count(len(unknown), 'output')} could not be compared: {_some([f'{gap.named} ({gap.why})' for gap in unknown])}"]
        if unknown
        else []
    )
    return notes + [f"{capture.name}: {note}" for capture in (a, b) for note in capture.notes]


def _told_of_pairs(a: Capture, b: Capture, common: Sequence[tuple[int, int]]) -> list[str]:
    """Return the outputs that a module has on one side alone, and modules of the first that --map has given one name."""
    notes = []
    beside: dict[int, str] = {}
    twice: dict[str, None] = {}
    alone: tuple[dict[str, None], dict[str, None]] = {}, {}
    for at, found in common:
        if found in beside and a.calls[at].kind:
            twice |= dict.fromkeys([beside[found], a.calls[at].module])
        beside[found] = a.calls[at].module
        calls = a.calls[at], b.calls[found]
        paired = _outputs(*calls)
        for side, call in enumerate(calls):
            missing = set(range(len(call.outputs))) - {pair[side] for pair in paired}
            outputs = [call.outputs[each].path for each in sorted(missing)]
            alone[side].update((f"{call.module or '(the model)'}[{path}]", None) for path in outputs if path not in MASKS or call.kind)
    if twice:
        notes.append(f"{count(len(twice), 'module')} of {a.name} were mapped to the same name in {b.name}: {_some(list(twice))}")
    for capture, names in zip((a, b), alone, strict=True):
        notes += [f"{count(len(names), 'output')} only in {capture.name}: {_some(list(names))}"] if names else []
    return notes


def _names(capture: Capture) -> str:
    """Return some of the modules' names, for an error."""
    names = dict.fromkeys(call.module for call in capture.calls if call.module and not call.module.endswith(INPUTS))
    return f"{capture.name} has {_some(list(names)) or 'only the model itself'}"


def _some(names: Sequence[str]) -> str:
    return some([name or "(the model)" for name in names])
