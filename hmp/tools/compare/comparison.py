"""The result of compare(): rows of statistics, ranked by op and by module, and what to move to the FP32 list first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from ...core import lists
from ..formatting import versioned
from ..op_owners import Direction
from ..pages.page import Page, Result
from ..record.rows import group_rows
from .distance import Distance
from .tokens import TokenDistance


@dataclass(frozen=True)
class ErrorRow:
    """One ATen op of one op of the lists, in one module and direction.

    `op` is the name that lists spell, or the ATen op's where hmp had no hand in it; `listed` the list that it is on, "" for none;
    `dtype` that of the results. `isolated` is the error of this op alone, against float32 on the same inputs; `accumulated` that of its
    result against the result of the float32 run. Errors are ||result - reference|| / ||reference||, the largest and the mean over `calls`
    calls; `_ulps` are in spacings of bfloat16. `isolated` is None where torch cannot compute the op alone in float32. `order` is the
    place of its first call among all rows.
    """

    op: str
    aten: str
    direction: Direction
    module: str
    dtype: str
    listed: str
    calls: int
    isolated: float | None
    isolated_mean: float | None
    isolated_ulps: float | None
    accumulated: float
    accumulated_mean: float
    accumulated_ulps: float
    share: float
    order: int


@dataclass(frozen=True)
class Group:
    """The rows of one op, or of one module: largest errors and the sum of the shares."""

    name: str
    calls: int
    isolated: float
    isolated_ulps: float
    accumulated: float
    accumulated_ulps: float
    share: float


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """How far a policy's run is from float32's, op by op; str() is a table.

    `rows` are in the order of the isolated error, the largest first. `output`, `loss` and `gradient` are the accumulated relative
    errors of the model's output, of the loss and of all parameters' gradients as one vector; None for what was not computed.
    `loss_source` says what the loss was. A row's `share` is its part of the sum over all calls of the squared isolated errors:
    independent roundings add up in squares; `squares` is that sum. `advice` holds (op, share) of the ops that are not in float32 already,
    the largest share first, those with half a percent or more: what to move to the FP32 list first, or to take off the FP8 list. `model`
    is the model's class, `date` when it was compared, `hmp` and `torch` are versions. `tokens` is how far the log-probabilities of the
    chosen tokens are from float32's, None for an output without logits. `gradient_packed` is how far the policy's saved list alone moves
    the gradients as one vector, None without such a list or without backward: nothing else here is packed.
    `untouched_output` and `untouched_loss` are the relative distances of the model's output and of the loss from those of a float32 run
    that hmp has not touched, whose loss is `untouched_loss_value`: there a model may go another way than under the policy, where it picks
    a constant or a branch by the dtype, which the float32 run of each op follows. None where `untouched_why_not` says why: the run failed,
    or drew random numbers.
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
    advice: tuple[tuple[str, float], ...] = ()
    notes: tuple[str, ...] = field(default=())
    model: str = ""
    device: str = ""
    date: str = ""
    hmp: str = ""
    torch: str = ""
    squares: float = 0.0
    gradient_packed: float | None = None
    tokens: TokenDistance | None = None
    untouched_output: float | None = None
    untouched_loss: float | None = None
    untouched_loss_value: float | None = None
    untouched_why_not: str = ""
    against: Comparison | None = None

    def by_op(self) -> list[Group]:
        """Return one group for each op, the largest share first.

        Returns:
            The groups.
        """
        return _grouped(self.rows, lambda row: row.op)

    def by_module(self) -> list[Group]:
        """Return one group for each module, by its path, the largest share first.

        Returns:
            The groups.
        """
        return _grouped(self.rows, lambda row: row.module or "(no module)")

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain JSON values.

        Returns:
            The values that `to_json()` writes.
        """
        names = """policy output loss gradient loss_value loss_source untouched_output untouched_loss untouched_loss_value
            untouched_why_not squares model device date hmp torch gradient_packed""".split()
        return versioned(
            {
                **{name: getattr(self, name) for name in names},
                "advice": [{"op": op, "share": share} for op, share in self.advice],
                "notes": list(self.notes),
                "rows": [asdict(row) for row in self.rows],
                "tokens": None if self.tokens is None else asdict(self.tokens),
                "against": None if self.against is None else self.against.to_dict(),
            }
        )

    def _page(self) -> Page:
        from .page import comparison_page  # here: it imports this module

        return comparison_page(self)

    def _why_nothing(self) -> str:
        """Return why no change to the lists is advised."""
        most = next((group for group in self.by_op() if group.share > 0), None)
        if most is None:
            return "no op adds a rounding error, so there is nothing to move to the FP32 list"
        return f"nothing to move to the FP32 list: {most.name} adds most of the error ({most.share:.0%}), and lists don't affect it"

    def first_changes(self) -> list[str]:
        """Return what to change first, a line for each list; from a list such as FP8 an op goes to the BF16 list first.

        Returns:
            The lines, or one that says why nothing is advised.
        """
        kinds = {kind.name: kind for kind in lists.kinds() if kind.instead}
        steps = [(f"take off the {kind.title} list", kind.instead, kind.name) for kind in kinds.values()]
        special = {row.op: row.listed for row in self.rows if row.listed in kinds}
        found = []
        for change, to, of in (*steps, ("move to the FP32 list", "fp32", None)):
            ops = [(op, share) for op, share in self.advice[:5] if special.get(op) == of]
            if ops:
                said = ", ".join(f"{op} ({share:.0%})" for op, share in ops)
                found.append(f'to {change} first: {said}; policy.move("{ops[0][0]}", "{to}")')
        return found or [self._why_nothing()]


class ErrorSums:
    """Collects what becomes a Comparison's rows; holds numbers, no tensors."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, Direction, str, str], _Sums] = {}

    def add(
        self, key: tuple[str, str, Direction, str, str], listed: str, own: Distance | None, accumulated: Distance, is_part: bool
    ) -> None:
        """One call of the row `key`: op, ATen op, direction, module, dtype; `is_part` is whether its own error counts elsewhere."""
        sums = self._rows.setdefault(key, _Sums(listed))
        sums.calls += 1
        sums.accumulated.append(accumulated)
        if own is not None:
            sums.isolated.append(own, 0.0 if is_part else 1.0)

    @property
    def squares(self) -> float:
        """Return the sum over all calls of the squared isolated errors."""
        return sum(sums.isolated.squares for sums in self._rows.values())

    def rows(self) -> tuple[ErrorRow, ...]:
        """Return the rows, the largest isolated error first."""
        total = self.squares
        rows = [sums.row(key, total, order) for order, (key, sums) in enumerate(self._rows.items())]
        return tuple(sorted(rows, key=lambda row: (-(row.isolated or 0.0), -row.accumulated, row.op, row.aten, row.module)))


