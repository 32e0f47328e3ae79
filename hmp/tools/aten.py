"""Facts about ATen ops, read from their schemas: what they write, whether they compute, draw, move or leave memory unwritten."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..core.casting import each_tensor
from ..core.torch_private import memory_of, storage_of
from ..errors import HmpError

Tensor = torch.Tensor

# They draw and look at no values.
_DRAWS = frozenset(
    """bernoulli bernoulli_ rand rand_like randn randn_like randint randint_like randperm normal normal_ uniform uniform_ random
    random_ exponential exponential_ log_normal log_normal_ cauchy cauchy_ geometric geometric_ multinomial poisson binomial
    normal_functional""".split()
)
# They move values and compute none.
_MOVES = frozenset(
    """_to_copy clone copy_ copy contiguous cat stack index index_select gather where masked_fill masked_fill_ constant_pad_nd repeat
    roll flip embedding _unsafe_view slice_scatter select_scatter index_put index_put_ index_copy index_copy_ scatter scatter_ fill_
    fill masked_scatter take tril triu tril_ triu_ lift_fresh_copy _reshape_copy resize_ split_with_sizes_copy _foreach_copy_
    nan_to_num""".split()
)
# They write into their first argument without reading it.
_OVERWRITES = frozenset({"copy_", "fill_", "zero_", "set_", "resize_", "_foreach_copy_", "_foreach_zero_"}) | _DRAWS
# Their schemas do not say that they write the running statistics.
_WRITES_STATISTICS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
# What a forward kernel leaves for its backward, in a form of its own.
_WORKSPACES = frozenset({"workspace", "reserve"})
_UNWRITTEN = ("empty", "new_empty", "_empty", "resize")


class Facts(NamedTuple):
    """What an ATen op's schema says.

    `writes` are positions and keywords of what it writes, `reads_written` is whether it also reads those at positions; `is_random` also
    holds of ops that compute with what they draw.
    """

    name: str
    writes: tuple[int | str, ...]
    reads_written: bool
    is_view: bool
    draws: bool
    moves: bool
    is_random: bool
    unwritten: bool
    has_workspace: bool
    takes_workspace: bool


@functools.cache
def facts(func: Any) -> Facts:
    """Return the facts of the overload `func`."""
    schema = func._schema
    name = schema.name.split("::")[-1]
    arguments = schema.arguments
    writes = tuple(
        a.name if a.kwarg_only else i
        for i, a in enumerate(arguments)
        if (a.alias_info is not None and a.alias_info.is_write)
        or (name in _WRITES_STATISTICS and a.name in ("running_mean", "running_var"))
    )
    words = {a.name for a in (*arguments, *schema.returns)}
    return Facts(
        name=name,
        writes=writes,
        reads_written=name not in _OVERWRITES,
        is_view=func.is_view,
        draws=name in _DRAWS,
        moves=name in _MOVES,
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        unwritten=name.startswith(_UNWRITTEN),
        has_workspace="rnn" in name or not words.isdisjoint(_WORKSPACES),
        takes_workspace=not _WORKSPACES.isdisjoint(a.name for a in arguments),
    )


def argument(args: Any, kwargs: Any, at: int | str) -> Any:
    """Return the argument at a position or keyword, None where the call leaves it out."""
    if isinstance(at, str):
        return kwargs.get(at)
    return args[at] if at < len(args) else None


def refuse_xla(device: torch.device, call: str) -> None:
    """Raise HmpError for tensors of XLA: below autograd torch shows others in their place, with nothing to identify them by."""
    if device.type == "xla":
        raise HmpError(f"{call} does not support XLA; move the model and its batch to the CPU")


def local(tensor: Tensor) -> Tensor:
    """Return the tensor, of a DTensor the part that this process has, waited for or not: what ops below autograd are called with."""
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return getattr(found, "elem", found)


def waited(tensor: Tensor) -> Tensor:
    """Return `local(tensor)` to read its values: once the collective that makes it has ended."""
    found = getattr(tensor, "_local_tensor", tensor)
    if hasattr(found, "trigger_wait"):
        found.trigger_wait()
    return local(tensor)


def storage_address(tensor: Tensor) -> int:
    """Return what identifies the tensor's memory, of a DTensor that of this rank's part; 0 if it has none of its own."""
    tensor = local(tensor)
    if tensor.layout is not torch.strided or tensor.is_meta:
        return 0
    return memory_of(storage_of(tensor))


# Two processes send to each other: each would wait for the other to receive.
_POINT_TO_POINT = frozenset({"send", "recv_", "recv_any_source_"})


def is_collective(func: Any) -> bool:
    """Return True if processes take part in the op together."""
    # the first writes into its first argument, the other returns new memory
    return func.namespace in ("c10d", "_c10d_functional")


def is_point_to_point(func: Any) -> bool:
    """Return True if the collective is one process's alone: it sends, or receives."""
    return func._schema.name.partition("::")[2] in _POINT_TO_POINT


def written_by_collective(func: Any, args: Any) -> list[torch.Tensor]:
    """Return which of the collective's arguments it writes."""
    return list(each_tensor(args[:1])) if func.namespace == "c10d" else []


def run_collective(func: Any, args: Any, kwargs: Any, call: Callable[..., Any] | None = None) -> Any:
    """Return what the collective returns, once the values are there. One to one other process is not waited for."""
    out = (call or func)(*args, **kwargs)
    if is_point_to_point(func):
        return out
    for work in out if isinstance(out, tuple) else (out,):
        if isinstance(work, torch.ScriptObject):
            work.wait()  # type: ignore[attr-defined]  # torch.classes.c10d.Work
    if func.namespace != "c10d":
        for tensor in each_tensor((out,)):
            getattr(torch.ops, func.namespace).wait_tensor(tensor)
    return out
