"""Kernels that write by address: on some devices the copy-on-write mark (write_marks, R18) stays where they wrote. Here they clear it.

torch's kernels for lists of tensors, `_foreach_` and `_fused_` ones, hand the addresses of a list on to the device without asking for write
access, on CUDA for one; and `record_stream` finds no allocator of marked memory and does nothing. So hmp registers a
Python kernel for them in torch's dispatcher, which calls from C++ reach too: it clears the marks of what they will write.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import locks, torch_private
from ..patching import patches

_NAMES = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_", "aten::record_stream")
_copy_on_write = torch_private.copy_on_write
_is_marked: Callable[[Any], bool] = (lambda tensor: False) if _copy_on_write is None else _copy_on_write.is_pending
_storage_of = torch_private.storage_of

_library: list[Any] = []  # the registrations in torch's dispatcher, while there are any
_lock = locks.RLock()


def watch() -> None:
    """Have these kernels clear marks until patches.restore(), from now on."""
    if not _library:
        with _lock:
            if not _library:
                patches.on_restore(_unwatch)  # first: an interrupt may come in between
                _library.append(_registered())


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Have these kernels clear marks inside."""
    if _library:
        yield
        return
    with _lock:
        library = _registered()
        try:
            yield
        finally:
            library._destroy()


def _unwatch() -> None:
    while _library:
        _library.pop()._destroy()


def _registered() -> Any:
    library = torch.library.Library("aten", "IMPL")
    for schema in torch_private.all_schemas():
        written = _written(schema)
        if written:
            name, overload = schema.name.removeprefix("aten::"), schema.overload_name
            op = getattr(getattr(torch.ops.aten, name), overload or "default")
            # the last key before a device's own, at which none of these ops has a kernel
            library.impl(f"{name}.{overload}" if overload else name, _clearing(op, written), "BackendSelect", with_keyset=True)
    return library


def _written(schema: Any) -> list[tuple[int, str, bool]]:
    """Return what an op of these writes: the place among its arguments, the name, and whether it is a list of tensors; [] for other ops."""
    if not schema.name.startswith(_NAMES):
        return []
    return [
        (place, argument.name, isinstance(argument.type, torch.ListType))
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _clearing(op: Any, written: list[tuple[int, str, bool]]) -> Callable[..., Any]:
    """Return `op`, which clears the marks of what it is to write first."""
    after = torch_private.keys_after_backend_select

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        for place, name, is_list in written:
            given: Any = args[place] if place < len(args) else kwargs[name]
            for tensor in given if is_list else (given,):
                if _is_marked(tensor):
                    _storage_of(tensor).data_ptr()
        return op.redispatch(keys & after, *args, **kwargs)

    return kernel
