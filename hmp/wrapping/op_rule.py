"""What op_wrap needs to know of an op and its rule, which tensors of a call the rule may cast, and what it makes of them."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import torch

from ..casting import Caster, Tensor, castable, each_tensor, tensor_casts
from ..lists import ListName

Op = Callable[..., Any]
Choose = Callable[[list[Tensor]], torch.dtype]
Kind = Literal[
    "bf16", "fp32", "promote", "first", "in_place", "mask_in_place", "fill", "guard", "guard_in_place", "no_kernel",
    "no_kernel_in_place", "inside", "autocast",
]  # fmt: skip
# What no rule looks into. Numbers are no part of it: they may overflow (R12).
SCALARS = frozenset({bool, str, type(None), torch.device, torch.layout, torch.Generator})


class OpRule(NamedTuple):
    """What op_wrap needs to know of an op and of the rule for it.

    `kind` is the list that the op is on, or for an unlisted op what R5, R7, R8, R11 or R12 ask for; `keep` are positions and
    keywords that are never cast; `order` are the positional parameters' names; `inplace_at` and `out_at` are the positions
    of those parameters in a Python function; `for_backward` is whether only backward refuses mixed inputs; `no_kernel` is where it is
    known to have none, `no_backward_kernel` where only its backward has none, and `retries` whether a failure in the low dtype
    may be tried again in float32 (R11). Of an op in which torch.autocast decides `unlisted` is what holds elsewhere, None for nothing.
    """

    op: str
    kind: Kind
    low: torch.dtype = torch.bfloat16
    keep: frozenset[int | str] = frozenset()
    order: tuple[str, ...] = ()
    inplace_at: int | None = None
    out_at: int | None = None
    composite: bool = False
    view: bool = False
    join: bool = False
    mask_taker: bool = False
    score_taker: bool = False
    arithmetic: bool = False
    fill: bool = False
    asks_torch_first: bool = False
    mixes_in_place: bool = True
    writes_out_itself: bool = False
    for_backward: bool = False
    no_kernel: frozenset[tuple[str, torch.dtype]] = frozenset()
    no_backward_kernel: frozenset[tuple[str, torch.dtype]] = frozenset()
    retries: bool = False
    unlisted: OpRule | None = None

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that R1 and R2 give every castable input; None where the inputs of a call tell."""
        return {"bf16": self.low, "fp32": torch.float32}.get(self.kind)

    @property
    def asks_for_kernels(self) -> bool:
        """Whether every call is to be looked up among those known to have no kernel (R11)."""
        return bool(self.no_kernel or self.no_backward_kernel) and self.dtype is not torch.float32

    @property
    def saturates(self) -> bool:
        """Whether scalars of a call may have to be moved inside a dtype that its tensors tell (R12)."""
        return self.arithmetic or self.fill


def user_rule(function: Op, op: str, cast: ListName, low: torch.dtype) -> OpRule:
    """The rule for a user's own function: one op, whose inner calls are not decided again; what it writes into is not cast."""
    # positions are those of the function that is called, also where it wraps another one
    order: tuple[str, ...] = ()
    if isinstance(function, types.FunctionType):
        order = function.__code__.co_varnames[: function.__code__.co_argcount]
    kept = {"out"} if _is_written_to(function, order, "out") else set()
    return OpRule(
        op=op,
        kind=cast,
        low=low,
        keep=frozenset(kept) | {position for position, name in enumerate(order) if name in kept},
        order=order,
        inplace_at=order.index("inplace") if "inplace" in order else None,
        composite=True,
        writes_out_itself=True,
    )


def _is_written_to(function: Op, order: tuple[str, ...], parameter: str) -> bool:
    """Whether `out` is a place to write to: None by default, or after the inputs. As the first input (of a loss) it is just a name.

    In doubt it is kept: an input that is not cast shows, a write that goes to a cast copy does not.
    """
    inputs = order[1:] if order[:1] in (("self",), ("cls",)) else order
    if parameter in inputs[1:]:
        return True
    try:
        found = inspect.signature(function).parameters.get(parameter)
    except ValueError:  # a C function without a signature
        return False
    return found is not None and found.default is None


class Observer(Protocol):
    """Sees every decision: its casters stand in for the plain ones, its functions around the wrappers, and inside them around torch's
    own ops, which may be called twice or not at all in one call of the wrapper."""

    def casting(self, caster: Caster) -> Caster: ...

    def calling(self, op: Op, rule: OpRule) -> Op: ...

    def around(self, wrapper: Op, rule: OpRule) -> Op: ...


class Observers:
    """Several observers as one: the first is nearest to the op."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = tuple(observers)

    def casting(self, caster: Caster) -> Caster:
        """`caster`, which all are told of."""
        for observer in self._observers:
            caster = observer.casting(caster)
        return caster

    def calling(self, op: Op, rule: OpRule) -> Op:
        """torch's own `op`, which all are told of."""
        for observer in self._observers:
            op = observer.calling(op, rule)
        return op

    def around(self, wrapper: Op, rule: OpRule) -> Op:
        """`wrapper`, which all are told of."""
        for observer in self._observers:
            wrapper = observer.around(wrapper, rule)
        return wrapper


def survey(args: tuple[Any, ...], kwargs: Mapping[str, Any], rule: OpRule) -> list[Tensor] | None:
    """The castable tensors that the rule may cast, in the order of the op's parameters; None where the op is left to torch:
    a float64 or complex tensor among the inputs, or an explicit dtype."""
    found: list[Tensor] = []
    keep = rule.keep
    for i, value in enumerate(args):
        if type(value) is torch.dtype or (i not in keep and not _collect(value, found)):
            return None
    names = kwargs if len(kwargs) < 2 or not rule.order else sorted(kwargs, key=lambda n: rule.order.index(n) if n in rule.order else 99)
    for name in names:
        value = kwargs[name]
        if type(value) is torch.dtype or (name not in keep and not _collect(value, found)):
            return None
    return found


def _collect(value: Any, found: list[Tensor]) -> bool:
    """Adds the castable tensors in `value` to `found`; False when there is one that leaves the op to torch."""
    if not isinstance(value, (Tensor, list, tuple, dict)):
        return True
    for tensor in each_tensor((value,)):
        if tensor.dtype in tensor_casts.LEFT_TO_TORCH:
            return False
        if castable(tensor):
            found.append(tensor)
    return True


def chooser(rule: OpRule) -> Choose:
    """What the rule makes of castable tensors, given in the order of the op's parameters; there is at least one."""
    if rule.kind == "bf16":
        return lambda tensors: rule.low
    if rule.kind == "fp32":
        return lambda tensors: torch.float32
    if rule.kind == "first":
        return lambda tensors: tensors[0].dtype
    if rule.kind in ("no_kernel", "inside"):  # the low dtype in play, which a kernel may not take
        return lambda tensors: next((t.dtype for t in tensors if t.dtype is not torch.float32), torch.float32)
    return lambda tensors: tensor_casts.widest(tensors, count_0dim=rule.join)


def flag(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int) -> bool:
    """Whether `inplace`, which stands at `position`, is set."""
    return bool(args[position] if position < len(args) else kwargs.get("inplace"))


def writes(args: tuple[Any, ...], kwargs: Mapping[str, Any], rule: OpRule) -> bool:
    """Whether the call writes into one of its arguments."""
    at = rule.out_at
    out = args[at] if at is not None and at < len(args) else kwargs.get("out")
    return out is not None or (rule.inplace_at is not None and flag(args, kwargs, rule.inplace_at))
