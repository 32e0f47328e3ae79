"""compare_captures(): two captures compared output by output: where two programs part, how the gap grows, what each computed in."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...core.active.regions import disable_casts
from ...errors import HmpError
from ..compare.distance import distance
from ..formatting import count, json_values, some, two_digits, versioned
from ..pages.page import (
    Cell,
    Depth,
    Items,
    Line,
    Page,
    Part,
    Result,
    Section,
    Table,
    Text,
    bar,
    error,
    error_text,
    flow,
    left_out,
    made_of,
    module,
    whole,
)
from ..record.models import pattern
from .file import INPUTS, MASK, TOKENS, Capture, ModuleCall

Tensor = torch.Tensor
_REMEDY = "capture both programs with the same batch: the same rows in the same order, padded alike"
OTHER_BITS = "its values differ"


@dataclass(frozen=True)
class Side:
    """One of the two captures.

    Its name and file, the policies that were active, and what the capture says about its program.
    """

    name: str
    path: str
    policies: tuple[str, ...]
    about: dict[str, str]

    def __str__(self) -> str:
        return " and ".join(f"policy {name!r}" if "torch.autocast" not in name else name for name in self.policies) or "no policy"


@dataclass(frozen=True)
class Computed:
    """In what one side computed a module's call: the dtypes of what it was given, of its own weights and of the output, and the shape."""

    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    output: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        given = ", ".join(self.inputs)
        said = f"{given} → {self.output}" if given and given != self.output else self.output
        return f"{said}, {', '.join(self.weights)} weights" if self.weights and self.weights != (self.output,) else said


@dataclass(frozen=True)
class Gap:
    """An output of a module's call in both programs, and how far it is apart.

    `module` is its name in the second program, `module_a` in the first; `kind` the class, `number` which call of it; `output` the path in
    what it returned. `relative` is ||a - b|| / ||b|| over what stands for the same rows and places, None where that is unknown; what
    is NaN, infinite or beyond 2**100 in both, as masks are, does not count. `how` says what was compared: "bits" (all are the same),
    "values" or "", and then `why` not.
    """

    module: str
    module_a: str
    kind: str
    number: int
    step: int
    is_leaf: bool
    output: str
    a: Computed
    b: Computed
    relative: float | None
    how: str
    why: str = ""

    @property
    def rounding(self) -> float:
        """Return the largest relative error of one rounding to the wider spaced of both dtypes; 0 for integers."""
        dtypes = [getattr(torch, each.output) for each in (self.a, self.b)]
        return max((torch.finfo(dtype).eps / 2 for dtype in dtypes if dtype.is_floating_point or dtype.is_complex), default=0.0)

    @property
    def named(self) -> str:
        """Return the module, with the path of the output, and the number of a later call."""
        name = self.module or "(the model)"
        return f"{name}{f'[{self.output}]' if self.output else ''}{f', call {self.number + 1}' if self.number else ''}"


