"""Whether an error is torch's refusal of a dtype, after which an op may run once more in another dtype.

An op may call the user's Python: saved-tensor hooks, modes, a tensor's class, a custom op, a callable among its arguments. That must not
run twice: torch's own error is raised then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import casting
from ..casting import Tensor
from ..torch_private import is_in_trace, saved_tensors_hooks

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
    if isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY) or is_in_trace():
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


def may_run_again(error: Exception, tensors: Iterable[Tensor]) -> bool:
    """Return True if the op that raised `error` may be called with `tensors` in another dtype: torch refused theirs, and no user saw it.

    The user's Python is in the error's traceback, but for hooks that have run before the op raised.
    """
    return is_dtype_refusal(error) and not (_hooks_are_users() and torch.is_grad_enabled() and any(t.requires_grad for t in tensors))


def _hooks_are_users() -> bool:
    """Return True if the saved-tensor hooks that an op would call are not hmp's; False where torch does not say whose they are (2.7)."""
    hooks = None if saved_tensors_hooks is None else saved_tensors_hooks(True)
    return hooks is not None and _root(getattr(hooks[1], "__module__", None) or "") != "hmp"


def _root(module: str) -> str:
    return module.partition(".")[0]
