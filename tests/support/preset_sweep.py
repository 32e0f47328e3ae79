"""The calls of op_db by which a preset is compared with torch.autocast: every spelling of every op, in four mixtures of dtypes."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from ops import op_db, title
from oracle import F32, flat

RELEASE = ".".join(torch.__version__.split(".")[:2])
MIXTURES = ("fp32", "low", "first fp32", "first low")
Sample = tuple[tuple[Any, ...], dict[str, Any]]


def spellings(info: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The ways to call the op, each looked up where it stands when it is called, as a program does; out= is left out (R6)."""
    yield "function", _late(torch, info.name, info.op)
    base = info.name.rpartition(".")[2]
    for what, name, found in (("method", base, info.method_variant), ("in place", base + "_", info.inplace_variant)):
        if found is not None:
            yield what, _late(torch.Tensor, name, found)
    for what, found in (("operator", info.operator_variant), ("operator in place", info.inplace_operator_variant)):
        if found is not None:
            yield what, found
    for alias in info.aliases:
        if alias.op is not None:
            yield alias.name, _late(torch, alias.name, alias.op)
    if info.name == "div" and not info.variant_test_name.endswith("rounding"):
        yield "operator", operator.truediv


def _late(owner: Any, path: str, found: Callable[..., Any]) -> Callable[..., Any]:
    *owners, name = path.removeprefix("torch.").split(".")
    for part in owners:
        owner = getattr(owner, part, None)
    if getattr(owner, name, None) != found:
        return found  # Python code of op_db's own, which looks torch's functions up when it is called
    return lambda *args, **kwargs: getattr(owner, name)(*args, **kwargs)


def samples(info: Any, *, first: int | None = None, most: int = 64) -> list[Sample]:
    """The first of op_db's samples, or, of all of them, at most so many, evenly chosen."""
    torch.default_generator.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    # not info.sample_inputs, which looks at the whole call stack for each op: that takes long under pytest
    drawn = info.sample_inputs_func(info, "cpu", F32, False)
    found = [((s.input, *s.args), s.kwargs) for s in itertools.islice(drawn, first)]
    return [found[i * len(found) // most] for i in range(most)] if len(found) > most else found


def cases(infos: Iterable[Any], *, first: int | None = None, most: int = 64) -> Iterator[tuple[str, str, Callable[..., Any], Sample, str]]:
    """Every call: the op, the case in words, what is called, with what, in which mixture. To be begun while nothing of torch is patched."""
    calls = [(info, list(spellings(info))) for info in infos]  # an op of op_db is found where it stands by comparison
    for info, spelled_calls in calls:
        chosen = samples(info, first=first, most=most)
        for (spelled, call), (number, sample), mixture in itertools.product(spelled_calls, enumerate(chosen), MIXTURES):
            yield title(info), f"{title(info)}, {spelled}, sample {number}, {mixture}", call, sample, mixture


def copied(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.detach().clone().to(dtype)


def mixed(
    sample: Sample, mixture: str, low: torch.dtype, make: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = copied
) -> Sample | None:
    """The arguments anew, their float32 tensors in the dtypes of the mixture; None where there are too few for it."""
    count = 0

    def fresh(value: Any) -> Any:
        nonlocal count
        if not isinstance(value, torch.Tensor) or value.dtype is not F32:
            return make(value, value.dtype) if isinstance(value, torch.Tensor) else value
        count += 1
        wide = {"fp32": True, "low": False, "first fp32": count == 1, "first low": count > 1}[mixture]
        return make(value, F32 if wide else low)

    made = tree_map(fresh, sample)
    return made if count >= {"fp32": 0, "low": 1}.get(mixture, 2) else None


def outcome(call: Callable[..., Any], arguments: Sample, region: AbstractContextManager[Any]) -> list[Any] | Exception:
    """What the call returns in the region, flat, or what it raises."""
    args, kwargs = arguments
    torch.default_generator.manual_seed(7)  # random ops draw the same numbers in both runs; torch.manual_seed is slow under pytest
    with region:
        try:
            return flat(call(*args, **kwargs))
        except Exception as error:
            return error


def shard(number: int, count: int) -> list[Any]:
    """Every count-th op of op_db that takes float32."""
    return [info for info in op_db() if F32 in info.supported_dtypes("cpu")][number::count]
