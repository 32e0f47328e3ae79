"""The result of compare() under several policies: each beside float32, and the others beside the first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ..formatting import aligned, two_digits
from ..report.rows import taken_together
from .comparison import TABLE_ROWS, Comparison, Row, at_most
from .values import Key, Values

ENDS = ("output", "loss", "gradient")
EQUAL = 1.05  # errors with a ratio below it are as large as each other


@dataclass(frozen=True)
class Apart:
    """How far another policy's output, loss and gradients are from the first's, relative to float32's; None for what was not computed."""

    output: float | None
    loss: float | None
    gradient: float | None


@dataclass(frozen=True)
class Beside:
    """One op in one module and direction under each policy; "" for what a row is the sum over: a row may be of an op, or of a module.

    The tuples are in the order of the policies. `dtypes` are those of the results, "" where a policy runs no such op; `isolated` and
    `accumulated` are its largest errors beside float32, and `squares` the sum of the squared isolated ones. `apart` is the largest
    distance of the values from those of the first policy, relative to float32's, for each policy but the first. In forward they are what
    the calls of the op return, in backward what its ATen ops make, of a module its outputs. None where the policies made no tensors
    that belong together.
    """

    op: str
    direction: str
    module: str
    dtypes: tuple[str, ...]
    isolated: tuple[float | None, ...]
    accumulated: tuple[float | None, ...]
    squares: tuple[float, ...]
    apart: tuple[float | None, ...]


