"""One call of an op, as hmp makes it and with its casts written out, and what it leaves behind.

P1 draws such calls, and the sweep goes through them one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

import hmp
from low_kernels_kit import products_as_computed
from ops import Call, Kinds, Sample, calls, given, op_db, samples, seed, title
from oracle import BF16, CASTABLE, F32, Plan, castable, distinct, flat, plans, tensors, unlike
from sweep_exceptions import EXCEPTIONS, ROUGH, STRUCTURE, UNINITIALISED


@dataclass
class Outcome:
    """What a call left behind."""

    error: str = ""
    results: list[Any] = field(default_factory=list)
    shape: str = ""  # how the results are nested
    grads: list[torch.Tensor | None] = field(default_factory=list)
    leaf_dtypes: list[torch.dtype] = field(default_factory=list)
    after: list[torch.Tensor] = field(default_factory=list)  # the inputs, as they are afterwards
    written: list[bool] = field(default_factory=list)  # which inputs were written to
    aliases: list[int | None] = field(default_factory=list)  # for each result, the first input whose memory it shares
    returned: list[bool] = field(default_factory=list)  # for each result, whether it is that input itself (for out=: the out)
    cast: bool = False  # whether an input was cast
    plan: Any = ()


Quiet = Callable[[], Any]


class Attempt:
    """One call, in three steps, so that only the second one need run while a policy is in force: prepare, run, outcome."""

    def __init__(
        self,
        call: Call,
        sample: Sample,
        dtypes: tuple[torch.dtype, ...],
        *,
        grad: bool,
        plan: Plan = (),
        out: tuple[Any, ...] | None = None,
        kinds: Kinds = (),
    ) -> None:
        self.call, self.finish = call, sample.finish
        self.args, self.kwargs = given(sample, dtypes, grad=grad, kinds=kinds)
        self.inputs = distinct(tensors([self.args, self.kwargs]))
        self.leaves = [t for t in self.inputs if t.requires_grad]
        if call.in_place and isinstance(self.args[0], torch.Tensor) and self.args[0].requires_grad:
            self.args = (self.args[0].clone(), *self.args[1:])  # a leaf that requires grad cannot be written to
            self.inputs = distinct(tensors([self.args, self.kwargs]))
        self.targets = {id(t): dtype for t, dtype in zip(distinct(castable([self.args, self.kwargs])), plan, strict=False)}
        self.out = out
        self.versions = [_version(t) for t in self.inputs]
        self.error = ""
        self.result: Any = None
        self.cast = False
        self.ends: list[torch.Tensor] = []
        self.grads: list[torch.Tensor | None] = []

    def run(self, quiet: Quiet = nullcontext) -> None:
        """Calls; `quiet` is a region in which nothing is cast, for what the sweep itself computes."""
        seed()
        extra = {} if self.out is None else {"out": self.out[0] if len(self.out) == 1 else self.out}
        try:
            if not self.targets:
                self.result = self.call.function(*self.args, **self.kwargs, **extra)
            else:
                self._run_cast(extra)
            if self.leaves:
                with quiet():
                    finished = self.finish(self.result)
                    self.ends = [t for t in tensors(finished) if t.requires_grad]
                    cotangents = [_cotangent(t) for t in self.ends]
                if self.ends:
                    self.grads = list(torch.autograd.grad(self.ends, self.leaves, cotangents, allow_unused=True))
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def _run_cast(self, extra: dict[str, Any]) -> None:
        if self.call.name == "embedding":
            # R2: of a look-up the result is cast, not the table
            self.cast = True
            self.result = self.call.function(*self.args, **self.kwargs).to(next(iter(self.targets.values())))
            return
        copies: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

        def cast(value: Any) -> Any:
            dtype = self.targets.get(id(value))
            if dtype is None or dtype is value.dtype:
                return value
            if id(value) not in copies:
                copy = value.to(dtype)
                copies[id(value)] = (value, copy, copy.detach().clone())
            return copies[id(value)][1]

        args, kwargs = tree_map(cast, (self.args, self.kwargs))
        result = self.call.function(*args, **kwargs, **extra)
        self.cast = bool(copies)
        originals = {}
        for value, copy, before in copies.values():
            # statistics of norms are written to without a new version
            if (self.call.in_place and value is self.args[0]) or not _equal(copy, before):
                value.copy_(copy)  # no write is lost
                originals[id(copy)] = value
        self.result = originals.get(id(result), result)

    def outcome(self) -> Outcome:
        if self.error:
            return Outcome(error=self.error, after=[t.detach() for t in self.inputs])
        results = flat(self.result)
        owners = list(self.out) if self.out is not None else self.inputs
        found = Outcome(shape=_nesting(self.result), after=[t.detach() for t in self.inputs], cast=self.cast)
        found.grads = self.grads or [None] * len(self.leaves)
        found.leaf_dtypes = [t.dtype for t in self.leaves]
        found.written = [_version(t) != version for t, version in zip(self.inputs, self.versions, strict=True)]
        found.aliases = [_owner(r, owners) for r in results]
        found.returned = [a is not None and r is owners[a] for r, a in zip(results, found.aliases, strict=True)]
        if self.out is not None:
            found.returned = [r is out for r, out in zip(results, self.out, strict=False)] if self.result is not None else []
            results = owners
        found.results = [r.detach() if isinstance(r, torch.Tensor) else r for r in results]
        return found


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided:
        return True  # nothing of torch's writes to these
    return one.shape == other.shape and bool((torch.eq(one, other) | (torch.ne(one, one) & torch.ne(other, other))).all())


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _cotangent(end: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    wide = torch.complex64 if end.is_complex() else F32
    dense = torch.randn(end.shape, generator=generator, dtype=wide).to(end.dtype)
    return dense if end.layout is torch.strided else dense.sparse_mask(end.detach()) if end.layout is torch.sparse_coo else dense


def _nesting(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(_nesting, value))})"
    return type(value).__name__


def _owner(result: Any, owners: list[torch.Tensor]) -> int | None:
    """The first of `owners` that the result is, or shares memory with."""
    if not isinstance(result, torch.Tensor):
        return None
    for number, owner in enumerate(owners):
        if result is owner:
            return number
    for number, owner in enumerate(owners):
        dense = result.layout is torch.strided and owner.layout is torch.strided and result.numel() and owner.numel()
        if dense and result.untyped_storage().data_ptr() == owner.untyped_storage().data_ptr():
            return number
    return None


# --- what the rules allow


@dataclass
class Expectation:
    """What the rules allow for a call: one of these outcomes, or an error of one of these types where plain torch takes it in no dtype."""

    allowed: list[Outcome]
    grad: bool
    no_kernel: bool = False
    errors: set[str] = field(default_factory=set)


def expect(
    call: Call, sample: Sample, dtypes: tuple[torch.dtype, ...], kind: str | None, kinds: Kinds = (), low: torch.dtype = BF16
) -> Expectation:
    """The outcomes of plain torch with the casts that the rules ask for, gradients included where the op has them."""
    args, kwargs = given(sample, dtypes, grad=False)
    tiers = plans(call, args, kwargs, kind, low)
    errors = set()
    for grad in (True, False) if call.differentiable else (False,):
        for number, tier in enumerate(tiers):
            outcomes = [_plain(call, sample, dtypes, plan, grad, kinds=kinds) for plan in dict.fromkeys(tier)]
            if outcomes[0].error:
                errors.add(outcomes[0].error.partition(":")[0])
                continue
            allowed = [o for o in outcomes if not o.error and _dtypes(o) == _dtypes(outcomes[0])]
            return Expectation(allowed, grad, number > 0 and number == len(tiers) - 1)
    return Expectation([], False, errors=errors)


def untouched(call: Call, sample: Sample, dtypes: tuple[torch.dtype, ...], kinds: Kinds) -> Expectation:
    """Plain torch's own outcome: what the rules allow where casts are off."""
    for grad in (True, False) if call.differentiable else (False,):
        attempt = Attempt(call, sample, dtypes, grad=grad, kinds=kinds)
        attempt.run()
        found = attempt.outcome()
        if not found.error:
            return Expectation([found], grad)
    return Expectation([], False, errors={found.error.partition(":")[0]})


