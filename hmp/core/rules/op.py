"""What a rule is, and an op under its rule: which tensors of a call it may cast, and to what."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...errors import HmpError
from .. import casting
from ..casting import Tensor, castable, each_tensor
from ..ops import sites, table
from ..ops.python_ops import parameters
from ..ops.sites import Site
from . import kernels

if TYPE_CHECKING:
    from ..lists import ListKind

Op = Callable[..., Any]
Parameter = torch.nn.Parameter
Choose = Callable[[list[Tensor]], torch.dtype]
# Types of arguments that no rule changes. No numbers are among them: they may overflow.
SCALARS = frozenset({bool, str, type(None), torch.device, torch.layout, torch.Generator})
# As an argument `dtype` these say how a float32 input is quantized, and nothing of the dtype to compute in.
_QUANTIZED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})


class OpOnList(NamedTuple):
    """An op under a policy: what its rule is chosen by."""

    op: str
    base: str  # the op that it follows, see `sites.base_of`
    ancestry: tuple[str, ...]  # it and the ops whose entries it follows, see `sites.ancestry`
    in_place: bool  # every call writes into the first input
    list: str | None  # the list that it is on, "autocast" for an entry such as `gru.autocast`; None in place, where no list counts
    low_dtype: torch.dtype


@dataclass(frozen=True, eq=False, repr=False)
class CastRule:
    """One rule. `registry` has them all: whatever asks which rule an op is under compares with an object of that table.

    `make(op, ruled, caster)` makes the wrapper of `op`, a function that computes the op under its rule `ruled`. Where such a wrapper calls
    more than torch's own function, `calls` makes its functions of that one: `make` is given the first as `op`, and the others after
    `caster`.
    """

    name: str
    label: str  # in tables and logs: its list, or a word for what it does; "" where torch's own function runs
    sentence: str  # what is done, as explain(), reports and messages print it
    make: Callable[..., Op]
    number: str = ""  # on the page of hmp's rules, and in reports of an op that no list names
    calls: Callable[[Op, OpUnderRule], tuple[Op, ...]] | None = None
    holds: Callable[[OpOnList], bool] = lambda case: True  # whether it is the op's rule, where none before it in the table is
    ops: AbstractSet[str] = frozenset()  # ops, sets of the table, that it may apply to when no list names them
    # The parameters whose tensors it casts, by position or name, to `dtype`; empty: all. Without a kernel such a call is torch's own error.
    only: frozenset[int | str] = frozenset()
    is_list: bool = False  # an entry of a list asks for it
    dtype: Callable[[torch.dtype], torch.dtype] | None = None  # of every castable input, from the policy's; None if `choose` finds it
    choose: Callable[[OpUnderRule], Choose] | None = None  # finds that dtype among the castable inputs of a call, where they say it
    hides_dtypes: bool = False  # what it rounds shows in no dtype of its inputs and results
    leaves_to_torch: bool = False  # nothing is cast but without a kernel, or where the result has to saturate
    runs_autocast: bool = False  # torch.autocast decides inside the op
    applies_in_backward: bool = False  # torch would raise without it, so it applies in backward and in optimizers too, where no list does

    def __post_init__(self) -> None:
        if self.only and self.dtype is None:
            raise HmpError(f"expected a rule with `only` to say its `dtype`, got {self.name} without one")

    def __str__(self) -> str:
        return self.label or self.number

    @property
    def in_reports(self) -> str:
        """Return what reports call it: the list, else its number; "" where the op is left to torch."""
        return self.label if self.is_list else self.number if self.label else ""


class OpFacts(NamedTuple):
    """What a wrapper has to know of a function, whatever its rule. By default a user's."""

    order: tuple[str, ...] = ()  # the names of the positional parameters, where they are needed
    keep: frozenset[int | str] = frozenset()  # positions and keywords that are never cast
    inplace_at: int | None = None  # the position of `inplace`, in a Python function
    out_at: int | None = None  # and of `out`
    in_place: bool = False  # every call writes into the first input
    composite: bool = False  # a Python function: what it calls is not decided again
    users: bool = False  # a user's function: `out` is one more argument to it, and it may write into any other
    takes_some_mixtures: bool = False  # of dtypes, so that torch is tried before a cast
    needs_instructions: bool = False  # its low-precision kernel is slow on a processor without instructions for the dtype
    retries: bool = False  # after a failure in the low-precision dtype it may run again in float32


class OpUnderRule(NamedTuple):
    """An op under its rule: what op_wrap is given."""

    op: str  # its id
    rule: CastRule
    facts: OpFacts
    low_dtype: torch.dtype = torch.bfloat16
    words: tuple[tuple[str, str], ...] = ()  # the fields of the policy that say how the ops of its lists are done, and what they say
    added: tuple[ListKind, ...] = ()  # the lists that add to what is done with it
    unlisted: OpUnderRule | None = None  # where torch.autocast decides inside: the rule where it cannot run the op, if there is one

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype of every castable input, where the list says it; None for rules whose dtype depends on the inputs of a call."""
        return None if self.rule.dtype is None else self.rule.dtype(self.low_dtype)

    def word(self, field: str) -> str:
        """Return what the policy says in the field."""
        return dict(self.words)[field]


def castable_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any], ruled: OpUnderRule) -> list[Tensor] | None:
    """Return the castable tensors that the rule may cast, in the order of the op's parameters.

    None where the call is left to torch: with a float64 or complex tensor among the inputs, or an explicit `dtype=`.
    """
    found: list[Tensor] = []
    keep = ruled.facts.keep
    order, named = ruled.facts.order, list(kwargs.items())
    if order and len(named) > 1:
        named.sort(key=lambda item: _position(item[0], order))
    for at, value in (*enumerate(args), *named):
        if type(value) is torch.dtype and value not in _QUANTIZED:
            return None
        # an input that the rule leaves as it is may be of float64, too
        if (at not in keep or ruled.rule.only) and not _collect(value, [] if at in keep else found):
            return None
    return found


_OF_NUMPY = {alias: name for name, aliases in table.NUMPY_NAMES.items() for alias in aliases}


def torchs_name(keyword: str, order: tuple[str, ...]) -> str:
    """Return the parameter that a call gives by `keyword`: torch takes numpy's names too."""
    return keyword if keyword in order else _OF_NUMPY.get(keyword, keyword)


