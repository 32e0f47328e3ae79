"""The calls of the sweep: for each OpInfo of torch a few sample inputs, and every way in which the op can be called with them."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import random
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy
import torch

from oracle import BF16, F32, F64, castable, tensors
from sweep_exceptions import OUT_OF_REACH


@functools.cache
def op_db() -> tuple[Any, ...]:
    """torch's own table of its ops. To import it takes seconds: nothing does so while tests are collected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db as entries
    return tuple(entries)


# The first so many samples of an op are looked at.
LOOKED_AT = 100

# What op_db calls around these ops is left out (a product, a clone): the op alone is swept.
_ALONE: dict[tuple[str, str], Callable[..., Any]] = {
    ("svd_lowrank", ""): lambda a, b, **kwargs: _seeded(torch.svd_lowrank, a, **kwargs),
    ("pca_lowrank", ""): lambda a, b, **kwargs: _seeded(torch.pca_lowrank, a, **kwargs),
    ("linalg.pinv", "singular"): lambda a, b: torch.linalg.pinv(a),
    ("zero_", ""): lambda x: torch.Tensor.zero_(x),
    ("resize_", ""): lambda x, *args: torch.Tensor.resize_(x, *args),
    ("resize_as_", ""): lambda x, other: torch.Tensor.resize_as_(x, other),
    ("rand_like", ""): lambda x, **kwargs: _seeded(torch.rand_like, x, **kwargs),  # op_db calls randn_like
}
_OF_A_PRODUCT = frozenset({"svd_lowrank", "pca_lowrank", "linalg.pinv"})
# Functions of op_db that write into their argument, and the op behind each.
_WRITERS = {name: name + "_" for name in "cauchy exponential geometric log_normal uniform".split()} | {"normal/in_place": "normal_"}

# Operators that op_db does not have under the op: (how it is called, the op's name, the call).
_OPERATORS: dict[str, tuple[tuple[str, str, Callable[..., Any]], ...]] = {
    "div/no_rounding_mode": (
        ("operator", "truediv", operator.truediv),
        ("operator __rtruediv__", "rtruediv", lambda x, y: torch.Tensor.__rtruediv__(x, y)),
        ("in-place operator", "itruediv", operator.itruediv),
    ),
    "floor_divide": (
        ("operator", "floordiv", operator.floordiv),
        ("operator __rfloordiv__", "rfloordiv", lambda x, y: torch.Tensor.__rfloordiv__(x, y)),
        ("in-place operator", "ifloordiv", operator.ifloordiv),
    ),
}


def _seeded(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    seed()
    return call(*args, **kwargs)


def seed() -> None:
    """Seeds the generators that samples and CPU ops draw from. torch.manual_seed asks every kind of device, which takes 3 ms."""
    random.seed(0)
    numpy.random.seed(0)
    torch.default_generator.manual_seed(0)


@dataclass(frozen=True)
class Sample:
    """One set of arguments in the dtypes that op_db gives: float32 wherever it can."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finish: Callable[[Any], Any]  # what op_db does to a result before it takes the gradient: SVD's sign, for one

    @property
    def tree(self) -> Any:
        return [self.args, self.kwargs]


@dataclass(frozen=True)
class Call:
    """One way to call an op. `name` is the op as lists spell it, None where none does."""

    op: str
    variant: str
    name: str | None
    function: Callable[..., Any]
    differentiable: bool = False
    reachable: bool = True
    samples: tuple[Sample, ...] = field(default=(), repr=False)

    @property
    def in_place(self) -> bool:
        return self.variant.startswith("in-place")

    @property
    def out(self) -> bool:
        return self.variant == "out"


def title(info: Any) -> str:
    """The name of an OpInfo, its variant's behind a slash."""
    return info.name + ("/" + info.variant_test_name if info.variant_test_name else "")


def list_name(path: str) -> str:
    """The name by which a list knows what op_db calls so: `linear` for nn.functional.linear, `rtruediv` for `__rdiv__`."""
    name = path.removeprefix("torch.").removeprefix("nn.functional.")
    if name.startswith("__"):
        return {"rdiv": "rtruediv"}.get(name.strip("_"), name.strip("_"))
    return name


# --- samples ----------------------------------------------------------------------------------------------------------------


def samples(info: Any) -> list[Sample]:
    """Sets of arguments, those that say most first: many castable tensors, other keywords, 0-dim tensors, then the rest."""
    seed()
    # op_db says nothing of the CPU for a few ops
    dtype = next((d for d in (F32, torch.complex64, torch.int64) if d in info.dtypes), F32)
    grad = bool(info.supports_autograd) and dtype is not torch.int64
    # op_db looks for the test that asks on the stack, at some cost, and seeds before each sample by its name
    from torch.testing._internal import common_utils

    quick = mock.patch.multiple(common_utils, set_rng_seed=lambda _: seed(), extract_test_fn=lambda: None)
    with warnings.catch_warnings(), quick:
        warnings.simplefilter("ignore")
        given = itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=grad), LOOKED_AT)
        found = [Sample((s.input, *s.args), dict(s.kwargs), s.output_process_fn_grad) for s in given]
    if info.name in _OF_A_PRODUCT and (info.name, info.variant_test_name) in _ALONE:
        products = [(s.args[0] @ s.args[1].mT).detach().requires_grad_(grad) for s in found]
        found = [replace(s, args=(product, *s.args[1:])) for s, product in zip(found, products, strict=True)]
    if info.name.endswith(("batch_norm", "instance_norm")):
        found = [s for s in found if not _idle(s)]
    found.sort(key=_weight, reverse=True)
    chosen: list[Sample] = found[:1]
    seen = {_kind(s) for s in chosen}
    for news in (lambda s: s.kwargs.keys() != found[0].kwargs.keys(), lambda s: any(not t.dim() for t in castable(s.tree)), lambda s: True):
        for sample in sorted(filter(news, found), key=lambda s: len(s.kwargs), reverse=True):
            if _kind(sample) not in seen:
                chosen.append(sample)
                seen.add(_kind(sample))
    ids = set(map(id, chosen))
    return chosen + [s for s in found if id(s) not in ids]


