"""What a rule is (`CastRule`), and an op under its rule (`OpRule`): which tensors of a call it may cast (`survey`), to what (`chooser`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..casting import Tensor, castable, each_tensor, tensor_casts
from ..torch_ops import op_facts
from .facts import OpFacts

Op = Callable[..., Any]
Parameter = torch.nn.Parameter
Choose = Callable[[list[Tensor]], torch.dtype]
# Types of arguments that no rule changes. No numbers are among them: they may overflow (R12).
SCALARS = frozenset({bool, str, type(None), torch.device, torch.layout, torch.Generator})
# As an argument `dtype` these say how a float32 input is quantized, and nothing of the dtype to compute in.
_QUANTIZED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})


class Case(NamedTuple):
    """An op under a policy: what its rule is chosen by."""

    op: str
    base: str  # the op that it follows, see `sites.base_of`
    line: tuple[str, ...]  # it and all that it follows
    in_place: bool  # every call writes into the first input
    list: str | None  # the list that it is on, "autocast" for an entry such as `gru.autocast`; None in place, where no list counts (R5)
    low_dtype: torch.dtype


@dataclass(frozen=True, eq=False, repr=False)
class CastRule:
    """One rule. `rules` has them all: whatever asks which rule an op is under compares with an object of that table.

    `make(op, rule, caster)` makes the wrapper of `op` under the OpRule `rule`. Where such a wrapper calls more than torch's own function,
    `calls` makes its functions of that one: `make` is given the first as `op`, and the others behind `caster`.
    """

    name: str
    number: str  # in rules.md, and in reports where no list asks for it
    label: str  # in tables and logs: its list, or a word for what it does; "" where torch's own function runs
    sentence: str  # what is done, as explain(), reports and messages print it
    make: Callable[..., Op]
    calls: Callable[[Op, OpRule], tuple[Op, ...]] | None = None
    holds: Callable[[Case], bool] = lambda case: False  # whether it is the op's rule, where none before it in the table is
    ops: frozenset[str] = frozenset()  # ops that it may hold for while no list names them
    is_list: bool = False  # an entry of a list asks for it
    dtype: Callable[[torch.dtype], torch.dtype] | None = None  # of every castable input, from the low one, where the list says it
    choose: Callable[[OpRule], Choose] | None = None  # finds that dtype among the castable inputs of a call, where they say it
    repairs: bool = False  # torch would raise without it: it counts in backward and for optimizers too, where no list does

    def __str__(self) -> str:
        return self.label or self.number

    @property
    def in_reports(self) -> str:
        """What reports call it: the list, else its number; "" where the op is left to torch."""
        return self.label if self.is_list else self.number if self.label else ""


class OpRule(NamedTuple):
    """An op under its rule: what op_wrap is given."""

    op: str  # its id
    kind: CastRule
    facts: OpFacts
    low_dtype: torch.dtype = torch.bfloat16
    fp8: tuple[str, str] = ("", "")  # on the FP8 list: the policy's recipe and kernel
    saved: str = ""  # the recipe by which what it keeps for backward is packed (R22)
    unlisted: OpRule | None = None  # where torch.autocast decides inside: the rule where it cannot run the op, if there is one

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of every castable input, where the list says it; None for rules whose dtype depends on the inputs of a call."""
        return None if self.kind.dtype is None else self.kind.dtype(self.low_dtype)


def survey(args: tuple[Any, ...], kwargs: Mapping[str, Any], rule: OpRule) -> list[Tensor] | None:
    """The castable tensors that the rule may cast, in the order of the op's parameters. None where the call is left to torch: with a
    float64 or complex tensor among the inputs, or an explicit `dtype=`."""
    found: list[Tensor] = []
    keep = rule.facts.keep
    for i, value in enumerate(args):
        if (type(value) is torch.dtype and value not in _QUANTIZED) or (i not in keep and not _collect(value, found)):
            return None
    order = rule.facts.order
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
    dtype = rule.dtype
    if dtype is not None:
        return lambda tensors: dtype
    assert rule.kind.choose is not None, f"{rule.kind.name} casts nothing to one dtype"
    return rule.kind.choose(rule)


def flag(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int) -> bool:
    """Whether the call sets `inplace`, the parameter at `position`."""
    return bool(args[position] if position < len(args) else kwargs.get("inplace"))


def writes(args: tuple[Any, ...], kwargs: Mapping[str, Any], rule: OpRule) -> bool:
    """Whether the call writes into one of its arguments, by `out` or `inplace`."""
    facts = rule.facts
    at = facts.out_at
    out = args[at] if at is not None and at < len(args) else kwargs.get("out")
    return out is not None or (facts.inplace_at is not None and flag(args, kwargs, facts.inplace_at))
