"""Random programs over a pool of tensors, and two ways to run them: as a user writes them, and with every cast written out.

The second is the oracle of P2 and P8. It knows nothing of hmp: a statement's op is looked up in the program's lists, and its
inputs get `.to()`.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from low_kernels_kit import products_as_computed
from oracle import BF16, CASTABLE, F16, F32, target

N = 4  # everything is N x N, or broadcasts to it
Tensor = torch.Tensor

# name: (the list's name, the call as a user writes it, how many tensors it takes)
COMPUTING: dict[str, tuple[str, Callable[..., Tensor], int]] = {
    "matmul": ("matmul", operator.matmul, 2),
    "torch.mm": ("mm", lambda a, b: torch.mm(a, b), 2),
    "linear": ("linear", lambda a, b: F.linear(a, weight=b), 2),
    "addmm": ("addmm", lambda a, b, c: torch.addmm(a, b, c), 3),
    "mul": ("mul", operator.mul, 2),
    "x.mul": ("mul", lambda a, b: a.mul(b), 2),
    "add": ("add", operator.add, 2),
    "sub": ("sub", lambda a, b: torch.sub(a, b), 2),
    "maximum": ("maximum", lambda a, b: torch.maximum(a, b), 2),
    "truediv": ("truediv", operator.truediv, 2),
    "softmax": ("softmax", lambda a: F.softmax(a, -1), 1),
    "log_softmax": ("log_softmax", lambda a: a.log_softmax(-1), 1),
    "relu": ("relu", lambda a: torch.relu(a), 1),
    "sin": ("sin", lambda a: a.sin(), 1),
    "tanh": ("tanh", lambda a: torch.tanh(a), 1),
    "layer_norm": ("layer_norm", lambda a: F.layer_norm(a, (N,)), 1),
    "cat": ("cat", lambda a, b: torch.cat([a, b])[:N], 2),
    "index_add": ("index_add", lambda a, b: a.index_add(0, torch.tensor([1, 0]), b[:2]), 2),
}
VIEWS: dict[str, tuple[str | None, Callable[[Tensor], Tensor]]] = {
    "t": ("t", lambda a: a.t()),
    "transpose": ("transpose", lambda a: torch.transpose(a, 0, 1)),
    "view": ("view", lambda a: a.view(a.shape)),
    "reshape": ("reshape", lambda a: a.reshape(N, N)),
    "detach": (None, lambda a: a.detach()),
    "expand": ("expand", lambda a: a.expand(N, N)),
    "slice": (None, lambda a: a[:]),
    "rows": (None, lambda a: a[[3, 2, 1, 0]]),
}
IN_PLACE: dict[str, tuple[Callable[..., Tensor], int]] = {
    "add_": (lambda x, y: x.add_(y), 2),
    "mul_": (lambda x, y: x.mul_(y), 2),
    "+=": (operator.iadd, 2),
    "*=": (operator.imul, 2),
    "copy_": (lambda x, y: x.copy_(y), 2),
    "addmm_": (lambda x, y, z: x.addmm_(y, z), 3),
    "relu_": (lambda x: torch.relu_(x), 1),
    "tanh_": (lambda x: x.tanh_(), 1),
    "F.relu(inplace)": (lambda x: F.relu(x, inplace=True), 1),
    "index_add_": (lambda x, y: x.index_add_(0, torch.tensor([1, 0]), y[:2]), 2),
    "x[0] = y[1]": (lambda x, y: _set(x, 0, y, 1), 2),
    "x[:, 1:] = y[:, 1:]": (lambda x, y: _set(x, (slice(None), slice(1, None)), y, (slice(None), slice(1, None))), 2),
    "x[mask] = 2": (lambda x: _fill(x), 1),
    "foreach": (lambda x, y: (torch._foreach_mul_([x], 0.5), x)[1], 2),
}
OUT: dict[str, tuple[str, Callable[..., Tensor], int]] = {
    "torch.mul(out=)": ("mul", lambda x, y, out: torch.mul(x, y, out=out), 2),
    "torch.matmul(out=)": ("matmul", lambda x, y, out: torch.matmul(x, y, out=out), 2),
    "torch.tanh(out=)": ("tanh", lambda x, out: torch.tanh(x, out=out), 1),
    "torch.add(out=)": ("add", lambda x, y, out: torch.add(x, y, out=out), 2),
}
LISTABLE = sorted({name for name, _, _ in COMPUTING.values()} | {name for name, _ in VIEWS.values() if name})
# ops that torch itself promotes, and computes with a mixture, in whatever list they are not
_TORCH_PROMOTES = frozenset({"mul", "add", "sub", "maximum", "truediv", "cat"})


def _set(x: Tensor, at: Any, y: Tensor, of: Any) -> Tensor:
    x[at] = y[of]
    return x


def _fill(x: Tensor) -> Tensor:
    x[torch.eye(N, dtype=torch.bool)] = 2.0
    return x


@dataclass(frozen=True)
class Statement:
    """One line of a program: what it does, to which tensors of the pool (by number, modulo how many there are), in which context."""

    kind: str  # compute, view, in place, out, data, grad, del
    name: str
    pool: tuple[int, int, int]
    context: str = ""  # "", off, on in off, another


@dataclass(frozen=True)
class Program:
    """Lists, the pool's dtypes, which of it require gradients, and statements."""

    lists: tuple[tuple[str, str], ...]  # (op, list)
    low: torch.dtype
    dtypes: tuple[torch.dtype, ...]
    leaves: tuple[bool, ...]
    statements: tuple[Statement, ...]
    seed: int = 0

    def list_of(self, name: str | None) -> str | None:
        return dict(self.lists).get(name or "")

    def names(self, kind: str) -> set[str]:
        return {name for name, each in self.lists if each == kind}

    def pool(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        made = [(torch.randn(N, N, generator=generator) * 0.7).to(dtype) for dtype in self.dtypes]
        return [t.requires_grad_(leaf) for t, leaf in zip(made, self.leaves, strict=True)]


def programs(*, writes: bool = True, contexts: bool = True) -> st.SearchStrategy[Program]:
    """Programs of 3 to 12 statements over 2 to 4 tensors."""
    names = {"compute": list(COMPUTING), "view": list(VIEWS)}
    if writes:
        names |= {"in place": list(IN_PLACE), "out": list(OUT), "data": [""], "grad": [""], "del": [""]}
    kinds = ["compute", "compute", "view", "view", "in place", "in place", "out", "data", "grad", "del"]
    statement = st.sampled_from([kind for kind in kinds if kind in names]).flatmap(
        lambda kind: st.builds(
            Statement,
            st.just(kind),
            st.sampled_from(names[kind]),
            st.tuples(*[st.integers(0, 5)] * 3),
            st.sampled_from(["", "", "", "off", "on in off", "another"] if contexts else [""]),
        )
    )
    lists = st.dictionaries(st.sampled_from(LISTABLE), st.sampled_from(["bf16", "bf16", "fp32", "promote"]), min_size=3, max_size=12)
    return st.integers(2, 4).flatmap(
        lambda count: st.builds(
            Program,
            lists.map(lambda d: tuple(sorted(d.items()))),
            st.sampled_from([BF16, BF16, F16]),
            st.tuples(*[st.sampled_from([F32, F32, BF16, F16])] * count),
            st.tuples(*[st.sampled_from([False, False, True])] * count),
            st.lists(statement, min_size=3, max_size=12).map(tuple),
            st.integers(0, 99),
        )
    )


# The other policy of the programs: what it lists and what not is neither what the first does.
ANOTHER = {"matmul": "fp32", "mul": "fp32", "tanh": "bf16", "softmax": "bf16", "t": "fp32"}


def overlap(name: str, out: Tensor, args: list[Tensor]) -> bool:
    """Whether torch itself writes into what it still reads: such a statement does nothing in either run."""
    return any(t.untyped_storage().data_ptr() == out.untyped_storage().data_ptr() and (t is not out or name == "matmul") for t in args)


@dataclass
class Interpreter:
    """Runs a program's statements with explicit casts."""

    program: Program
    pool: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = self.program.pool()

    def rule(self, name: str | None, context: str) -> tuple[str | None, torch.dtype]:
        if context == "off":
            return "off", self.program.low
        if context == "another":
            return (ANOTHER.get(name or "") or None), BF16
        return self.program.list_of(name), self.program.low

    def chosen(self, statement: Statement, count: int) -> list[Tensor]:
        return [self.pool[number % len(self.pool)] for number in statement.pool[:count]]

    def overlaps(self, statement: Statement) -> bool:
        out, *args = self.chosen(statement, 1 + OUT[statement.name][2])
        return overlap(OUT[statement.name][0], out, args)

    def may_be_refused(self, statement: Statement) -> bool:
        """What rules.md leaves open: an unlisted op with out= may refuse an out of another dtype than torch would."""
        if statement.kind != "out" or self.overlaps(statement) or self.rule(OUT[statement.name][0], statement.context)[0] is not None:
            return False
        return len({t.dtype for t in self.chosen(statement, 1 + OUT[statement.name][2])}) > 1

    def apply(self, statement: Statement) -> None:
        run = {"compute": self._compute, "in place": self._in_place, "out": self._out}.get(statement.kind)
        run(statement) if run else as_written(self.pool, statement)  # a view is never cast (R10), and the others compute nothing

    def cast(self, args: list[Tensor], kind: str | None, low: torch.dtype, name: str | None) -> list[Tensor]:
        if kind == "off":
            return args
        if kind is None:
            # R7: torch's own mixture where it takes one, else the dtype of the first
            return args if name in _TORCH_PROMOTES else [t.to(args[0].dtype) for t in args]
        if kind == "promote" and name in _TORCH_PROMOTES:
            return args
        dtype = target(kind, args, low=low)
        return [t if dtype is None or t.dtype not in CASTABLE else t.to(dtype) for t in args]

    def computed(self, call: Callable[..., Tensor], args: list[Tensor], kind: str | None) -> Tensor:
        if kind == "off":
            return call(*args)
        with products_as_computed():
            return call(*args)

    def _compute(self, statement: Statement) -> None:
        name, call, count = COMPUTING[statement.name]
        args = self.chosen(statement, count)
        kind, low = self.rule(name, statement.context)
        if name == "layer_norm" and kind == "promote":
            kind = None
        self.pool.append(self.computed(call, self.cast(args, kind, low, name), kind))

    def _in_place(self, statement: Statement) -> None:
        call, count = IN_PLACE[statement.name]
        written, *others = self.chosen(statement, count)
        if statement.context != "off":
            mixes = statement.name in ("add_", "mul_", "+=", "*=", "copy_")  # one rounding, torch's own
            others = others if mixes else [t.to(written.dtype) for t in others]
        self.computed(call, [written, *others], "off" if statement.context == "off" else None)

    def _out(self, statement: Statement) -> None:
        name, call, count = OUT[statement.name]
        if self.overlaps(statement):
            return
        out, *args = self.chosen(statement, 1 + count)
        kind, low = self.rule(name, statement.context)
        if args[0] is out and kind != "off":  # R5: it writes into its own input
            args, kind = (args if name in _TORCH_PROMOTES else [t.to(out.dtype) for t in args]), "as given"
        if kind in (None, "off"):
            call(*args, out=torch.empty_like(out))  # torch's own errors: for an out of another dtype, for gradients
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*args, out)):
            raise RuntimeError("out= takes no part in autograd")
        result = self.computed(functools.partial(call, out=None), args if kind == "as given" else self.cast(args, kind, low, name), kind)
        out.copy_(result)