def _idle(sample: Sample) -> bool:
    """Whether nobody can see that a norm writes its statistics: momentum 0, or nothing in them."""
    momenta = [a for a in (*sample.args, sample.kwargs.get("momentum")) if type(a) is float]
    return 0.0 in momenta or not all(t.numel() for t in tensors(sample.tree))


def _weight(sample: Sample) -> tuple[Any, ...]:
    floats = castable(sample.tree)
    elements = [t.numel() for t in tensors(sample.tree)] or [a for a in sample.args if type(a) is int]
    return all(elements) and all(t.dim() for t in floats), len(floats), sum(elements) < 5000


def _kind(sample: Sample) -> Any:
    """What two samples have in common that say much the same."""
    types_ = tuple((type(a), a.dim() if isinstance(a, torch.Tensor) else 0) for a in sample.args)
    return types_, frozenset(sample.kwargs)


def _float32(sample: Sample) -> list[torch.Tensor]:
    return list({id(t): t for t in castable(sample.tree)}.values())


def mixtures(sample: Sample, *, float64: bool) -> Iterator[tuple[str, tuple[torch.dtype, ...]]]:
    """The dtypes that the sample's float32 tensors are given, by the mixture's name."""
    count = len(_float32(sample))
    yield "fp32", (F32,) * count
    if count:
        yield "bf16", (BF16,) * count
    if count > 1:
        yield "first fp32", (F32, *(BF16,) * (count - 1))
        yield "first bf16", (BF16, *(F32,) * (count - 1))
    if count and float64:
        yield "first fp64", (F64, *(F32,) * (count - 1))


def given(sample: Sample, dtypes: tuple[torch.dtype, ...], *, grad: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A fresh copy of the arguments, the float32 tensors in `dtypes`; leaves, which require grad where the sample's do."""
    wanted = {id(t): dtype for t, dtype in zip(_float32(sample), dtypes, strict=True)}
    made: dict[int, torch.Tensor] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in made:
                fresh = value.detach().clone().to(wanted.get(id(value), value.dtype))
                made[id(value)] = fresh.requires_grad_(grad and value.requires_grad)
            return made[id(value)]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(copied, value))
        if isinstance(value, (list, tuple)):
            return type(value)(map(copied, value))
        return {key: copied(item) for key, item in value.items()} if isinstance(value, dict) else value

    return copied(sample.args), copied(sample.kwargs)


# --- calls ------------------------------------------------------------------------------------------------------------------
# Functions are looked up when they are called, as a program does: hmp replaces what stands at the name.


