"""The oracle: what rules.md promises, computed by plain torch with explicit `.to()` casts. It knows nothing of hmp."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from low_kernels_kit import products_as_computed

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
CASTABLE = (F32, BF16, F16)
MAX = {dtype: torch.finfo(dtype).max for dtype in CASTABLE}


def tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor in a tree of lists, tuples and dicts, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def distinct(values: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(t): t for t in values}.values())


def castable(value: Any) -> list[torch.Tensor]:
    """The tensors that a rule may cast."""
    return [t for t in tensors(value) if t.dtype in CASTABLE]


def left_to_torch(value: Any) -> bool:
    """float64 or complex among the inputs: rules.md leaves the op to torch."""
    return any(t.dtype is F64 or t.is_complex() for t in tensors(value))


def widest(value: Any, *, join: bool = False) -> torch.dtype:
    """R3: bf16 with fp16 is float32; a 0-dim tensor counts only in joins, or among its like."""
    found = castable(value)
    counted = found if join else [t for t in found if t.dim() > 0] or found
    dtypes = {t.dtype for t in counted}
    return dtypes.pop() if len(dtypes) == 1 else F32


def target(rule: str, value: Any, *, low: torch.dtype = BF16) -> torch.dtype | None:
    """The dtype that the castable inputs become on a list, None where nothing is cast."""
    if left_to_torch(value) or not castable(value):
        return None
    return {"bf16": low, "fp32": F32}.get(rule) or widest(value)


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """The same tree with each castable tensor in `dtype`."""
    return tree_map(lambda leaf: leaf if dtype is None or getattr(leaf, "dtype", None) not in CASTABLE else leaf.to(dtype), value)


def saturated(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """R12: `value` in `dtype`; what is finite stays finite, infinities stay infinities."""
    limit = MAX[dtype]
    return torch.where(value.isinf(), value, value.clamp(-limit, limit)).to(dtype)


@dataclass
class Outcome:
    """What a call left behind: results, the leaves' gradients, the inputs as they are afterwards, or an error."""

    error: type[Exception] | None = None
    results: list[Any] = field(default_factory=list)
    grads: list[torch.Tensor | None] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)
    kind: type | None = None
    message: str = ""


_XLA: Any = sys.modules.get("torch_xla")  # device_tensors.py imports it before, where tensors are to be there
# where there is no other device: torch.manual_seed formats the traceback three times for devices that may come
_seed = torch.manual_seed if torch.accelerator.is_available() or _XLA else torch.default_generator.manual_seed


def _computed() -> None:
    """Has XLA compute what was called so far: equal calls are then equal programs, of which the second need not be compiled."""
    if _XLA is not None:
        _XLA.sync()


def flat(result: Any) -> list[Any]:
    if isinstance(result, (list, tuple)):
        return [leaf for item in result for leaf in flat(item)]
    return [result]


def outcome(call: Callable[..., Any], args: Any, kwargs: dict[str, Any] | None = None, *, seed: int = 7) -> Outcome:
    """Call, then send a fixed cotangent back to the leaves among the arguments. Errors of torch become part of the outcome."""
    kwargs = kwargs or {}
    inputs = list(tensors([args, kwargs]))
    _seed(seed)  # random ops draw the same mask in both runs
    try:
        result = call(*args, **kwargs)
        leaves = flat(result)
        grads = _gradients(leaves, [t for t in inputs if t.requires_grad and t.is_leaf])
        _computed()
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        kept = inputs if _XLA is None else []  # XLA has not the inputs any more of a program that it refused
        return Outcome(error=type(error), inputs=kept, message=str(error))
    return Outcome(None, leaves, grads, inputs, None if isinstance(result, torch.Tensor) else type(result))


def _gradients(results: list[Any], leaves: list[torch.Tensor]) -> list[torch.Tensor | None]:
    ends = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    if not ends or not leaves:
        return [None] * len(leaves)
    generator = torch.Generator().manual_seed(11)
    # randn in float32, then .to(): the same cotangent for every result dtype
    cotangents = [torch.randn(e.shape, generator=generator, dtype=F32, device="cpu").to(e.device, e.dtype) for e in ends]
    return list(torch.autograd.grad(ends, leaves, cotangents, allow_unused=True))


def by_explicit_casts(
    call: Callable[..., Any], args: Any, kwargs: dict[str, Any] | None, dtype: torch.dtype | None, *, seed: int = 7
) -> Outcome:
    """The outcome of plain torch when the caller wrote the casts out by hand; gradients are those of the uncast leaves."""

    def cast_first(*args: Any, **kwargs: Any) -> Any:
        with products_as_computed():
            return call(*cast(args, dtype), **cast(kwargs, dtype))

    return outcome(cast_first, args, kwargs, seed=seed)


