"""The registry of rules: the sentence that explains each, the ops that it holds for, the dtype that it chooses, what makes its wrapper.

A rule that is added is one entry here and one function that makes a wrapper. explain(), reports, messages and the choice for an op read the
entry; nothing else names a rule but to ask for one of these objects.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from .. import casting, copies, lists
from ..active import without_casts
from ..casting import Caster
from ..lists import ListKind
from ..observe import Listener, clock_of
from ..ops import sites, table
from ..ops.sites import Site
from ..policy import ListEntry, ListName
from . import autocast_entries, float32_products, lost_writes, norms_and_lookups, saturation, wrappers
from .cudnn_weights import with_one_buffer
from .kernel_fallback import known
from .observation import counted, observed, timed
from .op_rule import Case, CastRule, Choose, Op, OpRule, facts_of, facts_of_users
from .wrappers import one_dtype_wrapper

# --- the dtype of a call --------------------------------------------------------------------------------------------------


def _widest(rule: OpRule) -> Choose:
    count_0dim = rule.op in table.JOINS or rule.op in table.MIXED_BACKWARD_RAISES
    return lambda tensors: casting.widest(tensors, count_0dim=count_0dim)


def _first(rule: OpRule) -> Choose:
    return lambda tensors: tensors[0].dtype


def _low_among_them(rule: OpRule) -> Choose:
    """Return the low-precision dtype that an input has already, for which a kernel may be missing."""
    return lambda tensors: next((t.dtype for t in tensors if t.dtype is not torch.float32), torch.float32)


# --- wrappers, and the functions that they call ---------------------------------------------------------------------------


def _own(op: Op, rule: OpRule) -> Op:
    return with_added(without_casts(op) if rule.facts.composite else with_one_buffer(op, rule.op), rule)


def with_added(op: Op, rule: OpRule) -> Op:
    """Return `op`, a function that computes the rule's op, with what the lists do around it that add to the rule."""
    for kind in rule.added:
        if kind.around is not None:
            op = _with_attributes(kind.around(op, rule), op)
    return op


def torchs(op: Op, rule: OpRule) -> tuple[Op, ...]:
    """Return what a wrapper calls: torch's own function, in float32 if the CPU has no instructions for a low-precision dtype."""
    return (_saturating(NO_INSTRUCTIONS.make(_own(op, rule), rule), rule),)


def _saturating(op: Op, rule: OpRule) -> Op:
    """Return `op`, with masks that stay finite in it if it takes them as torch's own function does."""
    make = None if rule.facts.composite else saturation.SATURATING.get(sites.base_of(rule.op))
    return op if make is None else _with_attributes(make(op), op)


def _torchs_and_for_autocast(op: Op, rule: OpRule) -> tuple[Op, ...]:
    own = _own(op, rule)
    return NO_INSTRUCTIONS.make(own, rule, as_autocast=True), own, NO_INSTRUCTIONS.make(own, rule)


def _cast_inputs(op: Op, rule: OpRule, caster: Caster) -> Op:
    """Return the wrapper of an op whose inputs are cast: norms, look-ups and attention have their own."""
    return norms_and_lookups.BUILDERS.get(rule.op, one_dtype_wrapper)(op, rule, caster)


def _with_autocast(op: Op, rule: OpRule, caster: Caster, own: Op, unlisted: Op) -> Op:
    alone = own if rule.unlisted is None else rule.unlisted.kind.make(unlisted, rule.unlisted, caster)
    # under torch.autocast too a scalar beyond the low-precision dtype saturates (R12)
    inside = alone if rule.unlisted is not None and rule.unlisted.kind in (FILL, GUARD) else own
    wrapper = autocast_entries.wrapper(own, inside, alone, rule, caster)
    return float32_products.under_autocast(wrapper, op, rule, caster)


# --- conditions that are longer than a line -------------------------------------------------------------------------------


def _is_promoted(case: Case) -> bool:
    if case.list == "promote":
        return case.op not in table.PROMOTED_WHOLLY
    return case.list is None and case.op in table.MIXED_BACKWARD_RAISES


def _is_guarded(case: Case) -> bool:
    if case.in_place:
        return case.base in table.GUARDED_ARITHMETIC
    return case.op in table.GUARDED_ARITHMETIC or (case.low_dtype is torch.float16 and case.op in table.SUMS)


def _may_lack_a_kernel(case: Case) -> bool:
    if case.in_place:
        return False
    return case.op in table.KERNEL_BY_ARGUMENTS or bool(known(case.line) or known(case.line, backward=True))


# --- the table: an op has the first rule that holds for it ----------------------------------------------------------------

