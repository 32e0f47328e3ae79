"""The wrapper for `gru.autocast` and the like on a BF16 list: torch.autocast is enabled for the one call of that op.

torch.autocast reaches what the C++ code of an op calls, and patches of Python names do not: it casts the products inside `gru`, and leaves
its gates in float32. No cast of the op's inputs gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import casting, copies
from ..active import autocast
from ..casting import Caster
from ..torch_ops import op_facts
from ..torch_private import is_autocast_available, is_traced
from . import refusals
from .op_rule import Op, OpRule, survey


def wrapper(op: Op, inside: Op, unlisted: Op, rule: OpRule, caster: Caster) -> Op:
    """Return `op`, called with torch.autocast enabled; `inside` is what is called there.

    The weights of a recurrent op are given to it in the low-precision dtype by `caster`: torch.autocast would cast those of a cell at each
    call, and sum their gradients in the low-precision dtype. So are the operands of `sparse.mm`: torch.autocast casts them where autograd
    does not see it, and saves for backward what its kernels refuse, unless backward too is called in the context.

    `unlisted`, the wrapper of the op on no list, is called where torch.autocast casts nothing, on devices that it does not support, and
    where it raises for a dtype. In an autocast context of the user's `op` itself is called.
    """

    def with_autocast(*args: Any, **kwargs: Any) -> Any:
        tensors = survey(args, kwargs, rule)
        if not tensors:
            return op(*args, **kwargs)
        device = tensors[0].device.type
        if not is_autocast_available(device):
            return unlisted(*args, **kwargs)
        if autocast.is_enabled(device):
            return op(*args, **kwargs)
        if casts_nothing(rule.op, args, kwargs, tensors):
            return unlisted(*args, **kwargs)
        given: Sequence[Any] = args
        named = kwargs
        # as in torch, whose cache has leaves only: what is used twice is cast once, and its gradients are summed in that dtype
        cached = torch.is_grad_enabled() and any(each.is_leaf and each.requires_grad for each in tensors)
        if rule.op == "sparse.mm":
            given, named = casting.cast_call(args, kwargs, rule.low_dtype, caster)
        elif rule.op in op_facts.CELLS or (rule.op in op_facts.RECURRENT and copies.can_make_nodes() and not is_traced(tensors[0])):
            weights = weights_at(rule.op, args)
            given = [casting.cast_within(a, rule.low_dtype, caster) if i in weights else a for i, a in enumerate(args)]
        elif rule.op in op_facts.RECURRENT:
            cached = False  # no node that sums in float32 can be made: torch.autocast casts the weights of a layer for each step
        try:
            return autocast.call_enabled(device, rule.low_dtype, cached, inside, *given, **named)
        except RuntimeError as error:
            if unlisted is op or not refusals.may_run_again(error, tensors):
                raise
        return unlisted(*args, **kwargs)

    return with_autocast


def casts_nothing(op: str, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> bool:
    """Return True for a call that torch.autocast does not reach.

    These are sparse.mm with `reduce=` or of two sparse matrices, and padding with a constant.
    """
    if op == "pad":
        return kwargs.get("mode", args[2] if len(args) > 2 else "constant") == "constant"  # type: ignore[no-any-return]
    return op == "sparse.mm" and (len(args) + len(kwargs) > 2 or all(each.layout is not torch.strided for each in tensors))


def weights_at(op: str, args: Sequence[Any]) -> Sequence[int]:
    """Return the positions of a recurrent op's weights: all after a cell's state, the last list of a layer."""
    return range(2, len(args)) if op in op_facts.CELLS else [i for i, each in enumerate(args) if isinstance(each, (list, tuple))][-1:]
