"""A cast turns a view into a copy; writing through that copy raises instead of being lost (R10)."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.modules.module import register_module_buffer_registration_hook

from ..casting import Tensor, cast, each_tensor
from ..context import state
from ..errors import HmpError
from ..patching import patches
from ..torch_private import dispatch_modes as _dispatch_modes
from ..torch_private import is_functorchs as _is_functorchs
from ..torch_private import storage_of as _storage
from ..torch_private import without_torch_function_of_classes as _plainly

# torch's own, taken before anything is patched
_as_subclass = torch.Tensor.as_subclass
_WRITERS = frozenset(
    f"__{name}__" for name in "iadd isub imul itruediv idiv ifloordiv imod ipow iand ior ixor ilshift irshift setitem".split()
)
# These end in "_" and change metadata only.
_METADATA = frozenset(
    """requires_grad_ detach_ share_memory_ rename_ t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_ set_""".split()
)


class CopiedView(Tensor):
    """The result of a cast view: reads like any tensor, and refuses to be written to.

    Everything computed from it is a plain tensor again; views of it refuse as well.
    """

    _hmp_op: str = "view"
    _hmp_original: Original | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        if isinstance(written, CopiedView):
            raise HmpError(_refusal(written._hmp_op, getattr(func, "__name__", "this op")))
        with _plainly():
            result = func(*args, **kwargs)
            sources = [t for t in each_tensor((args, kwargs)) if isinstance(t, CopiedView)]
            original = next((Original(func, args, kwargs, s._hmp_original.dtype) for s in sources if s._hmp_original is not None), None)
            return _settle(result, sources, original)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _plainly():
            return _as_subclass(self, Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with _plainly():
            copied = _as_subclass(self, Tensor).__deepcopy__(memo)
            return _as_subclass(copied, Tensor)


class Original:
    """What a cast view would have been without the cast: the view of the real input, as long as somebody else keeps that.

    Holds its tensors weakly: a copy must not keep the float32 original alive until backward.
    """

    def __init__(self, op: Callable[..., Any], args: Any, kwargs: Any, dtype: torch.dtype, part: int | None = None) -> None:
        self.dtype = dtype
        self.part = part
        self._op = op
        self._call = _weakly((tuple(args), dict(kwargs)))

    def of_part(self, part: int) -> Original:
        """The original of one tensor of a result that is a tuple."""
        one = Original(self._op, (), {}, self.dtype, part)
        one._call = self._call
        return one

    def view(self) -> Any:
        """The view, None where its input is gone."""
        try:
            args, kwargs = _strongly(self._call)
            result = state.call_without_casts(self._op, *args, **kwargs)
        except (ReferenceError, RuntimeError, IndexError, TypeError, ValueError):
            return None  # the input is gone, or is another shape by now
        return result if self.part is None else result[self.part]


def _weakly(value: Any) -> Any:
    if isinstance(value, CopiedView):
        return value._hmp_original if value._hmp_original is not None else weakref.ref(value)
    if isinstance(value, Tensor):
        return weakref.ref(value)
    if type(value) in (list, tuple):
        return type(value)(map(_weakly, value))
    return {name: _weakly(item) for name, item in value.items()} if type(value) is dict else value


def _strongly(value: Any) -> Any:
    if isinstance(value, (weakref.ref, Original)):
        tensor = value() if isinstance(value, weakref.ref) else value.view()
        if tensor is None:
            raise ReferenceError("the tensor is gone")
        return tensor
    if type(value) in (list, tuple):
        return type(value)(map(_strongly, value))
    return {name: _strongly(item) for name, item in value.items()} if type(value) is dict else value


def refuse_writes(result: Any, op: str, copies: list[Tensor], original: Original | None) -> Any:
    """`result` of the cast view op, every plain tensor in it that shares memory with one of `copies` refusing writes from now on."""
    if type(result) is Tensor:
        if _is_functorchs(result) or _in_make_fx():
            return result  # inside vmap and grad a wrapper level would be lost; make_fx refuses subclasses that it does not know
        if not any(_same_storage(result, copied) for copied in copies):
            return result
        with _plainly():
            marked = _as_subclass(result, CopiedView)
        marked._hmp_op, marked._hmp_original = op, original
        return marked
    if isinstance(result, (list, tuple)) and not hasattr(result, "_fields"):
        parts = (original and original.of_part(i) for i in range(len(result)))
        return type(result)(refuse_writes(item, op, copies, part) for item, part in zip(result, parts, strict=True))
    return result


def _in_make_fx() -> bool:
    """Whether ops on real tensors are being written down."""
    if not _dispatch_modes():
        return False
    proxy_tensor = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return proxy_tensor is not None and proxy_tensor.get_proxy_mode() is not None


def install() -> None:
    """A parameter or a buffer made of a cast view holds the view itself, as in plain torch, until patches.restore()."""
    new = torch.nn.Parameter.__new__
    patches.swap(new, _of_originals(patches.plain(new)))
    handle = register_module_buffer_registration_hook(_original_buffer)  # type: ignore[arg-type]  # torch uses what it returns
    patches.on_restore(handle.remove)


def uncopied(value: Any) -> Any:
    """`value`, but for a cast view the view that it was before the cast; where that is gone, the copy in its input's dtype.

    State that is made of it must be neither narrowed nor refuse to be written to.
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
    return lambda cls, data=None, requires_grad=True: new(cls, uncopied(data), requires_grad)


def _original_buffer(module: torch.nn.Module, name: str, value: Any) -> Tensor | None:
    return uncopied(value) if isinstance(value, CopiedView) else None


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What the call writes into, None for nothing."""
    out = kwargs.get("out")
    if out is not None:
        return next((o for o in each_tensor((out,)) if isinstance(o, CopiedView)), None)
    name: str = getattr(func, "__name__", "")
    code = getattr(func, "__code__", None)
    flag = kwargs.get("inplace")
    if code is not None and flag is None and "inplace" in code.co_varnames[: code.co_argcount]:
        position = code.co_varnames.index("inplace")
        flag = args[position] if position < len(args) else None
    # a name of torch.ops.aten ends in its overload: add_.Tensor
    writes = (name.partition(".")[0].endswith("_") and not name.endswith("__") and name not in _METADATA) or name in _WRITERS
    if not writes and not flag:
        return None
    target = args[0] if args else kwargs.get("input", kwargs.get("self"))
    return next((t for t in target if isinstance(t, CopiedView)), None) if isinstance(target, (list, tuple)) else target


def _settle(result: Any, sources: list[CopiedView], original: Original | None) -> Any:
    """`result`, refusing writes where it shares memory with one of `sources`, and plain elsewhere."""
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
        items = [_settle(item, sources, original and original.of_part(i)) for i, item in enumerate(result)]
        return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
    return result


def _same_storage(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    return bool(_storage(one)._cdata == _storage(other)._cdata)


def _refusal(op: str, writer: str) -> str:
    return (
        f"{writer} would write into a cast copy and be lost: {op!r} is on a list that casts, so its result is a copy of its "
        f"input and no view of it. Write into the input itself, run the two lines under hmp.disable_casts(), "
        f"or take {op!r} off the list"
    )
