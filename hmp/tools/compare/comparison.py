"""The result of compare(): rows of statistics by op and by module, and what moves of ops to other lists gain."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ...core import lists
from ...core.casting import dtype_name
from ...core.policy.names import can_be_listed
from ..op_owners import AtenCall, Direction
from ..pages.page import Page, Result, error_text
from .tokens import TokenDistance


@dataclass(frozen=True)
class ErrorRow:
    """One ATen op of one op of the lists, in one module and direction.

    `op` is the name that lists spell, or the ATen op's where hmp had no hand in it; `listed` the list that it is on, "" for none;
    `dtype` that of the results. `isolated` is the error of this op alone, against float32 on the same inputs; `accumulated` that of its
    result against the result of the float32 run. Errors are ||result - reference|| / ||reference||, the largest of all calls. `isolated`
    is None where torch cannot compute the op alone in float32. `calls` is how often the ATen op ran, `op_calls` how often the op was
    called in the module.
    """

    op: str
    aten: str
    direction: Direction
    module: str
    dtype: str
    listed: str
    calls: int
    op_calls: int
    isolated: float | None
    accumulated: float
    share: float


@dataclass(frozen=True)
class Group:
    """The rows of one op, or of one module: calls of ops, largest errors, the sum of the shares.

    `moved` is the output's error once the op, or one op of the module, computes in float32; None where that was not tried.
    """

    name: str
    calls: int
    isolated: float
    accumulated: float
    share: float
    moved: float | None = None


class Move(NamedTuple):
    """An entry such as `matmul @ blocks.1`, and the list that it is put on by `policy.move(entry, to)`."""

    entry: str
    to: str

    @property
    def op(self) -> str:
        """Return the op, without a scope."""
        return self.entry.partition(" @ ")[0]


@dataclass(frozen=True)
class MoveTrial:
    """A step under a policy with these moves: how far output, loss and gradients are from float32's; `why_not` says why that is not known.

    An error is None for what was not computed.
    """

    moves: tuple[Move, ...]
    output: float | None = None
    loss: float | None = None
    gradient: float | None = None
    why_not: str = ""

    @property
    def named(self) -> str:
        """Return the moves as text."""
        return " + ".join(move.entry for move in self.moves)

    @property
    def far(self) -> float:
        """Return the error of the output, or of the gradients or the loss of a step without one."""
        return next((each for each in (self.output, self.gradient, self.loss) if each is not None), math.inf)

    @property
    def order(self) -> tuple[float, ...]:
        """Return the errors by which trials are ranked, the output's first."""
        return tuple(math.inf if each is None else each for each in (self.output, self.gradient, self.loss))

    def gains(self, before: MoveTrial) -> bool:
        """Return True if the output's or the gradients' error is a tenth less than before, the loss's where the output is the same."""
        (output, gradient, loss), (output_before, gradient_before, loss_before) = self.order, before.order
        if self.why_not or output > 1.1 * output_before:
            return False
        is_same = output == output_before
        return output < 0.9 * output_before or gradient < 0.9 * gradient_before or (is_same and loss < 0.9 * loss_before)


