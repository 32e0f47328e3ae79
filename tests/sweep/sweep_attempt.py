"""One call of the sweep, with its casts written out or with none, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from oracle import F32, castable, tensors
from sweep_cases import Call, Sample, given, seed


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


Plan = tuple[torch.dtype | None, ...]
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
    ) -> None:
        self.call, self.finish = call, sample.finish
        self.args, self.kwargs = given(sample, dtypes, grad=grad)
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
            if isinstance(value, torch.Tensor):
                dtype = self.targets.get(id(value))
                if dtype is None or dtype is value.dtype:
                    return value
                if id(value) not in copies:
                    copy = value.to(dtype)
                    copies[id(value)] = (value, copy, copy.detach().clone())
                return copies[id(value)][1]
            if isinstance(value, (list, tuple)):
                return type(value)(map(cast, value))
            return {k: cast(v) for k, v in value.items()} if isinstance(value, dict) else value

        result = self.call.function(*cast(self.args), **cast(self.kwargs), **extra)
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
        results = list(_flat(self.result))
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


def distinct(values: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(t): t for t in values}.values())


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


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


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
        with torch._C.DisableTorchFunctionSubclass():  # a cast copy of a view refuses to give its storage
            if dense and result.untyped_storage().data_ptr() == owner.untyped_storage().data_ptr():
                return number
    return None
