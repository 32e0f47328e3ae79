"""CopiedView: the result of a view op whose input was cast. It is a copy and no view, so that writes into it raise (R10)."""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
import torch.utils.dlpack
from torch.multiprocessing.reductions import StorageWeakRef

from ...errors import HmpError
from ..casting import Tensor, each_tensor
from ..patching import PatchedMethod, PatchedOp, patches, unpatched_op
from ..torch_private import (
    METHODS_CODE,
    PYTHONS_OWNERS,
    OpOverload,
    OpOverloadPacket,
    no_torch_function,
    owners_of_storage,
    schemas_of,
)
from ..torch_private import base_of as _base
from ..torch_private import dispatch_modes as _dispatch_modes
from ..torch_private import is_functorchs as _is_functorchs
from ..torch_private import is_traced as _is_traced
from ..torch_private import storage_of as _storage
from ..torch_private import without_torch_function_of_classes as _plainly

# torch's own, taken before anything is patched
_as_subclass = torch.Tensor.as_subclass
_compiling = torch.compiler.is_dynamo_compiling
_is_inference = torch.Tensor.is_inference
_set = torch.Tensor.set_
_dlpack: Any = vars(torch.utils.dlpack)["to_dlpack"]
_alias = torch.ops.aten.alias.default
_get_base = _base.__get__
_dispatch, _default_handler = Tensor.__torch_dispatch__, Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
_WRITERS = frozenset(
    f"__{name}__" for name in "iadd isub imul itruediv idiv ifloordiv imod ipow iand ior ixor ilshift irshift setitem".split()
)
# Methods that end in "_" and change metadata only.
_METADATA = frozenset(
    """requires_grad_ detach_ share_memory_ rename_ t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_ set_""".split()
)
# These give their memory to code that torch does not see write.
_TO_NUMPY: tuple[Any, ...] = (Tensor.numpy, Tensor.__array__)
_EXPORTS = frozenset({*_TO_NUMPY, Tensor.__dlpack__})
_STORAGES = frozenset({Tensor.untyped_storage, Tensor.storage, Tensor._typed_storage})
# These ask for the class of the tensor, and give another answer for a subclass.
_OF_CLASS = frozenset({Tensor.__format__, Tensor.__repr__})


