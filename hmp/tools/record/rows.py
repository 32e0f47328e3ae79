"""The values of a report: one Row for each op, rule, dtypes and place, sums of them, and the calls that did not follow their list."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from ...core import lists
from ...core.observe import Listener
from ...errors import HmpError
from ..pages.page import Section

T = TypeVar("T")

# What the rule of an op is called that no rule decides.
UNLISTED = "unlisted"
# And of a listed op that was called by a name that Python code took before, and that hmp did not find.
BYPASSED = "bypassed"
# What is counted, and added up when rows are taken together.
COUNTED = ("calls", "casts", "casts_saved", "cast_bytes", "op_seconds", "cast_seconds", "no_kernel", "raised", "in_float32")
# What rows may be taken together by, with the fields that then distinguish them: but for modules, with rule and dtypes.
GROUPS = {"op": ("op",), "module": ("module",), "line": ("op", "file", "line"), "call": ("op", "module", "file", "line")}
_RULE_AND_DTYPES = ("rule", "label", "source", "inputs", "compute", "output")


@dataclass(frozen=True)
class Row:
    """Calls of one op by one rule, in one place, with the same dtypes.

    `op` is the op's id as lists spell it; `rule` the list that decided ("bf16", "fp32", "promote"), the rule that did ("R5", "R7",
    "R12"), "autocast" where torch.autocast decides inside, "unlisted", or "bypassed" for a call of torch's own function by a name that
    hmp.unreachable() knows; `source` the list entry, with file and line where it has one. `inputs`, `compute` and `output` are dtypes: of
    the castable inputs as the caller gave them, those that torch computed in, and of the result. `module`, `file` and `line` say
    who called. `casts` were made, `casts_saved` were not, thanks to a cache; `cast_bytes` are those of the tensors that were cast, as
    they were before. `op_seconds` is the time in torch's op, `cast_seconds` in its casts, both as the calling thread saw them.
    `no_kernel` calls ran in float32 for want of a kernel, `raised` calls raised.
    `in_float32` calls computed in float32 on inputs rounded to the low-precision dtype, and rounded their result, as the processor has no
    instructions for it. `label` says in words what a rule with a number does. `more` has the columns of plug-ins' lists, by name.
    """

    op: str
    rule: str
    source: str = ""
    inputs: str = ""
    compute: str = ""
    output: str = ""
    module: str = ""
    file: str = ""
    line: int = 0
    calls: int = 0
    casts: int = 0
    casts_saved: int = 0
    cast_bytes: int = 0
    op_seconds: float = 0.0
    cast_seconds: float = 0.0
    no_kernel: int = 0
    raised: int = 0
    in_float32: int = 0
    more: Mapping[str, float] = field(default_factory=dict, hash=False)
    label: str = ""

    @property
    def seconds(self) -> float:
        """Return the time in the op and in its casts."""
        return self.op_seconds + self.cast_seconds

    @property
    def stages(self) -> tuple[str, str, str]:
        """Return the dtypes of inputs, computation and output; of products that compute in float32 for bfloat16 "bfloat16 in float32"."""
        compute = f"{self.compute} in float32" if self.in_float32 and self.compute != "float32" else self.compute
        return self.inputs, compute, self.output

    @property
    def dtypes(self) -> str:
        """Return `inputs → compute → output`."""
        return " → ".join(part or "-" for part in self.stages)

    @property
    def rule_in_words(self) -> str:
        """Return the rule, with what it does where `rule` is a number."""
        return f"{self.label} ({self.rule})" if self.label else self.rule

    @property
    def place(self) -> str:
        """Return `module at file:line`, what of it is known."""
        return " at ".join(filter(None, (self.module, f"{self.file}:{self.line}" if self.file else "")))


FIELDS = tuple(each.name for each in fields(Row))


def grouped(rows: Iterable[Row], by: str) -> list[Row]:
    """Return the rows taken together by "op", "module", "line" or "call"; what differs within a group is left empty."""
    if by not in GROUPS:
        raise HmpError(f"invalid by={by!r}: expected {' or '.join(map(repr, GROUPS))}")
    return summed(rows, GROUPS[by] if by == "module" else (*GROUPS[by], *_RULE_AND_DTYPES))


def summed(rows: Iterable[Row], by: Sequence[str]) -> list[Row]:
    """Return the rows taken together that are the same by these fields; what differs within a group is left empty."""
    others = [name for name in FIELDS if name not in ("more", *COUNTED, *by)]
    return group_rows(rows, by, {**dict.fromkeys(COUNTED, sum), **dict.fromkeys(others, _common), "more": _added})


def in_order(rows: Iterable[Row], sort: str) -> list[Row]:
    """Return the rows sorted by a field: the largest number first, or text from a to z. HmpError if they have no such field."""
    if sort not in FIELDS:
        raise HmpError(f"invalid sort={sort!r}: expected a field of a row: {', '.join(FIELDS)}")
    return sorted(rows, key=lambda row: getattr(row, sort), reverse=not isinstance(getattr(Row("", ""), sort), str))


def _added(columns: list[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(each.get(name, 0) for each in columns) for name in dict.fromkeys(name for each in columns for name in each)}


def group_rows(rows: Iterable[T], by: Sequence[str], how: Mapping[str, Callable[[list[Any]], Any] | str]) -> list[T]:
    """Return the rows, dataclasses of one kind, with those that are the same `by` these fields as one.

    `how` has for each other field what makes one value of all, or the field by which its mean is weighed.
    """
    groups: dict[tuple[Any, ...], list[T]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row, name) for name in by), []).append(row)
    found = []
    for of in groups.values():
        if len(of) == 1:
            found.append(of[0])
            continue
        values = {name: [getattr(row, name) for row in of] for name in how}
        made = {name: _mean(values[name], values[one]) if isinstance(one, str) else one(values[name]) for name, one in how.items()}
        found.append(replace(of[0], **made))  # type: ignore[type-var]
    return found


def _common(values: list[Any]) -> Any:
    """Return the value that all are, else nothing."""
    return values[0] if values.count(values[0]) == len(values) else type(values[0])()


def _mean(values: list[float], weights: list[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / (sum(weights) or 1)


def total(rows: Iterable[Row]) -> Row:
    """Return the rows added up; an empty one of none."""
    return next(iter(summed(rows, ())), Row("", ""))


# --- calls that did not follow the entry of their list, and what overrode it


# Kind of violation, which is what overrode the entry of a list → what to do about it.
REMEDIES = {
    "region": "close the autocast context first, or enter hmp.casts() or call the applied model inside it",
    "island": "remove the autocast(enabled=False) context or, if float32 is right here, take the op off the list",
    "disable_casts": "move the call out of disable_casts(), or take the op off the list",
    "no_kernel": "take the op off the list on this device, or list it only for modules where it has a kernel: `op @ modules`",
    "outside": "call the model itself, or name the method: hmp.apply(model, methods=('forward', 'encode'))",
    "bypassed": "hmp.unreachable() shows the reference; take it after hmp patched torch, or look the function up at each call",
    "rounded_before": "keep weight and input in float32: no model.half(), and no FSDP2 param_dtype or DeepSpeed bf16 for this module",
    "torch": "hmp left the call to torch because of its arguments; see the rules for when it does",
}


def check_allowed(allow: Collection[str]) -> None:
    """Raise HmpError unless `allow` is a list of kinds of violations."""
    if isinstance(allow, str) or not isinstance(allow, Collection) or any(kind not in [*REMEDIES] for kind in allow):
        raise HmpError(f"allow= expected a list of kinds of violations, got {allow!r}; the kinds are {', '.join(map(repr, REMEDIES))}")


@dataclass(frozen=True)
class Violation:
    """Calls of one op in one place that ran otherwise than an entry of a list says.

    `source` is the line, with file and number where it has one; `wanted` the dtype that it asks for, `got` those that the calls computed
    in; `kind` what overrode it, a key of REMEDIES, and `by` what that was in words: a torch.autocast context with the line that
    opened it. `module`, `file` and `line` say who called, `calls` how often.
    """

    op: str
    source: str
    wanted: str
    got: str
    kind: str
    by: str
    module: str = ""
    file: str = ""
    line: int = 0
    calls: int = 0

    @property
    def place(self) -> str:
        """Return `module at file:line`, what of it is known."""
        return " at ".join(filter(None, (self.module, f"{self.file}:{self.line}" if self.file else "")))

    @property
    def remedy(self) -> str:
        """Return what may be done about it."""
        return REMEDIES[self.kind]

    def __str__(self) -> str:
        line = f" ({self.source})" if self.source else ""
        times = "once" if self.calls == 1 else f"{self.calls} times"
        return f"{self.op}{line} in {self.place}: wanted {self.wanted}, got {self.got}, {times}; caused by {self.by}"


def together(found: Iterable[Violation]) -> list[Violation]:
    """Return the violations, those that differ in nothing but the number of calls added up, most calls first."""
    same = [each.name for each in fields(Violation) if each.name != "calls"]
    return sorted(group_rows(found, same, {"calls": sum}), key=lambda each: -each.calls)


def kinds(found: Iterable[Violation]) -> list[str]:
    """Return the kinds of the violations, each once."""
    return list(dict.fromkeys(each.kind for each in found))


def in_lines(found: Iterable[Violation]) -> str:
    """Return the violations as lines of text, each kind with its remedy."""
    listed = list(found)
    lines = []
    for kind in kinds(listed):
        lines += [f"  {each}" for each in listed if each.kind == kind]
        lines.append(f"    to fix: {REMEDIES[kind]}")
    return "\n".join(lines)


# --- parts that kinds of lists bring: FP8's figures of each quantised tensor, the bytes that packing saves


class Recording(Listener):
    """Records one part of a report, from any thread."""

    def rows(self) -> list[Any]:
        """Return what was recorded so far, in the order of first uses."""
        raise NotImplementedError


@dataclass(frozen=True)
class ReportPart:
    """One part of a report: what `ListKind.report` makes. `report.NAME` has its rows, which are dataclasses of the kind `row`.

    `recording()` makes what records it, `merged(rows)` takes the rows of several recordings together, and `section(report)` makes its
    section of the page, None where it has nothing to say.
    """

    name: str
    row: type
    recording: Callable[..., Recording]
    merged: Callable[[Iterable[Any]], list[Any]]
    section: Callable[[Any], Section | None]


def report_parts() -> dict[str, ReportPart]:
    """Return the parts that the kinds of lists bring, by name."""
    made = (kind.report() for kind in lists.kinds() if kind.report is not None)
    return {part.name: part for part in made}
