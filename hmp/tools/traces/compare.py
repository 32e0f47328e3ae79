"""compare_captures(): two captures compared output by output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from ...core.active import disable_casts
from ...errors import HmpError
from ..compare.distance import distance
from ..formatting import count, some
from .comparison import OTHER_BITS, CaptureComparison, Computed, Gap, side_of
from .module_names import renamer
from .trace import INPUTS, MASK, TOKENS, Capture, ModuleCall

Tensor = torch.Tensor
# What a model is given → whether it marks the padding, and not what counts. The first is what capture(mask=...) was given.
MASKS = {MASK: False, "attention_mask": False, "src_key_padding_mask": True, "key_padding_mask": True}
_REMEDY = "capture both programs with the same batch: the same rows in the same order, padded alike"


def compare_captures(a: Capture | str | Path, b: Capture | str | Path, *, map: Mapping[str, str] | Iterable[str] = ()) -> CaptureComparison:
    """Compare two captured programs module by module: where they first differ, how the difference grows, and the dtypes of each.

    Both programs must have run the same batches. Modules are matched by name, by call of the model, and by number of the call in it.
    Positions masked by `attention_mask` (or capture's `mask=`) are left out.

    Args:
        a: A capture, or its file.
        b: Another capture or file. Differences are relative to it.
        map: Rules that map names of `a` to names of `b`: `["model.layers.*=transformer.h.*"]`. `*` matches any text; each rule is applied
            to the result of the rules before it.

    Returns:
        The comparison.

    Raises:
        HmpError: The captures have no module name in common, or the models were given different batches.

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
    there = _by_number(other.calls)
    pairs = [(at, there.get((rename(module), step, number))) for (module, step, number), at in _by_number(one.calls).items()]
    common = [(at, found) for at, found in pairs if found is not None]
    if not any(one.calls[at].kind for at, _ in common):
        raise HmpError(
            f"{one.path} and {other.path} have no module name in common: {_names(one)} and {_names(other)}; map the names: "
            'map=["model.layers.*=transformer.h.*"], --map "model.layers.*=transformer.h.*"'
        )
    order = _order(one.calls)
    common.sort(key=lambda pair: order[pair[0]])
    with disable_casts(), torch.no_grad():
        steps = [(call.root, call.step) for call in one.calls]
        counted = {steps[at]: _counted(one, other, at, found) for at, found in common if not one.calls[at].kind}
        gaps = [gap for at, found in common for gap in _gaps(one, other, at, found, counted.get(steps[at]))]
    alone = dict.fromkeys(one.calls[at].module for at, found in pairs if found is None)
    taken = {found for _, found in common}
    alone_there = dict.fromkeys(call.module for at, call in enumerate(other.calls) if at not in taken)
    notes = _notes(one, other, common, (alone, alone_there), gaps)
    return CaptureComparison(side_of(one), side_of(other), tuple(gaps), tuple(alone), tuple(alone_there), tuple(notes))


class _ByPath(Capture):
    """A capture that is called by its path, where both files have one name."""

    @property
    def name(self) -> str:
        return str(self.path)


def _by_number(calls: Sequence[ModuleCall]) -> dict[tuple[str, int, int], int]:
    """Return the position of each call by module, call of the model, and how many of its module there were before it in that."""
    found: dict[tuple[str, int, int], int] = {}
    seen: Counter[tuple[str, int]] = Counter()
    for at, call in enumerate(calls):
        found[call.module, call.step, seen[call.module, call.step]] = at
        seen[call.module, call.step] += 1
    return found


def _order(calls: Sequence[ModuleCall]) -> list[tuple[int, bool]]:
    """Return what sorts calls as they returned, and what a model was given before the first of that call of the model."""
    begun: dict[tuple[str, int], int] = {}
    for at, call in enumerate(calls):
        begun.setdefault((call.root, call.step), at)
    return [(begun[call.root, call.step], False) if call.module.endswith(INPUTS) else (at, True) for at, call in enumerate(calls)]


def _counted(a: Capture, b: Capture, at: int, found: int) -> Tensor | None:
    """Return which places of each row count, by the masks that the models were given in one call of each; None for all.

    Raise HmpError where they were given different batches.
    """
    sides, names, pairs = ((a, at), (b, found)), f"of {a.name} and {b.name}", _outputs(a.calls[at], b.calls[found])
    for here, there in pairs[:1]:
        shapes = list(a.calls[at].outputs[here].shape), list(b.calls[found].outputs[there].shape)
        if shapes[0] != shapes[1]:
            raise HmpError(f"the first inputs {names} are of shapes {shapes[0]} and {shapes[1]}; {_REMEDY}")
    masks = [mask for side in sides if (mask := _mask(*side)) is not None]
    tokens = [given[TOKENS] for side in sides if TOKENS in (given := _given(*side))]
    if len({each.shape for each in (*masks, *tokens)}) > 1:
        raise HmpError(f"{TOKENS} and masks {names} are of different shapes; {_REMEDY}")
    counted = torch.stack(masks).all(0) if masks else None
    if counted is not None and not counted.any():
        raise HmpError(f"the masks {names} leave no token in common; {_REMEDY}")
    apart = tokens[0] != tokens[-1] if tokens else torch.tensor(False)
    if (apart if counted is None else counted & apart).any():
        raise HmpError(f"{TOKENS} {names} differ, they begin with {tokens[0][0, :6].tolist()} and {tokens[1][0, :6].tolist()}; {_REMEDY}")
    return None if counted is None or bool(counted.all()) else counted


def _given(capture: Capture, call: int) -> dict[str, Tensor]:
    """Return the tokens and masks that a model was given."""
    outputs = enumerate(capture.calls[call].outputs)
    return {
        each.path: capture.values(call, at)
        for at, each in outputs
        if each.path in (TOKENS, *MASKS) and len(each.shape) == 2 and each.is_whole
    }


def _mask(capture: Capture, call: int) -> Tensor | None:
    """Return which places count. Raise HmpError if it is capture's own mask, and of no input's shape."""
    given = _given(capture, call)
    shapes = [output.shape[:2] for output in capture.calls[call].outputs if output.path not in MASKS]
    for path, is_padding in MASKS.items():
        mask = given.get(path)
        if mask is not None and path == "attention_mask" and TOKENS in given:
            mask = mask[:, -given[TOKENS].shape[1] :]  # with a cache it goes over the earlier places too
        if mask is not None and tuple(mask.shape) in shapes and bool(((mask == 0) | (mask == 1)).all()):
            return mask != is_padding
        if mask is not None and path == MASK:
            raise HmpError(
                f"{capture.name}: expected a mask= of the batch's shape, got {list(mask.shape)}; capture again with a mask of the shape "
                "(batch, positions), 1 at real tokens"
            )
    return None


def _picked(values: Tensor, counted: Tensor) -> Tensor | None:
    """Return the elements of an output in the places that count; None if the shape does not show where these are."""
    rows, places = counted.shape
    if values.dim() and len(values) == rows * places:  # a row for each token
        values = values.unflatten(0, (rows, places))
    if not values.dim() or len(values) != rows:
        return values
    dims = [dim for dim in range(1, values.dim()) if values.shape[dim] == places]
    if len(dims) > 1 and not (dims[0] == 1 and values.dim() <= 3):
        return None  # heads as many as places, or attention's weights
    return values.movedim(dims[0], 1)[counted] if dims else values


def _gaps(a: Capture, b: Capture, at: int, found: int, counted: Tensor | None) -> Iterator[Gap]:
    """Yield a gap for each output that a call of a module has on both sides."""
    one, other = a.calls[at], b.calls[found]
    for here, there in _outputs(one, other):
        relative, how, why = _apart(a, b, (at, here), (found, there), counted)
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


def _apart(a: Capture, b: Capture, here: tuple[int, int], there: tuple[int, int], counted: Tensor | None) -> tuple[float | None, str, str]:
    """Return how far two outputs are apart, how that is known, and why not."""
    one, other = a.calls[here[0]].outputs[here[1]], b.calls[there[0]].outputs[there[1]]
    if not one.bits or not other.bits:
        return None, "", "torch did not give access to its values"
    if one.shape != other.shape:
        return None, "", f"shapes {list(one.shape)} and {list(other.shape)}"
    if (one.dtype, one.bits) == (other.dtype, other.bits):
        return 0.0, "bits", ""
    if not (one.is_whole and other.is_whole):
        return None, "", f"{OTHER_BITS}, and it was too large to be stored" if one.dtype == other.dtype else "it was too large to be stored"
    picked, picked_too = (each if counted is None else _picked(each, counted) for each in (a.values(*here), b.values(*there)))
    if picked is None or picked_too is None:
        return None, "", f"the padding in shape {list(one.shape)} can't be told from what counts"
    return _relative(picked, picked_too), "values", ""


def _relative(a: Tensor, b: Tensor) -> float:
    """Return ||a - b|| / ||b|| in float64.

    Infinite where one side alone is NaN, infinite, or beyond 2**100, as masks are, or has another sign.
    """
    found = distance(a.to(torch.float64), b.to(torch.float64))
    if not found and a.dtype == b.dtype and not a.is_floating_point() and not torch.equal(a, b):
        return torch.finfo(torch.float64).eps  # integers that float64 does not distinguish
    return found


def _notes(a: Capture, b: Capture, common: Sequence[tuple[int, int]], alone: Sequence[Iterable[str]], gaps: Sequence[Gap]) -> list[str]:
    """Return what was not compared, and what each capture says of itself."""
    times = Counter(found for at, found in common if a.calls[at].kind)
    twice = dict.fromkeys(a.calls[at].module for at, found in common if times[found] > 1)
    unknown = [f"{gap.named} ({gap.why})" for gap in gaps if gap.relative is None]
    outputs: tuple[dict[str, None], dict[str, None]] = {}, {}
    for at, found in common:
        calls = a.calls[at], b.calls[found]
        paired = _outputs(*calls)
        for side, call in enumerate(calls):
            paths = [each.path for which, each in enumerate(call.outputs) if all(pair[side] != which for pair in paired)]
            outputs[side].update((f"{call.module or '(the model)'}[{path}]", None) for path in paths if path not in MASKS or call.kind)
    said = [
        ("module", f"called only in {a.name}, or more often there", list(alone[0])),
        ("module", f"called only in {b.name}, or more often there", list(alone[1])),
        ("output", "could not be compared", unknown),
        ("module", f"of {a.name} were mapped to the same name in {b.name}", list(twice)),
        ("output", f"only in {a.name}", list(outputs[0])),
        ("output", f"only in {b.name}", list(outputs[1])),
    ]
    notes = [f"{count(len(names), what)} {how}: {_some(names)}" for what, how, names in said if names]
    return notes + [f"{capture.name}: {note}" for capture in (a, b) for note in capture.notes]


def _names(capture: Capture) -> str:
    """Return some of the modules' names, for an error."""
    names = dict.fromkeys(call.module for call in capture.calls if call.module and not call.module.endswith(INPUTS))
    return f"{capture.name} has {_some(list(names)) or 'only the model itself'}"


def _some(names: Sequence[str]) -> str:
    return some([name or "(the model)" for name in names])