@dataclass(frozen=True)
class Trials:
    """What moves of ops gain: `start` is without any, `alone` one move each, the best first.

    `together` are the fewest moves found that bring the output within `tolerance`, or as near as was tried; None where none gains.
    `untried` moves were not tried.
    """

    start: MoveTrial
    alone: tuple[MoveTrial, ...] = ()
    together: MoveTrial | None = None
    tolerance: float = 0.0
    untried: int = 0
    why_not: str = ""


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """How far a policy's run is from float32's, op by op; str() is a table.

    `rows` are in the order of the isolated error, the largest first. `output`, `loss` and `gradient` are the relative errors of the
    model's output, of the loss and of all parameters' gradients as one vector; None for what was not computed. They are against what
    float32 gives on the path that the model takes under the policy, or against a run without hmp if that takes another path, as a note
    says. `float32_loss_value` is the loss there, and `loss_value` that under the policy. `loss_source` says what the loss was. A row's
    `share` is its part of the sum over all calls of the squared isolated errors: independent roundings add up in squares. `trials` are
    what output, loss and gradients gain by moves of ops to other lists. `model` is the model's class, `date` when it was compared,
    `hmp` and `torch` are versions. `tokens` is how far the log-probabilities of the chosen tokens are from float32's, None for an
    output without logits. `gradient_packed` is how far the policy's saved list alone moves the gradients as one vector, None without
    such a list or without backward: nothing else here is packed.
    `against` is the comparison of the policy that was given as that, on the same batch with the same random numbers.

    Example:
        >>> net, x = torch.nn.Linear(4, 1), torch.randn(8, 4)
        >>> found = hmp.compare(net, x, "autocast", loss=lambda output: output.square().mean())
        >>> len(found.by_op()) > 0, len(found.by_module()) > 0, found.to_dict()["policy"] == found.policy
        (True, True, True)
        >>> changes, json, page = found.first_changes(), found.to_json("comparison.json"), found.to_html("comparison.html")
    """

    policy: str
    rows: tuple[ErrorRow, ...]
    output: float | None
    loss: float | None
    gradient: float | None
    loss_value: float | None
    loss_source: str
    trials: Trials | None = None
    notes: tuple[str, ...] = field(default=())
    model: str = ""
    low_dtype: str = "bfloat16"
    device: str = ""
    date: str = ""
    hmp: str = ""
    torch: str = ""
    gradient_packed: float | None = None
    tokens: TokenDistance | None = None
    float32_loss_value: float | None = None
    against: Comparison | None = None

    @property
    def advice(self) -> tuple[MoveTrial, ...]:
        """Return the moves that gain, the best first: each brings the output's or the gradients' error down by a tenth or more."""
        trials = self.trials
        return () if trials is None else tuple(each for each in trials.alone if each.gains(trials.start))

    def by_op(self) -> list[Group]:
        """Return one group for each op: in the order of what moving it gains, then the largest share first.

        Returns:
            The groups.
        """
        return self._grouped(lambda op, module: op)

    def by_module(self) -> list[Group]:
        """Return one group for each module, by its path: in the order of what moving one of its ops gains, then the largest share first.

        Returns:
            The groups.
        """
        return self._grouped(lambda op, module: module or "(no module)")

    def _grouped(self, name: Callable[[str, str], str]) -> list[Group]:
        alone = () if self.trials is None else self.trials.alone
        tried = {each.named: at for at, each in enumerate(alone)}
        of: dict[str, list[ErrorRow]] = {}
        for row in self.rows:
            of.setdefault(name(row.op, row.module), []).append(row)
        groups = []
        for group, rows in of.items():
            calls = sum({(row.op, row.module): row.op_calls for row in rows}.values())
            isolated, accumulated = max(row.isolated or 0.0 for row in rows), max(row.accumulated for row in rows)
            at = min((tried[each] for row in rows for each in (f"{row.op} @ {row.module}", row.op) if each in tried), default=len(alone))
            moved = alone[at].output if at < len(alone) else None
            # the moves that gain come first among those tried
            groups.append((min(at, len(self.advice)), Group(group, calls, isolated, accumulated, sum(row.share for row in rows), moved)))
        ranked = sorted(groups, key=lambda each: (each[0], -each[1].share, -each[1].isolated, -each[1].accumulated, each[1].name))
        return [group for _, group in ranked]

    def _page(self) -> Page:
        from .page import comparison_page  # here: it imports this module

        return comparison_page(self)

    def first_changes(self) -> list[str]:
        """Return what to change first, a line for each list; from a list such as FP8 an op goes to the BF16 list first.

        Returns:
            The lines, or one that says why nothing is advised.
        """
        trials = self.trials
        if trials is None or trials.why_not:
            return [] if trials is None else [f"moves were not measured: {trials.why_not}"]
        special = {row.op: row.listed for row in self.rows}
        found = []
        for kind in (*(kind for kind in lists.kinds() if kind.instead), lists.kind_of("fp32")):
            of = [
                each for each in self.advice[:5] if (special[each.moves[0].op] == kind.name if kind.instead else each.moves[0].to == "fp32")
            ]
            if of:
                said = ", ".join(f"{each.named} ({_gain(trials.start, each)})" for each in of)
                change = f"{'take off' if kind.instead else 'move to'} the {kind.title} list"
                found.append(f'to {change} first: {said}; policy.move("{of[0].named}", "{of[0].moves[0].to}")')
        if trials.start.far <= trials.tolerance:
            found.insert(0, f"nothing has to be moved: the error is within the tolerance of {error_text(trials.tolerance)}")
        elif not found:
            found.append(self._why_nothing(trials))
        best = trials.together
        if best is not None and (best not in trials.alone or best.far > trials.tolerance):
            reached = "within" if best.far <= trials.tolerance else "the nearest of the sets tried to"
            found.append(f"together: {best.named} ({_gain(trials.start, best)}), {reached} the tolerance of {error_text(trials.tolerance)}")
        found += [f"{each.named} was not measured: {each.why_not}" for each in trials.alone if each.why_not]
        if trials.untried:
            found.append(f"not tried: {trials.untried} more moves; a larger trials= tries them, too")
        return found

    def _why_nothing(self, trials: Trials) -> str:
        """Return why no single move is advised."""
        if trials.together is not None:
            return "no single move brings the error down by a tenth: several ops share the cause"
        lead = "no single move brings the error down by a tenth" if trials.alone else "nothing to move to the FP32 list"
        most = max(self.by_op(), key=lambda group: group.share)
        cannot = "" if can_be_listed(most.name) else ", and lists don't affect it"
        return f"{lead}: {most.name} adds most of it ({most.share:.0%}){cannot}"


