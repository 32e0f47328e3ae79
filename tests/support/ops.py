"""The one table of ops: sample inputs for each OpInfo of torch, every way to call the op with them, and what op_db lacks."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import random
import re
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
from torch.utils._pytree import tree_map

from oracle import BF16, F32, F64, castable, tensors
from strategies import Leaf, Tagged
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


Kinds = tuple[str, ...]
KINDS = ("plain", "parameter", "subclass", "transposed", "strided")


def of_kind(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """The same values as a Parameter, in a subclass, or laid out in another way."""
    if kind == "parameter" and tensor.is_floating_point():
        return torch.nn.Parameter(tensor, requires_grad=False)
    if tensor.layout is not torch.strided:
        return tensor
    if kind == "subclass":
        return tensor.as_subclass(Tagged)
    if not tensor.dim():
        return tensor
    if kind == "transposed" and tensor.dim() > 1:
        return tensor.mT.contiguous().mT.detach()
    return torch.stack([tensor, tensor], -1)[..., 0].detach() if kind == "strided" else tensor


def _float32(sample: Sample) -> list[torch.Tensor]:
    return list({id(t): t for t in castable(sample.tree)}.values())


def mixtures(sample: Sample, *, float64: bool) -> Iterator[tuple[torch.dtype, ...]]:
    """The dtypes that the sample's float32 tensors are given: all of one, the first of another than the others."""
    count = len(_float32(sample))
    yield (F32,) * count
    if count:
        yield (BF16,) * count
    if count > 1:
        yield (F32, *(BF16,) * (count - 1))
        yield (BF16, *(F32,) * (count - 1))
    if count and float64:
        yield (F64, *(F32,) * (count - 1))


