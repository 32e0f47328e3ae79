"""What to try in the lists, from a report, by a few rules that the page states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ...errors import HmpError
from ...formatting import count, dtype_name, share, typeset_duration
from ...lists import EVERY_OP, Listed, ListName, Policy, can_be_listed, policies
from ...wrapping import rules
from ..report import Report
from ..rows import UNLISTED, Row
from .model import in_words, said_by_presets

LEAST_SHARE = 0.01  # of the time in ops and casts: what is below it is not worth a line in a list
LEAST_UNLISTED = 0.03
_FIRST = rules.FIRST_INPUT.in_reports
SHOWN = 8


@dataclass(frozen=True)
class Change:
    """A name that is added to a list ("+") or taken off it ("-")."""

    sign: str
    cast: ListName
    name: str

    @property
    def file(self) -> str:
        """The list's file in a policy's folder."""
        return f"{self.cast}.txt"


@dataclass(frozen=True)
class Advice:
    """One thing to try: the changes, what was seen, what time is at stake, "" for none, and what speaks against it."""

    title: str
    changes: tuple[Change, ...]
    seen: str
    stake: str
    caution: str
    seconds: float


@dataclass(frozen=True)
class Advices:
    """What to try, most time first, with Python that makes all the changes; or the reason why there is nothing."""

    items: tuple[Advice, ...] = ()
    code: str = ""
    nothing: str = ""
    left: tuple[str, ...] = ()  # what costs time, and is better left as it is


# The rules in words, as the page states them.
RULES = (
    "An op on the FP32 list that gets low-precision inputs, and whose casts take more time than itself: try it off that list, so that it "
    "runs in the dtype of its inputs; but not where every preset that names it keeps it in float32.",
    "An op on the BF16 list whose inputs all arrive in float32, and whose casts take more time than itself: try it off that list.",
    f"An op on no list that computes in float32 and takes at least {LEAST_UNLISTED:.0%} of the time, and that no more presets have on an "
    "FP32 list than on a BF16 list: try it on the BF16 list.",
    "An op on no list, or on the promote list, that gets low precision and float32 together and gives float32: what follows it is cast "
    "down again. Try it on the BF16 list.",
    "An op on no list that ran in the dtype of its first input, in two dtypes: put it on a list to settle which.",
    "An op on the BF16 list that ran in float32 for want of a kernel (R11): take it off the list where this is the device to run on.",
    f"What takes less than {LEAST_SHARE:.0%} of the time in ops and casts is left out, except for the last one.",
)
_FP32_CAUTION = "It may stand on the FP32 list for the sake of accuracy."
_BF16_CAUTION = "Eight significant bits have to be enough for its results."


def advices(report: Report) -> Advices:
    """What to try in the list of the one policy that was in force."""
    if len(report.policies) != 1:
        several = len(report.policies) > 1
        return Advices(
            nothing="More than one policy was in force. Record each by itself to see what to try in its lists."
            if several
            else "No policy was in force."
        )
    try:
        policy = Policy.from_dict(report.policies[0])
    except HmpError as error:  # recorded where other ops were registered
        return Advices(nothing=f"The policy of this recording cannot be read here: {error}")
    seen = _Seen(report, policy)
    found: dict[tuple[Change, ...], Advice] = {}
    for rule in (_costly, _unsettled, _unlisted_float32, _widening, _no_kernel):
        for advice in rule(seen):
            taken = {change.name for known in found.values() for change in known.changes}
            if advice.changes and taken.isdisjoint(change.name for change in advice.changes):
                found[advice.changes] = advice
    items = sorted(found.values(), key=lambda advice: -advice.seconds)[:SHOWN]
    if not items:
        return Advices(nothing="None of the rules below found anything worth a change in this recording.", left=tuple(_left(seen)))
    return Advices(tuple(items), _code(policy, items), left=tuple(_left(seen)))


class _Seen:
    """A report's rows by op, and the policy that was in force."""

    def __init__(self, report: Report, policy: Policy) -> None:
        self.report, self.policy = report, policy
        self.low = dtype_name(policy.dtype)
        self.rows = report.grouped("op")
        self.seconds = sum(row.seconds for row in self.rows)

    def by_op(self, wanted: Callable[[Row], bool]) -> Iterator[tuple[str, list[Row]]]:
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            if wanted(row) and not row.raised:
                found.setdefault(row.op, []).append(row)
        yield from found.items()

    def is_much(self, seconds: float, least: float = LEAST_SHARE) -> bool:
        return seconds > 0 and seconds >= least * self.seconds

    def stake(self, seconds: float, what: str) -> str:
        if not self.is_much(seconds, 0.001):
            return ""  # it is about what the list says, not about time
        return f"{typeset_duration(seconds)} in {what}, {share(seconds, self.seconds)} of the time in ops and casts"

    def inputs(self, row: Row) -> list[str]:
        return row.inputs.split(", ") if row.inputs else []


