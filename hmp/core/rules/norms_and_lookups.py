"""Wrappers of ops of which not all inputs may be cast: statistics of norms and tables of look-ups are state (R2, R9).

`BUILDERS` has the function that makes the wrapper, by op id. Each takes (op, rule, caster).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .. import casting
from ..casting import Caster, Tensor, castable, deliver
from ..ops import table
from ..torch_private import ATTENTION_BIASES, is_functorchs
from . import refusals
from .op_rule import Op, OpRule, chooser, torchs_name

# torch's own, taken before anything is patched
_renorm_ = torch.embedding_renorm_
_ones_like = torch.ones_like
_detach = torch.Tensor.detach
_reshape = torch.reshape
_PLAIN = frozenset({Tensor})


def _bind(order: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by parameter name."""
    return {**dict(zip(order, args, strict=False)), **kwargs}


def _left_to_torch(values: dict[str, Any]) -> bool:
    return any(isinstance(v, Tensor) and casting.left_to_torch(v) for v in values.values())


def norm(op: Op, rule: OpRule, caster: Caster) -> Op:
    """Return a norm whose input is cast (R9).

    Weight and bias stay float32 where torch has a kernel for that; statistics are updated in place.
    """
    order, choose = rule.facts.order, chooser(rule)
    weight_at, bias_at = order.index("weight"), order.index("bias")
    others_at = tuple(order.index(n) for n in ("weight", "bias", "running_mean", "running_var") if n in order)
    call = _in_one_dtype(op, rule)
    general = refusals.or_uncast(_any_norm(op, rule, caster), op)
    last_at = max(others_at)
    is_usual, is_unlisted = order[0] == "input", not rule.kind.is_list

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not kwargs and is_usual and len(args) > last_at and type(x := args[0]) is Tensor and x.dtype in casting.CASTABLE:
            # the common call: everything but the input is float32, or in the input's dtype, or absent
            tensors: list[Tensor] = [x]
            given = torch.float32
            for i in others_at:
                other = args[i]
                if other is None:
                    continue
                if isinstance(other, Tensor) and other.dtype is x.dtype and len(tensors) == 1:
                    given = x.dtype
                if not isinstance(other, Tensor) or other.dtype is not given:
                    return general(*args, **kwargs)
                tensors.append(other)
            if args[bias_at] is None or args[weight_at] is not None:
                dtype = x.dtype if is_unlisted else choose(tensors)
                if dtype is x.dtype and (given is dtype or (x.is_cpu and not is_functorchs(x) and not x.is_nested)):
                    return op(*args)
                if given is torch.float32 and (dtype is given or (x.device.type not in table.MIXED_NORM_KERNELS and not x.is_nested)):
                    return call(dtype, x if x.dtype is dtype else caster(x, dtype), *args[1:])
        return general(*args, **kwargs)

    return wrapper