IN_PLACE = CastRule(
    "IN_PLACE",
    number="R5",
    label="in place",
    sentence="an in-place op: its result keeps the dtype of the tensor that it writes to, whatever list it is on (R5)",
    make=wrappers.in_place_wrapper,
    choose=_first,
    holds=lambda case: case.in_place and not table.MIXED_INPLACE_RAISES.isdisjoint((case.op, case.base)),
    ops=table.MIXED_INPLACE_RAISES,
    repairs=True,
)
MASK_IN_PLACE = CastRule(
    "MASK_IN_PLACE",
    number="R5",
    label="in place",
    sentence="left to torch, in place; a sum with a mask stays finite in a low-precision dtype (R5, R12)",
    make=saturation.mask_in_place_wrapper,
    holds=lambda case: case.in_place and not table.SUMS.isdisjoint((case.op, case.base)),
    ops=table.SUMS,
)
NO_KERNEL_IN_PLACE = CastRule(
    "NO_KERNEL_IN_PLACE",
    number="R11",
    label="",
    sentence="left to torch, in place; without a kernel it runs in float32 and the result is written back (R5, R11)",
    make=wrappers.in_place_wrapper,
    choose=_first,
    holds=lambda case: case.in_place and bool(known(case.line)),
    ops=table.WITHOUT_KERNEL,
    repairs=True,
    leaves_dtypes=True,
)
BF16_LIST = CastRule(
    "BF16_LIST",
    number="R1",
    label="bf16",
    sentence="its floating-point inputs are cast to the low-precision dtype (R1)",
    make=_cast_inputs,
    holds=lambda case: case.list == "bf16",
    is_list=True,
    dtype=lambda low_dtype: low_dtype,
)
FP32_LIST = CastRule(
    "FP32_LIST",
    number="R2",
    label="fp32",
    sentence="its floating-point inputs are cast to float32 (R2)",
    make=_cast_inputs,
    holds=lambda case: case.list == "fp32",
    is_list=True,
    dtype=lambda low_dtype: torch.float32,
)
PROMOTE = CastRule(
    "PROMOTE",
    number="R3",
    label="promote",
    sentence="its floating-point inputs are cast to the widest dtype among them (R3)",
    make=_cast_inputs,
    holds=_is_promoted,
    ops=table.MIXED_BACKWARD_RAISES,
    is_list=True,
    choose=_widest,
    repairs=True,
)
AUTOCAST = CastRule(
    "AUTOCAST",
    number="R1",
    label="autocast",
    sentence="torch.autocast is on inside this op, and decides by its own lists",
    make=_with_autocast,
    holds=lambda case: case.list == "autocast",
    calls=_torchs_and_for_autocast,
    is_list=True,
)
FILL = CastRule(
    "FILL",
    number="R12",
    label="saturates",
    sentence="left to torch; a finite scalar beyond the tensor's dtype becomes that dtype's largest finite magnitude (R12)",
    make=saturation.fill_wrapper,
    holds=lambda case: (case.base if case.in_place else case.op) in table.FILLS,
    ops=table.FILLS,
)
GUARD = CastRule(
    "GUARD",
    number="R12",
    label="saturates",
    sentence="left to torch; with a scalar or a mask beyond the low-precision dtype the result saturates (R12)",
    make=saturation.guard_wrapper,
    holds=_is_guarded,
    ops=table.GUARDED_ARITHMETIC | table.SUMS,
)
FIRST_INPUT = CastRule(
    "FIRST_INPUT",
    number="R7",
    label="first input",
    sentence="unlisted: left to torch; if torch refuses mixed dtypes, its inputs are cast to the dtype of the first floating-point input "
    "(R7)",
    make=_cast_inputs,
    holds=lambda case: case.list is None and (case.op in table.MIXED_RAISES or case.op in table.NORMS),
    ops=table.MIXED_RAISES | table.NORMS,
    in_order=True,
    choose=_first,
    repairs=True,
)
NO_KERNEL = CastRule(
    "NO_KERNEL",
    number="R11",
    label="",
    sentence="left to torch; if the device has no kernel for a low-precision dtype, it runs in float32 (R11)",
    make=wrappers.unlisted_wrapper,
    holds=_may_lack_a_kernel,
    ops=table.WITHOUT_KERNEL | table.KERNEL_BY_ARGUMENTS,
    choose=_low_among_them,
    repairs=True,
    leaves_dtypes=True,
)
ONE_OP = CastRule(  # of torch's Python functions that call an op with another rule
    "ONE_OP",
    number="R8",
    label="",
    sentence="left to torch: Python code of torch, in which inner calls are not looked up on the lists (R8)",
    make=wrappers.composite_wrapper,
    holds=lambda case: False,
    choose=_low_among_them,
    leaves_dtypes=True,
)
VIEW = CastRule(
    "VIEW",
    number="R10",
    label="",
    sentence="a view: nothing is computed, so nothing is cast (R10)",
    make=lambda op, rule, caster: op,
    holds=lambda case: sites.is_view(case.op),
)
NO_INSTRUCTIONS = CastRule(  # around torch's own function, whatever rule the op is under
    "NO_INSTRUCTIONS",
    number="R11",
    label="",
    sentence="on this CPU it computes in float32 on rounded inputs and rounds its result (R11)",
    make=float32_products.in_float32,
    holds=lambda case: False,
)

