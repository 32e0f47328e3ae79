"""Whether an error is torch's refusal of a dtype, after which R7 and R11 try another dtype; the user's errors are raised unchanged.

An op may call the user's Python: saved-tensor hooks, modes, a tensor's class, a custom op, a callable among its arguments. That must not
run twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import casting, torch_private
from ..casting import Tensor

# Words in the errors by which torch 2.7 to 2.15 refuses inputs of different dtypes; found by running op_db with them.
_MIXTURE = re.compile(
    r"""
    \bsame\ (scalar\ |d)?types? | types?\b.*\bto\ be\ (the\ same|equal) | (should|must)\ (have\ )?be\ (of\ )?the\ same | different\ dtypes
    | dtypes\ match | did\ not\ match | mixed\ dtype | type\ promoting
    | expected\ (object\ of\ )?(dtype|scalar\ type) | to\ have\ scalar\ type | found\ dtype
    """,
    re.IGNORECASE | re.VERBOSE,
)
# Words in the errors by which it, and the libraries below it, refuse any dtype, found in the same way: one without a kernel, or a mixture.
_WORDS = re.compile(
    r"""
    not\ (yet\ )?implemented\ for | low\ precision | \bdtypes? | (scalar|data|c10::)\ ?types? | tensors\ of\ type
    | bfloat16 | half | float16 | \bfp16 | \bbf16 | types\ other\ than | type\ promoting | (input|weight|bias)\ type | floating[-\ ]point
    | could\ not\ create\ a\ primitive                                  # oneDNN
    | STATUS_(NOT_SUPPORTED|ARCH_MISMATCH) | unable\ to\ find\ an\ engine  # cuBLAS, cuDNN
    """,
    re.IGNORECASE | re.VERBOSE,
)
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
_OWN = frozenset({"torch", "hmp"})
_hooks = torch_private.saved_tensors_hooks
_function = torch.Tensor.__torch_function__
_disabled = torch_private.no_torch_function
_function_modes = torch_private.function_modes
_dispatch_modes = torch_private.dispatch_modes


def is_dtype_refusal(error: Exception) -> bool:
    """Return True if torch's own code raised `error`, and its text names a dtype."""
    return is_torchs_own(error) and _WORDS.search(str(error)) is not None


def is_mixture(error: Exception) -> bool:
    """Return True if the text of `error`, the refusal of a dtype, is about inputs of different dtypes, and not about a missing kernel."""
    return _MIXTURE.search(str(error)) is not None


def is_torchs_own(error: Exception) -> bool:
    """Return True if `error` is a RuntimeError of torch's, not of memory, without the user's Python in its traceback below the caller.

    False in a trace of torch.jit's, which such an error ends: it must reach the user.
    """
    if not isinstance(error, RuntimeError) or _root(type(error).__module__) not in ("builtins", "torch"):
        return False
    if isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY) or torch_private.is_in_trace():
        return False
    step = error.__traceback__  # begins where the error was caught
    while step is not None:
        if _root(step.tb_frame.f_globals.get("__name__", "")) not in _OWN:
            return False
        step = step.tb_next
    return True


# What classes of tensors raise for a cast that they do not support; quantised tensors of torchao's assert.
OF_CASTS = (TypeError, NotImplementedError, AssertionError)


def is_cast_refusal(error: Exception, values: Iterable[Any]) -> bool:
    """Return True if `error` came from hmp's cast of a tensor subclass among `values` that supports no such cast.

    The op is left to torch then.
    """
    if not isinstance(error, OF_CASTS) or all(map(casting.has_values, casting.each_tensor(values))):
        return False
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_globals is vars(casting):
            return True
        step = step.tb_next
    return False


def or_uncast(function: Callable[..., Any], op: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, which casts; `op` is called instead where the class of a tensor does not support the cast."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except OF_CASTS as error:
            if not is_cast_refusal(error, (args, kwargs)):
                raise
        return op(*args, **kwargs)

    return call


def is_torchs_function(function: Callable[..., Any]) -> bool:
    """Return True if `function` is torch's, or hmp's wrapper of one, and nobody else's. torch's C functions have no `__module__`."""
    return _root(getattr(function, "__module__", None) or "torch") in ("torch", "hmp")


def hooks_see(tensors: Iterable[Tensor]) -> bool:
    """Return True if an op of `tensors` would call saved-tensor hooks of the user's."""
    if not torch.is_grad_enabled() or (_hooks is not None and _hooks(True) is None):
        return False
    return any(t.requires_grad and casting.has_values(t) for t in tensors)


def saves_before_raising(run: Callable[[], Any]) -> bool:
    """Return True if `run()` saves tensors for backward before it raises: the user's hooks were called, and must not be called again."""
    saved: list[Tensor] = []
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda nothing: nothing):
            run()
    except RuntimeError:
        return bool(saved)
    return True  # it did not raise this time, so that nothing is known of the first


def users_python_sees(tensors: Iterable[Tensor]) -> bool:
    """Return True if an op of `tensors` would call the user's Python: saved-tensor hooks, modes active or a tensor's class."""
    tensors = list(tensors)
    return hooks_see(tensors) or any(map(_is_users, _modes())) or any(_is_users(t) for t in tensors if _answers(t))


def may_run_again(tensors: Iterable[Tensor]) -> bool:
    """Return True if an op of `tensors` may be called a second time: neither a mode of the user's nor a tensor's class handles it."""
    return not any(map(_is_users, _modes())) and not any(map(_answers, tensors))


def torch_accepts(op: Callable[..., Any], args: Iterable[Any], kwargs: Any, tensors: Iterable[Tensor]) -> bool:
    """Return True if torch accepts the call, found by making it without the user's hooks, modes and `__torch_function__`.

    False where a tensor has no values of its own for torch's kernels, or its class would see them in `__torch_dispatch__`.
    """
    if not all(map(casting.has_values, tensors)):
        return False
    try:
        with torch.no_grad(), torch_private.without_torch_function(), torch_private.without_dispatch_modes():
            op(*args, **kwargs)
    except RuntimeError:
        if torch_private.is_in_trace():
            raise
        return False
    return True


def _modes() -> list[Any]:
    """Return the torch function and torch dispatch modes active in this thread."""
    found: list[Any] = []
    if _function_modes():
        found += torch_private.function_mode_stack()
    if _dispatch_modes():
        found += torch_private.dispatch_mode_stack()
    return found


def _answers(tensor: Tensor) -> bool:
    """Return True if the tensor's class handles ops itself, by `__torch_function__` or `__torch_dispatch__`."""
    kind = type(tensor)
    return kind is not Tensor and (kind.__torch_function__ not in (_function, _disabled) or not casting.has_values(tensor))


def _is_users(found: object) -> bool:
    return _root(type(found).__module__) not in ("torch", "hmp")


def _root(module: str) -> str:
    return module.partition(".")[0]