def _costly(seen: _Seen) -> Iterator[Advice]:
    def off(cast: ListName, gets: Callable[[Row], bool], got: str, caution: str) -> Iterator[Advice]:
        for op, rows in seen.by_op(lambda row: row.rule == cast and gets(row)):
            casts, itself = _times(rows)
            if casts > itself and seen.is_much(casts) and not (cast == "fp32" and _always_float32(op)):
                yield Advice(
                    f"Try {op} off the {cast.upper()} list",
                    _taken_off(seen.policy, cast, op),
                    f"{_calls(rows)} got {got} took longer than computing ({typeset_duration(casts)} and {typeset_duration(itself)}).",
                    seen.stake(casts, "its casts"),
                    f"{caution} {_presets_say(op)}",
                    casts,
                )

    yield from off("fp32", lambda row: seen.low in seen.inputs(row), f"{seen.low}; casting it to float32", _FP32_CAUTION)
    yield from off(
        "bf16", lambda row: row.casts > 0 and set(seen.inputs(row)) == {"float32"}, "float32 only; casting",
        "Ops after it that are on the BF16 list would then cast its result.",
    )  # fmt: skip


def _unlisted_float32(seen: _Seen) -> Iterator[Advice]:
    for op, rows in seen.by_op(lambda row: row.rule in (UNLISTED, _FIRST) and row.compute == row.output == "float32"):
        seconds = sum(row.op_seconds for row in rows)
        said = said_by_presets(op)
        if not seen.is_much(seconds, LEAST_UNLISTED) or not can_be_listed(op) or len(said.get("fp32", ())) > len(said.get("bf16", ())):
            continue
        if all(set(seen.inputs(row)) == {"float32"} for row in rows):
            yield Advice(
                f"Try {op} on the BF16 list",
                (Change("+", "bf16", op),),
                f"{_calls(rows)} computed in float32, and no list names it.",
                seen.stake(seconds, "the op"),
                f"{_BF16_CAUTION} Its inputs would have to be cast. {_presets_say(op)}",
                seconds,
            )


def _widening(seen: _Seen) -> Iterator[Advice]:
    def widens(row: Row) -> bool:
        return row.rule in (UNLISTED, "promote", _FIRST) and {seen.low, "float32"} <= set(seen.inputs(row)) and row.output == "float32"

    # float32 that arrives at an op of the BF16 list is what widening costs
    again = [row for row in seen.rows if row.rule == "bf16" and row.inputs.startswith("float32")]
    seconds = sum(row.cast_seconds for row in again)
    for op, rows in seen.by_op(widens):
        if seen.is_much(seconds) and can_be_listed(op):
            first = max(again, key=lambda row: row.cast_seconds).op
            yield Advice(
                f"Try {op} on the BF16 list",
                (Change("+", "bf16", op),),
                f"{_calls(rows)} got {seen.low} together with float32 and gave float32. Ops of the BF16 list, most of all {first}, cast "
                "float32 down again.",
                f"at most {seen.stake(seconds, 'casts of such float32')}",
                f"{_BF16_CAUTION} Sums along a residual stream suffer first. {_presets_say(op)}",
                seconds,
            )


def _unsettled(seen: _Seen) -> Iterator[Advice]:
    for op, rows in seen.by_op(lambda row: row.rule == _FIRST and bool(row.compute)):
        dtypes = sorted({row.compute for row in rows})
        seconds = sum(row.op_seconds for row in rows)
        if len(dtypes) > 1 and seen.is_much(seconds) and can_be_listed(op):
            said = said_by_presets(op)
            cast: ListName = "fp32" if len(said.get("fp32", ())) > len(said.get("bf16", ())) else "bf16"
            yield Advice(
                f"Settle {op}: try it on the {cast.upper()} list",
                (Change("+", cast, op),),
                f"No list names it, so it ran in the dtype of its first input: {' and '.join(_split(rows))}.",
                seen.stake(seconds, "the op"),
                _presets_say(op) or "No preset names it.",
                seconds,
            )


