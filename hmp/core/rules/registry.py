"""The registry of rules: the sentence that explains each, the ops that it holds for, the dtype that it chooses, what makes its wrapper.

A rule that is added is one entry here and, if none fits, one function that makes a wrapper. explain(), reports, messages and the choice for
an op read the entry; nothing else names a rule but to ask for one of these objects.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import casting, copies, lists
from ..active.regions import without_casts
from ..casting import Caster
from ..lists import ListKind
from ..observe import Listener, clock_of
from ..ops import sites, table
from ..ops.sites import Site
from ..policy.entries import ListEntry, ListName
from . import emulation, fast, general, overflow, special
from .kernels import known_lacks
from .listeners import counted, observed, timed
from .op import CastRule, Choose, Op, OpOnList, OpUnderRule, facts_of, facts_of_users

# --- the dtype of a call --------------------------------------------------------------------------------------------------


def _widest(ruled: OpUnderRule) -> Choose:
    count_0dim = ruled.op in table.JOINS or ruled.op in table.MIXED_BACKWARD_RAISES
    return lambda tensors: casting.widest(tensors, count_0dim=count_0dim)


def _first(ruled: OpUnderRule) -> Choose:
    return lambda tensors: tensors[0].dtype


def _low_among_them(ruled: OpUnderRule) -> Choose:
    """Return the low-precision dtype that an input has already, for which a kernel may be missing."""
    return lambda tensors: next((t.dtype for t in tensors if t.dtype is not torch.float32), torch.float32)


# --- wrappers, and the functions that they call ---------------------------------------------------------------------------


def _own(op: Op, ruled: OpUnderRule) -> Op:
    return with_added(without_casts(op) if ruled.facts.composite else special.with_one_buffer(op, ruled.op), ruled)


def with_added(op: Op, ruled: OpUnderRule) -> Op:
    """Return `op`, a function that computes the rule's op, with what the lists do around it that add to the rule."""
    for kind in ruled.added:
        if kind.around is not None:
            op = functools.update_wrapper(kind.around(op, ruled), op, ("computes", "notes"), ())
    return op


def torchs(op: Op, ruled: OpUnderRule) -> tuple[Op, ...]:
    """Return what a wrapper calls: torch's own function, in float32 if the CPU has no instructions for a low-precision dtype."""
    own = NO_INSTRUCTIONS.make(_own(op, ruled), ruled)
    saturating = None if ruled.facts.composite else overflow.SATURATING.get(sites.base_of(ruled.op))  # masks stay finite in it
    return (own if saturating is None else saturating(own),)


def _torchs_and_for_autocast(op: Op, ruled: OpUnderRule) -> tuple[Op, ...]:
    own = _own(op, ruled)
    return NO_INSTRUCTIONS.make(own, ruled, as_autocast=True), own, NO_INSTRUCTIONS.make(own, ruled)


def _cast_inputs(op: Op, ruled: OpUnderRule, caster: Caster) -> Op:
    """Return the wrapper of an op whose inputs are cast: norms, look-ups and attention have their own."""
    return special.BUILDERS.get(ruled.op, fast.one_dtype_wrapper)(op, ruled, caster)


def _with_autocast(op: Op, ruled: OpUnderRule, caster: Caster, own: Op, unlisted: Op) -> Op:
    alone = own if ruled.unlisted is None else ruled.unlisted.rule.make(unlisted, ruled.unlisted, caster)
    # under torch.autocast too a scalar beyond the low-precision dtype saturates
    inside = alone if ruled.unlisted is not None and ruled.unlisted.rule in (FILL, GUARD) else own
    wrapper = special.autocast_wrapper(own, inside, alone, ruled, caster)
    return emulation.under_autocast(wrapper, op, ruled, caster)


# --- conditions that are longer than a line -------------------------------------------------------------------------------


def _is_promoted(case: OpOnList) -> bool:
    if case.list == "promote":
        return case.op not in table.PROMOTED_WHOLLY
    return case.list is None and case.op in table.MIXED_BACKWARD_RAISES


