"""Whose an error is: torch's own refusal of a dtype, which R7 and R11 answer by another dtype, or the user's, which goes through as it is.

An op may call the user's Python: saved-tensor hooks, modes, a tensor's class, a custom op, a callable among its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import torch_private
from ..casting import Tensor, tensor_casts
from . import jit_trace

# How torch 2.7 to 2.15 and the libraries below it refuse a dtype or a mixture, found by running op_db in low dtypes and mixtures.
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


def is_of_a_dtype(error: Exception) -> bool:
    """Whether torch itself refused a dtype: no Python of the user's ran below the call, and the words are those of such refusals."""
    return is_torchs_own(error) and _WORDS.search(str(error)) is not None


def is_torchs_own(error: Exception) -> bool:
    """Whether torch's code raised `error`, out of memory apart, and the user's Python is nowhere between the call and it."""
    if not isinstance(error, RuntimeError) or _root(type(error).__module__) not in ("builtins", "torch"):
        return False
    if isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY):
        return False
    step = error.__traceback__  # begins where the error was caught
    while step is not None:
        if _root(step.tb_frame.f_globals.get("__name__", "")) not in _OWN:
            return False
        step = step.tb_next
    return True


def is_of_a_cast(error: Exception, values: Iterable[Any]) -> bool:
    """Whether a tensor among `values` has a class that knows no such cast, or no clamp to saturate with (R12): the op is left to torch."""
    if not isinstance(error, (TypeError, NotImplementedError)) or all(map(tensor_casts.has_values, tensor_casts.each_tensor(values))):
        return False
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_globals is vars(tensor_casts):
            return True
        step = step.tb_next
    return False


def served(function: Callable[..., Any], op: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, and `op` itself where a tensor's class does not know the casts."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (TypeError, NotImplementedError) as error:
            if not is_of_a_cast(error, (args, kwargs)):
                raise
        return op(*args, **kwargs)

    return call


def is_torchs_function(function: Callable[..., Any]) -> bool:
    """Whether it is a function of torch's, or hmp's way to call one; the C functions of torch have no module."""
    return _root(getattr(function, "__module__", None) or "torch") in ("torch", "hmp")


def hooks_see(tensors: Iterable[Tensor]) -> bool:
    """Whether the user's saved-tensor hooks are called with what an op of `tensors` saves."""
    if not torch.is_grad_enabled() or (_hooks is not None and _hooks(True) is None):
        return False
    return any(t.requires_grad and tensor_casts.has_values(t) for t in tensors)


def saves_first(run: Callable[[], Any]) -> bool:
    """Whether `run`, which torch refused, saves tensors before it is refused: then hooks were called, and will not be called again."""
    saved: list[Tensor] = []
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda nothing: nothing):
            run()
    except RuntimeError:
        jit_trace.resume()
        return bool(saved)
    return True  # it was no refusal


def users_python_sees(tensors: Iterable[Tensor]) -> bool:
    """Whether an op of `tensors` calls the user's Python: saved-tensor hooks, modes in force, a tensor's own class."""
    tensors = list(tensors)
    return hooks_see(tensors) or any(map(_is_users, _modes())) or any(_is_users(t) for t in tensors if _answers(t))


def torch_takes(op: Callable[..., Any], args: Iterable[Any], kwargs: Any, tensors: Iterable[Tensor]) -> bool:
    """Whether torch accepts the call, found out where the user's Python does not see it; False where it cannot be."""
    if any(map(_answers, tensors)):
        return False
    try:
        with torch.no_grad(), torch_private.without_torch_function(), torch_private.without_dispatch_modes():
            op(*args, **kwargs)
    except RuntimeError:
        jit_trace.resume()
        return False
    return True


def _modes() -> list[Any]:
    found: list[Any] = []
    if _function_modes():
        found += torch_private.function_mode_stack()
    if _dispatch_modes():
        found += torch_private.dispatch_mode_stack()
    return found


def _answers(tensor: Tensor) -> bool:
    """Whether the tensor's class answers for ops in the place of torch."""
    kind = type(tensor)
    return kind is not Tensor and (kind.__torch_function__ not in (_function, _disabled) or not tensor_casts.has_values(tensor))


def _is_users(found: object) -> bool:
    return _root(type(found).__module__) not in ("torch", "hmp")


def _root(module: str) -> str:
    return module.partition(".")[0]