@dataclass(frozen=True, repr=False)
class CaptureComparison(Result):
    """How far two programs are apart, module by module; str() is a table.

    `gaps` are in the order in which the first program's modules returned, what they were given first. `unmatched_a` and `unmatched_b` are
    the modules that one program alone called.

    Example:
        >>> net, x = torch.nn.Linear(4, 2), torch.randn(3, 4)
        >>> for name in ("a.capture", "b.capture"):
        ...     with hmp.capture(name, net):
        ...         y = net(x)
        >>> found = hmp.compare_captures("a.capture", "b.capture")
        >>> found.verdict()
        ['they do not differ: 2 outputs that can be compared are equal']
        >>> found.layers(), found.computed(), found.to_dict()["first"]
        ({}, [], None)
        >>> json, page = found.to_json("captures.json"), found.to_html("captures.html")
    """

    a: Side
    b: Side
    gaps: tuple[Gap, ...]
    unmatched_a: tuple[str, ...] = ()
    unmatched_b: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Gap | None:
        """Return where they part: the first output of which one value is another. None where all are equal."""
        return next((gap for gap in self.gaps if gap.relative), None)

    @property
    def beyond_rounding(self) -> Gap | None:
        """Return the first output that is further apart than one rounding to its dtype explains, or None."""
        return next((gap for gap in self.gaps if gap.relative is not None and gap.relative > gap.rounding), None)

    @property
    def last(self) -> Gap | None:
        """Return the first output of the outermost module's last call that is compared."""
        whole = [gap for gap in self.gaps if not gap.module and gap.relative is not None]
        return next((gap for gap in whole if gap.number == whole[-1].number), None)

    def layers(self) -> dict[str, list[Gap]]:
        """Return the repeated modules, by their name with `*` for the last number: `model.layers.*`.

        Returns:
            Each with its first output in every layer of the first call, the outermost ones first.
        """
        found: dict[str, dict[int, Gap]] = {}
        for gap in self.gaps:
            name = re.fullmatch(r"(?:(.*)\.)?(\d+)", gap.module)
            if name is not None and gap.relative is not None and not gap.number:
                found.setdefault(f"{name[1]}.*" if name[1] else "*", {}).setdefault(int(name[2]), gap)
        several = {name: [gap for _, gap in sorted(gaps.items())] for name, gaps in found.items() if len(gaps) > 1}
        return dict(sorted(several.items(), key=lambda item: item[0].count(".")))

    def computed(self) -> list[tuple[str, str, str, int]]:
        """Return the modules that were computed in other dtypes in the two programs.

        Returns:
            Their names, with `*` for numbers, what each program computed them in, and how many they are, in the order of the calls.
        """
        found = Counter((pattern(gap.module), str(gap.a), str(gap.b)) for gap in self.gaps if gap.kind and not gap.number)
        return [(*names, number) for names, number in found.items() if names[1] != names[2]]

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain JSON values.

        Returns:
            The values that `to_json()` writes.
        """
        ends = {"first": self.first, "beyond_rounding": self.beyond_rounding, "last": self.last}
        named = {name: None if gap is None else gap.named for name, gap in ends.items()}
        return versioned(json_values({**asdict(self), **named}))

    def _page(self) -> Page:
        return captures_page(self)

    def verdict(self) -> list[str]:
        """Return where they part, where rounding alone no longer explains the gap, and how far the whole is apart.

        Returns:
            Sentences.
        """
        first, beyond, last = self.first, self.beyond_rounding, self.last
        if first is None:
            known = sum(gap.relative is not None for gap in self.gaps)
            others = [gap for gap in self.gaps if gap.why.startswith(OTHER_BITS)]
            if others:
                return [f"they differ, by an unknown amount, in {count(len(others), 'output')}, first {others[0].named}"]
            if not known:
                return ["they may or may not differ: no output can be compared"]
            return [f"they do not differ: {count(known, 'output')} that can be compared {'is' if known == 1 else 'are'} equal"]
        kind = f" ({first.kind})" if first.kind else ""
        unknown = sum(gap.relative is None for gap in self.gaps[: self.gaps.index(first)])
        since = f"; {count(unknown, 'output')} before it could not be compared" if unknown else ""
        within = "no output differs by more than one rounding to its dtype explains"
        further = beyond and f"they first differ by more than one rounding explains ({two_digits(beyond.rounding)}) at {beyond.named}: "
        said = [
            f"they first differ at {first.named}{kind}: by {two_digits(first.relative)}, {first.a} against {first.b}{since}",
            within if beyond is None else f"{further}by {two_digits(beyond.relative)}",
        ]
        if last is not None:
            said.append(f"the model's output{f' {last.output}' if last.output else ''} differs by {two_digits(last.relative)}")
        return said


def side_of(capture: Capture) -> Side:
    """Return what a capture says of its program."""
    policies = tuple(dict.fromkeys(call.policy for call in capture.calls if call.policy))
    return Side(capture.name, str(capture.path), policies, capture.about)


def compare_captures(a: Capture | str | Path, b: Capture | str | Path, *, map: Mapping[str, str] | Iterable[str] = ()) -> CaptureComparison:
    """Compare two captured programs module by module: where they first differ, how the difference grows, and the dtypes of each.

    Both programs must have run the same batches. Modules are matched by name, by call of the model, and by number of the call in it.
    Positions that `attention_mask` masks are left out.

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
        one, other = Capture(one.path), Capture(other.path)
        one.name, other.name = str(one.path), str(other.path)
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
        if each.path in (TOKENS, MASK) and len(each.shape) == 2 and each.is_whole
    }


