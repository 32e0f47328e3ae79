"""A cast turns a view into a copy; writing through that copy raises instead of being lost (R10)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.modules.module import register_module_buffer_registration_hook

from . import patches, state
from .casting import Tensor, each_tensor
from .errors import HmpError

# torch's own, taken before anything is patched
_as_subclass = torch.Tensor.as_subclass
_storage = torch.Tensor.untyped_storage
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
    _hmp_original: Callable[[], Any] | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        if isinstance(written, CopiedView):
            raise HmpError(_refusal(written._hmp_op, getattr(func, "__name__", "this op")))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            sources: list[Tensor] = [t for t in each_tensor((args, kwargs)) if isinstance(t, CopiedView)]
            return _settle(result, sources)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _as_subclass(self, Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            copied = _as_subclass(self, Tensor).__deepcopy__(memo)
            return _as_subclass(copied, Tensor)


def refuse_writes(result: Any, op: str, copies: list[Tensor], original: Callable[[], Any] | None = None) -> Any:
    """`result` of the cast view op, every plain tensor in it that shares memory with one of `copies` refusing writes from now on.

    `original()` gives what the op would have been without the cast: a view of the real input.
    """
    if type(result) is Tensor:
        if torch._C._functorch.is_functorch_wrapped_tensor(result):
            return result  # inside vmap and grad a wrapper level would be lost
        if not any(_same_storage(result, copied) for copied in copies):
            return result
        with torch._C.DisableTorchFunctionSubclass():
            marked = _as_subclass(result, CopiedView)
        marked._hmp_op, marked._hmp_original = op, original
        return marked
    if isinstance(result, (list, tuple)) and not hasattr(result, "_fields"):
        parts = (None if original is None else functools.partial(_part, original, i) for i in range(len(result)))
        return type(result)(refuse_writes(item, op, copies, part) for item, part in zip(result, parts, strict=True))
    return result


def _part(original: Callable[[], Any], position: int) -> Any:
    return original()[position]


def install() -> None:
    """A parameter or a buffer made of a cast view holds the view itself, as in plain torch, until patches.restore()."""
    new = torch.nn.Parameter.__new__
    patches.swap(new, _of_originals(patches.plain(new)))
    handle = register_module_buffer_registration_hook(_original_buffer)  # type: ignore[arg-type]  # torch uses what it returns
    patches.on_restore(handle.remove)


def uncopied(value: Any) -> Any:
    """What a cast view was before the cast: state that is made of it must be neither narrowed nor a copy. Else `value`."""
    if isinstance(value, CopiedView) and value._hmp_original is not None:
        return state.call_without_casts(value._hmp_original)
    return value


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


def _settle(result: Any, sources: list[Tensor]) -> Any:
    """`result`, refusing writes where it shares memory with one of `sources`, and plain elsewhere."""
    if isinstance(result, Tensor):
        if type(result) not in (Tensor, CopiedView) or not sources:
            return result
        for source in sources:
            if result is source:
                return result
            if _same_storage(result, source):
                return refuse_writes(_as_subclass(result, Tensor), source._hmp_op, [source])  # type: ignore[attr-defined]
        return _as_subclass(result, Tensor) if type(result) is CopiedView else result
    if isinstance(result, (list, tuple)) and any(isinstance(item, Tensor) for item in result):
        items = [_settle(item, sources) for item in result]
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
