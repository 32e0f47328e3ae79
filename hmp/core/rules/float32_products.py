"""R11, "No instructions": an op computes in float32 on its rounded inputs and rounds its result, where the CPU has no instructions.

The result and the gradients are those of `op(x.float(), ...).to(low)` for inputs `x` of the low-precision dtype: a low-precision product,
summed in float32 and rounded once, as accelerators compute it. For backward the inputs are kept in the low-precision dtype, as torch's
kernel keeps them.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .. import casting, copies, locks, low_kernels
from ..active.autocast import is_enabled as _is_autocast_enabled
from ..casting import Caster, Tensor, deliver, each_tensor, map_tensors
from ..log import log, should_log
from ..saved_tensors import refuse_written
from ..torch_ops import op_facts
from ..torch_private import (
    are_saved_tensors_hooks_allowed,
    dispatch_modes,
    function_modes,
    in_plain_autograd,
    kernel_switches,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    saved_tensors_hooks,
    trace_here,
    tree_flatten,
    tree_unflatten,
    without_torch_function,
)
from . import refusals
from .autocast_entries import casts_nothing, weights_at
from .op_rule import Op, OpRule, survey

_Parameter = torch.nn.Parameter
# torch's own, taken before anything is patched
_as_strided, _copy_, _equal, _detach, _view_as = torch.as_strided, Tensor.copy_, torch.equal, Tensor.detach, Tensor.view_as
_grad_enabled, _grad = torch.is_grad_enabled, torch.autograd.grad
_random_state, _set_random_state = torch.get_rng_state, torch.set_rng_state
_compiling = torch.compiler.is_dynamo_compiling

_FLOATING = casting.CASTABLE | casting.LEFT_TO_TORCH
_CONTAINERS = (list, tuple, dict)
# Of others torch has few low-precision kernels, and where it has none the result stays float32 (R11).
_LAYOUTS = frozenset({torch.strided, torch.sparse_coo, torch.jagged})
# Elements of a tensor from which it pays to keep less than it for backward.
_LARGE = 4096

Pairs = dict[int, tuple[Tensor, Tensor]]  # by the id of an input in float32: it, and as it was given

_logged: set[torch.dtype] = set()
_one_at_a_time = locks.RLock()  # what is computed again draws the random numbers of its forward from the process's one generator


def _applies(rule: OpRule) -> bool:
    """Return True if calls of the op on the CPU may have to compute in float32: the processor may have no instructions for their dtype."""
    slow = low_kernels.computed_in_float32()
    dtype = rule.low_dtype if rule.leaves_to_autocast else rule.dtype
    return rule.facts.needs_instructions and (bool(slow) if dtype is None else dtype in slow)


def in_float32(op: Op, rule: OpRule, *, as_autocast: bool = False) -> Op:
    """Return a function that calls `op` in float32 for CPU tensors of a low-precision dtype without instructions, and unchanged for others.

    `as_autocast`: what torch.autocast leaves in float32 stays so, a recurrent op's state next to its low-precision weights, and the result.
    """
    if not _applies(rule):
        return op
    slow = low_kernels.computed_in_float32()
    may_be_wide = as_autocast and rule.op in op_facts.WIDE_UNDER_AUTOCAST | {"lstm"}
    low_dtype_of = functools.partial(_low_dtype_of, slow=slow, beside=frozenset({torch.float32}) if may_be_wide else frozenset())

    def computed(*args: Any, **kwargs: Any) -> Any:
        low_dtype = low_dtype_of(args, kwargs)
        # an autocast context inside overrides the policy (R17), in a dtype of its own
        if low_dtype is None or (rule.op == "einsum" and _is_one_tensor(args, kwargs)) or _is_autocast_enabled("cpu"):
            return op(*args, **kwargs)
        out = kwargs.get("out")
        if out is not None:
            if not isinstance(out, Tensor) or out.dtype is not low_dtype or (_grad_enabled() and _any_needs_grad((args, kwargs))):
                return op(*args, **kwargs)  # torch's own error: out= takes no part in autograd, and has the inputs' dtype
            kwargs = {name: value for name, value in kwargs.items() if name != "out"}
        if low_dtype not in _logged and not _compiling():
            _log(low_dtype)
        if out is None and _recomputes(rule, args, kwargs, low_dtype):
            tensors = each_tensor((args, kwargs))
            result = _Recomputed.apply(_Plan(rule, op, args, kwargs, low_dtype), *tensors)  # type: ignore[no-untyped-call]
        else:
            try:
                call = _Call(op, args, kwargs, low_dtype, rule)
            except refusals.OF_CASTS as error:
                if not refusals.is_cast_refusal(error, (args, kwargs)):
                    raise
                return op(*args, **kwargs)
            if rule.facts.in_place:
                return _written(call, op, args, kwargs)
            result = call.run()
        if not may_be_wide or not _is_wide_under_autocast(rule, args):
            result = casting.cast(result, low_dtype) if type(result) is Tensor else _rounded(result, low_dtype)
        return result if out is None else deliver(result, out)

    computed.computes_in_float32 = low_dtype_of  # type: ignore[attr-defined]  # for reports
    return computed


def _written(call: _Call, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the first argument with the result of the in-place `op` in it."""
    try:
        call.run()
    except RuntimeError as error:
        if not refusals.is_torchs_own(error):
            raise
        return op(*args, **kwargs)  # torch's own error, or a shape that its low-precision addbmm_ takes and the float32 one does not
    return op(*args, **kwargs) if call.args[0].shape != args[0].shape else _copy_(args[0], call.args[0])


