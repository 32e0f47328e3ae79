"""The page of a comparison with float32: what moves of ops gain, and the errors by op and by module.

Of a comparison with another policy too first the errors of both.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..pages.page import Cell, Items, Page, Part, Section, Table, Text, code, error, error_text, made_of, module, number, part, whole
from .comparison import Comparison, Group

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
        [code(each.named or f"none: {comparison.policy}"), error(each.output), error(each.loss), error(each.gradient)] for each in shown
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