def _position(keyword: str, order: tuple[str, ...]) -> int:
    name = torchs_name(keyword, order)
    return order.index(name) if name in order else len(order)


def _collect(value: Any, found: list[Tensor]) -> bool:
    """Add the castable tensors in `value` to `found`; False where `value` has a float64 or complex tensor."""
    kind = type(value)
    if kind is Tensor or kind is Parameter:  # as below, in a third of the time
        dtype = value.dtype
        if dtype in casting.CASTABLE and value.layout is not casting.MKLDNN:
            found.append(value)
        return dtype not in casting.LEFT_TO_TORCH
    if not isinstance(value, (Tensor, list, tuple, dict)):
        return True
    for tensor in each_tensor((value,)):
        if casting.left_to_torch(tensor):
            return False
        if castable(tensor):
            found.append(tensor)
    return True


def chooser(ruled: OpUnderRule) -> Choose:
    """Return the function that gives the dtype for a call's castable tensors: one or more, in the order of the op's parameters."""
    dtype = ruled.dtype
    if dtype is not None:
        return lambda tensors: dtype
    assert ruled.rule.choose is not None, f"{ruled.rule.name} casts nothing to one dtype"
    return ruled.rule.choose(ruled)


def flag(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int) -> bool:
    """Return True if the call sets `inplace`, the parameter at `position`."""
    return bool(args[position] if position < len(args) else kwargs.get("inplace"))


def writes(args: tuple[Any, ...], kwargs: Mapping[str, Any], ruled: OpUnderRule) -> bool:
    """Return True if the call writes into one of its arguments, by `out` or `inplace`."""
    facts = ruled.facts
    at = facts.out_at
    out = args[at] if at is not None and at < len(args) else kwargs.get("out")
    return out is not None or (facts.inplace_at is not None and flag(args, kwargs, facts.inplace_at))


# --- the facts of a function ----------------------------------------------------------------------------------------------


def facts_of(site: Site, only: frozenset[int | str], *, with_order: bool) -> OpFacts:
    """Return the facts of torch's function at `site`, under a rule that casts the parameters `only`, or all.

    `with_order`: the names of a builtin's parameters, too, which its schemas have.
    """
    op, line, is_python, in_place = site.op, sites.ancestry(site.op), site.python, sites.writes_first(site.op)
    order = parameters(site.original, op) if is_python or with_order or only or op in table.KEPT_ARGUMENTS else ()
    left = {name for at, name in enumerate(order) if only and only.isdisjoint((at, name))}
    if only and order and len(left) == len(order):
        raise HmpError(f"expected `only` to name parameters of {op}({', '.join(order)}), got {', '.join(map(str, sorted(only, key=str)))}")
    kept = table.KEPT_ARGUMENTS.get(op, frozenset()) | left
    return OpFacts(
        order=order,
        keep=kept | {order.index(name) for name in kept if name in order},
        inplace_at=order.index("inplace") if is_python and "inplace" in order else None,
        out_at=order.index("out") if is_python and "out" in order else None,
        in_place=in_place,
        composite=is_python,
        # somebody else's patch of torch is the user's Python, which must not run twice
        takes_some_mixtures=op in table.MIXED_SOMETIMES_RAISES and kernels.is_torchs_function(site.original),
        needs_instructions=not in_place and not table.SLOW_WITHOUT_INSTRUCTIONS.isdisjoint(line),
        retries=not (in_place or only) and table.RANDOM.isdisjoint(line) and table.NORMS.isdisjoint(line),
    )


def facts_of_users(function: Callable[..., Any]) -> OpFacts:
    """Return the facts of a user's own function: it is one op, and a parameter `out` that it writes into is not cast."""
    # of the function itself, not of one that it wraps: positions are those of the call
    order: tuple[str, ...] = ()
    if isinstance(function, types.FunctionType):
        order = function.__code__.co_varnames[: function.__code__.co_argcount]
    kept = {"out"} if _is_written_to(function, order, "out") else set()
    return OpFacts(
        order=order,
        keep=frozenset(kept) | {position for position, name in enumerate(order) if name in kept},
        inplace_at=order.index("inplace") if "inplace" in order else None,
        composite=True,
        users=True,
    )


def _is_written_to(function: Callable[..., Any], order: tuple[str, ...], parameter: str) -> bool:
    """Return True if the function writes into `parameter` (`out`).

    Its default is None, or it is not the first input, which losses call `out` too.

    In doubt the answer is yes: an input that is not cast is noticed, a write that is lost in a cast copy is not.
    """
    inputs = order[1:] if order[:1] in (("self",), ("cls",)) else order
    if parameter in inputs[1:]:
        return True
    try:
        found = inspect.signature(function).parameters.get(parameter)
    except ValueError:  # a C function without a signature
        return False
    return found is not None and found.default is None
