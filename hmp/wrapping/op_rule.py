"""OpRule: what op_wrap needs to know of an op and its rule. Which tensors of a call the rule may cast (`survey`), to what (`chooser`)."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch

from ..casting import Caster, Tensor, castable, each_tensor, tensor_casts
from ..lists import ListName
from ..ops import op_facts

Op = Callable[..., Any]
Parameter = torch.nn.Parameter
Choose = Callable[[list[Tensor]], torch.dtype]
Kind = Literal[
    "fp8", "bf16", "fp32", "promote", "first", "in_place", "mask_in_place", "fill", "guard", "guard_in_place", "no_kernel",
    "no_kernel_in_place", "inside", "autocast", "saved",
]  # fmt: skip
# Types of arguments that no rule changes. No numbers are among them: they may overflow (R12).
SCALARS = frozenset({bool, str, type(None), torch.device, torch.layout, torch.Generator})
# As an argument `dtype` these say how a float32 input is quantized, and nothing of the dtype to compute in.
_QUANTIZED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})


class OpRule(NamedTuple):
    """What op_wrap needs to know of an op and of the rule for it.

    `kind` is the list that the op is on, or for an unlisted op what R5, R7, R8, R11 or R12 ask for; "saved" where R22 alone asks.
    """

    op: str  # its id
    kind: Kind
    low: torch.dtype = torch.bfloat16
    keep: frozenset[int | str] = frozenset()  # positions and keywords that are never cast
    order: tuple[str, ...] = ()  # the names of the positional parameters
    inplace_at: int | None = None  # the position of `inplace`, in a Python function
    out_at: int | None = None  # and of `out`
    composite: bool = False  # a Python function: what it calls is not decided again (R8)
    view: bool = False  # its result may be a view of its input, or its input itself (R10)
    join: bool = False  # 0-dim tensors count for the widest dtype (R3)
    mask_taker: bool = False  # an operand may be a mask that overflows the low dtype (R12)
    score_taker: bool = False  # the input may be scores with a mask added (R12)
    arithmetic: bool = False  # a scalar beyond the low dtype is computed with in float32 (R12)
    fill: bool = False  # a scalar beyond the low dtype becomes that dtype's extreme (R12)
    asks_torch_first: bool = False  # torch accepts some mixtures of dtypes, and is tried before a cast (R7)
    mixes_in_place: bool = True  # torch writes in place from another dtype (R5)
    users: bool = False  # a user's function: `out` is one more argument to it, and it may write into any other (R10)
    for_backward: bool = False  # only backward refuses mixed inputs (R7)
    no_kernel: frozenset[tuple[str, torch.dtype]] = frozenset()  # (device type or "*", dtype) without a kernel (R11)
    no_backward_kernel: frozenset[tuple[str, torch.dtype]] = frozenset()  # and without one for backward alone
    needs_instructions: bool = False  # its low-precision kernel is slow on a processor without instructions for the dtype (R11)
    retries: bool = False  # after a failure in the low dtype it may run again in float32 (R11)
    fp8: tuple[str, str] = ("", "")  # of kind "fp8": its recipe and its kernel, as the policy has them
    saved: str = ""  # the recipe by which what it keeps for backward is packed (R22)
    unlisted: OpRule | None = None  # of kind "autocast": the rule where torch.autocast cannot run the op, if there is one

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of every castable input under R1 and R2, and of a product that cannot run in FP8; None for rules whose dtype depends on
        the inputs of a call."""
        return {"fp8": self.low, "bf16": self.low, "fp32": torch.float32}.get(self.kind)

    @property
    def asks_for_kernels(self) -> bool:
        """Whether each call must be checked for a known lack of a kernel (R11)."""
        return bool(self.no_kernel or self.no_backward_kernel) and self.dtype is not torch.float32

    @property
    def saturates(self) -> bool:
        """Whether scalars of a call may be beyond the range of its low dtype, so that R12 applies."""
        return self.arithmetic or self.fill


def user_rule(function: Op, op: str, cast: ListName, low: torch.dtype) -> OpRule:
    """The rule for a user's own function on the list `cast`: it is one op (R8), and a parameter `out` that it writes into is not cast."""
    # of the function itself, not of one that it wraps: positions are those of the call
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
        users=True,
    )


def _is_written_to(function: Op, order: tuple[str, ...], parameter: str) -> bool:
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