def kept_for_backward(call: Callable[[], Any], besides: Iterable[torch.Tensor] = (), *, itself: bool = False) -> tuple[int, Any]:
    """The bytes of the memory that the ops of a call keep for backward, each once and that of `besides` left out, and the call's result.

    The graph keeps another tensor of that memory, or `itself`: then an output that its own node keeps is never freed.
    """
    known = {t.untyped_storage()._cdata for t in besides}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor if itself else tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()
    return sum(storage.nbytes() for at, storage in found.items() if at not in known), result


def assert_identical(got: Any, want: Any, what: str) -> None:
    """The same type, dtype, shape and bits; NaN equals NaN."""
    found = unlike(got, want)
    assert not found, f"{what}: {found[0][1]}: got {got}, rules.md wants {want}"


def unlike(got: Any, want: Any, allowed: float = 0.0) -> list[tuple[str, str]]:
    """How two values differ: dtype, then shape, then bits (NaN equals NaN), or more than `allowed` of the largest value."""
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        same = type(got) is type(want) and (got == want or (got != got and want != want))
        return [] if same else [("values", f"got {got!r}, the rules give {want!r}")]
    if type(got) is not type(want):
        return [("type", f"got a {type(got)}, the rules give a {type(want)}")]
    if got.dtype is not want.dtype:
        return [("dtype", f"got {got.dtype}, the rules give {want.dtype}")]
    if got.shape != want.shape or got.layout is not want.layout:
        return [("values", f"got {got.layout} {tuple(got.shape)}, the rules give {want.layout} {tuple(want.shape)}")]
    if allowed == float("inf"):
        return []
    got, want = (_dense(t) for t in (got, want))
    if bool((torch.eq(got, want) | (torch.ne(got, got) & torch.ne(want, want))).all()):
        return []
    wide = torch.complex128 if got.is_complex() else torch.float64
    worst = (got.to(wide) - want.to(wide)).abs().nan_to_num(nan=float("inf")).max().item()
    scale = want.to(wide).abs().nan_to_num().max().item()
    if worst <= allowed * scale:
        return []
    return [("values", f"largest difference {worst:.3g} where values are up to {scale:.3g} ({got.dtype})")]


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    tensor = tensor.detach().as_subclass(torch.Tensor)
    tensor = tensor.cpu() if tensor.device.type == "xla" else tensor  # where each comparison would be compiled
    tensor = tensor.to(torch.complex64) if tensor.dtype is torch.complex32 else tensor  # which torch cannot compare
    return tensor.dequantize() if tensor.is_quantized else tensor


def assert_same(got: Outcome, want: Outcome) -> None:
    """Results, gradients and the inputs' state agree to the bit; where plain torch raises, so does the call."""
    assert got.error is want.error, (
        f"got {got.error and got.error.__name__}({got.message!r}), rules.md wants {want.error and want.error.__name__}({want.message!r})"
    )
    for number, (one, other) in enumerate(zip(got.inputs, want.inputs, strict=True)):
        assert_identical(one, other, f"input {number} after the call")
    if want.error is not None:
        return
    assert got.kind is want.kind, f"returned a {got.kind}, rules.md wants a {want.kind}"
    assert len(got.results) == len(want.results)
    for number, (one, other) in enumerate(zip(got.results, want.results, strict=True)):
        assert_identical(one, other, f"result {number}")
    for number, (one, other) in enumerate(zip(got.grads, want.grads, strict=True)):
        assert_identical(one, other, f"gradient {number}")
    leaves = [t for t in got.inputs if t.requires_grad and t.is_leaf]
    for leaf, gradient in zip(leaves, got.grads, strict=True):
        assert gradient is None or gradient.dtype is leaf.dtype  # R13


# --- which list an op is on

Plan = tuple[torch.dtype | None, ...]
LISTS = Path(__file__).parents[2] / "op_lists"
KINDS = ("bf16", "fp32", "promote")

# R3: outside pointwise ops a 0-dim tensor counts, as in torch
_COUNTS_0DIM = frozenset("cat concat concatenate stack hstack vstack row_stack dstack column_stack block_diag addr".split())
_PROMOTED_IN_FORWARD = frozenset({"addr"})
_NORMS = frozenset(
    """batch_norm instance_norm layer_norm group_norm native_batch_norm native_layer_norm native_group_norm
    _native_batch_norm_legit""".split()
)
# R7: ops whose meaning is a dtype, or that hand out a number or a shape; and indexing, which cannot be patched reversibly (R16)
_UNTOUCHED = frozenset(
    """to type_as copy_ hash_tensor result_type can_cast view_as expand_as reshape_as set_ resize_ resize_as_ float half bfloat16 double int
    long short char byte bool cfloat cdouble chalf item getitem __getitem__""".split()
)
# R10: ops whose result is a view of their input wherever memory allows one
_VIEWS = frozenset(
    """adjoint as_strided atleast_1d atleast_2d atleast_3d broadcast_tensors broadcast_to chunk conj detach diagonal dsplit expand flatten
    hsplit linalg.diagonal meshgrid moveaxis movedim narrow permute pos positive ravel real reshape select split split_with_sizes squeeze
    swapaxes swapdims t tensor_split transpose unbind unflatten unsafe_chunk unsafe_split unsqueeze view view_as_complex vsplit""".split()
)
# op_db tells most synonyms; these it does not know, or has otherwise
_SYNONYMS = (
    ("div", "true_divide", "truediv"),
    ("remainder", "mod"),
    ("floor_divide", "floordiv"),
    ("pinverse", "linalg.pinv"),
    ("grid_sample", "grid_sampler"),
)
_NO_SYNONYMS = frozenset({"maximum", "minimum", "mH"})
_DUNDERS = frozenset("add sub mul truediv floordiv mod pow matmul".split())


