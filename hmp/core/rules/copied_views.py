"""CopiedView: the result of a view op whose input was cast. It is a copy and no view, so that writes into it raise (R10)."""

from __future__ import annotations

import functools
import inspect
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
from ..active import state
from ..casting import Tensor, cast, each_tensor
from ..patching import PatchedMethod, PatchedOp, patches, unpatched_op
from ..torch_private import (
    METHODS_CODE,
    PYTHONS_OWNERS,
    OpOverload,
    OpOverloadPacket,
    WeakTensor,
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
_EXPORTS = frozenset({Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})
_STORAGES = frozenset({Tensor.untyped_storage, Tensor.storage, Tensor._typed_storage})
# These ask for the class of the tensor, and give another answer for a subclass.
_OF_CLASS = frozenset({Tensor.__format__, Tensor.__repr__})


class CopiedView(Tensor):
    """The result of a view op on a cast copy. Reads like any tensor; a write that the real input would miss raises HmpError.

    What is computed from it is a plain tensor; a view of it is a CopiedView again. Of a subclass of Tensor it is a subclass, made by
    `_class_for`.
    """

    _hmp_op: str = "view"
    _hmp_original: Original | None = None
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
        if known.kind == "storage":
            return _StorageToRead(result, args[0]) if args[0]._hmp_is_missed() and not _is_torchs_call() else result
        if versions is not None and _versions(sources) != versions:  # what no name and no schema shows
            for view in sources:
                view._hmp_refuse(func)
        if not isinstance(result, (Tensor, list, tuple)) or func == _get_base:
            return result  # the base, too, is the copy itself: as a CopiedView it would have a base again, and so without end
        with _plainly():
            return _refusing_like(result, sources, (func, args, kwargs))

    def _hmp_refuse(self, writer: Any) -> None:
        """Raise HmpError where a write into this copy would be missed."""
        if self._hmp_is_missed():
            raise HmpError(_refusal(self._hmp_op, writer if isinstance(writer, str) else getattr(writer, "__name__", "this op")))

    def _hmp_is_missed(self) -> bool:
        """Return True if somebody would miss a write into this copy: whoever holds the real input, or another copy of it."""
        return self._hmp_original is None or self._hmp_original.cast.is_missed(self)

    def as_subclass(self, cls: Any) -> Any:
        """Return the same copy as a tensor of class `cls`, which refuses writes too: torch asks no `__torch_function__` for this."""
        with _plainly():
            result = _as_subclass(self, cls)
        return result if self._hmp_original is None else _marked(result, self._hmp_op, self._hmp_original, False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _bare(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = _bare(self).__deepcopy__(memo)
        return copied


class _StorageToRead:
    """The storage of a CopiedView, for code of the user's that compares memory; everything that might write raises HmpError.

    It isn't a sequence, which torch would make a tensor of.
    """

    __slots__ = ("_storage", "_view")

    def __init__(self, storage: Any, view: CopiedView) -> None:
        self._storage, self._view = storage, view

    def __getattr__(self, name: str) -> Any:
        if name not in _READS:
            self._hmp_refuse(name)
        return getattr(self._storage, name)

    def __len__(self) -> int:
        return len(self._storage)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._hmp_refuse("the storage's __setitem__")
        self._storage[index] = value

    def _hmp_refuse(self, writer: str) -> None:
        self._view._hmp_refuse(writer)


_READS = frozenset(
    """_cdata clone data_ptr device dtype element_size get_device is_cuda is_hpu is_pinned is_shared is_sparse is_sparse_csr nbytes
    resizable size tolist""".split()
)
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
    """Return the result of the call by the `__torch_function__` that it would have if its CopiedViews were what they are copies of."""
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

    def is_held(self, cast: Cast, view: Tensor) -> bool:
        """Return True if another cast copied it, or anything besides the graph of `view`, whose op may save it, holds it."""
        if self._weak is None or any(each() not in (None, cast) for each in self._casts):
            return True
        memory = self._weak.cdata
        return not self._weak.expired() and owners_of_storage(memory) - PYTHONS_OWNERS > _saved_in_graph(view, memory)


def _saved_in_graph(view: Tensor, memory: int) -> int:
    """Return how many of its outputs with that memory the op saved that made what `view` was made of, by views and casts alone."""
    with _plainly():
        node: Any = view.grad_fn
        for _ in range(16):
            if node is None:
                return 0
            names = [name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]
            found = sum(_saved_output(node, name, memory) for name in names)
            before = [each for each, _ in node.next_functions if each is not None]
            if found or len(before) != 1:
                return found
            node = before[0]
    return 0


def _saved_output(node: Any, name: str, memory: int) -> int:
    try:  # an input that is saved is the user's own tensor
        return sum(_address(saved) == memory and saved.grad_fn is node for saved in each_tensor((getattr(node, name),)))
    except RuntimeError:  # freed by backward
        return 0


class Cast:
    """One cast of a view op's inputs, of which CopiedViews share the result: reports whether a write into it would be missed."""

    __slots__ = ("__weakref__", "_memories")

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        self._memories = [_memory(part) for tensor in inputs for part in _parts(tensor)]
        for memory in self._memories:
            if memory is not None:
                memory.add(self)

    def is_missed(self, view: Tensor) -> bool:
        """Return True if anything else holds the memory of the inputs, or another copy of it. `view` is one that was made of this cast."""
        return any(memory is None or memory.is_held(self, view) for memory in self._memories)


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


class Original:
    """The call that a CopiedView came from, without the cast: `view()` makes the view of the real input. None as `op`: it cannot.

    Refers to its tensors weakly: a low-precision copy must not keep its float32 input alive until backward.
    """

    def __init__(self, op: Callable[..., Any] | None, args: Any, kwargs: Any, dtype: torch.dtype, cast: Cast) -> None:
        self.dtype = dtype
        self.cast = cast
        self._op = op
        self._call = _weakly((tuple(args), dict(kwargs)))
        self._part: tuple[Any, ...] = ()

    def of_part(self, part: Any) -> Original:
        """Return the same call, for item `part` of the tuple, list or dict that it returns."""
        one = Original(self._op, (), {}, self.dtype, self.cast)
        one._call, one._part = self._call, (*self._part, part)
        return one

    def view_like(self, copied: Tensor) -> Tensor | None:
        """Return the view of the real input; None if that is freed, was changed, or if `copied` reads its bits as another dtype."""
        view = self.view()
        with _plainly():
            is_it = isinstance(view, Tensor) and view.dtype is self.dtype and view.shape == copied.shape
        return view if is_it else None

    def view(self) -> Any:
        """Return the same for any result; None where it cannot be made."""
        if self._op is None:
            return None
        try:
            args, kwargs = _strongly(self._call)
            result = state.call_without_casts(self._op, *args, **kwargs)
            for part in self._part:
                result = result[part]
        except (ReferenceError, RuntimeError, LookupError, TypeError, ValueError):
            return None
        return result


def _weakly(value: Any) -> Any:
    """Return `value` with weak references in place of its tensors, and the `Original` of a CopiedView in place of that."""
    if isinstance(value, CopiedView):
        return value._hmp_original if value._hmp_original is not None else WeakTensor(value)
    if isinstance(value, Tensor):
        return WeakTensor(value)
    if type(value) in (list, tuple):
        return type(value)(map(_weakly, value))
    return {name: _weakly(item) for name, item in value.items()} if type(value) is dict else value


def _strongly(value: Any) -> Any:
    """Return what `_weakly` was given. Raise ReferenceError if a tensor is freed."""
    if isinstance(value, (WeakTensor, Original)):
        tensor = value() if isinstance(value, WeakTensor) else value.view()
        if tensor is None:
            raise ReferenceError("the tensor is freed")
        return tensor
    if type(value) in (list, tuple):
        return type(value)(map(_strongly, value))
    return {name: _strongly(item) for name, item in value.items()} if type(value) is dict else value


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


def refuse_writes(result: Any, op: str, copies: list[Tensor], original: Original) -> Any:
    """Return `result` of the view op `op`, with a CopiedView for each tensor that shares memory with one of its cast inputs `copies`."""
    if isinstance(result, Tensor):
        if isinstance(result, CopiedView) or not shares_memory(result, copies) or _in_make_fx():
            return result  # make_fx raises on subclasses that it does not know
        return _marked(result, op, original, any(result is copy for copy in copies))
    if isinstance(result, dict):
        for name, item in list(result.items()):
            marked = refuse_writes(item, op, copies, original.of_part(name))
            if marked is not item:
                result[name] = marked
        return result
    if is_dataclass(result) and not isinstance(result, type):
        for field in fields(result):
            marked = refuse_writes(getattr(result, field.name, None), op, copies, original.of_part(field.name))
            if marked is not getattr(result, field.name, None):
                object.__setattr__(result, field.name, marked)  # it may be frozen
        return result
    if isinstance(result, (list, tuple)):
        items = [refuse_writes(item, op, copies, original.of_part(i)) for i, item in enumerate(result)]
        if any(new is not old for new, old in zip(items, result, strict=True)):
            return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
        return result
    return _opaque_refusing(
        result, functools.partial(refuse_writes, op=op, copies=copies, original=Original(None, (), {}, original.dtype, original.cast))
    )


def _opaque_refusing(result: Any, mark: Callable[[Any], Any]) -> Any:
    """Return `result`, an iterator, set or object of the user's, with `mark` applied to what comes out of it."""
    if isinstance(result, types.GeneratorType):
        is_awaitable = result.gi_code.co_flags & inspect.CO_ITERABLE_COROUTINE
        return (_awaitable if is_awaitable else _each_marked)(result, mark)
    if isinstance(result, Iterator):
        return map(mark, result)
    for tensor in list(_held_in(result, {})):
        mark(tensor)  # in place
    return result


def _held_in(value: Any, seen: dict[int, Any]) -> Iterator[Tensor]:
    """Yield the tensors in sets, queues and the attributes of objects, and in what these hold."""
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen:
        seen[id(value)] = value
        if isinstance(value, (list, tuple, AbstractSet, deque)):
            items: Iterable[Any] = value
        elif isinstance(value, Mapping):
            items = value.values()
        else:
            items = () if callable(value) or isinstance(value, types.ModuleType) else getattr(value, "__dict__", {}).values()
        for item in items:
            yield from _held_in(item, seen)


def _each_marked(generator: Any, mark: Callable[[Any], Any]) -> Any:
    """Yield `generator`, with `mark` applied to what it yields and returns."""
    step, sent = generator.send, None
    while True:
        try:
            item = step(sent)
        except StopIteration as end:
            return mark(end.value)
        try:
            step, sent = generator.send, (yield mark(item))
        except GeneratorExit:
            generator.close()
            raise
        except BaseException as error:  # thrown into the generator
            step, sent = generator.throw, error


@types.coroutine
def _awaitable(generator: Any, mark: Callable[[Any], Any]) -> Any:
    return (yield from _each_marked(generator, mark))


def refuse_later_writes(copies: Iterable[Tensor], op: str, original: Original) -> None:
    """Have the cast inputs of the user's function `op` themselves refuse writes from now on: it may have kept them."""
    for copy in copies:
        if not (isinstance(copy, CopiedView) or _is_traced(copy) or _is_functorchs(copy) or _in_make_fx()):
            _marked(copy, op, original, False)


def _marked(result: Tensor, op: str, original: Original, is_copy: bool) -> Tensor:
    """Return `result` as a CopiedView; an alias where it is the copy itself. The real view where no CopiedView can be of its class."""
    kind = type(result)
    try:
        with _plainly():
            if is_copy:
                result = _alias(result) if kind.__torch_dispatch__ is not _dispatch else _as_subclass(result, kind)
            for part in _parts(result):
                if part is not result:  # to_local() of a DTensor gives it
                    _marked(part, op, Original(None, (), {}, original.dtype, original.cast), False)
            result.__class__ = _class_for(kind)
    except TypeError:
        real: Tensor | None = original.view()
        return result if real is None else real
    result._hmp_op, result._hmp_original = op, original  # type: ignore[attr-defined]
    return result


def _in_make_fx() -> bool:
    """Return True if make_fx is tracing ops in this thread."""
    if not _dispatch_modes():
        return False
    proxy_tensor = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return proxy_tensor is not None and proxy_tensor.get_proxy_mode() is not None


def install() -> None:
    """Have parameters made from a CopiedView hold the view of the real input, as in plain torch, until patches.restore()."""
    patches.wrap(torch.nn.Parameter, "__new__", _of_originals)
    patches.rebind(Tensor, "set_", PatchedMethod(_set, _set_to_original, "torch", "Tensor.set_"))
    to_dlpack = PatchedOp(_dlpack, _to_dlpack, "torch", "to_dlpack")
    for owner in (torch.utils.dlpack, torch):
        patches.rebind(owner, "to_dlpack", to_dlpack)


def original_view(value: Any) -> Any:
    """For a CopiedView the view of the real input, or where that is freed a plain tensor in the input's dtype; any other value itself.

    Parameters and buffers must be neither in a low-precision dtype (R9) nor refuse writes.
    """
    if not isinstance(value, CopiedView):
        return value
    original = value._hmp_original
    view = None if original is None else original.view_like(value)
    if view is not None:
        return view
    bare = _bare(value)
    return bare if original is None else cast(bare, original.dtype)


def tied_view(value: Any, into: str) -> Any:
    """As `original_view`, for what is assigned to state: HmpError where the values would be the rounded ones, or not tied to the input."""
    if not isinstance(value, CopiedView):
        return value
    view = None if value._hmp_original is None else value._hmp_original.view_like(value)
    if view is not None:
        return view
    raise HmpError(
        f"{into} would have rounded values: it is assigned the result of {value._hmp_op!r}, a cast copy of a tensor that is gone or has "
        f"changed; make the view under hmp.disable_casts(), or take {value._hmp_op!r} off the list"
    )


def _of_originals(new: Callable[..., Any]) -> Callable[..., Any]:
    return lambda cls, data=None, requires_grad=True: new(cls, original_view(data), requires_grad)


def _set_to_original(self: Tensor, source: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    """Return `set_` of torch's, which asks no class: it gives the memory of a CopiedView to a tensor that refuses no write."""
    if source is None:
        return _set(self, **kwargs)
    if type(source) is _StorageToRead:
        source._hmp_refuse("set_")
        source = source._storage
    if isinstance(source, CopiedView) and source._hmp_is_missed():
        view = tied_view(source, "the tensor that set_ is called on")
        if view.dtype is not self.dtype:
            source._hmp_refuse(_set)
        source = view
    return _set(self, source, *args, **kwargs)


def _to_dlpack(tensor: Tensor) -> Any:
    """Call torch's `to_dlpack`, which asks no class."""
    return _exported(_dlpack, (tensor,), {}) if isinstance(tensor, CopiedView) else _dlpack(tensor)


class _Known(NamedTuple):
    """What a function does to its arguments: which it writes, by position and by name, and by which flag. "told" as `kind`: no others."""

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
    """Return what `func` gives to numpy or dlpack of the view of the real input, in its dtype: writes arrive there."""
    copied, rest = args[0], args[1:]
    bare = _bare(copied)
    if not copied._hmp_is_missed():
        return func(bare, *rest, **kwargs)
    view = None if copied._hmp_original is None else copied._hmp_original.view_like(copied)
    if view is None:
        copied._hmp_refuse(func)
    try:
        return func(view, *rest, **kwargs)
    except TypeError:  # numpy has no bfloat16
        array = func(bare, *rest, **kwargs)
        array.flags.writeable = False
        return array


def _is_torchs_call() -> bool:
    """Return True if torch's own code or hmp's asks for the storage of a CopiedView: to compare memory, never to write."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in METHODS_CODE:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).startswith(("torch.", "hmp."))


def _versions(views: list[CopiedView]) -> list[int]:
    with _plainly():
        return [view._version for view in views if not _is_inference(view)]


def _refusing_like(result: Any, sources: list[CopiedView], call: tuple[Any, Any, Any], part: tuple[Any, ...] = ()) -> Any:
    """Return `result` with a CopiedView in place of each tensor that shares memory with one of `sources`, and plain tensors elsewhere."""
    if isinstance(result, Tensor):
        if any(result is source for source in sources) or _is_traced(result) or _is_functorchs(result):
            return result
        source = next((source for source in sources if _same_memory(result, source)), None)
        if source is None:
            return _as_subclass(result, Tensor) if type(result) is CopiedView else result
        first = source._hmp_original
        if isinstance(result, CopiedView) or first is None:
            return result
        original = Original(*call, first.dtype, first.cast)
        original._part = part
        return _marked(result, source._hmp_op, original, False)
    if isinstance(result, (list, tuple)) and any(isinstance(item, Tensor) for item in result):
        items = [_refusing_like(item, sources, call, (*part, i)) for i, item in enumerate(result)]
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