class Observer:
    """Is told of casts and calls: each method returns a function that does what the one it is given does, and reports it; here it is that
    one itself, for what an observer has no eye for."""

    def casting(self, caster: Caster) -> Caster:
        """`caster`, which a wrapper calls for each cast."""
        return caster

    def calling(self, op: Op, rule: OpRule) -> Op:
        """torch's own `op`, which a wrapper may call twice or not at all."""
        return op

    def around(self, wrapper: Op, rule: OpRule) -> Op:
        """The wrapper itself."""
        return wrapper


class Observers(Observer):
    """Several observers as one; the function of the first is the innermost."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = tuple(observers)

    def casting(self, caster: Caster) -> Caster:
        """`caster`, reported to all."""
        for observer in self._observers:
            caster = observer.casting(caster)
        return caster

    def calling(self, op: Op, rule: OpRule) -> Op:
        """torch's own `op`, reported to all."""
        for observer in self._observers:
            op = observer.calling(op, rule)
        return op

    def around(self, wrapper: Op, rule: OpRule) -> Op:
        """`wrapper`, reported to all."""
        for observer in self._observers:
            wrapper = observer.around(wrapper, rule)
        return wrapper


def survey(args: tuple[Any, ...], kwargs: Mapping[str, Any], rule: OpRule) -> list[Tensor] | None:
    """The castable tensors that the rule may cast, in the order of the op's parameters. None where the call is left to torch: with a
    float64 or complex tensor among the inputs, or an explicit `dtype=`."""
    found: list[Tensor] = []
    keep = rule.keep
    for i, value in enumerate(args):
        if (type(value) is torch.dtype and value not in _QUANTIZED) or (i not in keep and not _collect(value, found)):
            return None
    order = rule.order
    names = sorted(kwargs, key=lambda name: _position(name, order)) if order and len(kwargs) > 1 else kwargs
    for name in names:
        value = kwargs[name]
        if (type(value) is torch.dtype and value not in _QUANTIZED) or (name not in keep and not _collect(value, found)):
            return None
    return found


_OF_NUMPY = {alias: name for name, aliases in op_facts.NUMPY_NAMES.items() for alias in aliases}


def torchs_name(keyword: str, order: tuple[str, ...]) -> str:
    """The parameter that a call gives by `keyword`: torch takes numpy's names too."""
    return keyword if keyword in order else _OF_NUMPY.get(keyword, keyword)


def _position(keyword: str, order: tuple[str, ...]) -> int:
    name = torchs_name(keyword, order)
    return order.index(name) if name in order else len(order)


def _collect(value: Any, found: list[Tensor]) -> bool:
    """Adds the castable tensors in `value` to `found`; False where `value` has a float64 or complex tensor."""
    kind = type(value)
    if kind is Tensor or kind is Parameter:  # as below, in a third of the time
        dtype = value.dtype
        if dtype in tensor_casts.CASTABLE and value.layout is not tensor_casts.MKLDNN:
            found.append(value)
        return dtype not in tensor_casts.LEFT_TO_TORCH
    if not isinstance(value, (Tensor, list, tuple, dict)):
        return True
    for tensor in each_tensor((value,)):
        if tensor_casts.left_to_torch(tensor):
            return False
        if castable(tensor):
            found.append(tensor)
    return True


def chooser(rule: OpRule) -> Choose:
    """The function that gives the dtype for a call's castable tensors: one or more, in the order of the op's parameters."""
    if rule.kind in ("fp8", "bf16"):
        return lambda tensors: rule.low
    if rule.kind == "fp32":
        return lambda tensors: torch.float32
    if rule.kind == "first":
        return lambda tensors: tensors[0].dtype
    if rule.kind in ("no_kernel", "inside"):  # the low dtype, for which a kernel may be missing
        return lambda tensors: next((t.dtype for t in tensors if t.dtype is not torch.float32), torch.float32)
    return lambda tensors: tensor_casts.widest(tensors, count_0dim=rule.join)


def flag(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int) -> bool:
    """Whether the call sets `inplace`, the parameter at `position`."""
    return bool(args[position] if position < len(args) else kwargs.get("inplace"))


def writes(args: tuple[Any, ...], kwargs: Mapping[str, Any], rule: OpRule) -> bool:
    """Whether the call writes into one of its arguments, by `out` or `inplace`."""
    at = rule.out_at
    out = args[at] if at is not None and at < len(args) else kwargs.get("out")
    return out is not None or (rule.inplace_at is not None and flag(args, kwargs, rule.inplace_at))
