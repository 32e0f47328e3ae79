"""The wrapper for `gru.autocast` and the like on a BF16 list: torch.autocast is enabled for the one call of that op.

torch.autocast reaches what the C++ code of an op calls, and patches of Python names do not: it casts the products inside `gru`, and leaves
its gates in float32. No cast of the op's inputs gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import casting, copies
from ..active import autocast
from ..casting import Caster
from ..ops import table
from ..torch_private import is_autocast_available, is_traced
from . import refusals
from .op_rule import Op, OpRule, survey


def wrapper(op: Op, inside: Op, unlisted: Op, rule: OpRule, caster: Caster) -> Op:
    """Return `op`, called with torch.autocast enabled.

    The weights of a recurrent op are given to it in the low-precision dtype by `caster`: torch.autocast would cast those of a cell at each
    call, and sum their gradients in the low-precision dtype. So are the operands of `sparse.mm`: torch.autocast casts them where autograd
    does not see it, and saves for backward what its kernels refuse, unless backward too is called in the context.

    Args:
        op: The op, called in an autocast context of the user's.
        inside: What is called with torch.autocast enabled.
        unlisted: The wrapper of the op on no list, which is called where torch.autocast casts nothing, on devices that it does not support,
            and where it raises for a dtype.
        rule: The op's rule.
        caster: Casts a tensor.
    """
    call = _WithAutocast(op, inside, unlisted, rule, caster)
    return call.cell if rule.op in table.CELLS and caster is copies.low_weight else call.any


class _WithAutocast:
    def __init__(self, op: Op, inside: Op, unlisted: Op, rule: OpRule, caster: Caster) -> None:
        self.op, self.inside, self.unlisted, self.rule, self.caster = op, inside, unlisted, rule, caster

    def cell(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call of a cell."""
        device = None if kwargs else _device_of_plain(args)
        if device is None or not is_autocast_available(device) or autocast.is_enabled(device):
            return self.any(*args, **kwargs)
        lows = copies.low_weights(args[2:], self.rule.low_dtype)
        return self._enabled(device, False, (*args[:2], *lows), {}, args, kwargs)

    def any(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call."""
        tensors = survey(args, kwargs, self.rule)
        if not tensors:
            return self.op(*args, **kwargs)
        device = tensors[0].device.type
        if not is_autocast_available(device):
            return self.unlisted(*args, **kwargs)
        if autocast.is_enabled(device):
            return self.op(*args, **kwargs)
        name, dtype = self.rule.op, self.rule.low_dtype
        if casts_nothing(name, args, kwargs, tensors):
            return self.unlisted(*args, **kwargs)
        if name == "sparse.mm":
            given, named = casting.cast_call(args, kwargs, dtype, self.caster)
            return self._enabled(device, _is_cached(tensors), given, named, args, kwargs)
        if name not in table.RECURRENT:
            return self._enabled(device, _is_cached(tensors), args, kwargs, args, kwargs)
        if name in table.CELLS or (copies.can_make_nodes() and not is_traced(tensors[0])):
            weights = weights_at(name, args)
            given = [casting.cast_within(a, dtype, self.caster) if i in weights else a for i, a in enumerate(args)]
            return self._enabled(device, name not in table.CELLS and _is_cached(tensors), given, kwargs, args, kwargs)
        # no node that sums in float32 can be made: torch.autocast casts the weights of a layer for each step
        return self._enabled(device, False, args, kwargs, args, kwargs)

    def _enabled(
        self,
        device: str,
        cached: bool,
        given: Sequence[Any],
        named: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Return the result of the call of `args` and `kwargs`, cast to `given` and `named`."""
        try:
            return autocast.call_enabled(device, self.rule.low_dtype, cached, self.inside, *given, **named)
        except RuntimeError as error:
            if self.unlisted is self.op or not refusals.may_run_again(error, survey(args, kwargs, self.rule) or ()):
                raise
        return self.unlisted(*args, **kwargs)


def _is_cached(tensors: list[torch.Tensor]) -> bool:
    """Return True if torch.autocast may cast one of these twice: its cache has leaves, whose gradients are summed in that dtype."""
    return torch.is_grad_enabled() and any(each.is_leaf and each.requires_grad for each in tensors)


def _device_of_plain(args: tuple[Any, ...]) -> str | None:
    """Return the device of a usual call of a cell, of an input, a state or a pair of states, and weights; None for another call."""
    state = args[1] if len(args) > 2 else None
    for each in (args[0], *state, *args[2:]) if type(state) is tuple else args:
        kind = type(each)
        if kind is not torch.Tensor and kind is not torch.nn.Parameter:
            return None
        if each.dtype not in casting.CASTABLE or each.layout is not torch.strided:
            return None
    return args[0].device.type if args else None


def casts_nothing(op: str, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> bool:
    """Return True for a call that torch.autocast does not reach.

    These are sparse.mm with `reduce=` or of two sparse matrices, and padding with a constant.
    """
    if op == "pad":
        return kwargs.get("mode", args[2] if len(args) > 2 else "constant") == "constant"  # type: ignore[no-any-return]
    return op == "sparse.mm" and (len(args) + len(kwargs) > 2 or all(each.layout is not torch.strided for each in tensors))


def weights_at(op: str, args: Sequence[Any]) -> Sequence[int]:
    """Return the positions of a recurrent op's weights: all after a cell's state, the last list of a layer."""
    return range(2, len(args)) if op in table.CELLS else [i for i, each in enumerate(args) if isinstance(each, (list, tuple))][-1:]