@dataclass(frozen=True)
class SideBySide(Comparison):
    """The first policy's Comparison, with those of the others beside it; str() is a table, and begins with `verdict()`.

    `others` are the other policies' comparisons with float32, `comparisons` all of them. `apart` holds how far each of the others' whole
    is from the first's. `beside` has a row for each op in each module and direction, `beside_ops` for each op and `beside_modules` for
    each module. Of results with more than 1,024 elements, and of outputs and gradients with more than 65,536, so many are compared with
    the first policy's, spread evenly; what is compared with float32 is whole.
    """

    others: tuple[Comparison, ...] = ()
    apart: tuple[Apart, ...] = ()
    beside: tuple[Beside, ...] = ()
    beside_ops: tuple[Beside, ...] = ()
    beside_modules: tuple[Beside, ...] = ()

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """The first policy's comparison with float32, and the others'."""
        return (self, *self.others)

    @property
    def policies(self) -> tuple[str, ...]:
        """The names of the policies."""
        return tuple(each.policy for each in self.comparisons)

    def difference(self, one: int = 0, other: int = 1) -> list[tuple[str, float]]:
        """What each op adds to the squared errors of policy number `one` beyond those of `other`, as a part of all that any op adds to
        either; the largest first. Negative where `other` errs more."""
        pairs = [(row.op, row.squares[one] - row.squares[other]) for row in self.beside_ops]
        total = sum(abs(more) for _, more in pairs)
        return sorted(((op, more / total) for op, more in pairs if more), key=lambda pair: (-abs(pair[1]), pair[0]))

    def verdict(self) -> str:
        """In a line: which policy is nearest to float32, how many times, and which op makes the most of the difference."""
        broken = [(each.policy, ends) for each in self.comparisons if (ends := _broken(each))]
        said = [f"{name} makes NaN or Inf, or float32 a zero, of the {' and the '.join(ends)}" for name, ends in broken]
        whole = [at for at, each in enumerate(self.comparisons) if not _broken(each)]
        end = next((end for end in ENDS if all(getattr(self.comparisons[at], end) is not None for at in whole)), None)
        if len(whole) == 1:
            said.append(f"{self.policies[whole[0]]} is the only one with numbers for all")
        elif whole and end is not None:
            nearest = min(whole, key=lambda at: (getattr(self.comparisons[at], end), at))
            said += [self._nearer(nearest, at, end) for at in whole if at != nearest]
        return "; ".join(said) or "nothing of the whole was compared"

    def _nearer(self, near: int, far: int, end: str) -> str:
        one, other = self.policies[near], self.policies[far]
        small, large = getattr(self.comparisons[near], end), getattr(self.comparisons[far], end)
        and_is = f", and {one} is"
        if large == 0:
            return f"{one} and {other} have float32's {end}"
        if small == 0:
            said = f"{one} has float32's {end}, and {other} is {two_digits(large)} away from it"
        elif large / small < EQUAL:
            said = f"{one} and {other} are equally near to float32 in the {end}"
        else:
            said, and_is = f"{one} is {_times(large / small)} times nearer to float32 than {other} in the {end}", " and"
        small, large = self.comparisons[near].gradient, self.comparisons[far].gradient
        if end != "gradient" and small and large and (more := max(large / small, small / large)) >= EQUAL:
            said += f"{and_is} {_times(more)} times {'nearer' if large > small else 'farther'} in the gradient"
        most = [(op, part) for op, part in self.difference(far, near) if part > 0]
        return said + (f"; {most[0][0]} makes {100 * most[0][1]:.0f} % of the difference" if most else "")

    def to_dict(self) -> dict[str, Any]:
        """All comparisons as plain JSON values: the first policy's, with the others' in it."""
        lists = {name: [asdict(row) for row in getattr(self, name)] for name in ("apart", "beside", "beside_ops", "beside_modules")}
        return {**super().to_dict(), "verdict": self.verdict(), "others": [each.to_dict() for each in self.others], **lists}

    def __str__(self) -> str:
        names = ", ".join(map(repr, self.policies))
        lines = [self.verdict(), "", f"policies {names}, {self.loss_source}", "  error relative to float32; apart: from the first policy"]
        ends = [end for end in ENDS if any(getattr(each, end) is not None for each in self.comparisons)]
        whole = [("", *ends), *((each.policy, *_cells(each, ends)) for each in self.comparisons)]
        whole += [(f"{name} apart", *_cells(apart, ends)) for name, apart in zip(self.policies[1:], self.apart, strict=True)]
        lines += [f"  {line}" for line in aligned(whole)]
        lines += [f"  {each.policy}, {said}" for each in self.comparisons for said in each.said_of_tokens_and_packing()]
        for title, rows in (("op", self.beside_ops), ("module", self.beside_modules)):
            lines += ["", *(f"  {line}" for line in aligned(self._table(title, rows[:TABLE_ROWS])))]
            if len(rows) > TABLE_ROWS:
                lines.append(f"  and {len(rows) - TABLE_ROWS} with less: the page and .beside_{title}s have them all")
        lines += ["", *(f"{each.policy}: {change}" for each in self.comparisons for change in each.first_changes())]
        return "\n".join([*lines, *self.notes])

    def _table(self, title: str, rows: Sequence[Beside]) -> list[tuple[str, ...]]:
        """Of an op the isolated errors, of a module the accumulated ones; with two policies their ratio and the op's part of the
        difference."""
        is_op, others = title == "op", self.policies[1:]
        two = len(others) == 1
        parts = dict(self.difference()) if two and is_op else {}
        apart = ("apart",) if two else tuple(f"{name} apart" for name in others)
        heading = (title, *self.policies, *(("times",) if two else ()), *apart)
        lines = [(*heading, "difference") if parts else heading]
        for row in rows:
            errors = row.isolated if is_op else row.accumulated
            cells = [
                row.op or row.module or "(no module)",
                *map(_error, errors),
                *((times(errors),) if two else ()),
                *map(_error, row.apart),
            ]
            lines.append((*cells, f"{parts[row.op]:+.1%}" if row.op in parts else "0.0%") if parts else tuple(cells))
        return lines