def as_written(pool: list[Tensor], statement: Statement) -> None:
    """The statement as a user writes it; `pool` is changed by it."""

    def chosen(count: int) -> list[Tensor]:
        return [pool[number % len(pool)] for number in statement.pool[:count]]

    if statement.kind == "compute":
        _, call, count = COMPUTING[statement.name]
        pool.append(call(*chosen(count)))
    elif statement.kind == "view":
        pool.append(VIEWS[statement.name][1](*chosen(1)))
    elif statement.kind == "in place":
        call, count = IN_PLACE[statement.name]
        call(*chosen(count))
    elif statement.kind == "out":
        name, call, count = OUT[statement.name]
        out, *args = chosen(1 + count)
        if not overlap(name, out, args):
            call(*args, out=out)
    elif statement.kind == "data":
        written, other = chosen(2)
        written.data = other.detach().to(written.dtype).clone()
    elif statement.kind == "grad":
        written, other = chosen(2)
        if written.is_leaf:
            written.grad = other.detach().to(written.dtype).clone()
    elif len(pool) > 2:
        del pool[statement.pool[0] % len(pool)]


@dataclass
class Step:
    """What the oracle says of a statement: whether the rules let hmp refuse it, which error torch raises, and the pool behind it."""

    may_be_refused: bool
    error: type[BaseException] | None
    pool: list[Tensor]