def _is_guarded(case: OpOnList) -> bool:
    if case.in_place:
        return case.base in table.GUARDED_ARITHMETIC
    return case.op in table.GUARDED_ARITHMETIC or (case.low_dtype is torch.float16 and case.op in table.SUMS)


def _may_lack_a_kernel(case: OpOnList) -> bool:
    if case.in_place:
        return False
    return case.op in table.KERNEL_BY_ARGUMENTS or bool(known_lacks(case.ancestry) or known_lacks(case.ancestry, backward=True))


# --- the table: an op has the first rule that holds for it, and no other ----------------------------------------------------------------

IN_PLACE = CastRule(
    "IN_PLACE",
    number="R5",
    label="in place",
    sentence="an in-place op: its result keeps the dtype of the tensor that it writes to, whatever list it is on (R5)",
    make=fast.one_dtype_wrapper,
    choose=_first,
    holds=lambda case: case.in_place and not table.MIXED_INPLACE_RAISES.isdisjoint((case.op, case.base)),
    ops=table.MIXED_INPLACE_RAISES,
    applies_in_backward=True,
)
MASK_IN_PLACE = CastRule(
    "MASK_IN_PLACE",
    number="R5",
    label="in place, finite",
    sentence="left to torch, in place; a sum with a mask stays finite in a low-precision dtype (R5, R12)",
    make=fast.guard_wrapper,
    holds=lambda case: case.in_place and not table.SUMS.isdisjoint((case.op, case.base)),
    ops=table.SUMS,
    choose=_first,
    leaves_to_torch=True,
)
NO_KERNEL_IN_PLACE = CastRule(
    "NO_KERNEL_IN_PLACE",
    number="R11",
    label="",
    sentence="left to torch, in place; without a kernel it runs in float32 and the result is written back (R5, R11)",
    make=fast.one_dtype_wrapper,
    choose=_first,
    holds=lambda case: case.in_place and bool(known_lacks(case.ancestry)),
    ops=table.WITHOUT_KERNEL,
    applies_in_backward=True,
    leaves_to_torch=True,
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
    applies_in_backward=True,
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
    runs_autocast=True,
)
FILL = CastRule(
    "FILL",
    number="R12",
    label="saturates",
    sentence="left to torch; a finite scalar beyond the tensor's dtype becomes that dtype's largest finite magnitude (R12)",
    make=fast.fill_wrapper,
    holds=lambda case: (case.base if case.in_place else case.op) in table.FILLS,
    ops=table.FILLS,
)
GUARD = CastRule(
    "GUARD",
    number="R12",
    label="arithmetic saturates",
    sentence="left to torch; with a scalar or a mask beyond the low-precision dtype the result saturates (R12)",
    make=fast.guard_wrapper,
    holds=_is_guarded,
    ops=table.GUARDED_ARITHMETIC | table.SUMS,
    choose=_widest,
    leaves_to_torch=True,
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
    choose=_first,
    applies_in_backward=True,
)
NO_KERNEL = CastRule(
    "NO_KERNEL",
    number="R11",
    label="",
    sentence="left to torch; if the device has no kernel for a low-precision dtype, it runs in float32 (R11)",
    make=fast.unlisted_wrapper,
    holds=_may_lack_a_kernel,
    ops=table.WITHOUT_KERNEL | table.KERNEL_BY_ARGUMENTS,
    choose=_low_among_them,
    applies_in_backward=True,
    leaves_to_torch=True,
)
COMPOSITE = CastRule(  # of torch's Python functions that call an op with another rule
    "COMPOSITE",
    number="R8",
    label="",
    sentence="left to torch: Python code of torch, in which inner calls are not looked up on the lists (R8)",
    make=fast.unlisted_wrapper,
    holds=lambda case: False,
    choose=_low_among_them,
    leaves_to_torch=True,
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
    make=emulation.in_float32,
    holds=lambda case: False,
)

RULES = tuple(value for value in tuple(globals().values()) if isinstance(value, CastRule))  # in the order above
for _rule in RULES:
    lists.add_rule(_rule)


def _add(**kind: Any) -> None:
    lists.add(ListKind(module=__name__, is_optional=False, takes_functions=True, **kind))


