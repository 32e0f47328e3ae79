"""Ops that a cast of all inputs would damage: norms keep their statistics, look-ups their table (R2, R9).

Each builder takes (op, op's id, parameter names in order, the rule's choice of a dtype for castable tensors, caster).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..casting import Caster, Tensor, castable, deliver, tensor_casts
from ..ops import op_facts
from . import refusals
from .op_rule import Choose, Op

# torch's own, taken before anything is patched
_renorm_ = torch.embedding_renorm_
_ones_like = torch.ones_like
_detach = torch.Tensor.detach
_reshape = torch.reshape
_PLAIN_STATE = frozenset({torch.float32})


def _bind(order: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call's arguments by name."""
    return {**dict(zip(order, args, strict=False)), **kwargs}


def _left_to_torch(values: dict[str, Any]) -> bool:
    return any(isinstance(v, Tensor) and v.dtype in tensor_casts.LEFT_TO_TORCH for v in values.values())


def norm(op: Op, name: str, order: tuple[str, ...], choose: Choose, caster: Caster) -> Op:
    """R9: the input is cast. Weight and bias stay float32 where torch has a mixed kernel; running statistics are updated in place."""
    weight_at, bias_at = order.index("weight"), order.index("bias")
    affine_at = tuple(order.index(n) for n in ("weight", "bias", "running_mean", "running_var") if n in order)
    served = refusals.served(_any_norm(op, name, order, choose, caster), op)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not kwargs and type(args[0]) is Tensor and args[0].dtype in tensor_casts.CASTABLE and order[0] == "input":
            # the common call: everything but the input is float32 or absent
            x = args[0]
            given = [args[i] for i in affine_at if i < len(args) and args[i] is not None]
            held = {getattr(t, "dtype", None) for t in given}
            bias_alone = bias_at < len(args) and args[bias_at] is not None and args[weight_at] is None
            if held <= _PLAIN_STATE and not bias_alone:
                dtype = choose([x, *given])
                if dtype is torch.float32 or x.device.type not in op_facts.MIXED_NORM_KERNELS:
                    return op(x if x.dtype is dtype else caster(x, dtype), *args[1:])
        return served(*args, **kwargs)

    return wrapper


def _any_norm(op: Op, name: str, order: tuple[str, ...], choose: Choose, caster: Caster) -> Op:
    """R9 for any call of a norm.

    torch's kernels want weight, bias and statistics in one dtype: the input's, or float32. What does not fit is cast for
    the call, statistics with the result written back.
    """
    stats_at = order.index("running_mean") if "running_mean" in order else None
    without_stats = tuple(n for n in order if not n.startswith("running_"))

    def general(*args: Any, **kwargs: Any) -> Any:
        # a flag in the place of the statistics: the overload without them
        names = without_stats if stats_at is not None and stats_at < len(args) and isinstance(args[stats_at], bool) else order
        values = _bind(names, args, kwargs)
        x: Any = values.get("input")
        if not castable(x) or _left_to_torch(values):
            return op(*args, **kwargs)
        affine = {n: values[n] for n in ("weight", "bias") if castable(values.get(n))}
        stats = {n: values[n] for n in ("running_mean", "running_var") if castable(values.get(n))}
        dtype = choose([x, *affine.values(), *stats.values()])
        held = {t.dtype for t in (*affine.values(), *stats.values())}
        if held <= {dtype} and x.dtype is dtype:
            return op(*args, **kwargs)
        out = values.pop("out", None)
        kwargs.pop("out", None)
        copies = stats
        if held and held != {dtype}:
            mixed_kernel = name in op_facts.MIXED_NORM_KERNELS.get(x.device.type, op_facts.NORMS)
            wanted = torch.float32 if mixed_kernel or stats else dtype
            affine = {n: caster(t, wanted) for n, t in _with_weight(affine, values).items()}
            copies = {n: tensor_casts.cast(t, wanted) for n, t in stats.items()}
        values |= affine | copies | {"input": caster(x, dtype) if x.dtype is not dtype else x}
        result = _again(op, names, args, kwargs, values)
        if copies is not stats and _trains(names, values):
            _write_back(copies, stats)
        return result if out is None else deliver(result, out)

    return general


