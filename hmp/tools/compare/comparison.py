"""The result of compare(): rows of statistics by op and by module, and what moves of ops to other lists gain."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...core import lists
from ...core.casting import dtype_name
from ...core.policy.names import can_be_listed
from ..op_owners import AtenCall, Direction
from ..pages.page import Cell, Items, Page, Part, Result, Section, Table, Text, error, error_text, made_of, module, number, part, whole

Tensor = torch.Tensor


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
        """Return the error of the output, or of the gradients or the loss of a step without one; infinite if one of the three is."""
        known = [each for each in (self.output, self.gradient, self.loss) if each is not None]
        return math.inf if math.inf in known or not known else known[0]

    @property
    def order(self) -> tuple[float, ...]:
        """Return the errors by which trials are ranked, the output's first; those that were not computed are infinite."""
        return tuple(math.inf if each is None else each for each in (self.output, self.gradient, self.loss))

    def gains(self, before: MoveTrial) -> bool:
        """Return True if the output's or the gradients' error is a tenth less than before, the loss's where the output is the same.

        Or if fewer of the three are infinite.
        """
        (output, gradient, loss), (output_before, gradient_before, loss_before) = self.order, before.order
        if self.why_not or output > 1.1 * output_before:
            return False
        is_nearer = self.order.count(math.inf) < before.order.count(math.inf)
        is_same = output == output_before
        return is_nearer or output < 0.9 * output_before or gradient < 0.9 * gradient_before or (is_same and loss < 0.9 * loss_before)


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


# --- what a policy does to a language model's tokens ---

_CHUNK = 2**21  # logits in float64 at a time: 16 MiB for each of the few copies


@dataclass(frozen=True)
class TokenDistance:
    """How far the log-probabilities of `tokens` tokens are from float32's, in nats.

    `of` says which tokens: the batch's labels, or without any the tokens that float32 holds likeliest. `reference` is their mean
    log-probability in float32: minus the model's own loss, unless the labels are one place off. `error_mean` and `error_max` are the mean
    and the largest absolute difference, `kl_mean` and `kl_max` those of KL(float32 || policy) at the positions of these tokens. A NaN
    under the policy counts as probability 0.
    """

    of: str
    tokens: int
    reference: float
    error_mean: float
    error_max: float
    kl_mean: float
    kl_max: float

    def __str__(self) -> str:
        errors = f"error {self.error_mean:.2g} on average, {self.error_max:.2g} at most"
        of = f"{self.tokens} {self.of}, in float32 {self.reference:.4g} on average"
        return f"{errors}; KL divergence {self.kl_mean:.2g}, {self.kl_max:.2g} at most (nats; {of})"


def distance_of_tokens(
    output: Any, given: Mapping[str, Any], reference: Callable[[Tensor], Tensor], shift: bool = False
) -> TokenDistance | None:
    """Return the distance of the tokens of a model's output, None for one without logits of the shape (batch, positions, vocabulary).

    Args:
        output: What the model returned.
        given: The arguments of its call, by name.
        reference: Gives the float32 run's counterpart of a tensor.
        shift: Whether the logits at one place are of the label at the next one.
    """
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.dim() != 3:
        return None
    tokens: Any = given.get("labels")
    exact, of = reference(logits), "labels"
    fits = isinstance(tokens, Tensor) and tokens.shape == logits.shape[:-1] and not tokens.is_floating_point()
    if not fits or bool((tokens >= logits.shape[-1]).any()):
        tokens, of = exact.argmax(-1), "likeliest tokens"
    tokens = tokens.long().to(logits.device)
    where, mask = tokens >= 0, _mask(logits, output, given)
    where = where if mask is None else where & mask
    if shift and of == "labels":
        # padding predicts nothing, and is not predicted
        where = where[:, 1:] if mask is None else where[:, 1:] & mask[:, :-1]
        logits, exact, tokens, of = logits[:, :-1], exact[:, :-1], tokens[:, 1:], "labels (shifted by one position)"
    return token_distance(logits, exact, tokens, where, of)


