"""What a user's function writes into copies that hmp made of its arguments: a lost write into a tensor is an error (R10)."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ...errors import HmpError
from ..casting import Tensor, cast, dtype_name

_Call = tuple[Sequence[Any], Mapping[str, Any]]  # its positional arguments and its keywords
_Copy = tuple[str, Any, Any, Any]  # the argument, what was given, its copy, and what that was before the call


def watched_cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` in `dtype`, as a tensor that counts the writes into it: one that is made in inference mode does not."""
    with torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
        return cast(tensor, dtype)


def call(op: Callable[..., Any], name: str, cast_call: _Call, given: _Call, order: Sequence[str]) -> Any:
    """Return the result of the user's function `op`, called with `cast_call` for `given`; `order` names positional arguments.

    What it writes into a cast tensor is an error, and its changes of a list or dict that was copied are made in the caller's own. Those of
    a generator or a coroutine are looked at when it ends.
    """
    (args, kwargs), (cast_args, cast_kwargs) = given, cast_call
    names = [*order[: len(args)], *(f"argument {i + 1}" for i in range(len(order), len(args))), *kwargs]
    arguments = zip(names, [*args, *kwargs.values()], [*cast_args, *cast_kwargs.values()], strict=True)
    copies = [copy for argument in arguments for copy in _copies(*argument)]
    with _settled(name, copies):
        result = op(*cast_args, **cast_kwargs)
    if inspect.iscoroutine(result) or (inspect.isgenerator(result) and inspect.isawaitable(result)):
        return _until_it_returns(result, name, copies)
    return _until_it_ends(result, name, copies) if inspect.isgenerator(result) else result


def _until_it_ends(generator: Generator[Any, Any, Any], name: str, copies: list[_Copy]) -> Generator[Any, Any, Any]:
    with _settled(name, copies):
        return (yield from generator)


async def _until_it_returns(coroutine: Any, name: str, copies: list[_Copy]) -> Any:
    with _settled(name, copies):
        return await coroutine


def _copies(argument: str, given: Any, copy: Any) -> Iterator[_Copy]:
    """Yield the copy of an argument and the copies inside it, with what they were before the call: a version, or a container's items."""
    if isinstance(copy, Tensor) and copy is not given:
        yield argument, given, copy, copy._version
    elif copy is not given:
        yield argument, given, copy, _ids(copy)
        for (_, old), (_, new) in zip(_items(given), _items(copy), strict=True):
            yield from _copies(argument, old, new)


@contextlib.contextmanager
def _settled(name: str, copies: list[_Copy]) -> Iterator[None]:
    """Run a block in which the function `name` gets `copies`. What it put into a container is put into the caller's."""
    try:
        yield
    finally:
        own = {id(copy): given for _, given, copy, _ in copies}
        for _, given, copy, before in copies:
            if not isinstance(copy, Tensor) and _ids(copy) != before:
                given.clear()
                put = given.__setitem__ if isinstance(given, dict) else given.insert
                for key, item in _items(copy):
                    put(key, own.get(id(item), item))
    for argument, given, copy, before in copies:
        if isinstance(copy, Tensor) and copy._version != before:
            raise HmpError(
                f"{name} wrote into its argument `{argument}`, which was cast from {dtype_name(given.dtype)} to {dtype_name(copy.dtype)} "
                f"for the call, so the write is lost; pass a {dtype_name(copy.dtype)} tensor, return the new values, or call it inside "
                f"hmp.disable_casts()"
            )


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    return list(container.items() if isinstance(container, dict) else enumerate(container))


def _ids(container: Any) -> list[tuple[Any, int]]:
    return [(key, id(item)) for key, item in _items(container)]
