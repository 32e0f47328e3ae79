"""An op runs in float32 if the device has no low-precision kernel for it, by torch's known lacks or after a failed call."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .. import casting, locks
from ..casting import Tensor, dtype_name
from ..log import log, should_log
from ..observe import here
from ..ops import sites, table
from ..patching import patches
from ..torch_private import in_no_transform, is_in_trace, saved_tensors_hooks

if TYPE_CHECKING:
    from .op import OpUnderRule

# Returned in place of a result: the caller is to raise the error that it caught, unchanged.
GIVEN_UP = object()
_MOST_FAILED = 256  # signatures remembered for each op: arguments that vary without end must not fill the memory

_lock = locks.RLock()
_counts: Counter[str] = Counter()


def fallbacks() -> dict[str, int]:
    """Count the calls that ran in another dtype than their list says, because a kernel is missing.

    Returns:
        The number of calls by op: those that ran in float32 because the device has no low-precision kernel. "op: not ..., reason": those
        that did not do what a list of another kind than BF16, FP32 and promote asks for, such as "not in FP8" or "not packed". The counts
        are reset when hmp's patches of torch are removed.

    Example:
        >>> hmp.fallbacks()
        {}
    """
    with _lock:
        return dict(_counts)


def count(op: str, what: str = "", reason: str = "") -> bool:
    """Count a call of an op for `fallbacks()`: one that did not run as a list says, which `what` names; else one without a kernel.

    Return True for the first one with that reason, to be logged.
    """
    counted = f"{op}: {what}, {reason}" if what else op
    with _lock:
        if not _counts:
            patches.on_restore(_counts.clear)
        _counts[counted] += 1
        return _counts[counted] == 1 and should_log()


class Kernels:
    """For which calls an op has no kernel in a low-precision dtype. `failed` has the signatures of calls that raised for want of one.

    `may_lack`: calls may be known to have none, so that each must be looked at.
    """

    def __init__(self, ruled: OpUnderRule) -> None:
        self._op = ruled.op
        line = () if ruled.facts.users else sites.ancestry(ruled.op)
        self._known = known_lacks(line)
        self._no_backward = known_lacks(line, backward=True)
        self.may_lack = bool(self._known or self._no_backward) and ruled.dtype is not torch.float32
        self.failed: dict[Any, None] = {}

    def lacks(self, tensors: list[Tensor], dtype: torch.dtype, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return True if the call is known to have no kernel in `dtype` on the device of `tensors`.

        Such a call is counted for `fallbacks()`, and the op's first one logged.
        """
        if dtype not in casting.LOW:
            return False
        device = tensors[0].device.type
        found = (device, dtype) in self._known or ("*", dtype) in self._known
        if not found and (device, dtype) in self._no_backward:
            found = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if not found and self.failed:
            found = _signature(tensors, dtype, args, kwargs) in self.failed
        if found:
            self._note(device, dtype)
        return found

    def remember(self, tensors: list[Tensor], dtype: torch.dtype, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Have no call try `dtype` again that has the same devices, layouts, dimensions and other arguments as this one, which raised.

        Nothing is remembered in a function transform or forward-mode differentiation.
        """
        if in_no_transform():
            if not self.failed:
                patches.on_restore(self.failed.clear)  # a wrapper may be called again after revert() and convert()
            if len(self.failed) >= _MOST_FAILED:
                self.failed.clear()
            self.failed[_signature(tensors, dtype, args, kwargs)] = None
        self._note(tensors[0].device.type, dtype)

    def _note(self, device: str, dtype: torch.dtype) -> None:
        if here.call is not None and here.call.op == self._op:
            here.call.lacks_kernel = True
        if count(self._op):
            log.warning(
                "%s has no %s kernel on %s: it runs in float32 and returns float32 (see rule R11); hmp.fallbacks() counts such calls",
                self._op, dtype_name(dtype), device,
            )  # fmt: skip


@functools.cache
def known_lacks(names: tuple[str, ...], *, backward: bool = False) -> frozenset[tuple[str, torch.dtype]]:
    """Return the pairs (device type or "*", dtype) for which an op has no kernel; with `backward`, none for its backward alone.

    `names` are the op's id and the ids of the ops whose entries it follows.
    """
    rows = table.NO_BACKWARD_KERNEL if backward else table.NO_KERNEL
    return frozenset(
        (device, getattr(torch, dtype)) for device, dtypes, ops in rows if not ops.isdisjoint(names) for dtype in dtypes.split()
    )


def _signature(tensors: list[Tensor], dtype: torch.dtype, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return a hashable key of what the choice of a kernel depends on.

    These are device types, layouts, dimensions (`linalg.norm` of a matrix is another kernel than that of a vector), the low-precision dtype
    and all non-tensor arguments.
    """
    others = casting.map_tensors((args, dict(kwargs)), lambda tensor: None)  # type: ignore[arg-type, return-value]
    return dtype, repr(others), *((t.device.type, t.layout, t.dim()) for t in tensors)


# --- whether an error is torch's refusal of a dtype -------------------------------------------------------------------------
# An op may call the user's Python: saved-tensor hooks, modes, a tensor's class, a custom op, a callable among its arguments. That must not
# run twice: torch's own error is raised then.

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