def _mask(capture: Capture, call: int) -> Tensor | None:
    """Return which places count; None for all."""
    given = _given(capture, call)
    shapes = [output.shape[:2] for output in capture.calls[call].outputs if output.path != MASK]
    mask = given.get(MASK)
    if mask is not None and TOKENS in given:
        mask = mask[:, -given[TOKENS].shape[1] :]  # with a cache it goes over the earlier places too
    fits = mask is not None and tuple(mask.shape) in shapes and bool(((mask == 0) | (mask == 1)).all())
    return mask != 0 if mask is not None and fits else None


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
    places = {path: at for at, path in enumerate(_paths(b)) if path[0] != MASK or b.kind}
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
            outputs[side].update((f"{call.module or '(the model)'}[{path}]", None) for path in paths if path != MASK or call.kind)
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


# --- names of one program as another's


def renamer(rules: Mapping[str, str] | Iterable[str], names: Iterable[str]) -> Callable[[str], str]:
    """Return what gives a name in the second program for one in the first: each rule in turn rewrites what the ones before it gave.

    A rule is `OLD=NEW`, with as many `*` on both sides, each of which stands for any text; `model.*` also for `model` itself, and
    `model.*=*` takes the prefix away. Raise HmpError for an invalid rule, and for one that no name in `names` follows.
    """
    steps: list[Callable[[str], str]] = []
    known = [name for name in names if not name.endswith(INPUTS)]
    for old, new in rules.items() if isinstance(rules, Mapping) else (rule.partition("=")[::2] for rule in rules):
        if not new or old.count("*") != new.count("*"):
            raise HmpError(f"map {old}={new}: expected OLD=NEW with as many * on both sides, such as model.layers.*=transformer.h.*")
        steps.append(functools.partial(_renamed, re.compile("(.*)".join(map(re.escape, _ended(old).split("*")))), _ended(new)))
        changed = list(map(steps[-1], known))
        if changed == known:
            raise HmpError(f"map {old}={new}: no module is called {old}; the names are {_some(known[:4])}")
        known = changed
    return lambda name: name if name.endswith(INPUTS) else functools.reduce(lambda text, step: step(text), steps, name)


def _renamed(old: re.Pattern[str], new: str, name: str) -> str:
    found = old.fullmatch(f"{name}.")
    texts = iter(found.groups()) if found else iter(())
    return re.sub(r"\*", lambda _: next(texts), new).strip(".") if found else name


def _ended(pattern: str) -> str:
    """Return the pattern with the dot that ends every name, so that `model.*` holds for `model` too."""
    return pattern if pattern.endswith("*") else f"{pattern}."


# --- the page: the gap by depth, where it grows, and every module with what it computed in

TABLE_ROWS = 1500


def captures_page(comparison: CaptureComparison) -> Page:
    """Return what a comparison of two captures says."""
    a, b = comparison.a, comparison.b
    low = max((gap for gap in comparison.gaps if gap.relative is not None), key=lambda gap: gap.rounding, default=None)
    cards = [
        (name, error_text(gap.relative if gap else None), gap.named if gap else "nowhere")
        for name, gap in (
            ("first difference", comparison.first),
            ("beyond one rounding", comparison.beyond_rounding),
            ("the model's output", comparison.last),
        )
    ]
    if low is not None and low.rounding:
        cards.append(("one rounding", error_text(low.rounding), "at most, to the narrowest output dtype"))
    return Page(
        title=f"{a.name} against {b.name}",
        verdict="; ".join(comparison.verdict()).replace("they", "They", 1) + ".",
        made=made_of(b.about),
        policies=[(side.name, str(side)) for side in (a, b)],
        cards=cards,
        opening=[Items(comparison.notes, is_notes=True)] if comparison.notes else [],
        sections=[_depth(comparison, low), _dtypes(comparison), _modules(comparison)],
    )