def _in_one_dtype(op: Op, rule: OpRule) -> Callable[..., Any]:
    """Return a function that calls a norm whose input was cast to `dtype`, with the result in that dtype.

    Under vmap torch takes norms apart. With float32 weights the parts then refuse a low input, or promote it.
    """
    is_listed = rule.kind.is_list

    def call(dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
        try:
            result = op(*args, **kwargs)
        except RuntimeError as error:
            if not refusals.is_dtype_refusal(error) or not any(map(is_functorchs, casting.each_tensor((args, kwargs)))):
                raise
            result = op(*casting.cast_within(args, torch.float32, casting.cast), **kwargs)
        is_wide = type(result) is Tensor and result.dtype is not dtype and is_listed
        return casting.cast(result, dtype) if is_wide and is_functorchs(result) else result

    return call


def _any_norm(op: Op, rule: OpRule, caster: Caster) -> Op:
    """Any call of a norm (R9).

    torch's kernels take weight, bias and statistics in one dtype: the input's, or float32. Others are cast for the call, and the new
    statistics are written back into the tensors that were passed.
    """
    order, choose, call = rule.facts.order, chooser(rule), _in_one_dtype(op, rule)
    stats_at = order.index("running_mean") if "running_mean" in order else None
    widens = {device for device, norms in table.WIDENING_NORMS.items() if not rule.kind.is_list and rule.op in norms}
    without_stats = tuple(n for n in order if not n.startswith("running_"))

    def general(*args: Any, **kwargs: Any) -> Any:
        kwargs = {torchs_name(name, order): value for name, value in kwargs.items()}
        # a bool at the position of the statistics: the overload without them
        names = without_stats if stats_at is not None and stats_at < len(args) and isinstance(args[stats_at], bool) else order
        values = _bind(names, args, kwargs)
        x: Any = values.get("input")
        if not castable(x) or _left_to_torch(values) or x.device.type in widens:
            return op(*args, **kwargs)
        affine = {n: values[n] for n in ("weight", "bias") if castable(values.get(n))}
        stats = {n: values[n] for n in ("running_mean", "running_var") if castable(values.get(n))}
        dtype = choose([x, *affine.values(), *stats.values()])
        dtypes = {t.dtype for t in (*affine.values(), *stats.values())}
        out = values.pop("out", None)
        if out is not None and torch.is_grad_enabled() and any(t.requires_grad for t in casting.each_tensor((args, kwargs))):
            return op(*args, **kwargs)  # torch's own error: out= takes no part in autograd
        if dtypes <= {dtype} and x.dtype is dtype and (out is None or not rule.kind.is_list):
            return op(*args, **kwargs)
        kwargs.pop("out", None)
        copies = stats
        if dtypes and dtypes != {dtype}:
            mixed_kernel = rule.op in table.MIXED_NORM_KERNELS.get(x.device.type, table.NORMS) and not (
                x.is_nested and x.layout is torch.strided
            )
            wanted = torch.float32 if mixed_kernel or stats else dtype
            affine = {n: caster(t, wanted) for n, t in _with_weight(affine, values).items()}
            copies = {n: caster(t, wanted) for n, t in stats.items()}
        values |= affine | copies | {"input": caster(x, dtype) if x.dtype is not dtype else x}
        result = _call_with(functools.partial(call, dtype), names, args, kwargs, values)
        if copies is not stats and _updates_statistics(names, values):
            _write_back(copies, stats)
        return result if out is None else deliver(result, out)

    return general


def _with_weight(affine: dict[str, Tensor], values: dict[str, Any]) -> dict[str, Tensor]:
    """Return `affine`, with a weight of ones where it has only a bias.

    torch has no kernel for a bias alone in another dtype than the input.
    """
    if "bias" in affine and "weight" not in affine and "weight" in values:
        return {**affine, "weight": _ones_like(affine["bias"])}
    return affine


def _write_back(copies: dict[str, Tensor], stats: dict[str, Tensor]) -> None:
    """Write `copies`, which a norm has updated, into the running statistics that they were cast from (R9)."""
    with torch.no_grad():
        for n, copy in copies.items():
            if copy is not stats[n]:
                stats[n].copy_(copy)


def _updates_statistics(order: tuple[str, ...], values: dict[str, Any]) -> bool:
    """Return True if the call updates running statistics; the defaults are torch's."""
    if "training" in order:
        return bool(values.get("training"))
    return bool(values.get("use_input_stats", True))


def embedding(op: Op, rule: OpRule, caster: Caster) -> Op:
    """Return the wrapper of a look-up: its result is cast and not its table (R2), and `max_norm=` renormalises the real table (R9)."""
    choose = chooser(rule)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = op(*args, **kwargs)
        if not castable(result):
            return result
        dtype = choose([result])
        return result if result.dtype is dtype else cast_or_keep(result, dtype)

    cast_or_keep = refusals.or_uncast(caster, lambda result, dtype: result)
    return wrapper


def embedding_bag(op: Op, rule: OpRule, caster: Caster) -> Op:
    """Return the wrapper of sums of looked-up rows, of a cast table (R1, R2). `max_norm=` renormalises the real table first (R9)."""
    order, choose = rule.facts.order, chooser(rule)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        values = _bind(order, args, kwargs)
        weight, scale = values.get("weight"), values.get("per_sample_weights")
        summed = list(casting.each_castable((weight, scale)))
        if not castable(weight) or _left_to_torch(values):
            return op(*args, **kwargs)
        dtype = choose(summed)
        if all(t.dtype is dtype for t in summed):
            return op(*args, **kwargs)
        if values.get("sparse"):
            # a sparse gradient does not pass through a cast of the table: the sums are cast instead
            if castable(scale):
                values["per_sample_weights"] = caster(scale, weight.dtype)
            result = _call_with(op, order, args, kwargs, values)
            return casting.cast_within(result, dtype, caster)  # torch.embedding_bag returns indices, too
        if values.get("max_norm") is not None:
            indices = values["input"] if "input" in values and values["input"] is not weight else values["indices"]
            with torch.no_grad():
                _renorm_(_detach(weight), _reshape(indices, (-1,)), values["max_norm"], values.get("norm_type", 2.0))
            values["max_norm"] = None
        values["weight"] = caster(weight, dtype)
        if castable(scale):
            values["per_sample_weights"] = caster(scale, dtype)
        return _call_with(op, order, args, kwargs, values)

    return refusals.or_uncast(wrapper, op)


def attention(op: Op, rule: OpRule, caster: Caster) -> Op:
    """Attention with query, key and value cast (R1, R2, R7), and the mask in the dtype of query, its finite values staying finite (R12)."""
    order, choose, listed = rule.facts.order, chooser(rule), rule.dtype

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 3 and _PLAIN.issuperset(map(type, args)) and kwargs.get("attn_mask") is None:
            dtype = args[0].dtype if listed is None else listed
            if args[0].dtype is dtype and args[1].dtype is dtype and args[2].dtype is dtype:
                return op(*args, **kwargs)
            if listed is not None and all(a.dtype in casting.CASTABLE and a.layout is torch.strided for a in args):
                return op(*(a if a.dtype is dtype else caster(a, dtype) for a in args), **kwargs)
        values = _bind(order, args, kwargs)
        mask = values.get("attn_mask")
        if type(mask).__module__ == ATTENTION_BIASES:
            mask = None
        projected = {n: values[n] for n in ("query", "key", "value") if castable(values.get(n))}
        if not projected or _left_to_torch({**values, "attn_mask": mask}):
            return op(*args, **kwargs)
        dtype = choose(list(projected.values()))
        for n, tensor in projected.items():
            if tensor.dtype is not dtype:
                values[n] = caster(tensor, dtype)
        if castable(mask) and mask.dtype is not dtype:
            values["attn_mask"] = caster(casting.within(mask, dtype), dtype)
        return _call_with(op, order, args, kwargs, values)

    return refusals.or_uncast(wrapper, op)


def _call_with(op: Op, order: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any], values: dict[str, Any]) -> Any:
    """Return what `op` returns with `values` as its arguments; a positional argument stays positional."""
    return op(*(values[n] for n in order[: len(args)]), **{n: values[n] for n in kwargs})


BUILDERS: dict[str, Callable[[Op, OpRule, Caster], Op]] = {
    **dict.fromkeys(table.NORMS, norm),
    "scaled_dot_product_attention": attention,
    "flex_attention": attention,
    "embedding": embedding,
    "embedding_bag": embedding_bag,
}
