"""What rules.md asks of a call, run by plain torch with the casts written out. It reads the list files itself and knows nothing of hmp."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from low_kernels_kit import products_as_computed
from oracle import BF16, CASTABLE, F32, castable, left_to_torch, widest
from sweep_attempt import Attempt, Outcome, Plan, distinct
from sweep_cases import OP_DB, Call, Sample, given, list_name

LISTS = Path(__file__).parents[2] / "op_lists"
KINDS = ("bf16", "fp32", "promote")

# R3: outside pointwise ops a 0-dim tensor counts, as in torch
_COUNTS_0DIM = frozenset("cat concat concatenate stack hstack vstack row_stack dstack column_stack block_diag addr".split())
_NORMS = frozenset(
    """batch_norm instance_norm layer_norm group_norm native_batch_norm native_layer_norm native_group_norm
    _native_batch_norm_legit""".split()
)
# R7: ops whose meaning is a dtype, or that hand out a number or a shape; and indexing, which cannot be patched reversibly (R16)
_UNTOUCHED = frozenset(
    """to type_as copy_ result_type can_cast view_as expand_as reshape_as set_ resize_ resize_as_ float half bfloat16 double int long
    short char byte bool cfloat cdouble chalf item getitem __getitem__""".split()
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
    groups: list[set[str]] = [set(group) for group in _SYNONYMS]
    for info in OP_DB:
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
        """The list that the op is on: under its own name, the one it follows, or a synonym; BF16 and FP32 before promote."""
        if name is None or name in _UNTOUCHED:
            return None
        line = list(_follows(name))
        for kinds in (("bf16", "fp32"), ("promote",)):
            for spelled in line:
                for kind in kinds:
                    if spelled in getattr(self, kind):
                        return kind
        return None


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


def plans(call: Call, args: Any, kwargs: dict[str, Any], kind: str | None) -> list[list[Plan]]:
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
        return [[as_is], *_special(call, first, count), [_all(first, count)], no_kernel]
    if kind == "promote":
        target = widest(found, join=call.name in _COUNTS_0DIM)
        return [*_special(call, target, count), [_all(target, count), as_is], [_all(target, count)], no_kernel]
    target = BF16 if kind == "bf16" else F32
    return [*_special(call, target, count), [_all(target, count)], no_kernel]


def _all(dtype: torch.dtype, count: int) -> Plan:
    return (dtype,) * count


def _special(call: Call, target: torch.dtype, count: int) -> list[list[Plan]]:
    """R9: of norms the input is cast alone, weights and statistics stay float32."""
    if call.name in _NORMS:
        return [[(target, *(None,) * (count - 1))], [(target, *_all(F32, count - 1))]]
    return []


@dataclass
class Expectation:
    """What the rules allow for a call: one of these outcomes; none where plain torch accepts the call in no dtype."""

    allowed: list[Outcome]
    grad: bool
    no_kernel: bool = False


def expect(call: Call, sample: Sample, dtypes: tuple[torch.dtype, ...], kind: str | None) -> Expectation:
    """The outcomes of plain torch with the casts that the rules ask for, gradients included where the op has them."""
    args, kwargs = given(sample, dtypes, grad=False)
    tiers = plans(call, args, kwargs, kind)
    for grad in (True, False) if call.differentiable else (False,):
        for number, tier in enumerate(tiers):
            outcomes = [_plain(call, sample, dtypes, plan, grad) for plan in dict.fromkeys(tier)]
            if outcomes[0].error:
                continue
            allowed = [o for o in outcomes if not o.error and _dtypes(o) == _dtypes(outcomes[0])]
            return Expectation(allowed, grad, number > 0 and number == len(tiers) - 1)
    return Expectation([], False)


def also_without_kernel(call: Call, sample: Sample, dtypes: tuple[torch.dtype, ...], expected: Expectation) -> list[Outcome]:
    """The float32 run of R11, for a call that plain torch takes in the low dtype although it has no kernel for the op's other samples."""
    low = any(d is BF16 for o in expected.allowed for d in o.plan) or (BF16 in dtypes and any(None in o.plan for o in expected.allowed))
    if expected.no_kernel or call.out or not low:
        return []
    found = _plain(call, sample, dtypes, (F32,) * len(dtypes), expected.grad)
    return [] if found.error else [found]