RULES = tuple(value for value in tuple(globals().values()) if isinstance(value, CastRule))  # in the order above

lists.add(
    ListKind(
        name="bf16",
        title="BF16",
        contents="ops that run in the low-precision dtype",
        module=__name__,
        rule=BF16_LIST,
        over=("promote",),
        excludes=("fp32",),
        is_low=True,
        aliases=("fp16", "float16", "lower"),
        is_optional=False,
        takes_functions=True,
    )
)
lists.add(
    ListKind(
        name="fp32",
        title="FP32",
        contents="ops that run in float32",
        module=__name__,
        rule=FP32_LIST,
        over=("promote",),
        aliases=("float32",),
        is_optional=False,
        takes_functions=True,
    )
)
lists.add(
    ListKind(
        name="promote",
        title="promote",
        contents="ops that run in the widest dtype of their inputs",
        module=__name__,
        rule=PROMOTE,
        aliases=("widest",),
        is_optional=False,
        takes_functions=True,
    )
)


def of_list(cast: str) -> CastRule:
    """Return the rule of a list; of "autocast" that of its entries such as `gru.autocast`."""
    return AUTOCAST if cast == AUTOCAST.label else lists.kind_of(cast).rule


# --- which rule an op has -------------------------------------------------------------------------------------------------


def rule_for(op: str, entry: ListEntry | None, low_dtype: torch.dtype) -> CastRule | None:
    """Return the rule of an op that has this entry of a list, or none; None where the op is left to torch."""
    in_place = sites.writes_first(op)
    on_list = None if entry is None or in_place or sites.is_view(op) else "autocast" if entry.is_autocasts else entry.list_name
    case = Case(op, sites.base_of(op), sites.ancestry(op), in_place, on_list, low_dtype)
    if on_list is not None and on_list != AUTOCAST.label:
        kind = lists.kind_of(on_list)
        if kind.rule.holds(case):
            return kind.rule
        case = case._replace(list=kind.instead or on_list)
    for rule in RULES:
        if rule.ops and not rule.is_list and rule.ops.isdisjoint(case.line):
            continue  # it cannot hold, and most ops are in no such set
        if rule.holds(case):
            return rule
    return None


@sites.cached
def op_rule(site: Site, kind: CastRule, low_dtype: torch.dtype) -> OpRule:
    """Return the op of `site` under a rule."""
    alone = rule_for(site.op, None, low_dtype) if kind is AUTOCAST else None
    facts = facts_of(site, kind.keep, with_order=kind.in_order or site.op in norms_and_lookups.BUILDERS)
    return OpRule(site.op, kind, facts, low_dtype, unlisted=None if alone is None else op_rule(site, alone, low_dtype))


def user_rule(function: Op, op: str, cast: ListName, low_dtype: torch.dtype) -> OpRule:
    """Return a user's own function under the rule of the list `cast`."""
    return OpRule(op, of_list(cast), facts_of_users(function), low_dtype)


# --- the wrapper of an op -------------------------------------------------------------------------------------------------


def op_wrap(op: Op, rule: OpRule, told: Sequence[Listener] = (), around_cast: Callable[[Caster], Caster] | None = None) -> Op:
    """Return a function that calls `op` with its tensors cast by `rule`.

    What does not depend on the tensors of a call is decided here, once.

    Args:
        op: Torch's own function.
        rule: The op under its rule.
        told: The listeners that get each call.
        around_cast: Gives a function that is called instead of the one that casts.
    """
    caster = _caster(rule) if around_cast is None else around_cast(_caster(rule))
    calls = (rule.kind.calls or torchs)(op, rule)
    for kind in rule.added:
        if kind.around_cast is not None:
            caster = kind.around_cast(caster)
    clock = clock_of(told) if told else None
    if clock is not None:
        calls, caster = tuple(timed(each, rule, told, clock) for each in calls), counted(caster, clock, told)
    wrapper = rule.kind.make(calls[0], rule, caster, *calls[1:])
    return observed(wrapper, rule, op, told, clock) if told else wrapper


def _with_attributes(wrapper: Op, op: Op) -> Op:
    functools.update_wrapper(wrapper, op, ("computes", "computes_in_float32", "notes"), ())
    return wrapper


def _caster(rule: OpRule) -> Caster:
    """Return the function that casts the tensors of the rule's op: cached (R18), saturating (R12) or plain."""
    if rule.facts.users:
        return lost_writes.watched_cast
    if rule.op in table.PRODUCTS:
        return copies.low
    if rule.op in table.CELLS:
        return copies.low_weight
    if rule.op in table.RECURRENT:
        return functools.partial(copies.low, by_step=True)
    return saturation.caster(rule)
