"""CopiedView: the result of a view op whose input was cast. It is a copy and no view, so that writes into it raise (R10)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_buffer_registration_hook

from ..casting import Tensor, cast, each_tensor
from ..context import state
from ..errors import HmpError
from ..patching import patches
from ..torch_private import base_of as _base
from ..torch_private import dispatch_modes as _dispatch_modes
from ..torch_private import is_functorchs as _is_functorchs
from ..torch_private import storage_of as _storage
from ..torch_private import without_torch_function_of_classes as _plainly
from ..weak_tensors import WeakTensor

# torch's own, taken before anything is patched
_as_subclass = torch.Tensor.as_subclass
_get_base = _base.__get__
_WRITERS = frozenset(
    f"__{name}__" for name in "iadd isub imul itruediv idiv ifloordiv imod ipow iand ior ixor ilshift irshift setitem".split()
)
# Methods that end in "_" and change metadata only.
_METADATA = frozenset(
    """requires_grad_ detach_ share_memory_ rename_ t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_ set_""".split()
)


class CopiedView(Tensor):
    """The result of a view op on a cast copy. Reads like any tensor; a write raises HmpError.

    What is computed from it is a plain tensor; a view of it is a CopiedView again.
    """

    _hmp_op: str = "view"
    _hmp_original: Original | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        if isinstance(written, CopiedView) and (written._hmp_original is None or written._hmp_original.is_alive()):
            raise HmpError(_refusal(written._hmp_op, getattr(func, "__name__", "this op")))
        with _plainly():
            result = func(*args, **kwargs)
            if func == _get_base:
                return result  # the copy itself: as a CopiedView it would have a base again, and so without end
            sources = [t for t in each_tensor((args, kwargs)) if isinstance(t, CopiedView)]
            first = next((s._hmp_original for s in sources if s._hmp_original is not None), None)
            original = None if first is None else Original(func, args, kwargs, first.dtype).of(first)
            return _refusing_like(result, sources, original)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _plainly():
            return _as_subclass(self, Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with _plainly():
            copied = _as_subclass(self, Tensor).__deepcopy__(memo)
            return _as_subclass(copied, Tensor)


class Original:
    """The call that a CopiedView came from, without the cast: `view()` makes the view of the real input.

    Refers to its tensors weakly: a low-precision copy must not keep its float32 input alive until backward.
    """

    def __init__(self, op: Callable[..., Any], args: Any, kwargs: Any, dtype: torch.dtype, part: int | None = None) -> None:
        self.dtype = dtype
        self.part = part
        self._op = op
        self._call = _weakly((tuple(args), dict(kwargs)))
        self._memory: list[StorageWeakRef | None] | None = None

    def of_part(self, part: int) -> Original:
        """The same call, for item `part` of the tuple that it returns."""
        one = Original(self._op, (), {}, self.dtype, part)
        one._call, one._memory = self._call, self._memory
        return one

    def forget_if_freed(self, inputs: Iterable[Tensor]) -> None:
        """Has `is_alive()` be False once nothing holds the memory of `inputs` any more."""
        self._memory = [_weak_storage(tensor) for tensor in inputs]

    def is_alive(self) -> bool:
        """Whether a write may be missed in the real input."""
        return self._memory is None or any(memory is None or not memory.expired() for memory in self._memory)

    def of(self, view: Original) -> Original:
        """Itself, for a call that was given what `view` made: a write is missed here where it is missed there."""
        self._memory = view._memory
        return self

    def view(self) -> Any:
        """The view of the real input; None where that is freed or has another shape by now."""
        try:
            args, kwargs = _strongly(self._call)
            result = state.call_without_casts(self._op, *args, **kwargs)
        except (ReferenceError, RuntimeError, IndexError, TypeError, ValueError):
            return None
        return result if self.part is None else result[self.part]


def _weak_storage(tensor: Tensor) -> StorageWeakRef | None:
    try:
        storage = _storage(tensor)
    except (NotImplementedError, RuntimeError):
        return None  # a tensor without a storage
    return StorageWeakRef(storage) if storage.resizable() else None  # numpy and dlpack hold their memory past torch


def _weakly(value: Any) -> Any:
    """`value` with weak references in place of its tensors, and the `Original` of a CopiedView in place of that."""
    if isinstance(value, CopiedView):
        return value._hmp_original if value._hmp_original is not None else WeakTensor(value)
    if isinstance(value, Tensor):
        return WeakTensor(value)
    if type(value) in (list, tuple):
        return type(value)(map(_weakly, value))
    return {name: _weakly(item) for name, item in value.items()} if type(value) is dict else value


def _strongly(value: Any) -> Any:
    """What `_weakly` was given. Raises ReferenceError where a tensor is freed."""
    if isinstance(value, (WeakTensor, Original)):
        tensor = value() if isinstance(value, WeakTensor) else value.view()
        if tensor is None:
            raise ReferenceError("the tensor is freed")
        return tensor
    if type(value) in (list, tuple):
        return type(value)(map(_strongly, value))
    return {name: _strongly(item) for name, item in value.items()} if type(value) is dict else value


def shares_memory(result: Any, values: Iterable[Any]) -> bool:
    """Whether `result` may share memory with a tensor among `values`; True for what is no plain tensor.

    False under vmap and grad, and in a trace of torch.compile: a CopiedView would lose their level.
    """
    if type(result) is not Tensor:
        return True
    return not _is_functorchs(result) and any(isinstance(each, Tensor) and _same_storage(result, each) for each in values)


def refuse_writes(result: Any, op: str, copies: list[Tensor], original: Original | None) -> Any:
    """`result` of the view op `op`, with a CopiedView for each plain tensor that shares memory with one of its cast inputs `copies`."""
    if type(result) is Tensor:
        if not shares_memory(result, copies) or _in_make_fx():
            return result  # make_fx raises on subclasses that it does not know
        with _plainly():
            marked = _as_subclass(result, CopiedView)
        marked._hmp_op, marked._hmp_original = op, original
        return marked
    if isinstance(result, (list, tuple)) and not hasattr(result, "_fields"):
        parts = (original and original.of_part(i) for i in range(len(result)))
        return type(result)(refuse_writes(item, op, copies, part) for item, part in zip(result, parts, strict=True))
    return result


def _in_make_fx() -> bool:
    """Whether make_fx is tracing ops in this thread."""
    if not _dispatch_modes():
        return False
    proxy_tensor = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return proxy_tensor is not None and proxy_tensor.get_proxy_mode() is not None


def install() -> None:
    """Has parameters and buffers made from a CopiedView hold the view of the real input, as in plain torch, until patches.restore()."""
    new = torch.nn.Parameter.__new__
    patches.swap(new, _of_originals(patches.unpatched(new)))
    handle = register_module_buffer_registration_hook(_original_buffer)  # type: ignore[arg-type]  # torch uses what a hook returns
    patches.on_restore(handle.remove)


def _original_view(value: Any) -> Any:
    """For a CopiedView the view of the real input, or where that is freed a plain tensor in the input's dtype; any other value itself.

    Parameters and buffers must be neither in a low dtype (R9) nor refuse writes.
    """
    if not isinstance(value, CopiedView):
        return value
    original = value._hmp_original
    view = None if original is None else original.view()
    with _plainly():
        if original is not None and isinstance(view, Tensor) and view.shape == value.shape and view.dtype is original.dtype:
            return view
        plain = _as_subclass(value, Tensor)
        return plain if original is None else cast(plain, original.dtype)


def _of_originals(new: Callable[..., Any]) -> Callable[..., Any]:
    return lambda cls, data=None, requires_grad=True: new(cls, _original_view(data), requires_grad)


def _original_buffer(module: torch.nn.Module, name: str, value: Any) -> Tensor | None:
    return _original_view(value) if isinstance(value, CopiedView) else None


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The argument that the call writes into (of several the first CopiedView); None where it writes into none."""
    out = kwargs.get("out")
    if out is not None:
        return next((o for o in each_tensor((out,)) if isinstance(o, CopiedView)), None)
    name: str = getattr(func, "__name__", "")
    code = getattr(func, "__code__", None)
    flag = kwargs.get("inplace")
    if code is not None and flag is None and "inplace" in code.co_varnames[: code.co_argcount]:
        position = code.co_varnames.index("inplace")
        flag = args[position] if position < len(args) else None
    # in torch.ops.aten a name ends with the overload: add_.Tensor
    writes = (name.partition(".")[0].endswith("_") and not name.endswith("__") and name not in _METADATA) or name in _WRITERS
    if not writes and not flag:
        return None
    target = args[0] if args else kwargs.get("input", kwargs.get("self", kwargs.get("tensor")))  # nn.init says tensor=
    return next((t for t in target if isinstance(t, CopiedView)), None) if isinstance(target, (list, tuple)) else target


def _refusing_like(result: Any, sources: list[CopiedView], original: Original | None) -> Any:
    """`result` with a CopiedView in place of each tensor that shares memory with one of `sources`, and plain tensors elsewhere."""
    if isinstance(result, Tensor):
        if type(result) not in (Tensor, CopiedView) or not sources:
            return result
        for source in sources:
            if result is source:
                return result
            if _same_storage(result, source):
                return refuse_writes(_as_subclass(result, Tensor), source._hmp_op, [source], original)
        return _as_subclass(result, Tensor) if type(result) is CopiedView else result
    if isinstance(result, (list, tuple)) and any(isinstance(item, Tensor) for item in result):
        items = [_refusing_like(item, sources, original and original.of_part(i)) for i, item in enumerate(result)]
        return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
    return result


def _same_storage(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    return bool(_storage(one)._cdata == _storage(other)._cdata)


def _refusal(op: str, writer: str) -> str:
    """The text of the error for a call of `writer` on the CopiedView that `op` returned."""
    return (
        f"{writer} would write into a cast copy and be lost: {op!r} is on a list that casts, so its result is a copy of its "
        f"input and no view of it. Write into the input itself, run the two lines under hmp.disable_casts(), "
        f"or take {op!r} off the list"
    )