def replaces_autocast(rule: OpRule, tensors: Sequence[Tensor]) -> bool:
    """Return True if hmp computes a call in float32 and enables no torch.autocast for it: on the CPU, outside of the user's contexts."""
    if rule.op in op_facts.FLOAT32_UNDER_AUTOCAST or not tensors or not tensors[0].is_cpu or _is_autocast_enabled("cpu"):
        return False
    return _applies(rule)


def under_autocast(by_autocast: Op, op: Op, rule: OpRule, caster: Caster) -> Op:
    """Return a function for an op that torch.autocast decides elsewhere: on the CPU its inputs are rounded and `op` computes in float32.

    A recurrent op's state and result stay float32 where torch.autocast leaves them so.
    """
    if not _applies(rule):
        return by_autocast
    cast = functools.partial(casting.cast_within, dtype=rule.low_dtype, caster=caster)

    def cast_call(*args: Any, **kwargs: Any) -> Any:
        tensors = survey(args, kwargs, rule) or []
        if not replaces_autocast(rule, tensors) or not _has_a_product(rule.op, args, kwargs, tensors):
            return by_autocast(*args, **kwargs)
        if rule.op in op_facts.RECURRENT and _is_wide_under_autocast(rule, args):
            weights = weights_at(rule.op, args)
            return op(*(cast(a) if i == 0 or i in weights else a for i, a in enumerate(args)), **kwargs)
        return op(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})

    return cast_call


