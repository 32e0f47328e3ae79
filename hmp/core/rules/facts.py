"""OpFacts: what a wrapper has to know of a function of torch's or of a user's, whatever rule it is under."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from ..torch_ops import Site, op_facts, parameters, sites
from . import refusals


class OpFacts(NamedTuple):
    """What a wrapper has to know of a function, whatever its rule. By default a user's."""

    order: tuple[str, ...] = ()  # the names of the positional parameters, where they are needed
    keep: frozenset[int | str] = frozenset()  # positions and keywords that are never cast
    inplace_at: int | None = None  # the position of `inplace`, in a Python function
    out_at: int | None = None  # and of `out`
    in_place: bool = False  # every call writes into the first input (R5)
    composite: bool = False  # a Python function: what it calls is not decided again (R8)
    users: bool = False  # a user's function: `out` is one more argument to it, and it may write into any other (R10)
    view: bool = False  # its result may be a view of its input, or its input itself (R10)
    takes_some_mixtures: bool = False  # of dtypes, so that torch is tried before a cast (R7)
    needs_instructions: bool = False  # its low-precision kernel is slow on a processor without instructions for the dtype (R11)
    retries: bool = False  # after a failure in the low dtype it may run again in float32 (R11)


def facts_of(site: Site, *, with_order: bool) -> OpFacts:
    """The facts of torch's function at `site`; those of a builtin `with_order` of its parameters, which takes a look at its schemas."""
    op, line, is_python, in_place = site.op, sites.ancestry(site.op), site.python, sites.writes_first(site.op)
    order = parameters(site.original, op) if is_python or with_order or op in op_facts.KEPT_ARGUMENTS else ()
    kept = op_facts.KEPT_ARGUMENTS.get(op, frozenset())
    return OpFacts(
        order=order,
        keep=kept | {order.index(name) for name in kept if name in order},
        inplace_at=order.index("inplace") if is_python and "inplace" in order else None,
        out_at=order.index("out") if is_python and "out" in order else None,
        in_place=in_place,
        composite=is_python,
        # of torch.nn.functional nothing is a view: F.unfold is not Tensor.unfold
        view=not (op_facts.GIVING_BACK if site.where == "torch.nn.functional" else op_facts.ALIASING).isdisjoint(line),
        # somebody else's patch of torch is the user's Python, which must not run twice
        takes_some_mixtures=op in op_facts.MIXED_SOMETIMES_RAISES and refusals.is_torchs_function(site.original),
        needs_instructions=not op_facts.SLOW_WITHOUT_INSTRUCTIONS.isdisjoint(line),
        retries=not in_place and op_facts.RANDOM.isdisjoint(line) and op_facts.NORMS.isdisjoint(line),
    )


def facts_of_users(function: Callable[..., Any]) -> OpFacts:
    """The facts of a user's own function: it is one op (R8), and a parameter `out` that it writes into is not cast."""
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
    """Whether the function writes into `parameter` (`out`): its default is None, or it is not the first input, which losses call `out` too.

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