def _at(path: str) -> Any:
    owner: Any = torch
    for name in path.removeprefix("torch.").split("."):
        owner = getattr(owner, name, None)
    return owner


def _function(path: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: _at(path)(*args, **kwargs)


def _method(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self, name)(*args, **kwargs)


def calls(info: Any) -> Iterator[Call]:
    """Every way to call the op: as a function, with keywords, as a method, an operator, in place, with out=, under its aliases."""
    op, alone = title(info), _ALONE.get((info.name, info.variant_test_name))
    reach = info.name not in OUT_OF_REACH and not info.name.startswith("torch.ops.")
    name = list_name(info.name) if reach else None
    grad = bool(info.supports_autograd) and F32 in info.supported_backward_dtypes("cpu")
    function = alone or (_function(info.name) if _at(info.name) is info.op else info.op)
    if info.name.startswith("__"):
        function = lambda self, *args: getattr(torch.Tensor, info.name)(self, *args)  # noqa: E731
    writer = _WRITERS.get(op) or _WRITERS.get(info.name) or (info.name if info.name.endswith("_") and name == info.name else None)
    if writer:
        yield Call(op, "in-place", writer, function, grad)
        return
    yield Call(op, "function", name, function, grad, reach)
    if alone is not None or not reach:
        if info.supports_out and alone is None:
            yield Call(op, "out", name, function, grad, reach)
        return
    if info.supports_out:
        yield Call(op, "out", name, function, grad)
    if _at(info.name) is info.op and not isinstance(info.op, type):
        for number, names in enumerate(_keywords(info.name, info.op)):
            yield Call(op, f"keywords {number}" if number else "keywords", name, _by_keywords(function, names), grad)
    if info.method_variant is not None and hasattr(torch.Tensor, info.name) and not info.name.startswith("__"):
        yield Call(op, "method", name, _method(info.name), grad)
    if info.operator_variant is not None and not info.name.startswith("__"):
        yield Call(op, "operator", info.operator_variant.__name__.strip("_"), info.operator_variant, grad)
    in_place_grad = grad and bool(info.supports_inplace_autograd)
    if info.inplace_variant is not None:
        yield from _in_place(info, op, in_place_grad)
    if info.inplace_operator_variant is not None:
        yield Call(op, "in-place operator", info.inplace_operator_variant.__name__, info.inplace_operator_variant, in_place_grad)
    for variant, spelled, call in _OPERATORS.get(op, ()):
        yield Call(op, variant, spelled, call, grad and not variant.startswith("in-place"))
    for alias in info.aliases:
        path = alias.name.removeprefix("torch.")
        if callable(_at(path)):
            yield Call(op, f"alias {path}", list_name(path), _function(path), grad)
        if hasattr(torch.Tensor, path):
            yield Call(op, f"alias method {path}", list_name(path), _method(path), grad)
        if hasattr(torch.Tensor, path + "_") and info.inplace_variant is not None:
            yield Call(op, f"in-place alias {path}", path + "_", _method(path + "_"), in_place_grad)


def _in_place(info: Any, op: str, grad: bool) -> Iterator[Call]:
    last = info.name.rpartition(".")[2]
    if getattr(torch.Tensor, info.name + "_", None) is info.inplace_variant:
        yield Call(op, "in-place", last + "_", _method(info.name + "_"), grad)
        if callable(_at(info.name + "_")):
            yield Call(op, "in-place function", last + "_", _function(info.name + "_"), grad)
    else:
        yield Call(op, "in-place", last + "_", info.inplace_variant, grad)


def _keywords(path: str, function: Any) -> list[tuple[str, ...]]:
    """The names of the positional parameters, for each overload of the function."""
    if isinstance(function, types.FunctionType):
        parameters = inspect.signature(function).parameters.values()
        return [tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)]
    schemas = torch._C._jit_get_schemas_for_operator("aten::" + path.removeprefix("nn.functional.").replace(".", "_"))
    found = (tuple("input" if a.name == "self" else a.name for a in s.arguments if not a.kwarg_only) for s in schemas)
    # linalg's functions call it A, sparse's and others' keep what the schema says: torch tells which it takes
    return sorted({names for names in found if names}, key=lambda names: (-len(names), names))[:6]


def _by_keywords(function: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > len(names):
            raise TypeError("more arguments than names")
        return function(**dict(reversed(list(zip(names, args, strict=False)))), **kwargs)

    return call