def _has_a_product(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> bool:
    """Return False for a call that torch.autocast computes without a low-precision product, or in chunks whose dtypes it mixes."""
    if op == "sparse.mm":
        return not casts_nothing(op, args, kwargs, tensors)
    if op == "linear_cross_entropy":
        return kwargs.get("options") is None
    if op == "tensordot":  # to one element: a sum of products, which torch writes so
        dims = kwargs.get("dims", args[2] if len(args) > 2 else 2)
        if type(dims) is int:
            dims = range(-dims, 0), range(dims)
        if type(dims) not in (list, tuple):
            return True
        return any(tensor.numel() != math.prod(tensor.shape[i] for i in summed) for tensor, summed in zip(tensors, dims, strict=False))
    if op != "einsum" or not args or not isinstance(args[0], str):
        return True
    given, arrow, result = args[0].replace(" ", "").partition("->")
    operands = [set(operand) for operand in given.split(",")]
    several = {label for i, operand in enumerate(operands) for label in operand if any(label in other for other in operands[i + 1 :])}
    return bool(several - {"."} - set(result if arrow else ""))


def _is_wide_under_autocast(rule: OpRule, args: Sequence[Any]) -> bool:
    """Return True if torch.autocast computes a call of the op in the low-precision dtype in part.

    Of an LSTM that is a packed batch, whose weights come after sizes and state.
    """
    return rule.op in op_facts.WIDE_UNDER_AUTOCAST or (rule.op == "lstm" and len(args) > 3 and type(args[3]) in _CONTAINERS)


def _low_dtype_of(
    args: Iterable[Any], kwargs: Mapping[str, Any], *, slow: frozenset[torch.dtype], beside: frozenset[torch.dtype]
) -> torch.dtype | None:
    """Return the dtype, one of `slow`, of a call's CPU tensors; None if they have another floating dtype or the call names one.

    A dtype in `beside` does not count as another one.
    """
    found: torch.dtype | None = None
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind is torch.dtype:
            return None
        if kind is Tensor or kind is _Parameter:
            tensors: Iterable[Tensor] = (value,)
        elif isinstance(value, (Tensor, *_CONTAINERS)):
            tensors = each_tensor((value,))
        else:
            continue
        for tensor in tensors:
            dtype = tensor.dtype
            if dtype is found or dtype not in _FLOATING or dtype in beside:
                continue
            if found is not None or dtype not in slow or not tensor.is_cpu or tensor.layout not in _LAYOUTS:
                return None
            found = dtype
    return found


def _is_one_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True if there is one tensor among the arguments: an einsum of it is a view, and there is nothing to multiply."""
    return sum(1 for _ in each_tensor((*args, *kwargs.values()))) == 1


def _any_needs_grad(values: Iterable[Any]) -> bool:
    return any(t.requires_grad for t in each_tensor(values))


def _rounded(result: Any, low_dtype: torch.dtype) -> Any:
    return map_tensors(result, lambda t: casting.cast(t, low_dtype) if t.dtype is torch.float32 else t)


class _Call:
    """A call of an op whose tensors of the dtype `low_dtype` are widened to float32."""

    __slots__ = ("_low_dtype", "_op", "_pairs", "_rule", "args", "kwargs")

    def __init__(self, op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any], low_dtype: torch.dtype, rule: OpRule) -> None:
        self._op, self._low_dtype, self._rule = op, low_dtype, rule
        self._pairs: Pairs = {}
        self.args = [self._widened(value) for value in args]
        self.kwargs = {name: self._widened(value) for name, value in kwargs.items()} if kwargs else kwargs

    def _widened(self, value: Any) -> Any:
        return map_tensors(value, self._wide) if isinstance(value, (Tensor, *_CONTAINERS)) else value

    def _wide(self, tensor: Tensor) -> Tensor:
        if tensor.dtype is not self._low_dtype:
            return tensor
        wide = copies.wide(tensor, is_used_once=self._rule.op not in op_facts.USES_INPUTS_AGAIN)
        self._pairs[id(wide)] = wide, tensor
        return wide

    def run(self) -> Any:
        """Return the op's result; what it saves for backward is kept in the low-precision dtype where that loses nothing."""
        op, args, kwargs = self._op, self.args, self.kwargs  # local variables: by them it is known whose handler C code is about to call
        if not self._keeps_for_backward():
            return op(*args, **kwargs)
        keeping = _LowSavedTensors(self._rule, self._low_dtype, self._pairs)
        pack, unpack = keeping.pack, keeping.unpack
        try:  # an interrupt may come after any call
            push_saved_tensors_hooks(pack, unpack)
            return op(*args, **kwargs)
        finally:
            pop_saved_tensors_hooks()
            self._pairs.clear()  # the graph holds the hooks

    def _keeps_for_backward(self) -> bool:
        if not _grad_enabled() or _compiling() or not any(given.requires_grad for _, given in self._pairs.values()):
            return False
        # without the function that names the active hooks (torch 2.7) those of a checkpoint would be passed over
        allowed = saved_tensors_hooks is not None and are_saved_tensors_hooks_allowed()
        return allowed and not dispatch_modes() and in_plain_autograd()


class _LowSavedTensors:
    """The hooks for saved tensors of one call, by which float32 tensors are kept in the low-precision dtype.

    An input, a view of one, and any tensor that rounding does not change are kept so. Hooks that were active before (a checkpoint's, the
    user's) get the low-precision tensors, as from torch's own kernel, and the others as they are.
    """

    __slots__ = ("_around", "_low_dtype", "_pairs", "_rule")

    def __init__(self, rule: OpRule, low_dtype: torch.dtype, pairs: Pairs) -> None:
        self._rule, self._low_dtype, self._pairs = rule, low_dtype, pairs
        self._around = _hooks_around()

    def pack(self, tensor: Tensor) -> _HeldLow:
        """Return what the graph holds instead of the tensor."""
        with without_torch_function() if function_modes() else contextlib.nullcontext():
            low = _in_low(tensor, self._pairs, self._low_dtype)
        kept, source = (tensor, tensor) if low is None else low
        if self._around is not None:
            return _HeldLow(self._around[0](kept), low is not None)
        if low is None:
            kept = source = _detach(tensor)  # an op's result would hold the op's node
        # an input as it is: while the graph holds it, other products find it again
        return _HeldLow(kept, low is not None, source, source._version)

    def unpack(self, held: _HeldLow) -> Tensor:
        """Return the tensor that `pack` was given."""
        with without_torch_function() if function_modes() else contextlib.nullcontext():
            tensor: Tensor = held.kept if self._around is None else self._around[1](held.kept)
            if held.source is not None:
                refuse_written(held.source, held.version, self._rule.op)
            return casting.cast(_detach(tensor), torch.float32) if held.is_low else tensor


class _HeldLow(NamedTuple):
    """What the graph holds instead of a tensor, whether that is to be widened, and the tensor whose version hmp has to look at."""

    kept: Any
    is_low: bool
    source: Tensor | None = None
    version: int = -1


def _hooks_around() -> Any:
    """Return the pack and unpack hooks active around an op, None without any.

    If a function mode or a tensor subclass calls the op again, it is wrapped a second time: the hooks of the first time are skipped.
    """
    assert saved_tensors_hooks is not None
    found = saved_tensors_hooks(True)
    while found is not None and isinstance(first := getattr(found[0], "__self__", None), _LowSavedTensors):
        found = first._around
    return found


def _in_low(tensor: Tensor, pairs: Pairs, low_dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Return the tensor in the low-precision dtype, with the tensor whose writes are to be noticed; None if rounding changes it.

    That is the input that it is, one that it is a view of, or a rounded copy.
    """
    if tensor.dtype is not torch.float32:
        return None
    if (pair := pairs.get(id(tensor))) is not None:
        return pair[1], pair[1]
    if (pair := pairs.get(id(tensor._base))) is not None and pair[1].layout is torch.strided:
        return _view_in_low(tensor, *pair)
    if tensor.layout is not torch.strided or tensor.numel() < _LARGE or not casting.has_values(tensor):
        return None
    exact = _detach(tensor)
    rounded = casting.cast(exact, low_dtype)
    return (rounded, rounded) if _equal(casting.cast(rounded, torch.float32), exact) else None


def _view_in_low(view: Tensor, wide: Tensor, given: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return what `_in_low` does for a view of `wide`, which is `given` in float32."""
    if given.stride() == wide.stride() and casting.has_values(given):
        offset = int(view.storage_offset()) - int(wide.storage_offset()) + int(given.storage_offset())
        return _as_strided(_detach(given), view.shape, view.stride(), offset), given
    # a class may know no as_strided; an expanded view would be made larger
    return (casting.cast(_detach(view), given.dtype), given) if view.numel() <= wide.numel() else None


# --- ops that keep more than their inputs ---------------------------------------------------------------------------------


def _recomputes(rule: OpRule, args: tuple[Any, ...], kwargs: Mapping[str, Any], low_dtype: torch.dtype) -> bool:
    """Return True if the op is to be computed again in backward: it keeps more than its inputs, and they are large enough to pay."""
    if rule.op not in op_facts.KEEPS_MORE_THAN_INPUTS or rule.added or not _grad_enabled() or _compiling() or trace_here() is not None:
        return False
    tensors = list(each_tensor((args, kwargs)))
    if not any(t.requires_grad for t in tensors if t.dtype is low_dtype) or all(t.numel() < _LARGE for t in tensors):
        return False
    if any(t.is_inference() for t in tensors):  # such as a mask: autograd keeps none
        return False
    return not dispatch_modes() and in_plain_autograd() and refusals.may_run_again(tensors)


class _Plan:
    """A call that is made in forward and again in backward, without its tensors, which autograd keeps.

    Random numbers and torch's choice of kernels (torch.nn.attention.sdpa_kernel) are those of forward both times.
    """

    __slots__ = ("_is_used_once", "_leaves", "_low_dtype", "_op", "_places", "_spec", "_state", "_switches")

    def __init__(self, rule: OpRule, op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any], low_dtype: torch.dtype) -> None:
        leaves, self._spec = tree_flatten((args, dict(kwargs)))
        self._op, self._low_dtype, self._is_used_once = op, low_dtype, rule.op not in op_facts.USES_INPUTS_AGAIN
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._state = _random_state() if rule.op in op_facts.RANDOM else None
        self._switches = [is_on() for is_on, _ in kernel_switches]

    def forward(self, tensors: Sequence[Tensor], needed: Sequence[bool]) -> Any:
        """Return the op's result in float32: the one that is computed for training, which of an LSTM has other bits than inference's."""
        own = [_detach(t).requires_grad_(n) for t, n in zip(tensors, needed, strict=True)]
        hides_hooks = saved_tensors_hooks is not None and saved_tensors_hooks(True) is not None
        try:
            if hides_hooks:  # what the op itself keeps is not kept
                push_saved_tensors_hooks(_as_it_is, _as_it_is)
            with torch.enable_grad():
                result = self._called(own)
        finally:
            if hides_hooks:
                pop_saved_tensors_hooks()
        if self._state is not None and _equal(self._state, _random_state()):
            self._state = None  # no numbers were drawn
        return map_tensors(result, _detach)

    def gradients(self, tensors: Sequence[Tensor], of_results: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradients of those of the tensors that are needed; differentiable where the caller makes a graph."""
        makes_graph = _grad_enabled()
        # where a graph is made, nodes of their own: one tensor may be in the call twice, or be computed from another
        own = [(_view_as(t, t) if n else t) if makes_graph else _detach(t).requires_grad_(n) for t, n in zip(tensors, needed, strict=True)]
        no_region = torch.autocast("cpu", enabled=False) if _is_autocast_enabled("cpu") else contextlib.nullcontext()
        with torch.enable_grad(), no_region, self._as_in_forward():
            results = self._called(own)
        pairs = [
            (result, gradient)
            for result, gradient in zip(results if isinstance(results, tuple) else (results,), of_results, strict=True)
            if gradient is not None and result.requires_grad
        ]
        wanted = [i for i, is_needed in enumerate(needed) if is_needed]
        found = _grad(
            [result for result, _ in pairs],
            [own[i] for i in wanted],
            [gradient for _, gradient in pairs],
            create_graph=makes_graph,
            allow_unused=True,
        )
        by_place = dict(zip(wanted, found, strict=True))
        return [by_place.get(i) for i in range(len(own))]

    def _called(self, tensors: Sequence[Tensor]) -> Any:
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = copies.wide(tensor, is_used_once=self._is_used_once) if tensor.dtype is self._low_dtype else tensor
        args, kwargs = tree_unflatten(leaves, self._spec)
        return self._op(*args, **kwargs)

    @contextlib.contextmanager
    def _as_in_forward(self) -> Iterator[None]:
        switches = [is_on() for is_on, _ in kernel_switches]
        with _one_at_a_time if self._state is not None else contextlib.nullcontext():
            before = None if self._state is None else _random_state()
            try:
                if self._state is not None:
                    _set_random_state(self._state)
                _switch(switches, self._switches)
                yield
            finally:
                _switch(self._switches, switches)
                if before is not None:
                    _set_random_state(before)


class _Recomputed(torch.autograd.Function):
    """A call that keeps its inputs for backward, in the low-precision dtype, and makes the rest again."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: Tensor) -> Any:
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return plan.forward(tensors, ctx.needs_input_grad[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.plan.gradients(ctx.saved_tensors, gradients, ctx.needs_input_grad[1:])


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _switch(before: list[bool], wanted: list[bool]) -> None:
    """Have torch choose among kernels by these switches: sdpa_kernel() and the like may have been active in forward alone."""
    for was, is_on, (_, put) in zip(before, wanted, kernel_switches, strict=True):
        if was != is_on:
            put(is_on)


def _log(low_dtype: torch.dtype) -> None:
    """Say once in a process that products compute in float32, and how to have torch's kernels."""
    _logged.add(low_dtype)
    if should_log():
        log.info(
            "matrix multiplications, convolutions and recurrent ops in %s compute in float32 on the CPU, on rounded inputs: %s; "
            "to use torch's kernels set HMP_LOW_KERNELS=native or call hmp.set_low_kernels('native') (see rule R11)",
            str(low_dtype).removeprefix("torch."), low_kernels.why(low_dtype),
        )  # fmt: skip