def by_hand(program: Program) -> tuple[list[Step], list[Tensor | None] | None]:
    """Every statement by explicit casts, and the gradients of the leaves at the end; None where torch raises in backward. It ends where
    the rules leave open whether a statement is refused."""
    steps, wanted = _interpreted(program)
    with mock.patch.dict(os.environ, {"HMP_LOW_KERNELS": "native"}):
        # torch's kernels keep their inputs, and backward raises where these were written: so does what computes in float32 in their place
        is_error = wanted is None or _interpreted(program)[1] is None
        return steps, None if is_error else wanted


def _interpreted(program: Program) -> tuple[list[Step], list[Tensor | None] | None]:
    interpreter, steps = Interpreter(program), []
    leaves = [t for t in interpreter.pool if t.requires_grad]
    for statement in program.statements:
        may_be_refused, error = interpreter.may_be_refused(statement), None
        try:
            interpreter.apply(statement)
        except (RuntimeError, TypeError) as raised:
            error = type(raised)
        steps.append(Step(may_be_refused, error, [t.detach().clone() for t in interpreter.pool]))
        if may_be_refused:
            return steps, None
    if any(statement.kind == "data" for statement in program.statements):
        return steps, None  # torch does not count such a write: which values backward sees is left open
    return steps, gradients(interpreter.pool, leaves)


def gradients(pool: list[Tensor], leaves: list[Tensor]) -> list[Tensor | None] | None:
    ends = [t for t in pool if t.requires_grad]
    if not ends or not leaves:
        return [None] * len(leaves)
    try:
        return list(torch.autograd.grad(ends, leaves, [torch.ones_like(t) for t in ends], allow_unused=True))
    except RuntimeError:
        return None