class CopiedView(Tensor):
    """The result of a view op on a cast copy. Reads like any tensor; a write that the real input would miss raises HmpError.

    What is computed from it is a plain tensor; a view of it is a CopiedView again. Of a subclass of Tensor it is a subclass, made by
    `_class_for`.
    """

    _hmp_op: str = "view"
    _hmp_cast: Cast | None = None
    _hmp_kind: type[Tensor] = Tensor  # the class that it had as a view

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        func = unpatched_op(func)  # a wrapper has called it
        known = _learn(func) if _compiling() else _known(func)  # Dynamo warns of a cache
        kwargs = kwargs or {}
        if known.positions or known.flag_at is not None or kwargs:
            for view in known.written(args, kwargs):
                view._hmp_refuse(func)
        if known.kind == "exports":
            return _exported(func, args, kwargs)
        if known.kind == "of class" and cls is CopiedView:
            args = tuple(_bare(a) if type(a) is CopiedView else a for a in args)
        sources = [t for t in each_tensor((args, kwargs)) if isinstance(t, CopiedView)]
        versions = _versions(sources) if known.kind == "" else None
        result = _call(func, types, args, kwargs)
        if known.kind == "storage" and not _is_torchs_call():  # nothing sees who writes a storage
            args[0]._hmp_refuse(func)
        if versions is not None and _versions(sources) != versions:  # what no name and no schema shows
            for view in sources:
                view._hmp_refuse(func)
        if not isinstance(result, (Tensor, list, tuple)) or func == _get_base:
            return result  # the base, too, is the copy itself: as a CopiedView it would have a base again, and so without end
        with _plainly():
            return _refusing_like(result, sources)

    def _hmp_refuse(self, writer: Any) -> None:
        """Raise HmpError where a write into this copy would be missed."""
        if self._hmp_is_missed():
            raise HmpError(_refusal(self._hmp_op, writer if isinstance(writer, str) else getattr(writer, "__name__", "this op")))

    def _hmp_is_missed(self) -> bool:
        """Return True if somebody would miss a write into this copy: whoever holds the real input, or another copy of it."""
        return self._hmp_cast is None or self._hmp_cast.is_missed()

    def as_subclass(self, cls: Any) -> Any:
        """Return the same copy as a tensor of class `cls`, which refuses writes too: torch asks no `__torch_function__` for this."""
        with _plainly():
            result = _as_subclass(self, cls)
        if self._hmp_cast is not None:
            _mark(result, self._hmp_op, self._hmp_cast)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _bare(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = _bare(self).__deepcopy__(memo)
        return copied


_UNWRAPPED = frozenset({Tensor, torch.nn.Parameter, CopiedView})


def _class_for(kind: type[Tensor]) -> type[CopiedView]:
    """Return the class of CopiedViews of tensors of class `kind`."""
    return CopiedView if kind is Tensor else _subclass_for(kind)


@functools.cache
def _subclass_for(kind: type[Tensor]) -> type[CopiedView]:
    names = {"__slots__": (), "__module__": kind.__module__, "__doc__": kind.__doc__, "_hmp_kind": kind}
    metaclass: Any = type(kind)
    made: type[CopiedView] = metaclass(kind.__name__, (CopiedView, kind), names)
    return made


def _bare(view: CopiedView) -> Tensor:
    """Return the same copy as a tensor of the class that it had as a view."""
    kind = view._hmp_kind
    with _plainly():
        if kind.__torch_dispatch__ is not _dispatch:
            return _alias(view)  # type: ignore[no-any-return]  # of a class that wraps tensors, which as_subclass() would lose
        bare = _as_subclass(view, kind)
    if kind is not Tensor:
        vars(bare).update({name: value for name, value in vars(view).items() if not name.startswith("_hmp_")})
    return bare


def _call(func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call `func` through the `__torch_function__` that torch would use if each CopiedView still had its original class."""
    if len(types) == 1 and types[0] is CopiedView:  # most calls
        with _plainly():
            return func(*args, **kwargs)
    kinds: dict[Any, None] = dict.fromkeys(t._hmp_kind if issubclass(t, CopiedView) else t for t in types)
    theirs = tuple(k for k in kinds if k is not Tensor and k.__torch_function__ is not no_torch_function)
    for kind in theirs:
        result = kind.__torch_function__(func, theirs, args, kwargs)
        if result is not NotImplemented:
            return result
    if theirs:
        return NotImplemented
    with _plainly():
        return func(*args, **kwargs)


class _Memory:
    """Memory that was copied by casts: a weak reference to it, and to the casts whose results live."""

    __slots__ = ("_casts", "_weak")

    def __init__(self, storage: Any) -> None:
        # numpy and dlpack hold their memory past torch
        self._weak = StorageWeakRef(storage) if storage.resizable() else None
        self._casts: list[weakref.ref[Cast]] = []

    def add(self, cast: Cast) -> None:
        """Count `cast` among those that copied the memory, for as long as it lives."""
        casts = [each for each in self._casts if each() is not None] if self._casts else []
        casts.append(weakref.ref(cast))
        self._casts = casts

    def is_held(self, cast: Cast) -> bool:
        """Return True if another cast copied it, or anything holds it."""
        if self._weak is None or any(each() not in (None, cast) for each in self._casts):
            return True
        return not self._weak.expired() and owners_of_storage(self._weak.cdata) > PYTHONS_OWNERS


class Cast:
    """One cast of a view op's inputs, of which CopiedViews share the result: reports whether a write into it would be missed."""

    __slots__ = ("__weakref__", "_before", "_memories")

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self._before = [tensor._hmp_cast for tensor in inputs if isinstance(tensor, CopiedView)]
        self._memories = [_memory(part) for tensor in inputs for part in _parts(tensor)]
        for memory in self._memories:
            if memory is not None:
                memory.add(self)

    def is_missed(self) -> bool:
        """Return True if anything else holds the memory of the inputs, or another copy of it, or of what these were cast from."""
        if any(memory is None or memory.is_held(self) for memory in self._memories):
            return True
        return any(cast is None or cast.is_missed() for cast in self._before)


def _memory(tensor: Tensor) -> _Memory | None:
    """Return what is known of the tensor's memory; None for a tensor without a storage."""
    if _is_traced(tensor):
        return None
    try:
        storage = _storage(tensor)
    except (NotImplementedError, RuntimeError):
        return None
    found: _Memory | None = getattr(storage, "_hmp_memory", None)
    if found is None:
        found = storage._hmp_memory = _Memory(storage)
    return found


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors inside a tensor of a class that wraps others; of any other class the tensor itself."""
    flatten = None if type(tensor) in _UNWRAPPED else getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
    else:
        for part in (getattr(tensor, name) for name in flatten()[0]):
            if isinstance(part, Tensor):  # a DTensor names its mesh, too
                yield from _parts(part)


def shares_memory(result: Any, values: Iterable[Any]) -> bool:
    """Return True if `result` may share memory with a tensor among `values`, or isn't a tensor.

    False under vmap and grad, and in a trace of torch.compile: a CopiedView would lose their level.
    """
    if type(result) is not Tensor:
        if not isinstance(result, Tensor):
            return True
        if _is_traced(result):
            return False
    return not _is_functorchs(result) and any(isinstance(each, Tensor) and _same_memory(result, each) for each in values)


def refuse_writes(result: Any, op: str, copies: Sequence[Tensor], cast: Cast, kinds: AbstractSet[type[Tensor]] = frozenset()) -> None:
    """Make a CopiedView of each tensor in `result`, of the op `op`, that shares memory with one of its cast inputs `copies`.

    Raise TypeError where a tensor's class can have no such subclass, or one of `kinds`, of which torch may make the result afterwards.
    """
    if not _in_make_fx():  # it raises on subclasses that it does not know
        for tensor in list(_held_in(result, {})):
            if not isinstance(tensor, CopiedView) and shares_memory(tensor, copies):
                for kind in kinds:
                    if kind.__torch_function__ is not no_torch_function and kind not in _UNWRAPPED and not issubclass(kind, CopiedView):
                        _subclass_for(kind)
                _mark(tensor, op, cast)


def _held_in(value: Any, seen: dict[int, Any]) -> Iterator[Tensor]:
    """Yield the tensors in lists, tuples, dicts, sets, queues and the attributes of objects, and in what these hold."""
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen:
        seen[id(value)] = value
        if isinstance(value, (list, tuple, AbstractSet, deque)):
            items: Iterable[Any] = value
        elif isinstance(value, Mapping):
            items = value.values()
        elif is_dataclass(value) and not isinstance(value, type):
            items = [getattr(value, field.name, None) for field in fields(value)]  # it may have no `__dict__`
        else:
            items = () if callable(value) or isinstance(value, types.ModuleType) else getattr(value, "__dict__", {}).values()
        for item in items:
            yield from _held_in(item, seen)


def _mark(tensor: Tensor, op: str, cast: Cast) -> None:
    """Make the tensor, and those inside it, which to_local() of a DTensor gives, CopiedViews."""
    with _plainly():
        for part in _parts(tensor):
            if part is not tensor:
                _mark(part, op, cast)
    tensor.__class__ = _class_for(type(tensor))
    tensor._hmp_op, tensor._hmp_cast = op, cast  # type: ignore[attr-defined]


def _in_make_fx() -> bool:
    """Return True if make_fx is tracing ops in this thread."""
    if not _dispatch_modes():
        return False
    proxy_tensor = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return proxy_tensor is not None and proxy_tensor.get_proxy_mode() is not None


def install() -> None:
    """Have what asks no `__torch_function__` refuse CopiedViews, too, until patches.restore()."""
    patches.wrap(torch.nn.Parameter, "__new__", _refusing_data)
    patches.rebind(Tensor, "set_", PatchedMethod(_set, _set_to_source, "torch", "Tensor.set_"))
    to_dlpack = PatchedOp(_dlpack, _to_dlpack, "torch", "to_dlpack")
    for owner in (torch.utils.dlpack, torch):
        patches.rebind(owner, "to_dlpack", to_dlpack)


def refuse_as_state(value: Any, into: str) -> None:
    """Raise HmpError for a CopiedView, which is assigned to state: it would hold rounded values, not tied to the input."""
    if isinstance(value, CopiedView):
        raise HmpError(
            f"{into} would have rounded values: it is assigned the result of {value._hmp_op!r}, a cast copy; make the view under "
            f"hmp.disable_casts(), or take {value._hmp_op!r} off the list"
        )


def _refusing_data(new: Callable[..., Any]) -> Callable[..., Any]:
    def made(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        refuse_as_state(data, "a parameter")
        return new(cls, data, requires_grad)

    return made


def _set_to_source(self: Tensor, source: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    """Call torch's `set_`, which asks no class: it gives the memory of a CopiedView to a tensor that refuses no write."""
    if source is None:
        return _set(self, **kwargs)
    if isinstance(source, CopiedView):
        source._hmp_refuse(_set)
    return _set(self, source, *args, **kwargs)


def _to_dlpack(tensor: Tensor) -> Any:
    """Call torch's `to_dlpack`, which asks no class."""
    return _exported(_dlpack, (tensor,), {}) if isinstance(tensor, CopiedView) else _dlpack(tensor)


class _Known(NamedTuple):
    """Which arguments a function writes: by position, by name, and the first by a flag. With the kind "told" the list is complete."""

    kind: str = ""
    positions: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset({"out"})
    flag_at: int | None = None  # the position of `inplace`

    def written(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[CopiedView]:
        """Return the CopiedViews that the call writes into."""
        values = [args[i] for i in self.positions if i < len(args)] + [kwargs[name] for name in self.names & kwargs.keys()]
        if self.flag_at is not None and (args[self.flag_at] if self.flag_at < len(args) else kwargs.get("inplace")):
            values += args[:1] or [kwargs.get("input")]
        return (tensor for tensor in each_tensor(values) if isinstance(tensor, CopiedView))


def _learn(func: Any) -> _Known:
    """Return what is known of a function that a `__torch_function__` is asked for: by its schema if it has one, else by its name."""
    if func in _EXPORTS:
        return _Known("exports")
    if func in _STORAGES:
        return _Known("storage")
    if func in _OF_CLASS:
        return _Known("of class")
    name = str(getattr(func, "__name__", "")).partition(".")[0]  # of an overload of torch.ops.aten it is add_.Tensor
    if name in _METADATA:
        return _Known("metadata")
    if isinstance(func, OpOverloadPacket):
        schemas = [getattr(func, overload)._schema for overload in func.overloads()]  # type: ignore[attr-defined]
    elif isinstance(func, OpOverload):
        schemas = [func._schema]  # type: ignore[attr-defined]
    else:
        code = getattr(func, "__code__", None)
        order: tuple[str, ...] = () if code is None else code.co_varnames[: code.co_argcount]
        if "inplace" in order:
            return _Known(flag_at=order.index("inplace"))
        # all_reduce and the like; of other functions of torch.distributed the first input comes last
        collective = getattr(func, "__module__", None) == "torch.distributed.distributed_c10d" and {*order[:1]} <= {"tensor", "tensors"}
        schemas = [] if code is not None else schemas_of(f"aten::{name}")
        if not (name.endswith("_") and not name.endswith("__")) and name not in _WRITERS and not collective:
            return _Known("told" if schemas or name == "__get__" else "")
        if not schemas:
            # nn.init says tensor=
            return _Known(positions=frozenset({0}), names=frozenset({"out", "input", "self", "tensor", *order[:1]}))
    written = [(i, a) for schema in schemas for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    return _Known("told", frozenset(i for i, a in written if not a.kwarg_only), frozenset({"out", "input", *(a.name for _, a in written)}))


_known = functools.cache(_learn)


def _exported(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what `func` gives to numpy: read-only where a write would be missed. dlpack has nothing that is read-only."""
    is_missed = args[0]._hmp_is_missed()
    if is_missed and func not in _TO_NUMPY:
        args[0]._hmp_refuse(func)
    result = func(_bare(args[0]), *args[1:], **kwargs)
    if is_missed:
        result.flags.writeable = False
    return result


def _is_torchs_call() -> bool:
    """Return True if torch's own code or hmp's asks for the storage of a CopiedView: to compare memory, never to write."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in METHODS_CODE:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).startswith(("torch.", "hmp."))


def _versions(views: list[CopiedView]) -> list[int]:
    with _plainly():
        return [view._version for view in views if not _is_inference(view)]


def _refusing_like(result: Any, sources: list[CopiedView]) -> Any:
    """Return `result` with a CopiedView in place of each tensor that shares memory with one of `sources`, and plain tensors elsewhere."""
    if isinstance(result, Tensor):
        if any(result is source for source in sources) or _is_traced(result) or _is_functorchs(result):
            return result
        source = next((source for source in sources if _same_memory(result, source)), None)
        if source is None:
            return _as_subclass(result, Tensor) if type(result) is CopiedView else result
        if not isinstance(result, CopiedView) and source._hmp_cast is not None:
            _mark(result, source._hmp_op, source._hmp_cast)
        return result
    if isinstance(result, (list, tuple)) and any(isinstance(item, Tensor) for item in result):
        items = [_refusing_like(item, sources) for item in result]
        return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
    return result


def _address(tensor: Tensor) -> int | None:
    try:
        return int(_storage(tensor)._cdata) if tensor.layout is torch.strided else None
    except (NotImplementedError, RuntimeError):
        return None


def _same_memory(one: Tensor, other: Tensor) -> bool:
    if type(one) is Tensor and type(other) is Tensor:
        return (address := _address(one)) is not None and address == _address(other)
    with _plainly():
        others = {_address(part) for part in _parts(other)} - {None}
        return any(_address(part) in others for part in _parts(one))


def _refusal(op: str, writer: str) -> str:
    """Return the message for a call of `writer` on the CopiedView that `op` returned."""
    return (
        f"{writer} on the result of {op!r} would be lost: the input of {op!r} was cast, so its result is a copy and no view of the input; "
        f"write into the input itself, put both lines under hmp.disable_casts(), or take {op!r} off the list"
    )