_add(
    name="bf16",
    title="BF16",
    contents="ops that run in the low-precision dtype",
    rule=BF16_LIST,
    over=("promote",),
    excludes=("fp32",),
    is_low=True,
    aliases=("fp16", "float16", "lower"),
)
_add(name="fp32", title="FP32", contents="ops that run in float32", rule=FP32_LIST, over=("promote",), aliases=("float32",))
_add(name="promote", title="promote", contents="ops that run in the widest dtype of their inputs", rule=PROMOTE, aliases=("widest",))


def of_entry(entry: ListEntry) -> CastRule:
    """Return the rule that an entry asks for: that of its list, or of entries such as `gru.autocast`."""
    return AUTOCAST if entry.is_autocasts else lists.kind_of(entry.list_name).rule


# --- which rule an op has -------------------------------------------------------------------------------------------------


def rule_for(op: str, entry: ListEntry | None, low_dtype: torch.dtype) -> CastRule | None:
    """Return the rule of an op that has this entry of a list, or none; None where the op is left to torch."""
    in_place = sites.writes_first(op)
    listed = None if in_place or sites.is_view(op) else entry
    on_list = None if listed is None else "autocast" if listed.is_autocasts else listed.list_name
    case = OpOnList(op, sites.base_of(op), sites.ancestry(op), in_place, on_list, low_dtype)
    if listed is not None and not listed.is_autocasts:
        kind = lists.kind_of(listed.list_name)
        if kind.rule.holds(case):
            return kind.rule
        case = case._replace(list=kind.instead or listed.list_name)
    for rule in RULES:
        if rule.ops and not rule.is_list and rule.ops.isdisjoint(case.ancestry):
            continue  # it cannot hold, and most ops are in no such set
        if rule.holds(case):
            return rule
    return None


@sites.cached
def op_rule(site: Site, rule: CastRule, low_dtype: torch.dtype) -> OpUnderRule:
    """Return the op of `site` under a rule."""
    alone = rule_for(site.op, None, low_dtype) if rule is AUTOCAST else None
    facts = facts_of(site, rule.only, with_order=rule.choose is _first or site.op in special.BUILDERS)
    return OpUnderRule(site.op, rule, facts, low_dtype, unlisted=None if alone is None else op_rule(site, alone, low_dtype))


def user_rule(function: Op, op: str, list_name: ListName, low_dtype: torch.dtype) -> OpUnderRule:
    """Return a user's own function under the rule of a list."""
    return OpUnderRule(op, lists.kind_of(list_name).rule, facts_of_users(function), low_dtype)


# --- the wrapper of an op -------------------------------------------------------------------------------------------------


def op_wrap(op: Op, ruled: OpUnderRule, listeners: Sequence[Listener] = (), around_cast: Callable[[Caster], Caster] | None = None) -> Op:
    """Return a function that calls `op` with its tensors cast by its rule.

    What does not depend on the tensors of a call is decided here, once.

    Args:
        op: Torch's own function.
        ruled: The op under its rule.
        listeners: Those that get each call.
        around_cast: Gives a function that is called instead of the one that casts.
    """
    caster = _caster(ruled) if around_cast is None else around_cast(_caster(ruled))
    calls = (ruled.rule.calls or torchs)(op, ruled)
    for kind in ruled.added:
        if kind.around_cast is not None:
            caster = kind.around_cast(caster)
    clock = clock_of(listeners) if listeners else None
    if clock is not None:
        calls, caster = tuple(timed(each, ruled, listeners, clock) for each in calls), counted(caster, clock, listeners)
    wrapper = ruled.rule.make(calls[0], ruled, caster, *calls[1:])
    return observed(wrapper, ruled, op, listeners, clock) if listeners else wrapper


def _caster(ruled: OpUnderRule) -> Caster:
    """Return the function that casts the tensors of the rule's op: cached, saturating or plain."""
    if ruled.facts.users:
        return general.watched_cast
    if ruled.op in table.PRODUCTS:
        return copies.shared_cast
    if ruled.op in table.CELLS:
        return copies.shared_weight
    if ruled.op in table.RECURRENT:
        return functools.partial(copies.shared_cast, by_step=True)
    return overflow.caster(ruled)