# Ops with a low kernel in one of two dtypes, or whose low kernel gives numbers of no use: R11's table has them whole.
COARSE = frozenset({"matrix_exp"})


def lacks_kernel(call: Call, sample: Sample, dtypes: tuple[torch.dtype, ...], expected: Expectation, kinds: Kinds) -> list[Outcome]:
    """The float32 run of R11, where plain torch refuses the low-precision dtypes of this call's plan elsewhere."""
    lows = {d for o in expected.allowed for d in (*o.plan, *dtypes) if d in (torch.bfloat16, torch.float16)}
    info = next((each for each in op_db() if title(each) == call.op), None)
    if not lows or info is None or expected.no_kernel:
        return []

    def refuses(other: Sample) -> bool:
        count = len(distinct(castable(other.tree)))
        grad = call.differentiable
        fine = not _plain(call, other, (F32,) * count, (F32,) * count, grad).error
        return fine and any(_plain(call, other, (low,) * count, (low,) * count, grad).error for low in lows)

    call = replace(call, function=next(calls(info)).function, variant="function") if call.out else call
    if call.op not in COARSE and not any(map(refuses, samples(info)[:30])):
        return []
    found = _plain(call, sample, dtypes, (F32,) * len(dtypes), expected.grad, kinds=kinds)
    return [] if found.error else [found]