def _side(side: Computed) -> Cell:
    return flow(", ".join(side.inputs), side.output) if not side.weights else Cell(str(side))


def _depth(comparison: CaptureComparison, low: Gap | None) -> Section:
    told = (
        f"The relative difference of each module's output, ||a - b|| / ||b||, where b is {comparison.b.name}'s. In the order in which the "
        "modules returned: inner modules before the modules that contain them."
    )
    found: list[Part] = [Text(told, is_soft=True), _figure(comparison, low) or Text("No output differs.", is_soft=True)]
    for name, gaps in list(comparison.layers().items())[:1]:
        most = max((each.relative for each in gaps if each.relative is not None and math.isfinite(each.relative)), default=0.0)
        rows = [
            [module(gap.module), _side(gap.a), _side(gap.b), error(gap.relative), bar(most, ("casts", min(gap.relative or 0.0, most)))]
            for gap in gaps
        ]
        found.append(Table((name, comparison.a.name, comparison.b.name, ">difference", "by depth"), rows))
    return Section("depth", "By depth", "Difference by depth", found)


def _dtypes(comparison: CaptureComparison) -> Section:
    rows = [[module(name, "(the model)"), Cell(one), Cell(other), whole(number)] for name, one, other, number in comparison.computed()]
    told = (
        "The modules whose dtypes differ, with `*` for the numbers of layers: dtypes of inputs and outputs, and of the weights if they "
        "differ from these."
    )
    table = Table(("module", comparison.a.name, comparison.b.name, ">outputs"), rows, where=".computed() holds them")
    alike = Text("Every module has the same dtypes of inputs, weights and outputs in both programs.", is_soft=True)
    parts: list[Part] = [Text(told, is_soft=True), table] if rows else [alike]
    return Section("computed", "Dtypes", "Modules with different dtypes", parts)


def _modules(comparison: CaptureComparison) -> Section:
    shown = comparison.gaps[:TABLE_ROWS]
    rows = [
        [module(gap.named), whole(at), Cell(gap.kind), _side(gap.a), _side(gap.b), error(gap.relative), Cell(gap.how or gap.why)]
        for at, gap in enumerate(shown, 1)
    ]
    kinds = ("with inner modules", "innermost")
    table = Table(
        ("module", ">order", "class", comparison.a.name, comparison.b.name, ">difference", "compared by"),
        rows,
        label="The difference of every module's output",
        note=left_out(shown, len(comparison.gaps), "first", "`to_dict()`"),
        filter="module, class, dtype",
        choice="Modules",
        choices=kinds,
        groups=[kinds[gap.is_leaf] for gap in shown],
    )
    return Section("modules", "All modules", "All modules", [table], is_long=True)


def _figure(comparison: CaptureComparison, low: Gap | None) -> Depth | None:
    """Return the gap of every module's output in the order of the calls, those without modules inside as points.

    None where nothing is apart.
    """
    known = [(at, gap) for at, gap in enumerate(comparison.gaps, 1) if gap.relative and gap.kind]
    lines = []
    for is_leaf, name, colour in ((True, "modules", "casts"), (False, "modules with inner modules", "other")):
        points = [(at, min(gap.relative or 0.0, 1.0)) for at, gap in known if gap.is_leaf is is_leaf]
        if points:
            lines.append(Line(name, colour, points, 2.6))
    if not lines or low is None:
        return None
    first = next((at, min(gap.relative or 0.0, 1.0), gap.named) for at, gap in known)
    dtype = max((low.a.output, low.b.output), key=lambda name: name != "float32")
    across = "modules, in the order in which they returned"
    return Depth(lines, low.rounding or None, f"one rounding to {dtype}", first, across)