def given(sample: Sample, dtypes: tuple[torch.dtype, ...], *, grad: bool, kinds: Kinds = ()) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A fresh copy of the arguments, the float32 tensors in `dtypes`, and of `kinds` where these are given; leaves, which require grad
    where the sample's do."""
    wanted = {id(t): dtype for t, dtype in zip(_float32(sample), dtypes, strict=True)}
    wished = {id(t): kind for t, kind in zip(_float32(sample), kinds, strict=False)}
    made: dict[int, torch.Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            fresh = of_kind(value.detach().clone().to(wanted.get(id(value), value.dtype)), wished.get(id(value), "plain"))
            made[id(value)] = fresh.requires_grad_(grad and value.requires_grad)
        return made[id(value)]

    return tree_map(copied, (sample.args, sample.kwargs))


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


# --- calls that op_db lacks -------------------------------------------------------------------------------------------------

_OWNERS = ("", "nn.functional.", "_C._nn.", "_VF.", "special.", "linalg.", "Tensor.")
# What torch's own modules call in torch._VF, by their source. Nobody else does: the functions are torch's.
_SOURCES = [*(Path(torch.__file__).parent / "nn").rglob("*.py"), *(Path(torch.__file__).parent / "ao").rglob("*.py")]
_IN_VF = {name for path in _SOURCES for name in re.findall(r"\b_VF\.(\w+)", path.read_text(encoding="utf-8"))}
_NUMPYS = {"input": "x", "other": "x2", "dim": "axis", "keepdim": "keepdims", "tensors": "arrays"}
_MODULES: dict[str, Callable[..., Any]] = {
    "relu": lambda: torch.nn.ReLU(), "gelu": lambda: torch.nn.GELU(), "elu": lambda: torch.nn.ELU(),
    "silu": lambda: torch.nn.SiLU(), "mish": lambda: torch.nn.Mish(), "hardswish": lambda: torch.nn.Hardswish(),
    "softplus": lambda: torch.nn.Softplus(), "tanhshrink": lambda: torch.nn.Tanhshrink(), "logsigmoid": lambda: torch.nn.LogSigmoid(),
    "leaky_relu": lambda: torch.nn.LeakyReLU(0.3), "mse_loss": lambda: torch.nn.MSELoss(), "l1_loss": lambda: torch.nn.L1Loss(),
    "smooth_l1_loss": lambda: torch.nn.SmoothL1Loss(), "huber_loss": lambda: torch.nn.HuberLoss(), "nll_loss": lambda: torch.nn.NLLLoss(),
    "cross_entropy": lambda: torch.nn.CrossEntropyLoss(), "kl_div": lambda: torch.nn.KLDivLoss(reduction="batchmean"),
    "cosine_similarity": lambda: torch.nn.CosineSimilarity(-1), "softmax": lambda: torch.nn.Softmax(-1),
    "log_softmax": lambda: torch.nn.LogSoftmax(-1), "dropout": lambda: torch.nn.Dropout(0.5),
}  # fmt: skip


def more_calls(info: Any) -> Iterator[Call]:
    """The op under the same name elsewhere (torch._VF.dropout for F.dropout), as a module, and with numpy's names for its parameters.

    Not each takes the sample arguments of op_db: plain torch says which.
    """
    found = list(calls(info))
    yield from found
    if not found or found[0].name is None or found[0].variant != "function" or info.variant_test_name not in ("", "with_dtype"):
        return
    first, last = found[0], info.name.rpartition(".")[2]
    for owner in _OWNERS:
        path = owner + last
        here = _at(path)
        if owner == "_VF." and last not in _IN_VF:
            continue
        if callable(here) and not isinstance(here, type) and path not in (info.name, f"Tensor.{info.name}"):
            yield Call(first.op, f"at {path}", list_name(path.removeprefix("_C._nn.").removeprefix("_VF.").removeprefix("Tensor.")),
                       _function(path), first.differentiable)  # fmt: skip
    if last in _MODULES:
        yield Call(first.op, "module", first.name, lambda *args: _MODULES[last]()(*args), first.differentiable)
    if _at(info.name) is info.op and not isinstance(info.op, type):
        for number, names in enumerate(_keywords(info.name, info.op)):
            yield replace(first, variant=f"numpy's names {number}", function=_numpys(first.function, names))


def _numpys(function: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    spelled = _by_keywords(function, tuple(_NUMPYS.get(name, name) for name in names))
    return lambda *args, **kwargs: spelled(*args, **{_NUMPYS.get(key, key): value for key, value in kwargs.items()})


def odd(op: str, how: str, function: Callable[..., Any], *shapes: Any) -> tuple[Call, Sample]:
    """A call that no rule of spelling makes: the list's name for the op, and the shapes of its tensors; other arguments as they are."""
    made = [Leaf(each, values="positive", seed=n).build() if isinstance(each, tuple) else each for n, each in enumerate(shapes)]
    in_place = "in-place " * op.endswith("_")
    return Call(op, in_place + how, op, function, differentiable=how != "out is the input"), Sample(tuple(made), {}, lambda result: result)


def _assigned(index: Any) -> Callable[..., Any]:
    def assign(x: torch.Tensor, y: Any) -> torch.Tensor:
        x[index] = y
        return x

    return assign


@functools.cache
def odd_calls() -> tuple[tuple[Call, Sample], ...]:
    """Calls in containers, with torch's sublists, of recurrent kernels and private doors, with arguments written in unusual places."""
    nn, vf, f = torch._C._nn, torch._VF, torch.nn.functional
    m, v = (3, 3), (3,)
    rows, mask = torch.tensor([2, 0]), torch.tensor([[True, False, True], [False, False, True], [True, True, False]])
    index = {"[int]": 1, "[slice]": slice(0, 2), "[mask]": mask, "[list]": [0, 2], "[tensor, slice]": (rows, slice(0, 2)), "[...]": ...}
    of = {"[int]": v, "[slice]": (2, 3), "[mask]": (5,), "[list]": v, "[tensor, slice]": (2, 2), "[...]": m}
    rnn = {kind: [(4, 2, 3), *((1, 2, 4),) * (1 + (kind == "lstm")), (n * 4, 3), (n * 4, 4), (n * 4,), (n * 4,)]
           for kind, n in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1))}  # fmt: skip

    def recurrent(kind: str) -> Callable[..., Any]:
        states = 1 + (kind == "lstm")

        def layer(x: Any, *rest: Any) -> Any:
            state = rest[:2] if kind == "lstm" else rest[0]
            return getattr(torch._VF, kind)(x, state, list(rest[states:]), True, 1, 0.0, True, False, False)

        return layer

    def cell(kind: str) -> Callable[..., Any]:
        return lambda x, *rest: getattr(torch, f"{kind}_cell")(x, rest[:2] if kind == "lstm" else rest[0], *rest[1 + (kind == "lstm") :])

    return (
        odd("einsum", "of a list", lambda a, b: torch.einsum("ij,jk->ik", [a, b]), (2, 3), (3, 4)),
        odd("einsum", "of sublists", lambda a, b: torch.einsum(a, [0, 1], b, [1, 2], [2, 0]), (2, 3), (3, 4)),
        odd("einsum", "of a product", lambda a, b: torch.einsum("ij,ij->ij", a, b), (2, 3), (2, 3)),
        odd("cat", "of a tuple", lambda a, b: torch.cat((a, b)), (2, 3), (1, 3)),
        odd("cat", "keywords backwards", lambda a, b: torch.cat(dim=-1, tensors=[a, b]), m, m),
        odd("cat", "axis", lambda a, b: torch.cat([a, b], axis=1), m, m),
        odd("stack", "of scalars", lambda a, b: torch.stack([a, b]), (), ()),
        odd("hstack", "of a scalar", lambda a, b: torch.hstack([a, b]), (2,), ()),
        odd("block_diag", "a vector", lambda a, b: torch.block_diag(a, b), (2, 2), (2,)),
        odd("atleast_3d", "of a list", lambda a, b: torch.atleast_3d([a, b]), m, v),
        odd("meshgrid", "positional", lambda a, b: torch.meshgrid(a, b, indexing="ij"), (2,), v),
        odd("linalg.multi_dot", "three", lambda *ts: torch.linalg.multi_dot(list(ts)), (2, 3), (3, 4), (4, 2)),
        odd("tensordot", "dims of a pair", lambda a, b: torch.tensordot(a, b, dims=([1], [0])), (3, 4), (4, 2, 2)),
        odd("addmm", "beta", lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), (4,), (2, 3), (3, 4)),
        odd("addmm", "a method", lambda c, a, b: c.addmm(mat2=b, mat1=a), (2, 4), (2, 3), (3, 4)),
        odd("linear", "keywords backwards", lambda x, w, b: torch.nn.functional.linear(bias=b, weight=w, input=x), (2, 3), (4, 3), (4,)),
        odd("linear", "numpy's a", lambda x, w: torch.nn.functional.linear(a=x, weight=w, bias=None), (2, 3), (4, 3)),
        odd("conv2d", "stride of a pair", lambda x, w: f.conv2d(x, w, None, (1, 2), (1, 0), 1, 1), (1, 2, 5, 5), (4, 2, 3, 3)),
        odd("conv2d", "padding by name", lambda x, w: f.conv2d(x, w, padding="same"), (1, 2, 5, 5), (4, 2, 3, 3)),
        odd("conv2d", "channels_last", lambda x, w: f.conv2d(x.to(memory_format=torch.channels_last), w), (2, 2, 5, 5), (3, 2, 3, 3)),
        odd("conv_tbc", "", lambda x, w, b: torch.conv_tbc(x, w, b), (5, 2, 3), (3, 3, 4), (4,)),
        odd("leaky_relu", "private door", lambda x: nn.leaky_relu(x, 0.3), (3, 4)),
        odd(
            "fake_quantize_per_tensor_affine",
            "a tensor of scale",
            lambda x: torch.fake_quantize_per_tensor_affine(x, torch.tensor(0.1003), torch.tensor(3, dtype=torch.int32), 0, 255),
            m,
        ),
        odd("dropout", "VF", lambda x: vf.dropout(x, 0.5, True), (6, 4)),
        odd("matmul", "reflected", lambda b, a: b.__rmatmul__(a), (3, 4), (2, 3)),
        odd("mul", "reflected", lambda b, a: b.__rmul__(a), v, (2, 3)),
        odd("mul", "number first", lambda x: torch.mul(2, x), m),
        odd("add", "number first", lambda x: 2.5 + x, m),
        odd("truediv", "reflected", lambda b, a: b.__rtruediv__(a), v, (2, 3)),
        odd("div", "rounding_mode", lambda a, b: a.div(b, rounding_mode="trunc"), m, m),
        odd("softmax", "axis", lambda x: torch.softmax(x, axis=0), m),
        odd("softmax", "dtype by position", lambda x, dtype: f.softmax(x, 0, 3, dtype), m, F32),
        odd("softmax", "float64 by keyword", lambda x, dtype: x.softmax(dim=0, dtype=dtype), m, F64),
        odd("mean", "no dim", lambda x: torch.mean(x, dim=None, keepdim=True), m),
        odd("mean", "axis, keepdims", lambda x: torch.mean(x, axis=1, keepdims=True), m),
        odd("lerp", "a 0-dim weight", lambda a, b, w: torch.lerp(a, b, w), v, v, ()),
        odd("where", "a 0-dim tensor", lambda x, s: torch.where(x > 1, x, s), v, ()),
        odd("cross_entropy", "probabilities", lambda a, p: f.cross_entropy(a, p), (4, 3), (4, 3)),
        odd(
            "scaled_dot_product_attention",
            "causal, by keywords",
            lambda q, k, w: f.scaled_dot_product_attention(q, key=k, value=w, is_causal=True, scale=0.3),
            (2, 5, 4),
            (2, 5, 4),
            (2, 5, 4),
        ),
        *(odd(kind, "VF", recurrent(kind), *shapes) for kind, shapes in rnn.items()),
        *(
            odd(f"{kind}_cell", "torch", cell(kind), shapes[0][1:], *(s[1:] if len(s) == 3 else s for s in shapes[1:]))
            for kind, shapes in rnn.items()
        ),
        *(odd("setitem_", f"x{at} = y", _assigned(where), m, of[at]) for at, where in index.items()),
        odd("setitem_", "x[mask] = 0-dim", _assigned(mask), m, ()),
        odd("addmm_", "", lambda x, a, b: x.addmm_(a, b, beta=0.5), m, (3, 2), (2, 3)),
        odd("addmv_", "torch", lambda x, a, b: torch.addmv_(x, a, b), v, (3, 2), (2,)),
        odd("index_add_", "", lambda x, y: x.index_add_(0, rows, y), m, (2, 3)),
        odd("index_put_", "torch", lambda x, y: torch.index_put_(x, (rows,), y, accumulate=True), m, (2, 3)),
        odd("put_", "", lambda x, y: x.put_(rows, y), m, (2,)),
        odd("add_", "alpha", lambda x, y: x.add_(other=y, alpha=2), m, v),
        odd("ipow_", "**=", operator.ipow, m, v),
        odd("floordiv_", "//=", operator.ifloordiv, m, v),
        odd("relu_", "flag by position", lambda x: f.relu(x, True), m),
        odd("dropout_", "flag by keyword", lambda x: f.dropout(x, 0.5, True, inplace=True), m),
        odd("relu_", "module", lambda x: torch.nn.ReLU(inplace=True)(x), m),
        odd("leaky_relu_", "private door", lambda x: nn.leaky_relu_(x, 0.3), m),
        odd("dropout_", "VF", lambda x: vf.dropout_(x, 0.5, True), m),
        odd("t_", "", lambda x: x.t_(), m),
        odd("mul_", "out is the input", lambda x, y: torch.mul(x, y, out=x), m, v),
        odd("addmm_", "out is the input", lambda x, a, b: torch.addmm(x, a, b, out=x), m, (3, 2), (2, 3)),
    )