def _with_weight(affine: dict[str, Tensor], values: dict[str, Any]) -> dict[str, Tensor]:
    """`affine`, with a weight of ones beside a bias alone, for which torch has no mixed kernel."""
    if "bias" in affine and "weight" not in affine and "weight" in values:
        return {**affine, "weight": _ones_like(affine["bias"])}
    return affine


def _write_back(copies: dict[str, Tensor], stats: dict[str, Tensor]) -> None:
    """R9: what an op has made of copies of running statistics arrives in the statistics themselves."""
    with torch.no_grad():
        for n, copy in copies.items():
            if copy is not stats[n]:
                stats[n].copy_(copy)


def _trains(order: tuple[str, ...], values: dict[str, Any]) -> bool:
    """Whether the norm moves its running statistics; the defaults are torch's."""
    if "training" in order:
        return bool(values.get("training", False))
    return bool(values.get("use_input_stats", True))


def embedding(op: Op, name: str, order: tuple[str, ...], choose: Choose, caster: Caster) -> Op:
    """R2: of a look-up the result is cast, not the table. The values are the same, and `max_norm=` renormalises the real table (R9)."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = op(*args, **kwargs)
        if not castable(result):
            return result
        dtype = choose([result])
        return result if result.dtype is dtype else served(result, dtype)

    served = refusals.served(caster, lambda result, dtype: result)
    return wrapper


def embedding_bag(op: Op, name: str, order: tuple[str, ...], choose: Choose, caster: Caster) -> Op:
    """R1, R2: for sums of looked-up rows weight and per_sample_weights are cast; `max_norm=` renormalises the real table first (R9)."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        values = _bind(order, args, kwargs)
        weight, scale = values.get("weight"), values.get("per_sample_weights")
        summed = list(tensor_casts.each_castable((weight, scale)))
        if not castable(weight) or _left_to_torch(values):
            return op(*args, **kwargs)
        dtype = choose(summed)
        if all(t.dtype is dtype for t in summed):
            return op(*args, **kwargs)
        if values.get("sparse"):
            # a sparse gradient does not pass through a cast of the table: cast the sums
            if castable(scale):
                values["per_sample_weights"] = caster(scale, weight.dtype)
            result = _again(op, order, args, kwargs, values)
            return caster(result, dtype) if castable(result) else result
        if values.get("max_norm") is not None:
            indices = values["input"] if "input" in values and values["input"] is not weight else values["indices"]
            with torch.no_grad():
                _renorm_(_detach(weight), _reshape(indices, (-1,)), values["max_norm"], values.get("norm_type", 2.0))
            values["max_norm"] = None
        values["weight"] = caster(weight, dtype)
        if castable(scale):
            values["per_sample_weights"] = caster(scale, dtype)
        return _again(op, order, args, kwargs, values)

    return refusals.served(wrapper, op)


def attention(op: Op, name: str, order: tuple[str, ...], choose: Choose, caster: Caster) -> Op:
    """R1, R2, R7: query, key and value are cast, and a mask to the dtype of query, finite values staying finite (R12)."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        values = _bind(order, args, kwargs)
        projected = {n: values[n] for n in ("query", "key", "value") if castable(values.get(n))}
        if not projected or _left_to_torch(values):
            return op(*args, **kwargs)
        dtype = choose(list(projected.values()))
        for n, tensor in projected.items():
            if tensor.dtype is not dtype:
                values[n] = caster(tensor, dtype)
        mask = values.get("attn_mask")
        if castable(mask) and mask.dtype is not dtype:
            values["attn_mask"] = caster(tensor_casts.within(mask, dtype), dtype)
        return _again(op, order, args, kwargs, values)

    return refusals.served(wrapper, op)


def _again(op: Op, order: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any], values: dict[str, Any]) -> Any:
    """The call with `values` in place of its arguments, positional ones staying positional."""
    return op(*(values[n] for n in order[: len(args)]), **{n: values[n] for n in kwargs})


BUILDERS: dict[str, Callable[[Op, str, tuple[str, ...], Choose, Caster], Op]] = {
    **dict.fromkeys(op_facts.NORMS, norm),
    "scaled_dot_product_attention": attention,
    "embedding": embedding,
    "embedding_bag": embedding_bag,
}