def token_distance(logits: Tensor, reference: Tensor, tokens: Tensor, where: Tensor, of: str) -> TokenDistance | None:
    """Return the distance of the log-probabilities of the `tokens` that are `where` the mask is True, None where it is nowhere."""
    errors, exact, divergences = [], [], []
    rows = where.flatten().nonzero()[:, 0]
    for chunk in rows.split(max(1, _CHUNK // logits.shape[-1])) if len(rows) else ():
        token = tokens.flatten()[chunk][:, None]
        low, wide = (each.flatten(0, -2)[chunk].double().log_softmax(-1) for each in (logits, reference))
        low = low.masked_fill(low.isnan(), -math.inf)
        terms = (wide.exp() * (wide - low)).masked_fill(wide == -math.inf, 0.0)
        divergences.append(terms.sum(-1).clamp(min=0.0))
        low, wide = low.gather(-1, token), wide.gather(-1, token)
        errors.append((low - wide).masked_fill(low == wide, 0.0).abs())  # -inf in both
        exact.append(wide)
    if not errors:
        return None
    error, divergence = torch.cat(errors), torch.cat(divergences)
    numbers = torch.cat(exact).mean(), error.mean(), error.max(), divergence.mean(), divergence.max()
    return TokenDistance(of, len(error), *map(float, numbers))


def _mask(logits: Tensor, output: Any, given: Mapping[str, Any]) -> Tensor | None:
    """Return where the logits are not those of padding."""
    decodes = isinstance(output, Mapping) and "encoder_last_hidden_state" in output
    found = given.get("decoder_attention_mask" if decodes else "attention_mask")
    if isinstance(found, Tensor) and found.dim() == 2 and found.shape == logits.shape[:-1]:
        return found.to(logits.device) > 0
    return None


# --- the result ---


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
        if (best := trials.together) is not None and (best not in trials.alone or best.far > trials.tolerance):
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


# --- the page, of a comparison with another policy too first the errors of both ---

TEXT_ROWS = 20


def comparison_page(comparison: Comparison) -> Page:
    """Return what a comparison says."""
    other = comparison.against
    both = [comparison, *([other] if other else [])]
    notes = [f"log-probabilities under {each.policy}: {each.tokens}" for each in both if each.tokens]
    notes += [f"under {each.policy!r}: {note}" if other else note for each in both for note in each.notes]
    changes = comparison.first_changes()
    if other is not None:
        changes += [f"under {other.policy!r}: {each}" for each in other.first_changes()]
    told = (
        "Each row is a step of the model with the ops of these entries in float32, or off the FP8 list: what is left of the errors. "
        "Moving an op may cost time: measure both policies with `hmp.benchmark()`."
    )
    change: list[Part] = [Items(changes), *(_trials(each) for each in both if each.trials and each.trials.alone), Text(told, is_soft=True)]
    sections = [Section("change", "What to change", "What to change in your lists", change)]
    for at, each in enumerate(both):
        under = f" under {each.policy}" if other else ""
        sections += [_by(f"op{under}", f"by-op-{at}", each.by_op()), _by(f"module{under}", f"by-module-{at}", each.by_module())]
    return Page(
        title=f"{comparison.policy} against float32" if other is None else f"{comparison.policy} and {other.policy} against float32",
        verdict=" ".join(map(_verdict, both)),
        made=made_of(vars(comparison)),
        policies=[(f"policy {comparison.policy}", f"{comparison.low_dtype}; {comparison.loss_source}")],
        cards=_cards(comparison),
        opening=[Items(notes, is_notes=True)] if notes else [],
        sections=sections,
    )


def _cards(comparison: Comparison) -> list[tuple[str, str, str]]:
    other, found = comparison.against, []
    for name in ("output", "loss", "gradient"):
        value = getattr(comparison, name)
        of = "not computed" if value is None else "relative to float32"
        if name == "loss" and comparison.loss_value is not None:
            of = f"{comparison.float32_loss_value:.5g} became {comparison.loss_value:.5g}"
        of += f"; {error_text(getattr(other, name))} under {other.policy}" if other else ""
        found.append((f"error of the {name}", error_text(value), of))
    if comparison.gradient_packed is not None:
        of = "compared with the same step without packing"
        found.append(("error of the gradient by packing alone", error_text(comparison.gradient_packed), of))
    return found


def _trials(comparison: Comparison) -> Table:
    """Return the errors that are left after each move, the best first."""
    trials = comparison.trials
    assert trials is not None
    shown = [trials.start, *trials.alone, *([trials.together] if trials.together and trials.together not in trials.alone else [])]
    rows = [
        [Cell(each.named or f"none: {comparison.policy}", "code"), error(each.output), error(each.loss), error(each.gradient)]
        for each in shown
    ]
    return Table(("moved", ">output", ">loss", ">gradient"), rows, label=f"Errors after each move under {comparison.policy}")


def _by(what: str, name: str, groups: Sequence[Group]) -> Section:
    """Return the largest errors of each op or module."""
    rows = [
        [module(each.name), whole(each.calls), at_most(each.isolated), at_most(each.accumulated), part(each.share, 1), error(each.moved)]
        for each in groups
    ]
    told = (
        "Isolated is the error that an op adds, accumulated the error including that of all earlier ops. Each is the largest of all calls. "
        "Output if moved is the error of the model's output with the op, or the one op of the module that gains most, in float32."
    )
    columns = (what.split()[0], ">calls", ">isolated", ">accumulated", ">share", ">output if moved")
    table = Table(columns, rows, label=f"Errors by {what}", where="the page, .by_op() and .by_module() have them all", most=TEXT_ROWS)
    return Section(name, f"By {what}", f"By {what}", [table, Text(told, is_soft=True)])


def at_most(value: float) -> Cell:
    """Beyond its own size an error says no more than that nothing is left of the value: often one that float32 cancels to zero."""
    return error(value) if value <= 1 else number(value, ">1")


def _verdict(comparison: Comparison) -> str:
    """Return how far the output is from float32, and which move gains most."""
    error = f"Under {comparison.policy} the error of the output is {error_text(comparison.output)}"
    return f"{error}; {comparison.advice[0].named} gains most in float32." if comparison.advice else f"{error}."
