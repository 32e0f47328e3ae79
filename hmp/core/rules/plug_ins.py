"""What a plug-in imports to write the rule of its list.

`calls_of` and `make_of` are for ops that a function of the plug-in's computes: where that cannot take a call, the op is cast as on BF16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..active.regions import without_casts
from ..casting import Caster
from ..log import log
from .fast import one_dtype_wrapper
from .kernels import count
from .op import CastRule, Op, OpUnderRule, writes
from .registry import torchs, with_added

__all__ = ["CastRule", "Op", "OpUnderRule", "calls_of", "count", "make_of", "one_dtype_wrapper", "writes"]

_compiling = torch.compiler.is_dynamo_compiling


def calls_of(
    compute: Callable[..., Any], *, computes: Callable[[OpUnderRule], torch.dtype], notes: str = ""
) -> Callable[[Op, OpUnderRule], tuple[Op, ...]]:
    """Return a rule's `calls`: torch's own function, and `compute(rule's op, low_dtype, words, *args, **kwargs)`.

    What `compute` calls is not decided again: torch's decompositions are Python, and would call the op that they are of. In compiled
    code the compiler traces it as it traces user code, with its autograd.Function; else its steps would be differentiated.

    Args:
        compute: Computes the op; `words` are those of the policy for the list, all that comes before `args` is constant to a compiler.
        computes: Gives the dtype that it computes in, for reports.
        notes: The list, where it takes an argument `observer`, to which it reports while hmp.record() runs; see `Listener.noted`.
    """

    def calls(op: Op, ruled: OpUnderRule) -> tuple[Op, ...]:
        inlined = getattr(op, "inlined", None)
        run = without_casts(compute) if inlined is None else functools.partial(inlined, compute)
        made = functools.partial(run, ruled.op, ruled.low_dtype, ruled.words)
        made.computes, made.notes = computes(ruled), notes  # type: ignore[attr-defined]
        return *torchs(op, ruled), with_added(made, ruled)

    return calls


def make_of(
    why_not_of: Callable[[OpUnderRule], Callable[[tuple[Any, ...], dict[str, Any]], str]],
    what: str,
    list_title: str,
    also: Callable[[str, tuple[Any, ...], dict[str, Any]], dict[str, Any]] | None = None,
) -> Callable[..., Op]:
    """Return a rule's `make`, for `calls_of`: the function gets the inputs as they are, whatever their dtypes.

    A call that it cannot take is one of torch's function in the low-precision dtype, and counted for hmp.fallbacks() with the reason.

    Args:
        why_not_of: Gets the op under its rule. Returns what says of a call's arguments why the function cannot take them; "" where it can.
        what: What is counted of a call that it cannot take: "not rounded stochastically".
        list_title: The list, for the log.
        also: Gets the op and a call's arguments, and gives more keywords to the function: what a compiler's trace could not ask.
    """

    def make(op: Op, ruled: OpUnderRule, caster: Caster, computed: Op) -> Op:
        in_low, why_not = one_dtype_wrapper(op, ruled, caster), why_not_of(ruled)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            reason = why_not(args, kwargs)
            if not reason:
                return computed(*args, **kwargs) if also is None else computed(*args, **kwargs, **also(ruled.op, args, kwargs))
            if not _compiling() and count(ruled.op, what, reason):
                said = "%s is on the %s list, but this call runs in bfloat16 or float16 (%s); hmp.fallbacks() counts such calls"
                log.info(said, ruled.op, list_title, reason)
            return in_low(*args, **kwargs)

        return wrapper

    return make