class _Errors:
    def __init__(self) -> None:
        self.count, self.largest, self.ulps, self.sum, self.squares = 0, 0.0, 0.0, 0.0, 0.0

    def append(self, error: Distance, weight: float = 1.0) -> None:
        self.count += 1
        self.largest = max(self.largest, error.relative)
        self.ulps = max(self.ulps, error.ulps)
        self.sum += error.relative
        # an error beyond the value itself says that nothing is left of it, and counts as that
        self.squares += weight * min(error.relative, 1.0) ** 2


class _Sums:
    def __init__(self, listed: str) -> None:
        self.listed = listed
        self.calls = 0
        self.isolated = _Errors()
        self.accumulated = _Errors()

    def row(self, key: tuple[str, str, Direction, str, str], total: float, order: int) -> ErrorRow:
        own, accumulated = self.isolated, self.accumulated
        known = own.count > 0
        return ErrorRow(
            *key,
            listed=self.listed,
            calls=self.calls,
            isolated=own.largest if known else None,
            isolated_mean=own.sum / own.count if known else None,
            isolated_ulps=own.ulps if known else None,
            accumulated=accumulated.largest,
            accumulated_mean=accumulated.sum / accumulated.count,
            accumulated_ulps=accumulated.ulps,
            share=own.squares / total if total else 0.0,
            order=order,
        )


def _grouped(rows: Iterable[ErrorRow], name: Callable[[ErrorRow], str]) -> list[Group]:
    groups = [
        Group(name(row), row.calls, row.isolated or 0.0, row.isolated_ulps or 0.0, row.accumulated, row.accumulated_ulps, row.share)
        for row in rows
    ]
    largest = dict.fromkeys(("isolated", "isolated_ulps", "accumulated", "accumulated_ulps"), max)
    found = group_rows(groups, ("name",), {"calls": sum, "share": sum, **largest})
    return sorted(found, key=lambda group: (-group.share, -group.isolated, -group.accumulated, group.name))


def paired(groups: list[Group], others: list[Group]) -> list[tuple[Group | None, Group | None]]:
    """Return each group with the one of its name among the others, and after them those that are among the others alone."""
    names = {other.name: other for other in others}
    pairs: list[tuple[Group | None, Group | None]] = [(group, names.pop(group.name, None)) for group in groups]
    return [*pairs, *((None, other) for other in names.values())]