def accepted(call: Call, sample: Sample) -> bool:
    """Whether plain torch takes this call at all, its float32 tensors as they are; with out= one of the results' own dtypes."""
    dtypes = (F32,) * len(distinct(castable(sample.tree)))
    found = _plain(replace(call, variant="function") if call.out else call, sample, dtypes, (), False)
    if found.error or not call.out:
        # addbmm_ makes a tensor that it broadcasts larger, which is no writing in place
        return not found.error and not (
            call.in_place and [t.shape for t in found.after] != [t.shape for t in distinct(tensors(sample.tree))]
        )
    if not found.results or not all(isinstance(r, torch.Tensor) for r in found.results):
        return False
    return not _plain(call, sample, dtypes, (), False, outs(found, F32, "full")).error


def expect_out(
    call: Call, sample: Sample, dtypes: tuple[torch.dtype, ...], kind: str | None, dtype: torch.dtype, *, how: str, low: torch.dtype = BF16
) -> tuple[Expectation, tuple[torch.Tensor, ...]]:
    """R6: the outcomes that the rules allow with an `out` of this dtype, and such an out; none where plain torch takes no such
    out with any uniform inputs."""
    function = replace(call, variant="function", differentiable=False)  # out= takes no part in autograd
    found = expect(function, sample, dtypes, kind, low=low)
    if not found.allowed:
        return found, ()
    results = found.allowed
    makes = functools.partial(outs, results[0], dtype, how)
    uniform = [(F32,) * len(dtypes)]
    if len(set(dtypes)) == 1 and F32 not in dtypes and not found.no_kernel:
        uniform.append(dtypes)
    takes = [o for o in (_plain(call, sample, dtypes, plan, False, makes()) for plan in uniform) if not o.error]
    if not takes and found.no_kernel and len(set(dtypes)) == 1 and F32 not in dtypes:
        # without a kernel for bfloat16 plain torch takes no such out: R11 has the float32 result arrive in it
        takes = [_plain(call, sample, dtypes, uniform[0], False, outs(results[0], F32, how))]
    if not takes:
        return Expectation([], False), ()
    shape = takes[0].shape
    allowed = [delivered(o, dtype, shape) for o in results]
    # torch's own delivery may round once where two casts round twice
    direct = [_plain(call, sample, dtypes, o.plan, False, makes()) for o in results]
    errors = set()
    if kind is None:  # what torch says of an out of another dtype stands, where the mixture is torch's own
        as_is = _plain(call, sample, dtypes, (), False, makes())
        errors = {as_is.error.partition(":")[0]} if as_is.error else set()
    return Expectation(allowed + [o for o in direct if not o.error], False, found.no_kernel, errors), makes()


