"""A finding: the op that made NaN or Inf, where, from what, under which rule, and what to write in which list file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from ...core import lists
from ...core.casting import LOW, dtype_name
from ...core.ops import table
from ...core.policy.entries import AUTOCAST, EVERY_OP
from ...core.policy.names import can_be_listed
from ...core.policy.policy import Policy, as_policy
from ...core.policy.presets import is_in_one, policies
from ...core.rules import registry
from ...errors import OpListError
from ..aten import Facts
from ..compare.distance import widened
from ..explain import Rule, explain
from ..op_owners import AtenCall, Direction, Owner

FindingKind = Literal["op", "data", "parameter"]  # an op, or where a NaN or Inf came in


class Values(NamedTuple):
    """A tensor in short: dtype, shape, the range of its finite values (None where it has none), how many are NaN and Inf."""

    dtype: str
    shape: tuple[int, ...]
    low: float | None
    high: float | None
    nan: int
    inf: int

    def __str__(self) -> str:
        found = f"{self.dtype}{list(self.shape)}"
        odd = [(count, name) for count, name in ((self.nan, "NaN"), (self.inf, "Inf")) if count]
        if self.low is None and len(odd) == 1:
            count, name = odd[0]
            return f"{found}, the value is {name}" if count == 1 else f"{found}, all {count} values are {name}"
        found += ", no value is finite" if self.low is None else f" in [{self.low:.4g}, {self.high:.4g}]"
        return ", ".join([found, *(f"{count} {name}" for count, name in odd)])


def values(tensor: torch.Tensor) -> Values:
    """Return `tensor` in short."""
    given = widened(tensor.detach())
    finite = given[torch.isfinite(given)]
    real = torch.view_as_real(finite) if finite.is_complex() else finite
    low, high = (float(real.min()) + 0.0, float(real.max()) + 0.0) if real.numel() else (None, None)
    nan = int(torch.isnan(given).sum())
    inf = int(given.numel() - finite.numel()) - nan
    return Values(dtype_name(tensor.dtype), tuple(tensor.shape), low, high, nan, inf)


@dataclass(frozen=True)
class Finding:
    """The first op that made NaN or Inf out of finite arguments (`kind` "op"), or where one came in ("data", "parameter").

    `op` is the name that lists spell, or the ATen op's; `made` is "NaN", "Inf" or "NaN and Inf"; `node` is the autograd node in
    backward, "" in forward, and the place is that of the forward op or of the user's own backward code. `rule` is what hmp did with
    the op, `remedy` what to try; for data `source` says what it came in with. What an op wrote to in place is not among `inputs`: its
    earlier values are lost. `rank` is the process that found it, None where there is one alone.
    """

    kind: FindingKind
    op: str
    aten: str
    direction: Direction
    node: str
    module: str
    file: str
    line: int
    made: str
    inputs: tuple[Values, ...]
    outputs: tuple[Values, ...]
    rule: str
    remedy: str
    source: str = ""
    rank: int | None = None

    def __str__(self) -> str:
        said = self._said()
        return said if self.rank is None else f"rank {self.rank}: {said}"

    def _said(self) -> str:
        where = f"{f'in {self.module}, ' if self.module else ''}{self.file}:{self.line}"
        spelled = f"`{self.op}`" + (f" ({self.aten})" if self.aten != self.op else "")
        if self.kind == "op":
            in_backward = f" in the backward ({self.node})" if self.direction == "backward" else ""
            head = f"{spelled} made {self.made} out of finite inputs{in_backward}: {where}"
        else:
            head = f"no op made {self.made}: it was already in {self.source}; first used by {spelled}: {where}"
        given = "; ".join(map(str, self.inputs)) or "none, or only the tensor that it wrote to"
        lines = [head, f"  inputs: {given}", f"  output: {'; '.join(map(str, self.outputs))}"]
        return "\n".join([*lines, f"  {self.rule}", f"  {'note' if _IN_RANGE in self.remedy else 'try'}: {self.remedy}"])


def find(
    call: AtenCall,
    known: Facts,
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
    kind: FindingKind = "op",
    *,
    source: str = "",
    scope: str = "",
    in_float32: str | None = None,
) -> Finding:
    """Return the finding for a call that has just been made.

    `scope` is the module as scoped entries name it, `in_float32` what the op makes of its inputs in float32: None where that isn't known.
    """
    owner, place = call.owner, call.owner.place
    written = {id(t) for t in outputs}
    explained = _explained(owner)
    is_low = _is_low(owner, (*inputs, *outputs))
    return Finding(
        kind=kind,
        op=owner.op,
        aten=known.name,
        direction=call.direction,
        node="" if call.node is None else str(call.node.name()),
        module=place.module,
        file=place.file,
        line=place.line,
        made=made(outputs),
        inputs=tuple(values(t) for t in inputs if id(t) not in written),
        outputs=tuple(map(values, outputs)),
        rule=_rule(call, explained),
        remedy=_remedy(call, explained, scope, in_float32, is_low) if kind == "op" else _DATA[kind],
        source=source,
    )


def made(tensors: Iterable[torch.Tensor]) -> str:
    """Return "NaN", "Inf", "NaN and Inf", or "" where all values are finite."""
    found = [values(t) for t in tensors]
    return " and ".join(name for name, count in (("NaN", sum(v.nan for v in found)), ("Inf", sum(v.inf for v in found))) if count)


_DATA = {
    "data": "check the batch: op lists don't affect this",
    "parameter": "check the previous step, or the checkpoint that was loaded: op lists don't affect this",
}
_BY_HAND = "give this line float32 tensors: op lists don't affect it here"
_IN_RANGE = "so op lists don't affect this; keep its inputs in range, with an eps or a clamp"


def _explained(owner: Owner) -> Rule | None:
    """Return what explain() says, None for an unlisted op."""
    if owner.policy is None:
        return None
    for name in (owner.op, owner.op.strip("_")):
        with contextlib.suppress(OpListError):
            return explain(name, owner.policy)
    return None


def _rule(call: AtenCall, explained: Rule | None) -> str:
    owner = call.owner
    around = _autocast(owner)
    if owner.policy is None:
        if call.by_user:
            return "lists don't apply to your own code in backward (R13)"
        return f"no policy was active here, but {around}" if around else "no policy was active here"
    if _in_place(owner):
        return registry.IN_PLACE.sentence
    around = f"; {around} overrides it for the ops on torch's lists" if around else ""
    if explained is None or explained.cast is None:
        return f"on no list of policy {owner.policy.name!r}: computed in the dtype of its inputs{around}"
    where = f" ({explained.path}:{explained.line})" if explained.path else ""
    low = f", low-precision dtype {dtype_name(owner.policy.dtype)}" if explained.cast in lists.low() else ""
    return f"on the {explained.cast} list of policy {owner.policy.name!r}{where}{low}{around}"


def _autocast(owner: Owner) -> str:
    return " and ".join(f'torch.autocast("{device}") with {dtype_name(dtype)}' for device, dtype in owner.autocast)


def _in_place(owner: Owner) -> bool:
    return owner.op.endswith("_") if owner.ruled is None else owner.ruled.facts.in_place


def _is_low(owner: Owner, tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if few bits took part, also those of rounded values that are float32 numbers."""
    return (owner.ruled is not None and owner.ruled.rule.hides_dtypes) or any(t.dtype in LOW for t in tensors)