def accepted(call: Call, sample: Sample) -> bool:
    """Whether plain torch takes this call at all, its float32 tensors as they are; with out= one of the results' own dtypes."""
    dtypes = (F32,) * len(distinct(castable(sample.tree)))
    found = _plain(replace(call, variant="function") if call.out else call, sample, dtypes, (), False)
    if found.error or not call.out:
        return not found.error
    if not found.results or not all(isinstance(r, torch.Tensor) for r in found.results):
        return False
    return not _plain(call, sample, dtypes, (), False, outs(found, F32, empty=False)).error


def expect_out(
    call: Call, sample: Sample, dtypes: tuple[torch.dtype, ...], kind: str | None, dtype: torch.dtype, *, empty: bool
) -> tuple[Expectation, tuple[torch.Tensor, ...]]:
    """R6: the outcomes that the rules allow with an `out` of this dtype, and such an out; none where plain torch takes no such
    out with any uniform inputs."""
    function = replace(call, variant="function", differentiable=False)  # out= takes no part in autograd
    found = expect(function, sample, dtypes, kind)
    if not found.allowed:
        return found, ()
    results = found.allowed
    makes = functools.partial(outs, results[0], dtype, empty=empty)
    uniform = [(F32,) * len(dtypes)]
    if set(dtypes) == {BF16} and not found.no_kernel:
        uniform.append(dtypes)
    takes = [o for o in (_plain(call, sample, dtypes, plan, False, makes()) for plan in uniform) if not o.error]
    if not takes and found.no_kernel and set(dtypes) == {BF16}:
        # without a kernel for bfloat16 plain torch takes no such out: R11 has the float32 result arrive in it
        takes = [_plain(call, sample, dtypes, uniform[0], False, outs(results[0], F32, empty=empty))]
    if not takes:
        return Expectation([], False), ()
    shape = takes[0].shape
    allowed = [delivered(o, dtype, shape) for o in results]
    # torch's own delivery may round once where two casts round twice
    direct = [_plain(call, sample, dtypes, o.plan, False, makes()) for o in results]
    return Expectation(allowed + [o for o in direct if not o.error], False, found.no_kernel), makes()


def _plain(
    call: Call, sample: Sample, dtypes: tuple[torch.dtype, ...], plan: Plan, grad: bool, out: tuple[Any, ...] | None = None
) -> Outcome:
    attempt = Attempt(call, sample, dtypes, grad=grad, plan=plan, out=out)
    if call.reachable:
        with products_as_computed():
            attempt.run()
    else:
        attempt.run()
    found = attempt.outcome()
    found.plan = plan
    return found


def _dtypes(outcome: Outcome) -> list[Any]:
    return [getattr(r, "dtype", None) for r in outcome.results]


def outs(outcome: Outcome, dtype: torch.dtype, *, empty: bool) -> tuple[torch.Tensor, ...]:
    """Tensors to write the results into: castable ones in `dtype`, the others as they are; of their shapes, or empty."""
    made = []
    for result in outcome.results:
        wanted = dtype if result.dtype in CASTABLE else result.dtype
        made.append(torch.empty(0, dtype=wanted) if empty else torch.full(result.shape, 1, dtype=wanted))
    return tuple(made)


def delivered(outcome: Outcome, dtype: torch.dtype, shape: str) -> Outcome:
    """R6: the outcome with its castable results in `dtype`; `shape` is what torch returns for out=."""
    arrived = [r.to(dtype) if r.dtype in CASTABLE else r for r in outcome.results]
    return Outcome(results=arrived, shape=shape, after=outcome.after, written=outcome.written)