def _plain(
    call: Call,
    sample: Sample,
    dtypes: tuple[torch.dtype, ...],
    plan: Plan,
    grad: bool,
    out: tuple[Any, ...] | None = None,
    kinds: Kinds = (),
) -> Outcome:
    attempt = Attempt(call, sample, dtypes, grad=grad, plan=plan, out=out, kinds=kinds)
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


def outs(outcome: Outcome, dtype: torch.dtype, how: str) -> tuple[torch.Tensor, ...]:
    """Tensors to write the results into: castable ones in `dtype`, the others as they are; of their shapes, empty, or a view of twice as
    much memory."""
    made = []
    for result in outcome.results:
        wanted = dtype if result.dtype in CASTABLE else result.dtype
        doubled = torch.full((*result.shape, 2), 1, dtype=wanted)
        made.append({"full": doubled[..., 0].clone(), "empty": torch.empty(0, dtype=wanted), "view": doubled[..., 0]}[how])
    return tuple(made)


def delivered(outcome: Outcome, dtype: torch.dtype, shape: str) -> Outcome:
    """R6: the outcome with its castable results in `dtype`; `shape` is what torch returns for out=."""
    arrived = [r.to(dtype) if r.dtype in CASTABLE else r for r in outcome.results]
    return Outcome(results=arrived, shape=shape, after=outcome.after, written=outcome.written)


# --- how one outcome differs from another


def differences(call: Call, got: Outcome, want: Outcome, out: bool) -> list[tuple[str, str]]:
    """How `got` differs from `want`, as (what, detail)."""
    if got.error:
        return [("raises", got.error.splitlines()[0][:220])]
    found: list[tuple[str, str]] = []
    if got.shape != want.shape:
        return [("nesting", f"got {got.shape}, the rules give {want.shape}")]
    base = call.op.partition("/")[0]
    allowed = float("inf") if base in UNINITIALISED else ROUGH.get(base, 0.0)
    if call.op in STRUCTURE:
        compared = [*zip(got.results, want.results, strict=True), *zip(got.grads, want.grads, strict=True)]
        found += [("values", f"result {n}: got {one}, about {other}") for n, (one, other) in enumerate(compared) if not roughly(one, other)]
        return found + _in_leaf_dtype(got)
    for number, (one, other) in enumerate(zip(got.results, want.results, strict=True)):
        found += [(what, f"result {number}: {detail}") for what, detail in unlike(one, other, allowed)]
    for number, (one, other) in enumerate(zip(got.after, want.after, strict=True)):
        found += [("input", f"input {number} afterwards: {detail}") for _, detail in unlike(one, other, allowed)]
    if got.written != want.written:
        found.append(("write", f"writes into inputs: {got.written}, the rules give {want.written}"))
    if out:
        return found if all(got.returned) else [*found, ("write", "what is returned is not out")]
    if call.in_place and not got.returned[0] and want.returned[0]:
        found.append(("write", "what is returned is not the first input"))
    if not want.cast and got.aliases != want.aliases:
        found.append(("alias", f"results share memory with inputs {got.aliases}, the rules give {want.aliases}"))
    for number, (one, other) in enumerate(zip(got.grads, want.grads, strict=True)):
        if (one is None) != (other is None):
            found.append(("gradient", f"gradient {number} is {'missing' if one is None else 'there'}, plain torch's is not"))
        elif one is not None:
            found += [("gradient", f"gradient {number}: {detail}") for _, detail in unlike(one, other, allowed)]
    return found + _in_leaf_dtype(got)


def _in_leaf_dtype(got: Outcome) -> list[tuple[str, str]]:
    """R13."""
    pairs = zip(got.grads, got.leaf_dtypes, strict=True)
    return [("gradient", f"a gradient is {g.dtype}, its leaf {leaf}") for g, leaf in pairs if g is not None and g.dtype is not leaf]