def side_by_side(comparisons: Sequence[Comparison], others: Sequence[Values]) -> SideBySide:
    """The result, of each policy's comparison and of the values of every run but the first."""
    first = comparisons[0]
    rows = _rows(comparisons, others)
    outputs = {row.module or "(no module)": tuple(values.largest([("module", row.module)]) for values in others) for row in rows}
    modules = _merged(rows, lambda row: replace(row, op="", direction="", module=row.module or "(no module)"))
    modules = [replace(row, apart=outputs[row.module]) for row in modules]
    notes = [*first.notes]
    for comparison, values in zip(comparisons[1:], others, strict=True):
        notes += _differing_references(first.policy, comparison.policy, values)
    return SideBySide(
        **{each.name: getattr(first, each.name) for each in fields(Comparison)} | {"notes": tuple(notes)},
        others=tuple(comparisons[1:]),
        apart=tuple(Apart(*(values.together(values.keys(end)) for end in ENDS)) for values in others),
        beside=tuple(rows),
        beside_ops=tuple(_merged(rows, lambda row: replace(row, direction="", module=""))),
        beside_modules=tuple(modules),
    )


def times(errors: Sequence[float | None]) -> str:
    """How many times as large the first error is as the second; "-" where one is unknown, zero or infinite."""
    one, other = errors[:2]
    return _times(one / other) if one and other and math.isfinite(one) and math.isfinite(other) else "-"


def _rows(comparisons: Sequence[Comparison], others: Sequence[Values]) -> list[Beside]:
    """A row for each op, direction and module, in the order in which they first run."""
    places: dict[tuple[str, str, str], list[list[Row]]] = {}
    for at, comparison in enumerate(comparisons):
        for row in sorted(comparison.rows, key=lambda row: row.order):
            found = places.setdefault((row.op, row.direction, row.module), [[] for _ in comparisons])
            found[at].append(row)
    backward: dict[tuple[str, str, str], set[Key]] = {}
    for values in others:
        for key in values.keys("backward"):
            backward.setdefault((key[1], key[0], key[2]), set()).add(key)
    rows = []
    for place, found in places.items():
        op, direction, module = place
        keys = backward.get(place, set()) if direction == "backward" else {("forward", op, module)}
        rows.append(
            Beside(
                *place,
                dtypes=tuple(_joined(row.dtype for row in each) for each in found),
                isolated=tuple(_largest(row.isolated for row in each) for each in found),
                accumulated=tuple(_largest(row.accumulated for row in each) for each in found),
                squares=tuple(sum(row.share for row in each) * of.squares for each, of in zip(found, comparisons, strict=True)),
                apart=tuple(values.largest(keys) for values in others),
            )
        )
    return rows


def _merged(rows: Iterable[Beside], name: Callable[[Beside], Beside]) -> list[Beside]:
    """One row for each that `name` gives the same op and module, those with the largest squared errors first."""
    largest = _by_policy(_largest)
    how = {"dtypes": _by_policy(_joined), "isolated": largest, "accumulated": largest, "squares": _by_policy(sum), "apart": largest}
    return sorted(taken_together(map(name, rows), ("op", "module"), how), key=lambda row: -max(row.squares))


def _by_policy(how: Callable[[Any], Any]) -> Callable[[list[Any]], Any]:
    """What makes one tuple of several, each in the order of the policies, by `how` for each policy."""
    return lambda values: tuple(map(how, zip(*values, strict=True)))


def _joined(dtypes: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(each for each in dtypes if each))


def _differing_references(first: str, other: str, values: Values) -> list[str]:
    """A note where the two float32 runs are not the same: what stands beside each other is then not the policies' doing alone."""
    apart = [values.together(values.keys(f"float32's {end}")) for end in ENDS]
    far = max((each for each in apart if each is not None), default=0.0)
    if far <= 1e-3:
        return []
    return [
        f"the float32 runs beside {first} and {other} are {two_digits(far)} apart: the model drew other random numbers, or "
        "went other ways, and that is part of what is between the two"
    ]


def _broken(comparison: Comparison) -> list[str]:
    return [end for end in ENDS if (error := getattr(comparison, end)) is not None and not math.isfinite(error)]


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _cells(holder: Any, ends: Sequence[str]) -> list[str]:
    return [_error(getattr(holder, end)) for end in ends]


def _error(value: float | None) -> str:
    return "-" if value is None else at_most(value, 1)


def _times(ratio: float) -> str:
    return f"{ratio:.2g}" if ratio < 99.5 else f"{ratio:,.0f}"  # from where two digits are written as 1e+02
