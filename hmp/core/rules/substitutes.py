"""For lists of plug-ins whose ops are computed by a function of the plug-in's: where that cannot take a call, the op is cast as on BF16."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from ..active import without_casts
from ..casting import Caster
from ..log import log
from .kernel_fallback import count
from .op_rule import Op, OpRule
from .rules import torchs, with_added
from .wrappers import one_dtype_wrapper

_compiling = torch.compiler.is_dynamo_compiling
_counted = threading.local()  # the ops whose calls, counted as computed otherwise, are running in this thread


def calls_of(
    compute: Callable[..., Any], *, computes: Callable[[OpRule], torch.dtype], notes: str = ""
) -> Callable[[Op, OpRule], tuple[Op, ...]]:
    """Return a rule's `calls`: torch's own function, and `compute(rule's op, low_dtype, words, *args, **kwargs)`.

    What `compute` calls is not decided again (R8): torch's decompositions are Python, and would call the op that they are of. In compiled
    code the compiler traces it as it traces user code, with its autograd.Function; else its steps would be differentiated.

    Args:
        compute: Computes the op; `words` are those of the policy for the list, all that comes before `args` is constant to a compiler.
        computes: Gives the dtype that it computes in, for reports.
        notes: The list, where it takes an argument `observer`, to which it reports while hmp.record() runs; see `Listener.noted`.
    """

    def calls(op: Op, rule: OpRule) -> tuple[Op, ...]:
        inlined = getattr(op, "inlined", None)
        run = without_casts(compute) if inlined is None else functools.partial(inlined, compute)
        made = functools.partial(run, rule.op, rule.low_dtype, rule.words)
        made.computes, made.notes = computes(rule), notes  # type: ignore[attr-defined]
        return *torchs(op, rule), with_added(made, rule)

    return calls


def make_of(
    why_not_of: Callable[[OpRule], Callable[[tuple[Any, ...], dict[str, Any]], str]],
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

    def make(op: Op, rule: OpRule, caster: Caster, computed: Op) -> Op:
        in_low, why_not = one_dtype_wrapper(op, rule, caster), why_not_of(rule)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            reason = why_not(args, kwargs)
            if not reason:
                return computed(*args, **kwargs) if also is None else computed(*args, **kwargs, **also(rule.op, args, kwargs))
            if _compiling():
                return in_low(*args, **kwargs)
            inside = _counted.__dict__.setdefault("ops", set())
            if rule.op in inside:  # a tensor subclass calls the op that it was called for
                return in_low(*args, **kwargs)
            if count(rule.op, what, reason):
                said = "%s is on the %s list, but this call runs in bfloat16 or float16 (%s); hmp.fallbacks() counts such calls"
                log.info(said, rule.op, list_title, reason)
            inside.add(rule.op)
            try:
                return in_low(*args, **kwargs)
            finally:
                inside.discard(rule.op)

        return wrapper

    return make