def _no_kernel(seen: _Seen) -> Iterator[Advice]:
    for op, rows in seen.by_op(lambda row: row.rule == "bf16" and row.no_kernel > 0):
        lacking = sum(row.no_kernel for row in rows)
        yield Advice(
            f"Take {op} off the BF16 list",
            _taken_off(seen.policy, "bf16", op),
            f"{lacking} of {sum(row.calls for row in rows)} calls ran in float32: there is no {seen.low} kernel for them here.",
            seen.stake(sum(row.cast_seconds for row in rows), "its casts"),
            "On another device it may have a kernel.",
            sum(row.cast_seconds for row in rows),
        )


def _left(seen: _Seen) -> Iterator[str]:
    """What takes time in casts for a reason."""
    for op, rows in seen.by_op(lambda row: row.rule == "fp32" and seen.low in seen.inputs(row)):
        casts, _ = _times(rows)
        if seen.is_much(casts) and _always_float32(op):
            yield (
                f"{op}: {seen.stake(casts, 'casts to float32')}. Every preset that names it keeps it in float32 "
                f"({', '.join(said_by_presets(op)['fp32'])})."
            )
    for op, rows in seen.by_op(lambda row: row.rule == "bf16" and {seen.low, "float32"} <= set(seen.inputs(row))):
        casts, _ = _times(rows)
        if seen.is_much(casts):
            yield (
                f"{op}: {seen.stake(casts, 'casts of float32 that it got beside ' + seen.low)}, as parameters are. Parameters stay float32 "
                "and are cast after every change; larger batches spread that cost, and inference keeps the copies."
            )


def _always_float32(op: str) -> bool:
    said = said_by_presets(op)
    return len(said.get("fp32", ())) >= 3 and set(said) == {"fp32"}


def _preset(policy: Policy) -> str | None:
    """The preset that the policy is, unchanged."""
    return policy.name if policy.name in policies() and Policy.load(policy.name) == policy else None


def _taken_off(policy: Policy, cast: ListName, op: str) -> tuple[Change, ...]:
    """The names to take off a list so that it does not decide `op` any more: its own, and those that it follows."""
    changes: list[Change] = []
    while True:
        source = Listed(policy).source(op)
        if source is None and EVERY_OP in getattr(policy, cast):
            return (*changes, Change("+", "promote", op))  # `*` holds it, and a list of its own wins
        if source is None or source.cast != cast:
            return tuple(changes)
        changes.append(Change("-", cast, source.name))
        policy = policy.replace(**{cast: getattr(policy, cast) - {source.name}})


def _code(policy: Policy, items: Iterable[Advice]) -> str:
    """Python that loads the policy and makes all the changes."""
    base = _preset(policy)
    lines = ["policy = ...  # the policy of this recording" if base is None else f'policy = hmp.Policy.load("{base}")']
    arguments = []
    lists: tuple[ListName, ...] = ("bf16", "fp32", "promote")
    for cast in lists:
        value = f"policy.{cast}"
        for sign, operator in (("-", "-"), ("+", "|")):
            names = sorted({change.name for item in items for change in item.changes if (change.sign, change.cast) == (sign, cast)})
            if names:
                value = f"{f'({value})' if ' ' in value else value} {operator} {{{', '.join(map(_quoted, names))}}}"
        if value != f"policy.{cast}":
            arguments.append(f"    {cast}={value},")
    lines += ["tried = policy.replace(", *arguments, ")", 'tried.save("my_lists")  # bf16.txt, fp32.txt, promote.txt, to be edited further']
    return "\n".join(lines)


def _quoted(name: str) -> str:
    return f'"{name}"'


def _times(rows: Iterable[Row]) -> tuple[float, float]:
    kept = list(rows)
    return sum(row.cast_seconds for row in kept), sum(row.op_seconds for row in kept)


def _calls(rows: Iterable[Row]) -> str:
    return count(sum(row.calls for row in rows), "call")


def _split(rows: list[Row]) -> list[str]:
    dtypes = sorted({row.compute for row in rows})
    return [f"{dtype} in {_calls([row for row in rows if row.compute == dtype])}" for dtype in dtypes]


def _presets_say(op: str) -> str:
    words = in_words(said_by_presets(op))
    return f"Presets: {words}." if words else ""