def _remedy(call: AtenCall, explained: Rule | None, scope: str, in_float32: str | None, is_low: bool) -> str:
    """Return what to try about an op that made NaN or Inf, in one line; `is_low`: it had low-precision inputs or results."""
    owner, op = call.owner, call.owner.op
    dtypes = [dtype for _, dtype in owner.autocast] if owner.policy is None else [owner.policy.dtype]
    if not is_low or in_float32:
        ran = f"in float32 it makes {in_float32}, too" if is_low else "it ran in float32 or wider"
        return f"{ran}, {_IN_RANGE}" + (" (float16 rounds an eps below 3e-08 to 0)" if torch.float16 in dtypes else "")
    if op in table.DTYPE_OPS or call.by_user:
        return _BY_HAND
    if owner.policy is None and owner.autocast:
        device, dtype = owner.autocast[0]
        policy = Policy.load("autocast").replace(dtype=dtype)
        instead = _moved(explain(op, policy), policy, scope) if can_be_listed(op) else ""
        disabled = f'call it on `.float()` inputs inside `torch.autocast("{device}", enabled=False)`'
        return f"{disabled}, or enter `hmp.casts(policy)` instead of torch.autocast: {instead}" if instead else disabled
    if owner.policy is None or _in_place(owner) or explained is None:
        return _BY_HAND
    wider = "bfloat16 instead of float16 has float32's range" if owner.policy.dtype is torch.float16 else ""
    if explained.cast == "fp32":
        said = f"`{op}` is on the FP32 list, but its result overflowed when it was cast for the next op; put that op on the FP32 list too"
        return "; ".join(filter(None, (said, wider)))
    inside = f"enter the policy inside {_autocast(owner)}, which overrides it" if owner.autocast else ""
    return _moved(explained, owner.policy, scope, "; ".join(filter(None, (inside, wider))))


def _moved(explained: Rule, policy: Policy, module: str, note: str = "") -> str:
    """Return how an op comes onto the FP32 list: a line of Python to paste, or what to write in list files that are the user's own."""
    entry, at, scope = (explained.listed_as or "").partition(" @ ")
    listed = explained.listed_as if explained.cast in lists.low() and entry != EVERY_OP else None
    # there is no einsum.autocast on an FP32 list
    name = f"{explained.name if listed is None or entry.endswith(AUTOCAST) else entry}{at}{scope}"
    scoped = "" if at or not module else f"{name} @ {module}"
    is_users = explained.path is not None and not is_in_one(explained.path)
    folders = {Path(each.path).parent for each in (*policy.origin.values(), *policy.scoped) if each.path and not is_in_one(each.path)}
    if is_users or [each.name for each in folders] == [policy.name]:  # of a folder over a base.txt, the entry may be the preset's
        file = folders.pop() / "fp32.txt" if len(folders) == 1 else "fp32.txt"
        off = f" and take it off {explained.path}:{explained.line}" if listed and is_users else ""
        alone = f"or write `{scoped}` for this module alone" if scoped else ""
        return "; ".join(filter(None, (f"write `{name}` in {file}{off}", alone, note)))
    before = "policy"
    if policy.name in policies() and as_policy(policy.name).replace(dtype=policy.dtype) == policy:
        before = f'hmp.Policy.load("{policy.name}")'
        if as_policy(policy.name).dtype is not policy.dtype:
            before += f'.replace(dtype="{dtype_name(policy.dtype)}")'
    alone = f'or for this module alone, with hmp.apply(): .move("{scoped}", "fp32")' if scoped else ""
    notes = "; ".join(filter(None, (alone, note)))
    return f'policy = {before}.move("{name}", "fp32")' + (f"  # {notes}" if notes else "")