def roughly(got: Any, want: Any) -> bool:
    """Whether two tensors agree within a twentieth of the largest value, whatever their dtypes; both may be None."""
    if got is None or want is None:
        return got is want
    got, want = got.to(torch.float64), want.to(torch.float64)
    return got.shape == want.shape and bool(((got - want).abs() <= 0.05 * want.abs().max().clamp(min=1e-3)).all())


RECURRENT = {"rnn_relu", "rnn_tanh", "lstm", "gru"}


@dataclass
class Case:
    """A call with one mixture of dtypes and kinds, what the rules allow for it, and hmp's attempt at it."""

    call: Call
    sample: Sample
    dtypes: tuple[torch.dtype, ...]
    kinds: tuple[str, ...]
    out: str
    expected: Expectation
    attempt: Attempt

    def __str__(self) -> str:
        dtypes = " ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        return f"{self.call.op} | {self.call.variant} | {dtypes} | {' '.join(self.kinds)} {self.out}"


def case_of(
    call: Call, sample: Sample, dtypes: tuple[torch.dtype, ...], kind: str | None, kinds: tuple[str, ...] = (), low: torch.dtype = BF16
) -> Case:
    """The call on the list `kind`, oracle done. To be called while nothing of torch is patched."""
    expected = expect(call, sample, dtypes, kind, kinds, low)
    return Case(call, sample, dtypes, kinds, "", expected, Attempt(call, sample, dtypes, grad=expected.grad, kinds=kinds))


def case_off(call: Call, sample: Sample, dtypes: tuple[torch.dtype, ...], kinds: tuple[str, ...]) -> Case:
    """The same where casts are off."""
    expected = untouched(call, sample, dtypes, kinds)
    return Case(call, sample, dtypes, kinds, "", expected, Attempt(call, sample, dtypes, grad=expected.grad, kinds=kinds))


def cases_into(
    call: Call,
    sample: Sample,
    dtypes: tuple[torch.dtype, ...],
    kind: str | None,
    outs: Iterable[tuple[str, torch.dtype]],
    low: torch.dtype = BF16,
) -> Iterator[Case]:
    """The same into each of these outs, given by (how, dtype), of which torch takes such a one at all (R6)."""
    for how, dtype in outs:
        expected, out = expect_out(call, sample, dtypes, kind, dtype, how=how, low=low)
        if expected.allowed:
            attempt = Attempt(call, sample, dtypes, grad=False, out=out)
            yield Case(call, sample, dtypes, (), f"into {how} {dtype}", expected, attempt)


def attempted(cases: Iterable[Case]) -> None:
    """Makes the calls, in the context that the caller is in."""
    for case in cases:
        case.attempt.run(hmp.disable_casts)


def wrong(case: Case, off: bool = False) -> list[str]:
    """How the attempt differs from what the rules allow, a line each."""
    got, expected = case.attempt.outcome(), case.expected
    if got.error.partition(":")[0] in expected.errors:
        return []
    if not expected.allowed:
        return [f"{case}: got {got.error or 'no error'}, torch raises {expected.errors}"]
    found = min((differences(case.call, got, want, bool(case.out)) for want in expected.allowed), key=len)
    if found and not off:
        allowed = lacks_kernel(case.call, case.sample, case.dtypes, expected, case.kinds)  # R11's table knows ops, not samples
        found = min((found, *(differences(case.call, got, want, bool(case.out)) for want in allowed)), key=len)
    if len(set(case.dtypes)) > 1 or not case.call.reachable:
        found = [(what, detail) for what, detail in found if (case.call.op, what) not in EXCEPTIONS]
    if case.call.op in RECURRENT:  # R21: their steps' gradients are summed in float32, with torch's low kernels in the low dtype
        found = [(what, detail) for what, detail in found if what != "gradient"]
    return [f"{case}: {what}: {detail}" for what, detail in found]