@functools.cache
def synonyms() -> dict[str, set[str]]:
    """Each op's other names, from op_db's aliases."""
    from ops import list_name, op_db  # imports this module

    groups: list[set[str]] = [set(group) for group in _SYNONYMS]
    for info in op_db():
        names = {list_name(name) for name in (info.name, *(a.name for a in info.aliases))}
        if len(names) > 1 and not names & _NO_SYNONYMS:
            groups.append(names)
    found: dict[str, set[str]] = {}
    for group in groups:
        joined = set(group).union(*(found.get(name, ()) for name in group))
        for name in joined:
            found[name] = joined
    return found


@dataclass(frozen=True)
class Lists:
    """A policy's three lists."""

    bf16: frozenset[str]
    fp32: frozenset[str]
    promote: frozenset[str]

    @classmethod
    def read(cls, preset: str) -> Lists:
        lists = []
        for kind in KINDS:
            text = (LISTS / preset / f"{kind}.txt").read_text(encoding="utf-8")
            words = (line.split("#")[0].strip() for line in text.splitlines())
            lists.append(frozenset(word.partition("_copy.")[0] for word in words if word))
        return cls(*lists)

    def of(self, name: str | None) -> str | None:
        """The list that the op is on: under its own name, else the one it follows, or a synonym; of a name BF16 and FP32 before promote."""
        if name is None or name in _UNTOUCHED | _VIEWS:
            return None
        return next((kind for spelled in _follows(name) for kind in KINDS if spelled in getattr(self, kind)), None)


def _follows(name: str) -> Iterator[str]:
    """`name`, what it is a form of (`mul` for `rmul`, `imul` and `mul_`, `softmax` for special.softmax), then the synonyms of these."""
    forms = [name]
    if name.endswith("_"):
        forms.append(name[:-1])
    if name[:1] in "ri" and name[1:] in _DUNDERS:
        forms.append(name[1:])
    namespace, _, last = forms[-1].rpartition(".")
    if namespace in ("special", "linalg", "sparse"):
        forms.append(last)
    yield from forms
    for form in forms:
        yield from sorted(synonyms().get(form, ()))
        if f"special.{form}" not in forms and hasattr(torch.special, form):
            yield f"special.{form}"


# --- the rules --------------------------------------------------------------------------------------------------------------


def plans(call: Any, args: Any, kwargs: dict[str, Any], kind: str | None, low: torch.dtype = BF16) -> list[list[Plan]]:
    """The casts that the rules allow, in tiers: those of the first tier of which plain torch accepts one.

    A plan holds the dtype of each castable input, None where it stays as it is.
    """
    found = distinct(castable([args, kwargs]))
    count = len(found)
    as_is: Plan = (None,) * count
    explicit = any(isinstance(v, torch.dtype) for v in (*args, *kwargs.values()))
    if not found or explicit or left_to_torch([args, kwargs]):
        return [[as_is]]
    no_kernel = [_all(F32, count)]  # R11
    if call.name in _UNTOUCHED or not call.reachable:
        return [[as_is]]
    if call.in_place:
        others = (None, *_all(found[0].dtype, count - 1))
        return [[as_is, others], [others], no_kernel] if castable(args[0]) else [[as_is]]
    if kind is None:
        first = found[0].dtype
        if call.name == "scaled_dot_product_attention" and count == 4:
            return [[_all(first, count)], no_kernel]  # R12: attn_mask has the dtype of query
        # R7: torch's forward promotes a mixture, and backward takes none: the result has forward's dtype, with gradients or without
        promoted = [[_all(widest(found, join=True), count)]] if call.name in _PROMOTED_IN_FORWARD else []
        return [[as_is], *_special(call, first, count), *promoted, [_all(first, count)], no_kernel]
    if kind == "promote":
        target = widest(found, join=call.name in _COUNTS_0DIM)
        return [*_special(call, target, count), [_all(target, count), as_is], [_all(target, count)], no_kernel]
    target = low if kind == "bf16" else F32
    return [*_special(call, target, count), [_all(target, count)], no_kernel]


def _all(dtype: torch.dtype, count: int) -> Plan:
    return (dtype,) * count


def _special(call: Any, target: torch.dtype, count: int) -> list[list[Plan]]:
    """R9: of norms the input is cast alone, weights and statistics stay float32."""
    if call.name in _NORMS:
        return [[(target, *(None,) * (count - 1))], [(target, *_all(F32, count - 1))]]
    return []