def _gain(start: MoveTrial, trial: MoveTrial) -> str:
    """Return the first error that a trial lowers, before and after."""
    ends = list(zip(("output", "gradient", "loss"), start.order, trial.order, strict=True))
    end, before, after = next((each for each in ends if each[2] < 0.9 * each[1]), ends[0])
    return f"{end} {error_text(before)} becomes {error_text(after)}"


class ErrorSums:
    """Collects what becomes a Comparison's rows; holds numbers, no tensors."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, Direction, str, str], _Sums] = {}

    def add(self, call: AtenCall, aten: str, dtype: torch.dtype, own: float | None, accumulated: float, is_part: bool) -> None:
        """Add a call of an ATen op; `is_part` is whether its own error counts elsewhere."""
        rule = None if call.owner.ruled is None else call.owner.ruled.rule
        listed = next((kind.name for kind in lists.kinds() if kind.rule is rule and not kind.adds), "")
        key = (call.owner.op, aten, call.direction, call.owner.place.module, dtype_name(dtype))
        sums = self._rows.setdefault(key, _Sums(listed))
        sums.calls += 1
        sums.accumulated = max(sums.accumulated, accumulated)
        if own is not None:
            sums.isolated = max(sums.isolated or 0.0, own)
            # an error beyond the value itself says that nothing is left of it, and counts as that
            sums.squares += 0.0 if is_part else min(own, 1.0) ** 2

    def last(self) -> str:
        """Return what was compared last, each with its accumulated error: an error of the model's comes right after it."""
        seen = list(self._rows.items())[-4:]
        return "; ".join(f"{key[0]} in {key[3] or 'no module'} ({key[4]}): {sums.accumulated:.2g}" for key, sums in seen) or "no op"

    def rows(self, calls: Mapping[tuple[str, str], int]) -> tuple[ErrorRow, ...]:
        """Return the rows, the largest isolated error first. `calls` are those of ops, by op and module."""
        total = sum(sums.squares for sums in self._rows.values()) or 1.0
        rows = []
        for key, sums in self._rows.items():
            of_op = calls.get((key[0], key[3]), sums.calls)  # of what autograd alone runs, those of ATen
            rows.append(ErrorRow(*key, sums.listed, sums.calls, of_op, sums.isolated, sums.accumulated, sums.squares / total))
        return tuple(sorted(rows, key=lambda row: (-(row.isolated or 0.0), -row.accumulated, row.op, row.aten, row.module)))


@dataclass
class _Sums:
    listed: str
    calls: int = 0
    isolated: float | None = None
    accumulated: float = 0.0
    squares: float = 0.0
